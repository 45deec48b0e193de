"""Records a whole step, with all its looks, once as a CUDA graph, and replays it.

A step on a small model is mostly Python and kernel launches: the device waits for the host. A recorded step is one
launch. The first steps run eagerly as a warm-up; then the step is recorded, once for every phase of the method
(`Every` has two), and from then on replayed. Nothing else changes: the learning rate and scheduled radii may change
from step to step, BatchNorm's statistics are updated once per step, dropout masks are the same in all looks of a step
and new in the next; schedulers, checkpoints, `opt.steps` and `opt.metrics` work as in eager steps.

A step that cannot be recorded runs eagerly, and `Captured.how` says why. On a CPU all steps do: the same code runs
everywhere.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ..engine.groups import SEED, STEP, first_parameter
from ..optimizer import SharpnessAware
from ..support.devices import default_generator
from .branches import Branches
from .fixed_scale import FixedScale
from .recorder import LiveNumbers, RecordedStep, make_recordable, obstacle
from .replayed import no_garbage_collection

WARM_UP = 2  # eager steps of each kind before a step of that kind is recorded

Batch = Tensor | Sequence[Tensor]


def capture(
    loss: Callable[..., Tensor],
    opt: SharpnessAware,
    *,
    scaler: GradScaler | None = None,
    between: Callable[[], Any] | None = None,
    side_by_side: bool = True,
) -> Captured:
    """Make a step function that replays one CUDA graph.

    Args:
        loss: a function from a batch to its loss, ``loss(x, y)``: forward, with autocast inside if wanted, and no
            backward. Its Python runs only while the step is warmed up and recorded.
        opt: the optimizer, on CUDA parameters; on any other device the steps run eagerly.
        scaler: for fp16. The looks are replayed; unscaling, the step and the scaler's update run eagerly, because the
            host decides whether to skip the step. With a `FixedScale` there is nothing to decide: all is replayed.
        between: a function to call between the looks and the base's step, for example to clip the gradients. It is
            recorded too (not with a `GradScaler`).
        side_by_side: record independent looks (of SAMPa, MARWP, GAM; of TraceSAM and UniversalSAM if n > 1) as parallel
            branches of the graph, with the same bits. This is done only if the optimizer knows the model, the model is
            not too large, and there is no scaler. Set it to False if `loss` itself writes to tensors that it shares
            between looks (in other looks than the first), or to save memory: each branch has its own weights and
            activations.

    Some steps run eagerly: those of a phase that occurs only once, and those on a batch of another shape than the first
    (the last batch of an epoch). After a setting has changed, the step is warmed up and recorded again. Loading a
    checkpoint drops the recordings. After freezing parameters or switching the mode of a part of the model, call
    `Captured.reset`: both are part of a recording.

    >>> from torch import nn
    >>> from steppe import SAM
    >>> model = nn.Linear(2, 1)
    >>> opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(), model=model)
    >>> step = capture(lambda x, y: nn.functional.mse_loss(model(x), y), opt)
    >>> loss = step(torch.ones(4, 2), torch.zeros(4, 1))
    >>> step.how
    'eager: the parameters are not on a CUDA device'
    """
    return Captured(loss, opt, scaler, between, side_by_side)


class Captured:
    """A step function, made by `capture`. Call it with a batch; it returns the loss at w, without synchronising.

    While `loss` runs, `look` is the index of the look in the step (0: at w, on the step's batch). `looks` counts the
    looks of all steps, replayed ones too.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        opt: SharpnessAware,
        scaler: GradScaler | None,
        between: Callable[[], Any] | None,
        side_by_side: bool = True,
    ):
        self._loss, self._opt, self._scaler, self._between = loss, opt, scaler, between
        self._method = opt.method
        self._shapes: Hashable = None  # of the first batch
        self._kinds: dict[Hashable, _StepKind] = {}
        self._live: LiveNumbers | None = None
        self._pool: Any = None
        self._stream: Any = None
        self.look = self.looks = 0
        self._obstacle = obstacle(opt)
        device = first_parameter(opt.param_groups).device
        self._branches = Branches(device) if side_by_side and not self._obstacle else None
        self._whole = False  # whether the base's step is recorded with the looks
        self.reset()
        weak = weakref.ref(self)  # a reference cycle would keep the recordings' memory until garbage collection

        def drop_recordings(*_: Any) -> None:
            if (captured := weak()) is not None:
                captured.reset()

        opt.register_load_state_dict_post_hook(drop_recordings)

    @property
    def how(self) -> str:
        """How steps run: replayed, or eagerly and why."""
        if self._obstacle:
            return f"eager: {self._obstacle}"
        recorded = sum(kind.recorded is not None for kind in self._kinds.values())
        if not recorded:
            return "eager so far: nothing has been recorded yet"
        what = "the whole step" if self._whole else "the looks; the base optimizer's step runs eagerly"
        parallel = ", independent looks side by side" if self._branches is not None and self._branches.forks else ""
        return f"replayed ({recorded} recorded): {what}{parallel}"

    def reset(self) -> None:
        """Drop all recordings: the next steps warm up and record again."""
        self._kinds, self._live, self._pool = {}, None, None
        self._method = self._opt.method
        host_decides = self._scaler is not None and not isinstance(self._scaler, FixedScale)
        self._whole = not self._obstacle and not host_decides and make_recordable(self._opt)

    def __call__(self, *batch: Tensor, auxiliary: Batch | None = None) -> Tensor:
        """Take one step on a batch, and on an auxiliary batch if the method needs one."""
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

    def _kind(self, batch: tuple[Tensor, ...]) -> _StepKind | None:
        """The kind of this step; None if it cannot be recorded. Steps of a kind differ in values on the device only."""
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
            if name not in _NOT_CONSTANT
        )
        address = first_parameter(opt.param_groups).data_ptr()
        key = phase, constants, address, opt.model is None or opt.model.training
        return self._kinds.setdefault(key, _StepKind())

    # Eager

    def _run(self, batch: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
        loss = self._look(batch, other)
        self._step()
        self.looks += self.look
        return loss

    def _warm_up(self, kind: _StepKind, batch: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
        """Take an eager step, and note what recording needs: the number of looks, and whether they draw numbers."""
        generator = self._generator()
        before = generator.get_offset()
        loss = self._run(batch, other)
        kind.runs, kind.looks, kind.draws = kind.runs + 1, self.look, generator.get_offset() != before
        return loss

    def _look(self, batch: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
        """The first half of a step: run the looks, which leave the direction in p.grad."""
        batches: dict[str, Any] = {}
        self.look = 0
        if other:
            batches["auxiliary"] = lambda: self._counted_loss(*other)
        if "sample" in self._method.needs:

            def sample(i: int) -> Tensor:
                return self._counted_loss(*(t[i % len(t)].unsqueeze(0) for t in batch))

            batches["sample"] = sample
        loss = self._opt.gradient(lambda: self._counted_loss(*batch), scaler=self._scaler, **batches)
        assert loss is not None
        return loss

    def _counted_loss(self, *batch: Tensor) -> Tensor:
        value = self._loss(*batch)
        self.look += 1
        return value

    def _step(self) -> None:
        """The second half of a step: the base optimizer's step, with clipping and the scaler."""
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
        self._opt.zero_grad()  # a skipped step leaves gradients that must not be used

    # Recorded

    def _record(self, kind: _StepKind, batch: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> RecordedStep | None:
        """Record a step without running it. If that fails, warn and return None."""
        opt, generator, graph = self._opt, self._generator(), torch.cuda.CUDAGraph()
        opt.zero_grad()
        draws = opt.prepare_recording()
        self._live = LiveNumbers(opt, self._method, self._whole) if self._live is None else self._live
        inputs = tuple(t.to(generator.device, copy=True) for t in (*batch, *other))
        look_states = [generator.clone_state() for _ in range(kind.looks)] if kind.draws else []
        for state in (*look_states, *draws):
            graph.register_generator_state(state)
        own = generator.graphsafe_get_state()
        # A separate stream: cuBLAS has one workspace per stream, and graphs that run at the same time must not share
        # it. (With a shared workspace, split sums have been seen to deadlock.)
        self._stream = self._stream or torch.cuda.Stream(generator.device)
        try:
            if look_states:
                generator.graphsafe_set_state(look_states[0])
            with opt.recording(list(look_states), self._branches), no_garbage_collection(), self._live.in_use():  # noqa: SIM117
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    loss = self._look(inputs[: len(batch)], inputs[len(batch) :])
                    if self._whole:
                        self._step()
        except Exception as error:
            # A failed recording leaves the random state that it drew from marked as being captured, and every later
            # draw (dropout) would raise. A copy has the same seed and offset, but not the mark.
            own = own.clone_state()
            return self._give_up(error)
        finally:
            generator.graphsafe_set_state(own)
        self._pool = graph.pool()
        return RecordedStep(graph, inputs, loss, opt.recorded(), look_states)

    def _give_up(self, error: Exception) -> None:
        torch.cuda.synchronize()
        self._opt.zero_grad()
        if self._branches is not None and self._branches.forks:  # perhaps out of memory: record one after another
            self._kinds, self._live, self._branches = {}, None, None
            warnings.warn(f"looks are recorded one after another, not side by side: {error}", stacklevel=4)
        elif self._whole:  # perhaps because of the base's step: record the looks alone
            self._kinds, self._live, self._whole = {}, None, False
            warnings.warn(f"the base optimizer's step cannot be recorded and runs eagerly: {error}", stacklevel=4)
        else:
            self._obstacle = f"recording failed: {error}"
            warnings.warn(f"the step cannot be recorded and runs eagerly: {error}", stacklevel=4)

    def _replay(self, recorded: RecordedStep, batch: tuple[Tensor, ...]) -> Tensor:
        torch._foreach_copy_(list(recorded.inputs), list(batch), non_blocking=True)
        assert self._live is not None
        self._live.refresh()
        self._opt.seed_generators()
        if recorded.look_states:
            now = self._generator().get_state()
            for state in recorded.look_states:
                state.set_state(now)
        recorded.graph.replay()
        if recorded.look_states:
            self._generator().set_state(recorded.look_states[0].get_state())
        loss, metrics = recorded.results()
        self._opt.replayed(recorded.outcome, metrics)
        if not self._whole:
            self._step()
        return loss

    def _generator(self) -> torch.Generator:
        return default_generator(first_parameter(self._opt.param_groups).device)


@dataclass
class _StepKind:
    """Steps that run the same operations with the same constants: one recording serves all of them."""

    runs: int = 0  # eager steps so far
    looks: int = 0  # per step
    draws: bool = False  # whether the looks draw random numbers on the device
    recorded: RecordedStep | None = None


# Entries of a parameter group that are no constants of a recording: it reads them from the device, or not at all.
_NOT_CONSTANT = frozenset({"params", "lr", "initial_lr", STEP, SEED, "param_names"})
