"""The optimizer that drives every method.

It moves the weights to where the method looks, collects loss and gradient, restores the weights exactly (copied, never
subtracted), and leaves the method's direction in ``p.grad`` for any base optimizer to use. There are two halves,
`passes` (or `gradient`, which runs closures in them) and `step`; what a trainer does between backward and step
(unscale, clip, log, skip) stays where it is.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .engine import checks
from .engine.closures import Closures, closures_for, evaluate, hessian_product
from .engine.compiling import Uncompiled, exclude_from_tracing
from .engine.groups import Groups
from .engine.home import Place
from .engine.looks import LookSettings, Pass, Products
from .engine.random_vectors import Draws
from .engine.recording import Recordable
from .engine.shards import NormGroup
from .engine.state import MethodState
from .engine.step import Phase, Step
from .method import Context, Method
from .methods.registry import by_name
from .vector import Each, Space, same

Base = Optimizer | Sequence[Optimizer]
# Methods of `SharpnessAware` that torch.compile must not trace:
_NOT_TRACED = ("step", "passes", "gradient", "begin", "abandon", "zero_grad", "state_dict", "load_state_dict")
# Settings of `SharpnessAware` besides base, method and model:
_SETTINGS = ("local", "hvp", "seed", "norm_group", "loss_group", "home", "members")


class SharpnessAware(Recordable, Optimizer):
    """Wraps a base optimizer so that it steps in the direction of a sharpness-aware method.

    Args:
        base: any `torch.optim.Optimizer` that minimises from one gradient, or a list of several (Muon for matrices,
            AdamW for the rest), each with its own parameters. It still owns the parameter groups and their state. A
            group may set ``rho`` (overrides the method's; not with a base that has its own, such as Adadelta),
            ``perturb=False`` (no look moves its weights, and norms of perturbations leave them out) and
            ``adaptive=False`` (adaptive methods treat its weights as if they were of size one).
        method: for example ``SAM(rho=0.05)``.
        model: the module that is called in training, as wrapped by DDP or FSDP2. It is needed to restore buffers
            (BatchNorm statistics), modes and shards in the extra looks. Leave it out only if the model has neither
            buffers nor shards.
        local: under DDP, let every rank compute its perturbation from its own batch alone, and average only the
            directions ("m-sharpness": what the SAM and GSAM papers did). Saves all all-reduces but one. What the
            method remembers is then per rank.
        hvp: how Hessian-vector products are computed, in methods that need them: by a "forward" or "central"
            difference of gradients, or "exact" by double backward (only with closures that do not call backward).
        seed: of the method's random vectors, which are the same on all ranks.
        norm_group: the process group whose ranks hold other parameters of the same model that are not DTensors:
            stages of a pipeline, experts. Norms and inner products are then summed over these ranks. If only some
            parameters differ between ranks: a function from a parameter to its group, or to None.
        loss_group: for methods that use the loss, the process group of the ranks that share it, if `model` does not
            show it.
        home: where the weights are kept while a look is elsewhere: on their "device", or on the "cpu", in pinned
            memory. "cpu" saves one copy of the weights on the GPU (SAM's peak is then that of the base) and takes the
            time of one transfer per step; the bits are the same. A forward must not change the weights by `.data`.
        members: train this many independent models in one step. Every parameter stacks theirs along its first
            dimension (`torch.func.stack_module_state`), closures return one loss for each, and each has its own norms,
            radius and method's memory. The base optimizer must treat every entry alone, as SGD and Adam do.

    >>> model = nn.Linear(2, 1)
    >>> opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), by_name("sam"), model=model)
    >>> x, y = torch.ones(4, 2), torch.zeros(4, 1)
    >>> loss = opt.step(lambda: nn.functional.mse_loss(model(x), y))
    """

    def __init__(
        self,
        base: Base,
        method: Method,
        model: nn.Module | None = None,
        *,
        local: bool = False,
        hvp: Products = "forward",
        seed: int = 0,
        norm_group: NormGroup | None = None,
        loss_group: Any = None,
        home: Place = "device",
        members: int | None = None,
    ):
        self.base = checks.combine_bases(base)
        checks.check_settings(self.base, method, model, local, hvp, SharpnessAware)
        self.home: Place = checks.check_home(home)
        self.method, self.model, self.local, self.members = method, model, local, members
        self.hvp: Products = hvp
        self.norm_group, self.loss_group = norm_group, loss_group
        self.metrics: dict[str, Any] = {}
        self.under_way = Step()
        self._memory = MethodState()
        self._lr_set: Any = None  # the learning rate the method has set
        self._scaler_steps = False  # whether a GradScaler has begun a step and has not called `step` yet
        exclude_from_tracing(SharpnessAware, _NOT_TRACED)
        Optimizer.__setstate__(self, {})  # makes the hook registries; super().__init__ would make parameter groups
        self._groups = Groups(self.base, seed)

    # The base owns parameter groups, state and defaults

    param_groups: Any = property(lambda s: s.base.param_groups, lambda s, v: setattr(s.base, "param_groups", v))
    state: Any = property(lambda s: s._memory.merged_with(s.base.state), lambda s, v: setattr(s.base, "state", v))
    defaults: Any = property(lambda s: s.base.defaults, lambda s, v: setattr(s.base, "defaults", v))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the base optimizer."""
        added = self._groups.add(param_group)
        if "lr" in self.method.needs and self.steps > 0:  # the method has set one learning rate for all groups
            added["lr"] = self.param_groups[0]["lr"]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler reads this just before it calls step. False, also for a fused base: the scaler must unscale."""
        self._scaler_steps = checks.called_by_scaler()  # others read it too: Lightning does, to clip
        return False

    @property
    def steps(self) -> int:
        """Steps taken so far; a step that a GradScaler skipped does not count."""
        return self._groups.steps

    # First half: run the looks, leave the direction in p.grad

    def passes(self, scaler: GradScaler | None = None) -> Generator[Pass, None, None]:
        """Iterate over the looks of a step: the body of the loop runs forward and backward.

        The body computes the loss and calls backward, once or (gradient accumulation) several times. After the loop
        ``p.grad`` holds the direction; unscale, clip and call `step` as usual. With fp16, pass the scaler. Leaving the
        loop early restores everything.

            for look in opt.passes(scaler):
                with torch.autocast("cuda", torch.float16):
                    loss = criterion(model(x), y)
                scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

        ``look.batch`` says which batch the look is on ("main" or "auxiliary"). A method that needs the loss gets it
        from ``look.report(loss)``.
        """
        self.under_way.close()
        space = self._space()
        self.under_way.refuse_leftovers(space)
        if self.hvp == "exact" and "hvp" in self.method.needs:
            raise RuntimeError('hvp="exact" needs closures that return a graph: use step(closure) or gradient(closure)')
        return Uncompiled(self._start(space, scaler, first_done=False))

    def gradient(
        self,
        closure: Closures,
        *,
        auxiliary: Closures | None = None,
        sample: Callable[[int], Tensor] | None = None,
        scaler: GradScaler | None = None,
        first_done: bool = False,
    ) -> Tensor | None:
        """Run the method's looks with a closure, leave the direction in ``p.grad``, and return the loss at w.

        The closure returns the loss. It may call backward itself (on the scaled loss, if there is a scaler). It must
        use the same data each time. A list of closures is a list of micro-batches: losses and gradients are summed.

        Methods that look at a second batch need `auxiliary`, its closure; methods that look at single examples
        need `sample`, a function from an example's number to its loss.

        With ``first_done=True`` the gradient at w is in ``p.grad`` already (a framework accumulated it; call
        `begin` before it does, so that dropout can be replayed) and the closure runs in the extra looks only.
        """
        self.under_way.close()
        space = self._space()
        if not first_done:
            self.under_way.refuse_leftovers(space)
        elif all(p.grad is None for p in space.params):
            raise RuntimeError("first_done=True, but no parameter has a gradient: run backward first")
        batches: dict[str, Any] = {"main": closure, "auxiliary": auxiliary, "sample": sample}
        first_loss = None
        with torch.enable_grad(), contextlib.closing(self._start(space, scaler, first_done)) as looks:
            for look in looks:
                if first_done and look.index == 0:
                    continue
                closures = closures_for(look, batches, self.method.name)
                if look.product is not None:
                    look.answer = hessian_product(closures, look.product.vector, space.params, self.model, self.local)
                else:
                    look.loss = evaluate(closures, space.params, self.model, scaler, self.members, look.index > 0)
                if look.index == 0:
                    first_loss = look.loss
        return first_loss

    def begin(self) -> None:
        """Save buffers, modes and random state before a framework runs the first pass of a step itself.

        Then call ``gradient(..., first_done=True)``.
        """
        self.under_way.begin(self.model, self._groups.trainable(), self.method)

    def abandon(self) -> None:
        """Give up the step under way: restore the weights, but keep the buffers and random state of its first look.

        For trainers that run a pass and then take no step. (Leaving the loop over `passes` early restores buffers and
        random state too.)
        """
        self.under_way.abandon()

    def _start(self, space: Space, scaler: GradScaler | None, first_done: bool) -> Generator[Pass, None, None]:
        checks.check_members(self.members, self.method, self.model, scaler)
        self._scaler_steps = False
        return self.under_way.track(self._looks(space, scaler, first_done))

    def _looks(self, space: Space, scaler: GradScaler | None, first_done: bool) -> Generator[Pass, None, None]:
        """The looks of one step."""
        ctx = self._context(space)
        method = self.method.at(ctx.step, ctx.lr, self._groups.rho())
        settings = LookSettings(self.model, self.local, self.hvp, self.loss_group, self.home, self.under_way.branches)
        yield from self.under_way.run(method, space, ctx, settings, scaler, first_done)

    def _context(self, space: Space) -> Context:
        if "lr" in self.method.needs:
            checks.check_lr(self.method, self.param_groups, self._lr_set)
        draws = Draws(space, self._groups.seed, self.steps, self.under_way.generators)
        lr = self._groups.first().get("lr")
        return Context(self.steps, lr, space.live, draws, self._memory.recall(space))

    # Second half: step

    def step(self, closure: Closures | None = None, **batches: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the base optimizer's step along the direction in ``p.grad``.

        ``step(closure, ...)`` runs the looks first: it is ``gradient(closure, ...)`` followed by ``step()``, and
        returns the loss at w. (Directly after `gradient` or `passes`, a closure is only called, as trainers expect. To
        skip a step, call `zero_grad`; that a GradScaler has skipped one is noticed.)
        """
        hooked = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return (self._step_with_hooks if hooked else self._step)(closure, **batches)

    # torch wraps every step to run the global hooks. They already run around the base's step and must not run twice.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def _step(self, closure: Closures | None = None, **batches: Any) -> Any:
        if batches.get("scaler") is not None:
            raise TypeError("step takes no scaler: call opt.gradient(closure, scaler=scaler), then scaler.step(opt)")
        self.under_way.close()
        loss, begun, self._scaler_steps = None, self._scaler_steps, False
        by_scaler = begun and checks.called_by_scaler()  # otherwise it has skipped its step, and this is the next one
        if closure is not None and (self.under_way.ready is None or (begun and not by_scaler)):
            if by_scaler:
                checks.refuse_closure_of_scaler()
            loss = self.gradient(closure, **batches)
        elif callable(closure):
            with torch.enable_grad():
                loss = closure()
        ready = self.under_way.take()
        if ready is None:
            return self._make_state()
        space, ctx = ready.space, ready.ctx
        if not same(self._groups.trainable(), space.params):
            raise RuntimeError("the base optimizer's parameters changed after the looks: repeat the looks, then step()")
        if "lr" in ctx.wishes:
            self._lr_set = self._groups.set_lr(ctx.wishes["lr"])
        enabled, aside = torch.is_grad_enabled(), ctx.wishes.get("aside")
        rates = [] if aside is None else self._groups.learning_rates()
        try:
            self.base.step()
            if aside is not None:
                with torch.no_grad():
                    space.live().add_(-1.0 * (Each(rates) * aside))
        except KeyboardInterrupt:
            self.under_way.interrupted(enabled, undo=space if aside is not None else None)
            raise
        self._memory.keep(space.params, ctx.remembered)
        checks.mark_used(space.params)
        self.count_step(ctx.metrics)
        return loss

    def _step_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step with this optimizer's own hooks. (torch's global hooks run around the base's step.)"""
        args = (self, *args)
        for before in self._optimizer_step_pre_hooks.values():
            args, kwargs = before(self, args, kwargs) or (args, kwargs)
        loss = SharpnessAware._step(*args, **kwargs)
        for after in self._optimizer_step_post_hooks.values():
            after(self, args, kwargs)
        return loss

    def _make_state(self) -> None:
        """Create optimizer state without a direction: distributed checkpointing calls step() at lr 0 for that."""
        if any(float(group.get("lr", 1)) != 0 for group in self.param_groups):
            raise RuntimeError("step() needs a direction: call step(closure), or loop over opt.passes() first")
        self._space()  # makes the method's memory too
        self.base.step()

    def train(self) -> None:
        """Put a base that has two modes (schedule-free optimizers) into training mode. Trainers call it."""
        self.under_way.recover()
        self._groups.call("train")

    def eval(self) -> None:
        """Put such a base into evaluation mode, before the model is evaluated or saved."""
        self.under_way.before_saving()
        self._groups.call("eval")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them a direction that no step has used."""
        self.under_way.recover()
        self.base.zero_grad(set_to_none=set_to_none)
        if self.under_way.phase is not Phase.LOOKING:  # a closure may call this during a look
            self.under_way.take()
            checks.mark_used(self._groups.trainable())

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, with the method's memory inside."""
        self.under_way.before_saving()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._groups.first()
        state_dict = self._memory.save(self.base.state_dict(), self._groups.all_params())
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class, or of the plain base optimizer."""
        self.under_way.close()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        checks.check_loaded(state_dict)
        settings = self._groups.own_settings()
        memory = MethodState(self._memory.pinned)
        self.base.load_state_dict(memory.load(state_dict, self._groups.all_params()))
        self._memory = memory  # only now: the base may have raised
        self._groups.restore_own(settings)
        self.under_way, self._lr_set = Step(), None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        self.under_way.recover()
        # Schedulers and trainers leave a patched `step`, bound to this object, in __dict__.
        patched = ("step", "_opt_called")
        state = {k: v for k, v in self.__dict__.items() if k not in patched and not k.startswith("_optimizer_")}
        # A step under way is not copied. `_lr_set` is compared by identity, which a copy does not keep.
        return {**state, "under_way": Step(), "_lr_set": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> SharpnessAware:
        checks.refuse_copy(self.model)
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __repr__(self) -> str:
        return f"SharpnessAware(method={self.method!r}, base={self.base!r})"

    def _space(self) -> Space:
        """The space of the trainable parameters, with the method's memory prepared for it."""
        params = self._groups.trainable()
        if not params:
            raise RuntimeError("the base optimizer has no parameter that requires a gradient")
        before, flags = self.under_way.space, self._groups.flags()
        space = self.under_way.space_for(params, *flags, self.norm_group, self.members)
        if space is not before:
            checks.drop_used(self._groups.all_params())
        enabled = torch.is_grad_enabled()
        try:
            self._memory.prepare(self.method, space)
        except KeyboardInterrupt:
            self.under_way.interrupted(enabled)
            raise
        return space


def wrap(base: Base, method: str | Method, model: nn.Module | None = None, **settings: Any) -> SharpnessAware:
    """Make a `SharpnessAware` optimizer from a base optimizer and a method, given by name or as an object.

    Settings that `SharpnessAware` does not have are those of the method.

    >>> model = nn.Linear(2, 1)
    >>> opt = wrap(torch.optim.SGD(model.parameters(), lr=0.1), "gsam", model=model, rho=0.1)
    >>> opt.method.rho
    0.1
    """
    own = {name: settings.pop(name) for name in _SETTINGS if name in settings}
    if isinstance(method, str):
        method = by_name(method, **settings)
    elif settings:
        raise TypeError(f"the method is an object: give these to the method itself: {', '.join(settings)}")
    return SharpnessAware(base, method, model, **own)
