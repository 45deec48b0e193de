"""What the extra looks of a step must not disturb.

Plain training does one forward pass a step. It moves BatchNorm's statistics and every other buffer once, and
draws random numbers once. A step with several looks must leave exactly that behind, and every look must see
what the first one saw: the same dropout masks, the same buffers. It must also see the weights as they are
*now*, not as autocast or FSDP2 remember them. Saving and putting back is the one construct that is right for
all kinds of buffers, changes no attribute of a module (so `torch.compile` has nothing to recompile) and needs
no knowledge of layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from .vector import copies, copy_into, local


class Snapshot:
    """Buffers, random state and modes at one moment."""

    def __init__(self, modules: Iterable[nn.Module], devices: Iterable[torch.device]):
        self._modes = [(module, module.training) for module in modules]
        params = [p for module, _ in self._modes for p in module._parameters.values() if p is not None]
        self._trainable = [(p, p.requires_grad) for p in params]
        # By place and not only by value: a forward may put another tensor where a buffer was.
        places = [(module._buffers, name) for module, _ in self._modes for name in module._buffers]
        self._buffers = [(where, name, buffer) for where, name in places if (buffer := where[name]) is not None]
        self._values = copies([local(buffer).detach() for *_, buffer in self._buffers])
        self._cpu_rng = torch.get_rng_state()
        accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
        self._device_rng = [(d, torch.get_device_module(d).get_rng_state(d)) for d in accelerators]

    def restore(self) -> None:
        """Make everything as it was when the snapshot was taken."""
        for where, name, buffer in self._buffers:
            if where[name] is not buffer:
                where[name] = buffer
        with torch.no_grad():
            copy_into([local(buffer) for *_, buffer in self._buffers], self._values)
        torch.set_rng_state(self._cpu_rng)
        for device, state in self._device_rng:
            torch.get_device_module(device).set_rng_state(state, device)
        for module, training in self._modes:
            if module.training != training:
                module.training = training
        for param, trainable in self._trainable:
            if param.requires_grad != trainable:
                param.requires_grad_(trainable)


class Quiet:
    """Keeps one step's looks from disturbing anything: the state before the first look, and after it."""

    def __init__(self, model: nn.Module | None, params: list[Tensor]):
        self._model = model
        self._modules = [] if model is None else list(model.modules())
        self._params = params
        self._devices = sorted({p.device for p in params}, key=str)
        self._sharded = [m for m in self._modules if isinstance(m, FSDPModule)]
        self._before = self._snapshot()
        self._after: Snapshot | None = None
        # Parameters of the model that are another optimizer's: extra looks must not add to their gradients.
        ours = {id(p) for p in params}
        everyones = (p for m in self._modules for p in m._parameters.values() if p is not None)
        self._others = list({id(p): p for p in everyones if id(p) not in ours}.values())
        self._others_grads: list[Tensor | None] = []
        self._autocast: torch.dtype | None = None

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._modules, self._devices)

    def rewind(self) -> None:
        """Before each extra look: as before the first one."""
        if self._after is None:
            self._after = self._snapshot()
            self._others_grads = [p.grad for p in self._others]
        for p in self._others:
            p.grad = None
        self._before.restore()

    def settle(self) -> None:
        """After the last look: as after the first one."""
        if self._after is not None:
            self._after.restore()
            self._give_back_gradients()

    def undo(self) -> None:
        """After an exception: as if the step had never begun."""
        self._before.restore()
        if self._after is not None:
            self._give_back_gradients()

    def _give_back_gradients(self) -> None:
        for p, grad in zip(self._others, self._others_grads, strict=True):
            p.grad = grad

    @contextlib.contextmanager
    def noting_precision(self) -> Generator[None, None, None]:
        """Around a look: find out in which precision the model computes, for `precision`."""
        self._autocast = _autocast_dtype(self._params[0].device.type)
        if self._model is None:
            yield
            return

        def note(*_: object) -> None:
            self._autocast = _autocast_dtype(self._params[0].device.type) or self._autocast

        hook = self._model.register_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def single_example(self) -> Generator[None, None, None]:
        """Around a look at one example: batch norm uses its running statistics, for a batch of one has none."""
        norms = [m for m in self._modules if isinstance(m, _BatchNorm) and m.training]
        for module in norms:
            module.training = False
        try:
            yield
        finally:
            for module in norms:
                module.training = True

    def precision(self) -> str:
        """The coarsest precision that gradients are computed in, by the name of a dtype (TF32 counts as float16)."""
        dtypes = {p.dtype for p in self._params} | {self._autocast} - {None}
        dtypes |= {getattr(m._get_fsdp_state()._mp_policy, "param_dtype", None) for m in self._sharded} - {None}
        for dtype in (torch.bfloat16, torch.float16):
            if dtype in dtypes:
                return str(dtype).removeprefix("torch.")
        if torch.float32 not in dtypes:
            return "float64"
        convolves = self._model is None or any(isinstance(m, _ConvNd) for m in self._modules)
        tf32 = self._params[0].is_cuda and (
            torch.get_float32_matmul_precision() != "highest" or (convolves and torch.backends.cudnn.allow_tf32)
        )
        return "float16" if tf32 else "float32"

    def weights_moved(self) -> None:
        """Forget copies of the weights: autocast's low-precision ones, FSDP2's gathered ones."""
        torch.clear_autocast_cache()
        for module in self._sharded:
            module.reshard()


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
