"""A whole step, with all its looks, recorded once as a CUDA graph and replayed.

A step on a small model is mostly Python and kernel launches: the device waits for the host. A recorded step is one
launch. The first steps run as ever and warm things up; then the step is recorded, once for every phase of the
method (`Every` has two), and from there on replayed. Nothing else changes: the learning rate and scheduled radii
may change from step to step, BatchNorm's statistics move once a step, dropout masks are the same in all looks of a
step and new in the next; schedulers, checkpoints, `opt.steps` and `opt.metrics` (overwritten by the next step: clone
what you keep) work as ever.

Where a step cannot be recorded it runs as ever, and `Captured.how` says why. On a CPU that is always so: the same
code runs everywhere.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

from ..engine.shards import sharded
from ..method import Method, number_fields
from ..optimizer import SharpnessAware
from ..vector import Space
from .fixed_scale import FixedScale
from .recorder import Left, draw_looks_from, generators, pin
from .replayed import uncollected

WARM_UP = 2  # steps of a kind that run as ever before one is recorded

Batch = Tensor | Sequence[Tensor]


def capture(
    loss: Callable[..., Tensor],
    opt: SharpnessAware,
    *,
    scaler: GradScaler | None = None,
    between: Callable[[], Any] | None = None,
) -> Captured:
    """Make a step function that replays one CUDA graph.

    Args:
        loss: a function from a batch to its loss, ``loss(x, y)``: forward, with autocast inside if wanted, and no
            backward. Its Python runs only while the step is warmed up and recorded.
        opt: the optimizer, on CUDA parameters; anywhere else the steps run as ever.
        scaler: for fp16. The looks are replayed; unscaling, the step and the scaler's update run as ever, for it
            is the host that decides whether to skip. With a `FixedScale` there is nothing to decide: all is replayed.
        between: what to do between the looks and the base's step, for example clip the gradients. It is recorded
            too (not with a `GradScaler`).

    A method with a phase that it never repeats, a batch of another shape than the first (the last of an epoch) or
    a changed setting is no error: such a step runs as ever. Loading a checkpoint records anew. After freezing
    parameters or switching the mode of a part of the model, call `Captured.reset`: that is in the recording.

    >>> from torch import nn
    >>> from steppe import SAM
    >>> model = nn.Linear(2, 1)
    >>> opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(), model=model)
    >>> step = capture(lambda x, y: nn.functional.mse_loss(model(x), y), opt)
    >>> loss = step(torch.ones(4, 2), torch.zeros(4, 1))
    >>> step.how
    'as ever: the parameters are not on a CUDA device'
    """
    return Captured(loss, opt, scaler, between)


class Captured:
    """A step function: see `capture`. Call it with a batch; it returns the loss at w, without waiting for it.

    While `loss` runs, `look` says which look of the step it runs for (0: at w, on the step's batch). `looks` counts
    them all, replayed ones too.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        opt: SharpnessAware,
        scaler: GradScaler | None,
        between: Callable[[], Any] | None,
    ):
        self._loss, self._opt, self._scaler, self._between = loss, opt, scaler, between
        self._method = opt.method
        self._shapes: Hashable = None  # of the first batch
        self._kinds: dict[Hashable, _Kind] = {}
        self._live: _Live | None = None
        self._pool: Any = None
        self._stream: Any = None
        self.look = self.looks = 0
        self._obstacle = _obstacle(opt)
        self._whole = False  # whether the base's step is recorded with the looks
        self.reset()
        me = weakref.ref(self)  # a circle would keep the recordings, and their memory, until Python looks for such

        def forget(*_: Any) -> None:
            if (captured := me()) is not None:
                captured.reset()

        opt.register_load_state_dict_post_hook(forget)

    @property
    def how(self) -> str:
        """How steps are run, and if they are not replayed, why."""
        if self._obstacle:
            return f"as ever: {self._obstacle}"
        recorded = sum(kind.recorded is not None for kind in self._kinds.values())
        if not recorded:
            return "as ever, so far: nothing has been recorded yet"
        what = "the whole step" if self._whole else "the looks; the base optimizer's step runs as ever"
        return f"replayed ({recorded} recorded): {what}"

    def reset(self) -> None:
        """Forget what is recorded: the next steps warm up and record anew."""
        self._kinds, self._live, self._pool = {}, None, None
        self._method = self._opt.method
        host_decides = self._scaler is not None and not isinstance(self._scaler, FixedScale)
        self._whole = not self._obstacle and not host_decides and _make_recordable(self._opt)

    def __call__(self, *batch: Tensor, auxiliary: Batch | None = None) -> Tensor:
        """Take one step on a batch, and with a method that wants one, an auxiliary batch."""
        other = () if auxiliary is None else (auxiliary,) if isinstance(auxiliary, Tensor) else tuple(auxiliary)
        kind = self._kind((*batch, *other))
        if kind is None:
            return self._run(batch, other)
        if kind.recorded is None:
            if kind.runs < WARM_UP:
                return self._warm_up(kind, batch, other)
            kind.recorded = self._record(kind, batch, other)
            if kind.recorded is None:
                return self._run(batch, other)
        self.looks += kind.looks
        return self._replay(kind.recorded, (*batch, *other))

    def _kind(self, batch: tuple[Tensor, ...]) -> _Kind | None:
        """Which recording fits this step: one for all that is not a number on the device. None if none can."""
        if self._obstacle:
            return None
        opt = self._opt
        if opt.method is not self._method:
            self.reset()
        shapes = tuple((t.shape, t.dtype) for t in batch)
        self._shapes = shapes if self._shapes is None else self._shapes
        phase = self._method.phase(opt.steps)
        if shapes != self._shapes or phase is None:
            return None
        constants = tuple(
            value if isinstance(value, Hashable) else repr(value)
            for group in opt.param_groups
            for name, value in group.items()
            if name not in _NO_CONSTANTS
        )
        place = opt.param_groups[0]["params"][0].data_ptr()
        key = phase, constants, place, opt.model is None or opt.model.training
        return self._kinds.setdefault(key, _Kind())

    # As ever

    def _run(self, batch: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
        loss = self._look(batch, other)
        self._step()
        self.looks += self.look
        return loss

    def _warm_up(self, kind: _Kind, batch: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
        """A step as ever that shows what recording has to know: how many looks, and whether masks are drawn."""
        generator = self._generator()
        before = generator.get_offset()
        loss = self._run(batch, other)
        kind.runs, kind.looks, kind.draws = kind.runs + 1, self.look, generator.get_offset() != before
        return loss

    def _look(self, batch: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
        """The first half: the looks, the direction in p.grad."""
        batches: dict[str, Any] = {}
        self.look = 0
        if other:
            batches["auxiliary"] = lambda: self._count(*other)
        if "sample" in self._method.needs:
            batches["sample"] = lambda i: self._count(*(t[i % len(t)].unsqueeze(0) for t in batch))
        loss = self._opt.gradient(lambda: self._count(*batch), scaler=self._scaler, **batches)
        assert loss is not None
        return loss

    def _count(self, *batch: Tensor) -> Tensor:
        value = self._loss(*batch)
        self.look += 1
        return value

    def _step(self) -> None:
        """The second half."""
        if self._scaler is None:
            if self._between is not None:
                self._between()
            self._opt.step()
            return
        if self._between is not None:
            self._scaler.unscale_(self._opt)
            self._between()
        self._scaler.step(self._opt)
        self._scaler.update()
        self._opt.zero_grad()  # a step that was skipped leaves gradients that nobody may use

    # Recorded

    def _record(self, kind: _Kind, batch: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> _Recorded | None:
        """Record a step without running it. None, and a warning, if that is impossible."""
        opt, generator, graph = self._opt, self._generator(), torch.cuda.CUDAGraph()
        opt.zero_grad()
        pin(opt)
        self._live = _Live(opt, self._method, self._whole) if self._live is None else self._live
        inputs = tuple(t.to(generator.device, copy=True) for t in (*batch, *other))
        masks = [generator.clone_state() for _ in range(kind.looks)] if kind.draws else []
        for state in (*masks, *generators(opt)):
            graph.register_generator_state(state)
        own = generator.graphsafe_get_state()
        try:
            if masks:
                generator.graphsafe_set_state(masks[0])
            draw_looks_from(opt, list(masks))
            # A stream of its own: cuBLAS has one workspace a stream, which programs that run at the same time must
            # not share. (Sharing it, split sums have been seen to wait for each other for ever.)
            self._stream = self._stream or torch.cuda.Stream(generator.device)
            with uncollected(), self._live.numbers(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                loss = self._look(inputs[: len(batch)], inputs[len(batch) :])
                if self._whole:
                    self._step()
        except Exception as error:
            return self._give_up(error)
        finally:
            draw_looks_from(opt, [])
            generator.graphsafe_set_state(own)
        self._pool = graph.pool()
        return _Recorded(graph, inputs, Left.by(opt, loss), masks)

    def _give_up(self, error: Exception) -> None:
        torch.cuda.synchronize()
        self._opt.zero_grad()
        if self._whole:  # perhaps it was the base: the looks alone may do
            self._kinds, self._live, self._whole = {}, None, False
            warnings.warn(f"the base optimizer's step cannot be recorded and runs as ever: {error}", stacklevel=4)
        else:
            self._obstacle = f"recording failed: {error}"
            warnings.warn(f"the step cannot be recorded and runs as ever: {error}", stacklevel=4)

    def _replay(self, recorded: _Recorded, batch: tuple[Tensor, ...]) -> Tensor:
        torch._foreach_copy_(list(recorded.inputs), list(batch), non_blocking=True)
        assert self._live is not None
        self._live.refresh()
        generators(self._opt)
        if recorded.masks:
            generator = self._generator()
            now = generator.get_state()
            for state in recorded.masks:
                state.set_state(now)
        recorded.graph.replay()
        if recorded.masks:
            self._generator().set_state(recorded.masks[0].get_state())
        loss = recorded.left.give_to(self._opt)
        if not self._whole:
            self._step()
        return loss

    def _generator(self) -> torch.Generator:
        device = self._opt.param_groups[0]["params"][0].device
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


@dataclass
class _Recorded:
    """A recorded step: what it reads, what it writes, and a random state for each of its looks."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    left: Left
    masks: list[torch.Generator]


@dataclass
class _Kind:
    """Steps that one recording serves."""

    runs: int = 0
    looks: int = 0
    draws: bool = False
    recorded: _Recorded | None = None


class _Live:
    """The numbers that change from step to step, where a recorded step reads them: learning rates and schedules."""

    def __init__(self, opt: SharpnessAware, method: Method, whole: bool):
        self._opt = opt
        first = opt.param_groups[0]["params"][0]
        self._zero = Space([first]).zero()
        self._schedules: list[tuple[Callable[..., Any], Tensor, list[float]]] = []
        self._method = self._made_live(method)
        groups = opt.param_groups if whole and "lr" not in method.needs else []
        # float32 whatever the default is, for fused kernels read it so
        self._lrs = [(torch.zeros((), dtype=torch.float32, device=first.device), [float("nan")]) for _ in groups]
        self.refresh()

    def _made_live(self, method: Method) -> Method:
        """The method with every schedule replaced by one that always gives the same tensor."""
        values: dict[str, Any] = {}
        for f in fields(method):
            value = getattr(method, f.name)
            if isinstance(value, Method):
                values[f.name] = self._made_live(value)
            elif f.name in number_fields(type(method)) and callable(value):
                number = self._zero.clone()
                self._schedules.append((value, number, [float("nan")]))
                values[f.name] = lambda step, lr, number=number: number
        return replace(method, **values) if values else method

    def refresh(self) -> None:
        """Write this step's values, those that have changed."""
        groups = self._opt.param_groups
        for (number, last), group in zip(self._lrs, groups, strict=False):
            _write(number, float(group["lr"]), last)
        for schedule, number, last in self._schedules:
            _write(number, float(schedule(self._opt.steps, groups[0].get("lr"))), last)

    @contextlib.contextmanager
    def numbers(self) -> Generator[None, None, None]:
        """While recording: let the optimizer see the tensors."""
        opt, method = self._opt, self._opt.method
        lrs = [group.get("lr") for group in opt.param_groups]
        opt.method = self._method
        for group, (number, _) in zip(opt.param_groups, self._lrs, strict=False):
            group["lr"] = number
        try:
            yield
        finally:
            opt.method = method
            if self._lrs:
                for group, lr in zip(opt.param_groups, lrs, strict=True):
                    group["lr"] = lr


def _write(number: Tensor, value: float, last: list[float]) -> None:
    if value != last[0]:
        number.fill_(value)
        last[0] = value


# Entries of a parameter group that a recording does not depend on: they change, or are where it reads them.
_NO_CONSTANTS = frozenset({"params", "lr", "initial_lr", "steppe_step", "steppe_seed", "param_names"})


def _obstacle(opt: SharpnessAware) -> str:
    """Why steps of this optimizer cannot be recorded; empty if nothing is known to be in the way."""
    params = [p for group in opt.param_groups for p in group["params"]]
    if not all(p.is_cuda for p in params):
        return "the parameters are not on a CUDA device"
    if len({p.device for p in params}) > 1:
        return "the parameters are on several devices"
    if isinstance(opt.model, DistributedDataParallel) or any(sharded(p) for p in params):
        return "the model is spread over processes (DistributedDataParallel or FSDP2)"
    return ""


def _make_recordable(opt: SharpnessAware) -> bool:
    """Let the base optimizer keep all of its state on the device and read its learning rate there, if it can."""
    base, groups = opt.base, opt.param_groups
    hooks = (*opt._optimizer_step_pre_hooks, *opt._optimizer_step_post_hooks)
    hooks += (*base._optimizer_step_pre_hooks, *base._optimizer_step_post_hooks)
    if hooks or type(base).__module__.split(".")[:2] != ["torch", "optim"]:
        return False  # hooks must run; and another optimizer may count its steps in Python
    fused = type(base) in (SGD, Adam, AdamW) and not any(group.get("differentiable") for group in groups)
    if not fused and not all("capturable" in group for group in groups):
        return False
    for group in groups:
        if fused:
            group["fused"], group["foreach"] = True, None
        if "capturable" in group:
            group["capturable"] = True
            base._warned_capturable_if_run_uncaptured = True
    for p, state in base.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(p.device)
    return True
