"""The optimizer that drives every method.

It moves the weights to where the method looks, collects loss and gradient, brings the weights back exactly
(copied, never subtracted), and leaves the method's direction in ``p.grad`` for any base optimizer to use.
There are two halves, `passes` (or `gradient`, which runs closures in them) and `step`; what a trainer does
between backward and step (unscale, clip, log, skip) stays where it always was.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .engine import checks, replicas
from .engine.closures import Closures, evaluate, hessian_product
from .engine.isolation import Quiet
from .engine.looks import Pass, Scale, Walk
from .engine.random_vectors import Draws, Generators
from .engine.state import Store
from .method import Context, Method
from .methods import by_name
from .vector import Each, Space, Vector, same

STEP, SEED = "steppe_step", "steppe_seed"  # keys in param_groups[0]: there they survive every kind of checkpoint
_OWN = (SEED, "rho", "perturb", "adaptive")  # keys of ours in any group


class SharpnessAware(Optimizer):
    """Wraps a base optimizer so that it steps in the direction of a sharpness-aware method.

    Args:
        base: any `torch.optim.Optimizer` that minimises from one gradient. It stays the owner of parameter groups and
            state. A group may carry ``rho`` (overrides the method's; not with a base that has a ``rho`` of its own,
            such as Adadelta), ``perturb=False`` (its weights are never moved by a look, and do not count in norms of
            perturbations) and ``adaptive=False`` (adaptive methods treat its weights as if of size one).
        method: for example ``SAM(rho=0.05)``.
        model: the module that is called in training, as wrapped by DDP or FSDP2. It is how buffers (BatchNorm
            statistics), modes and gathered shards are kept right in the extra looks. Leave it out only if the
            model has no buffers and no shards.
        local: under DDP, let every rank look around on its own batch alone and average only the directions
            ("m-sharpness": what the SAM and GSAM papers did). Saves all all-reduces but one. What a method
            remembers is then each rank's own.
        hvp: how Hessian-vector products are made, in methods that need them: from a "forward" or "central"
            difference of gradients, or "exact" by double backward (closures that do not call backward only).
        seed: of the method's random draws, which are the same on all ranks.

    >>> model = nn.Linear(2, 1)
    >>> opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), by_name("sam"), model=model)
    >>> x, y = torch.ones(4, 2), torch.zeros(4, 1)
    >>> loss = opt.step(lambda: nn.functional.mse_loss(model(x), y))
    """

    def __init__(
        self,
        base: Optimizer,
        method: Method,
        model: nn.Module | None = None,
        *,
        local: bool = False,
        hvp: Literal["forward", "central", "exact"] = "forward",
        seed: int = 0,
    ):
        checks.check_settings(base, method, model, local, hvp, SharpnessAware)
        self.base, self.method, self.model, self.local, self.hvp = base, method, model, local, hvp
        self.metrics: dict[str, Any] = {}
        self._store = Store()
        self._pending: tuple[Space, Context] | None = None  # a direction waits in p.grad; this is what it came from
        self._open: weakref.ref[Any] | None = None  # the looks under way
        self._quiet: Any = None  # Quiet, kept between steps for its memory
        self._begun = False
        self._room: Vector | None = None  # memory for a copy of the weights, likewise
        self._generators: Generators = {}  # of the method's draws, likewise
        self._space_before: Space | None = None  # the last step's, likewise
        self._method_before: Method | None = None  # whose memory was made
        self._lr_set: Any = None  # the learning rate the method has set
        self._scaler_steps = False  # a GradScaler is calling
        Optimizer.__setstate__(self, {})  # makes the hook registries; there is no super().__init__ to call
        for group in self.param_groups:
            checks.check_group(group)
        self._first_before = self.param_groups[0]  # holds the step count and the seed
        self._first_before.setdefault(STEP, 0)
        self._first_before.setdefault(SEED, index(seed))  # a plain int: numpy's overflow, and are not loaded safely

    # The base owns parameter groups, state and defaults

    param_groups: Any = property(lambda s: s.base.param_groups, lambda s, v: setattr(s.base, "param_groups", v))
    state: Any = property(lambda s: s._store.joined(s.base.state), lambda s, v: setattr(s.base, "state", v))
    defaults: Any = property(lambda s: s.base.defaults, lambda s, v: setattr(s.base, "defaults", v))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the base optimizer."""
        self.base.add_param_group(param_group)
        try:
            checks.check_group(self.param_groups[-1])
        except Exception:
            del self.param_groups[-1]
            raise
        if "lr" in self.method.needs and self.steps > 0:  # the method's, for all groups
            self.param_groups[-1]["lr"] = self.param_groups[0]["lr"]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks just before it calls step. A fused base must not make it leave the unscaling to us."""
        self._scaler_steps = True
        return False

    @property
    def steps(self) -> int:
        """Steps taken so far; a step that a GradScaler skipped does not count."""
        return self._first().setdefault(STEP, 0)

    def _first(self) -> dict[str, Any]:
        """The first group. If it is another one than before (groups may be removed), it takes our keys over."""
        first, before = self.param_groups[0], self._first_before
        if first is not before:
            first.update({key: before.pop(key) for key in (STEP, SEED) if key in before and key not in first})
            self._first_before = first
        return first

    # First half: look around, leave the direction in p.grad

    def passes(self, scaler: GradScaler | None = None) -> Generator[Pass, None, None]:
        """Run a training loop's forward and backward as often as the method needs.

        The body of the loop computes the loss and calls backward, once or (accumulation) several times. After
        the loop ``p.grad`` holds the direction; unscale, clip and call `step` as ever. With fp16, give the
        scaler. Leaving the loop early puts everything back as it was before.

            for look in opt.passes(scaler):
                with torch.autocast("cuda", torch.float16):
                    loss = criterion(model(x), y)
                scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

        A method that looks at a second batch says so in ``look.batch``; one that needs the loss is told it by
        ``look.report(loss)``.
        """
        self._close()
        space = self._space()
        self._refuse_leftovers(space)
        if self.hvp == "exact" and "hvp" in self.method.needs:
            raise RuntimeError(
                'hvp="exact" needs a closure that returns a graph: use step(closure) or gradient(closure)'
            )
        return self._start(space, scaler, first_done=False)

    def gradient(
        self,
        closure: Closures,
        *,
        auxiliary: Closures | None = None,
        sample: Callable[[int], Tensor] | None = None,
        scaler: GradScaler | None = None,
        first_done: bool = False,
    ) -> Tensor | None:
        """Run the method's looks with a closure; leave the direction in ``p.grad``; return the loss at w.

        The closure returns the loss. It may call backward itself (then scaled by the scaler, if there is one)
        or leave that to the optimizer. It must use the same data each time. A list of closures is a list of
        micro-batches: their losses and gradients add up.

        Methods that look at a second batch need `auxiliary`, its closure; methods that look at single examples
        need `sample`, a function from an example's number to its loss.

        With ``first_done=True`` the gradient at w is in ``p.grad`` already (a framework accumulated it; call
        `begin` before it does, so that dropout can be replayed) and the closure runs in the extra looks only.
        """
        self._close()
        space = self._space()
        if not first_done:
            self._refuse_leftovers(space)
        elif all(p.grad is None for p in space.params):
            raise RuntimeError("first_done=True, but no parameter has a gradient: run backward first")
        batches: dict[str, Any] = {"main": closure, "auxiliary": auxiliary, "sample": sample}
        first_loss = None
        with torch.enable_grad(), contextlib.closing(self._start(space, scaler, first_done)) as looks:
            for look in looks:
                if first_done and look.index == 0:
                    continue
                closures = batches[look.batch]
                if closures is None:
                    raise RuntimeError(
                        f"{self.method.name} looks at a batch called {look.batch!r}: give step or gradient "
                        f"{look.batch}=, its closure"
                    )
                if look.sample is not None:
                    closures = lambda f=closures, i=look.sample: f(i)  # noqa: E731
                if look.product is not None:
                    hessian_product(closures, look, space.params, self.model)
                else:
                    look.loss = evaluate(closures, space.params, self.model, scaler)
                if look.index == 0:
                    first_loss = look.loss
        return first_loss

    def _refuse_leftovers(self, space: Space) -> None:
        if self._pending is None:  # else a direction that nothing stepped along: a GradScaler skipped the step
            checks.refuse_leftover_gradients(space.params)

    def begin(self) -> None:
        """Call before a pass that a framework runs itself, when ``gradient(..., first_done=True)`` will follow."""
        self._begin(self._trainable())
        self._begun = True

    def _begin(self, params: list[Tensor]) -> None:
        torch.clear_autocast_cache()  # autocast around a whole loop remembers the weights of the step before
        self._quiet = Quiet(self.model, params) if self._quiet is None else self._quiet.again(self.model, params)

    def _start(self, space: Space, scaler: GradScaler | None, first_done: bool) -> Generator[Pass, None, None]:
        self._pending, self._scaler_steps = None, False
        run = self._run(space, scaler, first_done)
        self._open = weakref.ref(run)  # weak: a loop that is left early must end, and restore, at once
        return run

    def _run(self, space: Space, scaler: GradScaler | None, first_done: bool) -> Generator[Pass, None, None]:
        """One step's looks, and what they led to."""
        walk = self._walk(space, None if scaler is None else Scale(scaler, space.pieces()[0].device), first_done)
        direction = yield from walk.passes(first_done)
        if walk.home is not None:
            self._room = walk.home
        self._leave(direction, walk)

    def _walk(self, space: Space, scale: Scale | None, first_done: bool) -> Walk:
        ctx = self._context(space)
        if not (first_done and self._begun):
            self._begin(space.params)
        self._begun = False
        ours = "rho" not in self.defaults  # else it is the base's own: Adadelta has one
        group_rho = self._by_group("rho") if ours and any("rho" in group for group in self.param_groups) else None
        method = self.method.at(ctx.step, ctx.lr, group_rho)
        return Walk(method, space, ctx, self._quiet, self.model, scale, self.local, self.hvp, self._room)

    def _context(self, space: Space) -> Context:
        group = self._first()
        if "lr" in self.method.needs:
            checks.check_lr(self.method, self.param_groups, self._lr_set)
        draws = Draws(space, group.setdefault(SEED, 0), self.steps, self._generators)
        return Context(self.steps, group.get("lr"), space.live, draws, self._store.recall(space))

    def _leave(self, direction: Any, walk: Walk) -> None:
        """Put the direction into p.grad, apart from anything the method keeps: others will change it in place."""
        if not isinstance(direction, Vector):
            raise TypeError(f"{self.method.name}.looks must return a Vector, not {direction!r}")
        ctx, used = walk.ctx, walk.used
        values = (*ctx.memory.values(), *ctx.remembered.values(), *ctx.wishes.values())
        kept = {id(t) for value in values if isinstance(value, Vector) for t in value.tensors}
        with torch.no_grad():
            if kept and any(id(t) in kept for t in direction.tensors):
                direction = direction.clone()
            if kept and self._room is not None and any(id(t) in kept for t in self._room.tensors):
                self._room = None  # the method remembers the weights: their memory is its own now
            if self.local:
                replicas.average_(direction.tensors, self.model)
                used = replicas.used_anywhere(used, self.model)
                for name, wish in ctx.wishes.items():
                    ctx.wishes[name] = wish = wish.clone()
                    replicas.average_(wish.tensors if isinstance(wish, Vector) else [wish], self.model)
            if walk.scale is not None:
                walk.scale.put_back(direction)
        for p, grad, has in zip(walk.space.params, walk.space.wrap(direction), used, strict=True):
            p.grad = grad if has else None  # no look saw a gradient: the base must not touch the parameter
        self._pending = walk.space, ctx

    # Second half: step

    def step(self, closure: Closures | None = None, **batches: Any) -> Any:
        """Take the base optimizer's step along the direction in ``p.grad``.

        ``step(closure, ...)`` looks around first: it is ``gradient(closure, ...)`` and ``step()`` in one, and
        returns the loss at w. (Directly after `gradient` or `passes`, a closure is only called, as trainers expect.)
        """
        hooked = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return (self._step_with_hooks if hooked else self._step)(closure, **batches)

    # torch wraps a step to run hooks. The base's is wrapped: hooks for all optimizers must not run twice.
    step.hooked = True

    def _step(self, closure: Closures | None = None, **batches: Any) -> Any:
        if batches.get("scaler") is not None:
            raise TypeError("step takes no scaler: call opt.gradient(closure, scaler=scaler), then scaler.step(opt)")
        self._close()
        loss, by_scaler, self._scaler_steps = None, self._scaler_steps, False
        if closure is not None and self._pending is None:
            if by_scaler:
                raise RuntimeError(
                    "scaler.step(opt, closure) would step along scaled gradients: call opt.gradient(closure, "
                    "scaler=scaler) first, then scaler.step(opt)"
                )
            loss = self.gradient(closure, **batches)
            self._scaler_steps = False  # others ask too: Lightning, before it clips in the closure
        elif callable(closure):
            with torch.enable_grad():
                loss = closure()
        if self._pending is None:
            return self._make_state()
        (space, ctx), self._pending = self._pending, None
        if not same(self._trainable(), space.params):
            raise RuntimeError("the base optimizer's parameters changed between looking around and step()")
        if "lr" in ctx.wishes:
            self._set_lr(ctx.wishes["lr"])
        self.base.step()
        if "aside" in ctx.wishes:
            with torch.no_grad():
                lr = Each(self._by_group("lr"))
                space.live().add_(-1.0 * (lr * ctx.wishes["aside"]))
        self._store.keep(space.params, ctx.remembered)
        self.metrics = ctx.metrics
        self.param_groups[0][STEP] = self.steps + 1
        checks.mark_used(space.params)
        return loss

    def _step_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """With this optimizer's own hooks, as torch runs them; those for all optimizers run around the base's step."""
        args = (self, *args)
        for before in self._optimizer_step_pre_hooks.values():
            args, kwargs = before(self, args, kwargs) or (args, kwargs)
        loss = SharpnessAware._step(*args, **kwargs)
        for after in self._optimizer_step_post_hooks.values():
            after(self, args, kwargs)
        return loss

    def _set_lr(self, lr: Tensor) -> None:
        takes_tensor = all(group.get("fused") or group.get("capturable") for group in self.param_groups)
        self._lr_set = lr if takes_tensor else float(lr)  # other bases would wait for the device themselves
        for group in self.param_groups:
            group["lr"] = self._lr_set

    def _make_state(self) -> None:
        """A step with nothing to step on: what distributed checkpointing does, at lr 0, to have state created."""
        if any(float(group.get("lr", 1)) != 0 for group in self.param_groups):
            raise RuntimeError(
                "step() needs a direction: call step(closure), or run your forward and backward in "
                "`for _ in opt.passes():` first"
            )
        self._space()  # and with it the method's memory
        self.base.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them a direction that was not stepped along."""
        self.base.zero_grad(set_to_none=set_to_none)
        if self._open is None or self._open() is None:  # a closure may call this during a look
            self._pending = None
            checks.mark_used(self._trainable())

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, with the method's memory inside."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._first()
        state_dict = self._store.save(self.base.state_dict(), self._all_params())
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class, or of the plain base optimizer."""
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        ours = [key for key in _OWN if key not in self.defaults]
        own = [{key: group[key] for key in ours if key in group} for group in self.param_groups]
        store = Store(self._store.pinned)
        self.base.load_state_dict(store.load(state_dict, self._all_params()))
        self._store = store  # only now: the base may have refused
        if STEP not in self.param_groups[0]:  # the base's own checkpoint, which knows nothing of these
            for group, kept in zip(self.param_groups, own, strict=True):
                group.update(kept)
            self.param_groups[0][STEP] = 0
        self._pending, self._lr_set, self._space_before = None, None, None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        # Schedulers and trainers leave a patched `step`, bound to this object, in __dict__.
        gone = ("step", "_opt_called")
        state = {k: v for k, v in self.__dict__.items() if k not in gone and not k.startswith("_optimizer_")}
        # A step under way belongs to this object alone; and a copy has another object for the learning rate.
        own = ("_open", "_quiet", "_room", "_space_before", "_pending", "_lr_set")
        return {**state, **dict.fromkeys(own), "_begun": False, "_generators": {}}

    def __repr__(self) -> str:
        return f"SharpnessAware(method={self.method!r}, base={self.base!r})"

    # Parameters and their gradients

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _trainable(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _space(self) -> Space:
        params = self._trainable()
        if not params:
            raise RuntimeError("the base optimizer has no parameter that requires a gradient")
        special = any("perturb" in group or "adaptive" in group for group in self.param_groups)
        flags = (self._by_group("perturb", True), self._by_group("adaptive", True)) if special else (None, None)
        space = self._space_before
        if space is None or not space.fits(params, *flags):
            space, self._method_before, self._room = Space(params, *flags), None, None
            self._space_before = space
            checks.drop_used(self._all_params())
        if self.method is not self._method_before:
            self._store.prepare(self.method, space)
            self._method_before = self.method
        return space

    def _by_group(self, key: str, default: Any = None) -> list[Any]:
        """What each trainable parameter's group says."""
        return [g.get(key, default) for g in self.param_groups for p in g["params"] if p.requires_grad]

    def _close(self) -> None:
        """End a loop over `passes` that is still under way, as if it had been left."""
        run = None if self._open is None else self._open()
        if run is not None and not run.gi_running:
            run.close()
        self._open = None


def wrap(base: Optimizer, method: str | Method, model: nn.Module | None = None, **settings: Any) -> SharpnessAware:
    """Wrap a base optimizer by a method's name; what is not the optimizer's own setting is the method's.

    >>> model = nn.Linear(2, 1)
    >>> opt = wrap(torch.optim.SGD(model.parameters(), lr=0.1), "gsam", model=model, rho=0.1)
    >>> opt.method.rho
    0.1
    """
    own = {name: settings.pop(name) for name in ("local", "hvp", "seed") if name in settings}
    if isinstance(method, str):
        method = by_name(method, **settings)
    elif settings:
        raise TypeError(f"give these to the method itself: {', '.join(settings)}")
    return SharpnessAware(base, method, model, **own)
