"""The step under way as one object: its phase, and the memory that the next step reuses."""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ..method import Context, Method
from ..vector import Space, Vector
from . import checks, replicas
from .home import Home, Place, home_in
from .interrupts import recover_before_saving
from .isolation import Isolation
from .looks import Abandoned, LookRunner, LookSettings, LossScale, Pass
from .random_vectors import Generators
from .side_by_side import LookBranches


class Phase(Enum):
    """The phases of a step."""

    IDLE = "idle"  # no step is under way
    LOOKING = "looking"  # the looks run; the weights may be perturbed
    READY = "ready"  # the direction is in p.grad, for the base optimizer's step


@dataclass(frozen=True)
class Ready:
    """Where the direction in p.grad comes from: the space and the context of its looks."""

    space: Space
    ctx: Context


@dataclass(frozen=True)
class Outcome:
    """What a step, or its looks alone, left behind in Python when it was recorded as a CUDA graph."""

    params: list[Tensor]
    grads: list[Tensor | None]
    ready: Ready | None  # None if the base's step was recorded with the looks
    metrics: dict[str, Any]
    lr: Any  # if the method sets the learning rate


class Step:
    """The step under way. Nothing in here is saved: a copy of an optimizer gets a new `Step`.

    Isolation, space, generators and the copy of the weights are kept between steps, so that their memory is reused.
    """

    def __init__(self) -> None:
        self.generators: Generators = {}  # of the method's random vectors
        self.recording = False  # whether a CUDA graph is recording this step
        self.branches: LookBranches | None = None  # while recording: for independent looks side by side
        self.recorded_metrics: dict[str, Any] = {}  # of the last step that was recorded
        self._space: Space | None = None
        self._isolation: Isolation | None = None
        self._home: tuple[Place, Home] | None = None  # memory for a copy of the weights, and where it is
        self._ready: Ready | None = None
        self._looks: weakref.ref[Generator[Pass, None, None]] | None = None
        self._warned = False  # whether the user was warned that no look saw a gradient
        self._grad_mode: bool | None = None  # after an interrupt: the gradient mode to restore
        self._undo: Space | None = None  # after an interrupt in the middle of a step: the weights to restore
        self._runner: LookRunner | None = None  # of looks that have begun and have not restored everything
        self._noting: contextlib.ExitStack | None = None  # between `begin` and the looks

    @property
    def phase(self) -> Phase:
        """The phase of the step."""
        if self._running() is not None:
            return Phase.LOOKING
        return Phase.IDLE if self._ready is None else Phase.READY

    @property
    def ready(self) -> Ready | None:
        """Where the direction in p.grad comes from; None if there is no direction for the base's step."""
        return self._ready

    @property
    def space(self) -> Space | None:
        """The space of the last step."""
        return self._space

    def space_for(
        self, params: list[Tensor], perturbed: Any, adaptive: Any, norm_group: Any = None, members: int | None = None
    ) -> Space:
        """The space of a step on these parameters: that of the last step, if nothing has changed."""
        if self._space is None or not self._space.fits(params, perturbed, adaptive, norm_group, members):
            checks.refuse_pipeline_without_group(params, norm_group)
            checks.refuse_pieces_for_ddp(params)
            checks.check_stacked(params, members)
            self._space, self._home = Space(params, perturbed, adaptive, norm_group, members), None
        return self._space

    # Looking

    def refuse_leftovers(self, space: Space) -> None:
        """Raise for gradients that no step has used, unless they are a direction whose step a GradScaler skipped."""
        if self._ready is None:
            checks.refuse_leftover_gradients(space.params)

    def begin(self, model: nn.Module | None, params: list[Tensor], method: Method) -> None:
        """Save what the looks must not disturb, before a framework runs the first look itself."""
        self.close()
        self._stop_noting()
        isolation = self._isolate(model, params)
        self._noting = contextlib.ExitStack()
        self._noting.enter_context(isolation.noting(method))

    def track(self, looks: Generator[Pass, None, None]) -> Generator[Pass, None, None]:
        """Make these the looks of the step under way, and return them. An unused direction is dropped."""
        self._ready = None
        # Weak: when a loop is left early, its generator must be freed, and so restore the weights, immediately.
        self._looks = weakref.ref(looks)
        return looks

    def run(
        self,
        method: Method,
        space: Space,
        ctx: Context,
        settings: LookSettings,
        scaler: GradScaler | None,
        first_done: bool,
    ) -> Generator[Pass, None, None]:
        """Yield once for every look, then put the direction into p.grad."""
        begun = self._stop_noting() and first_done
        isolation = self._isolation if begun else None
        isolation = isolation or self._isolate(settings.model, space.params, settings.local)
        scale = None if scaler is None else LossScale(scaler, space.pieces()[0].device)
        home = self._home_in(settings.home, space)
        runner = LookRunner(method, space, ctx, isolation, settings, scale, home, begun)
        self._runner, enabled = runner, torch.is_grad_enabled()
        try:
            direction = yield from runner.passes(first_done)
            self._leave(direction, runner, settings)
        except KeyboardInterrupt:  # it may have come after the body of a `with torch.no_grad()` and before its exit
            self._grad_mode = enabled
            raise
        finally:
            if runner.restored:  # otherwise `recover` has to finish it
                self._runner = None

    def _isolate(self, model: nn.Module | None, params: list[Tensor], local: bool = False) -> Isolation:
        torch.clear_autocast_cache()  # autocast around the whole loop has cached the weights of the previous step
        before = self._isolation
        self._isolation = Isolation(model, params) if before is None else before.for_next_step(model, params)
        if self._isolation is not before:
            if local and self._isolation.trains_others():
                warnings.warn(
                    "local=True: the gradients of parameters that another optimizer trains are those of this rank, not "
                    "means over ranks: average them, or freeze what is not trained",
                    stacklevel=2,
                )
            checks.check_model(model)  # trainers set opt.model, the wrapped model, after the optimizer was made
            recover_before_saving(self, model)
        return self._isolation

    def _home_in(self, place: Place, space: Space) -> Home:
        if self._home is None or self._home[0] != place:
            self._home = place, home_in(place, space.live())
        return self._home[1]

    def _stop_noting(self) -> bool:
        """End the noting that `begin` started; return whether it was on."""
        noting, self._noting = self._noting, None
        if noting is not None:
            noting.close()
        return noting is not None

    def _leave(self, direction: Any, runner: LookRunner, settings: LookSettings) -> None:
        """Put the direction into p.grad, in memory that the method does not keep: clipping changes it in place."""
        if not isinstance(direction, Vector):
            raise TypeError(f"{runner.method.name}.looks must return a Vector, not {direction!r}")
        ctx, used = runner.ctx, runner.used
        values = (*ctx.memory.values(), *ctx.remembered.values(), *ctx.wishes.values())
        kept = {id(t) for value in values if isinstance(value, Vector) for t in value.tensors}
        with torch.no_grad():
            if kept and any(id(t) in kept for t in direction.tensors):
                direction = direction.clone()
            if kept and runner.home is not None:
                runner.home.forget(kept)
            if runner.scale is not None:  # before the mean over ranks: all of them must see that one has overflowed
                runner.scale.restore(direction)
            if settings.local:
                replicas.average_(direction.tensors, settings.model)
                used = replicas.used_anywhere(used, settings.model)
                for name, wish in ctx.wishes.items():
                    ctx.wishes[name] = wish = wish.clone()
                    replicas.average_(wish.tensors if isinstance(wish, Vector) else [wish], settings.model)
        if not any(used) and not self._warned:
            self._warned = True
            warnings.warn("the loss reaches no parameter of this optimizer: nothing will be trained", stacklevel=2)
        for p, grad, has_grad in zip(runner.space.params, runner.space.wrap(direction), used, strict=True):
            p.grad = grad if has_grad else None  # without a gradient in any look, the base must not touch it
        self._ready = Ready(runner.space, ctx)

    def _running(self) -> Generator[Pass, None, None] | None:
        return None if self._looks is None else self._looks()

    # Ending

    def close(self) -> None:
        """End a loop over the looks that is still under way, as if it had been left early: everything is restored."""
        looks = self._running()
        if looks is not None and inspect.getgeneratorstate(looks) != inspect.GEN_RUNNING:
            looks.close()
        self._looks = None
        self.recover()

    def recover(self) -> None:
        """Restore what the looks could not restore because of an interrupt (Ctrl-C)."""
        looks = self._running()
        if looks is not None and inspect.getgeneratorstate(looks) != inspect.GEN_CLOSED:
            return
        if self._grad_mode is not None:
            torch.set_grad_enabled(self._grad_mode)
            self._grad_mode = None
        if self._undo is not None and self._home is not None:
            with torch.no_grad():
                self._home[1].restore(self._undo.live())
        if self._runner is not None and not self._runner.restored:
            self._runner.undo()
        self._runner = self._undo = None

    def before_saving(self) -> None:
        """Restore the weights if a loop over the looks was left, but a variable keeps its iterator (`looks.close()`).

        From within a look at the weights themselves they may be saved.
        """
        if self._runner is not None and self._runner.away:
            self.close()
        else:
            self.recover()

    def interrupted(self, grad_mode: bool, undo: Space | None = None) -> None:
        """Note an interrupt outside of the looks. With `undo`, the step was half done: its weights are restored."""
        self._grad_mode, self._undo = grad_mode, undo

    def abandon(self) -> None:
        """Give up the step and restore the weights, but keep the buffers and random state of its first look."""
        looks = self._running()
        if looks is not None:
            with contextlib.suppress(Abandoned):
                looks.throw(Abandoned())
        self._looks = None

    def take(self) -> Ready | None:
        """Take the direction out: return where it comes from, and be idle again."""
        ready, self._ready = self._ready, None
        return ready

    def resume(self, ready: Ready | None) -> None:
        """Be ready with the direction of replayed looks."""
        self._ready = ready

    def draw_looks_from(self, states: list[torch.Generator]) -> None:
        """While a CUDA graph records the step: use one random state per look, because none can be restored."""
        if self._isolation is not None:
            self._isolation.look_states = states
