"""What the extra looks of a step must not disturb: buffers, random state, modes, other optimizers' gradients.

Plain training runs one forward pass a step. It updates BatchNorm's statistics and every other buffer once, and draws
random numbers once. A step with several looks must leave exactly that behind, and every look must see what the first
one saw: the same dropout masks, the same buffers. It must also see the weights as they are *now*, not cached copies of
autocast or FSDP2. Saving and restoring is right for all kinds of buffers, changes no attribute of a module (so
`torch.compile` has nothing to recompile) and needs no knowledge of layers.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from ..method import Method
from ..vector import same
from .host_random import FIRST_STEPS, HostRandomState, access, may_draw, own_generators
from .outputs import OutputGradients
from .precision import Precision
from .replicas import fully_sharded, reshard
from .shards import local


class Snapshot:
    """A saved state: buffers (and `more` tensors), random states and modes. `take` saves again, in the same memory."""

    def __init__(self, modules: Sequence[nn.Module], devices: Iterable[torch.device], more: Sequence[Tensor] = ()):
        self._modules = modules
        self._params = [p for module in modules for p in module._parameters.values() if p is not None]
        # The dictionaries of buffers, not only their values: a forward may replace a buffer by another tensor.
        self._buffer_dicts = [module._buffers for module in modules]
        self._saved_dicts = [dict(buffers) for buffers in self._buffer_dicts]
        self._buffers = _all_values(self._buffer_dicts)
        present = [buffer for buffer in self._buffers if buffer is not None]
        self._pairs = _with_copies([_as_bits(local(tensor.detach())) for tensor in (*present, *more)])
        # And their addresses: a forward may give a buffer other memory (`buffer.data = ...`, `resize_`).
        self._strided = [buffer for buffer in present if type(buffer) is Tensor and buffer.layout is torch.strided]
        self._memory = [buffer.detach() for buffer in self._strided]
        self._addresses = [buffer.data_ptr() for buffer in self._strided]
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self.own_generators = own_generators(modules)
        self._random_states = [_random_state(torch.device("cpu")), *access(self.own_generators)]
        self._host_states = len(self._random_states)
        self._random_states += [_random_state(device) for device in self._devices]
        self.take()

    def take(self) -> None:
        """Save the current state."""
        self._modes = [module.training for module in self._modules]
        self._trainable = [p.requires_grad for p in self._params]
        for sources, values in self._pairs:
            torch._foreach_copy_(values, sources)
        # While a CUDA graph records, each look has its own random state of the device: see Isolation.look_states.
        known = self._random_states[: self._host_states] if _recording(self._devices) else self._random_states
        self._random = [(write, read()) for read, write in known]

    def buffers(self) -> list[Tensor]:
        """New copies of the saved buffers."""
        copies = [torch.empty_like(buffer) for buffer in self._buffers if buffer is not None]
        groups = _by_dtype_and_device([_as_bits(copy) for copy in copies])
        for group, (_, values) in zip(groups, self._pairs, strict=True):
            torch._foreach_copy_(group, values)
        return copies

    def restore(self) -> None:
        """Restore the saved state."""
        if not self.fits():
            for buffers, saved in zip(self._buffer_dicts, self._saved_dicts, strict=True):
                buffers.clear()
                buffers.update(saved)
            for buffer, memory, address in zip(self._strided, self._memory, self._addresses, strict=True):
                if buffer.data_ptr() != address:
                    buffer.data = memory
        for sources, values in self._pairs:
            torch._foreach_copy_(sources, values)
        for write, state in self._random:
            write(state)
        if [module.training for module in self._modules] != self._modes:
            for module, training in zip(self._modules, self._modes, strict=True):
                module.training = training
        if [p.requires_grad for p in self._params] != self._trainable:
            for param, trainable in zip(self._params, self._trainable, strict=True):
                param.requires_grad_(trainable)

    def drew_since(self, earlier: Snapshot) -> bool:
        """Whether random numbers were drawn between an earlier snapshot and this one."""
        pairs = zip(self._random, earlier._random, strict=True)
        return not all(a.equal(b) if isinstance(a, Tensor) else a == b for (_, a), (_, b) in pairs)

    def fits(self) -> bool:
        """Whether the modules still have the same buffers, in the same memory."""
        same_tensors = same(_all_values(self._buffer_dicts), self._buffers)
        return same_tensors and [buffer.data_ptr() for buffer in self._strided] == self._addresses


class Isolation:
    """Isolates the extra looks of a step.

    Each of them starts from the state before the first look. At the end the state after the first look is restored.
    """

    def __init__(self, model: nn.Module | None, params: list[Tensor], changing: Sequence[Tensor] = ()):
        self._model, self._params = model, params
        reshard(modules := [] if model is None else list(model.modules()))  # else they have FSDP2's gathered weights
        self._changing = list(changing)  # parameters of others that a forward changes, for example a moving average
        self._modules = modules
        self._part_dicts = [one for m in self._modules for one in (m._modules, m._parameters)]
        self._parts = _all_values(self._part_dicts)  # as long as these are the same objects, so are model and snapshot
        self._devices = sorted({p.device for p in params}, key=str)
        self._sharded = [m for m in self._modules if fully_sharded(m)]
        self._before = Snapshot(self._modules, self._devices, self._changing)
        self._after: Snapshot | None = None
        self._may_draw, self._steps_to_watch = may_draw(self._modules), FIRST_STEPS
        self._host_before: HostRandomState | None = None
        self._host_after: HostRandomState | None = None  # if the first look drew from those generators
        self._save_host_state()
        self._first_look_saved = False  # whether the state after the first look is saved
        # Parameters of the model that belong to another optimizer: extra looks must not add to their gradients.
        ours = {id(p) for p in params}
        all_params = (p for m in self._modules for p in m._parameters.values() if p is not None)
        self._others = list({id(p): p for p in all_params if id(p) not in ours}.values())
        self._others_grads: list[Tensor | None] = []
        self._versions = [p._version for p in self._others]
        self._changed: list[tuple[Tensor, Tensor]] = []  # those that the first look changed unexpectedly: (p, value)
        self.precision = Precision(model, self._modules, params)
        self.outputs = OutputGradients(model, params)
        # While a CUDA graph records: one random state for each look. All start where that of the first look starts.
        self.look_states: list[torch.Generator] = []

    def for_next_step(self, model: nn.Module | None, params: list[Tensor]) -> Isolation:
        """This object with a new snapshot, or a new object if model or parameters have changed."""
        reshard(self._sharded)
        same_model = model is self._model and same(_all_values(self._part_dicts), self._parts)
        # A forward may create a generator. To look for new ones takes too long for every step.
        same_model &= self._steps_to_watch < 0 or same(own_generators(self._modules), self._before.own_generators)
        if not (same_model and same(params, self._params) and self._before.fits()) or self._changed:
            return Isolation(model, params, [*self._changing, *(p for p, _ in self._changed)] if same_model else ())
        self._first_look_saved = False
        self._versions = [p._version for p in self._others]
        self._before.take()
        self._save_host_state()
        return self

    def _save_host_state(self) -> None:
        """Save the state of Python's and NumPy's generators, if the model may draw from them."""
        self._steps_to_watch -= 1
        self._host_before = HostRandomState() if self._may_draw or self._steps_to_watch >= 0 else None
        self._host_after = None

    @contextlib.contextmanager
    def noting(self, method: Method) -> Generator[None, None, None]:
        """The context of the first look: note what later looks of the method need to know about it."""
        with contextlib.ExitStack() as stack:
            if "hvp" in method.needs:
                stack.enter_context(self.precision.noting())
            if "outputs" in method.needs:
                stack.enter_context(self.outputs.kept(method.name))
            yield

    def before_extra_look(self) -> None:
        """Restore the state before the first look."""
        if not self._first_look_saved:
            self._first_look_saved = True
            if self._after is not None and self._after.fits():
                self._after.take()
            else:
                self._after = Snapshot(self._modules, self._devices, self._changing)
            # A view is DDP's memory (gradient_as_bucket_view), which the next look overwrites.
            grads = [p.grad for p in self._others]
            self._others_grads = [g if g is None or g._base is None else g.clone() for g in grads]
            self._find_changed()
            if self._host_before is not None and (now := HostRandomState()) != self._host_before:
                self._may_draw, self._host_after = True, now
        for p in self._others:
            p.grad = None
        self._before.restore()
        if self._host_before is not None and self._host_after is not None:
            self._host_before.restore()
        self._use_state_of_next_look()

    def after_last_look(self) -> None:
        """Restore the state after the first look: what plain training would have left behind."""
        self.outputs.forget()
        self._use_state_of_first_look()
        if self._first_look_saved and self._after is not None:
            self._after.restore()
            if self._host_after is not None:
                self._host_after.restore()
            self._restore_changed()
            self._return_gradients()

    def undo(self) -> None:
        """Restore the state before the step, after an exception."""
        self.outputs.forget()
        self._use_state_of_first_look()
        self._before.restore()
        if self._host_before is not None:
            self._host_before.restore()
        if self._first_look_saved:
            self._restore_changed()
            self._return_gradients()

    def _find_changed(self) -> None:
        """Note which parameters of others the first look has changed. In later steps they are saved like buffers."""
        if [p._version for p in self._others] != self._versions:
            changed = (p for p, version in zip(self._others, self._versions, strict=True) if p._version != version)
            known = {id(p) for p in self._changing}
            self._changed = [(p, p.detach().clone()) for p in changed if id(p) not in known]

    def _restore_changed(self) -> None:
        with torch.no_grad():
            for p, value in self._changed:
                p.copy_(value)

    def _use_state_of_next_look(self) -> None:
        """While recording: let the device draw from the random state of the next look."""
        if len(self.look_states) > 1:
            _draw_from(self.look_states.pop(1))

    def _use_state_of_first_look(self) -> None:
        """While recording: let the device draw from the random state with which training continues."""
        if self.look_states:
            _draw_from(self.look_states[0])

    def _return_gradients(self) -> None:
        for p, grad in zip(self._others, self._others_grads, strict=True):
            p.grad = grad
        self._others_grads = []  # no reference, so that their owner can free them

    def only_buffers(self) -> bool:
        """Whether a forward changes buffers only: no parameters of others, no random state of the host, no shards."""
        return not (self._changing or self._changed or self._may_draw or self._sharded)

    def trains_others(self) -> bool:
        """Whether parameters of the model that belong to another optimizer are trained."""
        return any(p.requires_grad for p in self._others)

    def buffers_before(self) -> list[Tensor]:
        """New copies of the model's buffers as they were before the first look. Call it only if `only_buffers`."""
        return self._before.buffers()

    @contextlib.contextmanager
    def single_example(self) -> Generator[None, None, None]:
        """The context of a look at one example: BatchNorm uses its running statistics, because one example has none."""
        norms = [m for m in self._modules if isinstance(m, _BatchNorm) and m.training]
        for module in norms:
            module.training = False
        try:
            yield
        finally:
            for module in norms:
                module.training = True

    def drop_cached_weights(self) -> None:
        """Drop what was made from the weights before they moved: by autocast, `parametrize.cached()` and FSDP2."""
        torch.clear_autocast_cache()
        parametrize._cache.clear()
        reshard(self._sharded)


def _recording(devices: Sequence[torch.device]) -> bool:
    """Whether a CUDA graph is recording."""
    return any(d.type == "cuda" for d in devices) and torch.cuda.is_current_stream_capturing()


def _draw_from(state: torch.Generator) -> None:
    """Let a device's default generator draw from a random state."""
    torch.cuda.default_generators[state.device.index].graphsafe_set_state(state)


def _random_state(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Functions that read and write the random state of a device."""
    if device.type == "cpu":
        return torch.default_generator.get_state, torch.default_generator.set_state
    if device.type != "cuda":
        module = torch.get_device_module(device)
        return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)
    generator = torch.cuda.default_generators[device.index]

    def read() -> tuple[int, int]:  # seed and offset are the whole state, and faster to read than its tensor
        return generator.initial_seed(), generator.get_offset()

    def write(state: tuple[int, int]) -> None:
        seed, offset = state
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)

    return read, write


def _all_values(dicts: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [value for each in dicts if each for value in each.values()]


def _as_bits(tensor: Tensor) -> Tensor:
    """A view of the same memory as 32-bit integers, if possible, so that one kernel copies statistics and counters."""
    if tensor.layout is torch.strided and 0 in tensor.stride():  # expanded: all entries share one memory cell
        tensor = tensor[tuple(slice(None if step else 1) for step in tensor.stride())]
    # A conjugate view, or the imaginary part of one, carries a flag that `torch._foreach` kernels do not support.
    tensor = tensor.conj() if tensor.is_conj() else torch._neg_view(tensor) if tensor.is_neg() else tensor
    if tensor.dtype not in (torch.float32, torch.int64) or tensor.layout is not torch.strided:
        return tensor
    return tensor.view(-1).view(torch.int32) if tensor.is_contiguous() else tensor


def _with_copies(tensors: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Groups of tensors, each with memory for a copy of its values."""
    return [(group, [torch.empty_like(t) for t in group]) for group in _by_dtype_and_device(tensors)]


def _by_dtype_and_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors grouped by dtype and device, as `torch._foreach` kernels need them."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.dtype, t.device), []).append(t)
    return list(groups.values())
