"""The optimizer that drives every method.

It moves the weights to where the method looks, collects loss and gradient, brings the weights back exactly
(copied, never subtracted), and leaves the method's direction in ``p.grad`` for any base optimizer to use.
There are two halves, `passes` (or `gradient`, which runs a closure in them) and `step`; what a trainer does
between backward and step — unscale, clip, log, skip — stays where it always was.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer, SparseAdam

from .method import Context, Memory, Method, Seen
from .quiet import Quiet
from .vector import Each, Space, Vector, local

Closure = Callable[[], Tensor]
_STEP = "steppe_step"  # the step counter's key in param_groups[0]: there it survives every kind of checkpoint
_OWN, _SHARED = "steppe.", "steppe_shared."  # prefixes of the method's memory in state_dict


@dataclass
class Pass:
    """One round of `SharpnessAware.passes`: which look it is, and on which batch the method wants it."""

    index: int
    batch: str = "main"
    loss: Tensor | None = None

    def report(self, loss: Tensor) -> None:
        """Tell the method the loss of this look (the unscaled one). Called several times, it adds up."""
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()


@dataclass
class _Pending:
    """A direction that waits in p.grad, and what becomes true when the step is taken."""

    params: list[Tensor]
    remembered: Memory
    metrics: dict[str, Any] = field(default_factory=dict)


class SharpnessAware(Optimizer):
    """Wraps a base optimizer so that it steps in the direction of a sharpness-aware method.

    Args:
        base: any `torch.optim.Optimizer` that needs one gradient. It stays the owner of parameter groups and
            state. A group may carry ``rho`` (overrides the method's) and ``perturb=False`` (its weights are
            never moved by a look, and do not count in norms of perturbations).
        method: for example ``SAM(rho=0.05)``.
        model: the module that is called in training, as wrapped by DDP or FSDP2. It is how buffers (BatchNorm
            statistics), modes and gathered shards are kept right in the extra looks. Leave it out only if the
            model has no buffers and no shards.
        local: under DDP, let every rank look around on its own batch alone and average only the directions
            ("m-sharpness": what the SAM and GSAM papers did). Saves all all-reduces but one.

    >>> model = nn.Linear(2, 1)
    >>> opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), by_name("sam"), model=model)
    >>> x, y = torch.ones(4, 2), torch.zeros(4, 1)
    >>> loss = opt.step(lambda: nn.functional.mse_loss(model(x), y))
    """

    _step_supports_amp_scaling = False  # a fused base must not make GradScaler leave the unscaling to us

    def __init__(self, base: Optimizer, method: Method, model: nn.Module | None = None, *, local: bool = False):
        if not isinstance(base, Optimizer):
            raise TypeError(f"base must be a torch.optim.Optimizer, not {base!r}; build it first, then wrap it")
        if isinstance(base, (LBFGS, SparseAdam, SharpnessAware)):
            raise TypeError(f"{type(base).__name__} cannot be the base: it does not step on one dense gradient")
        if not isinstance(method, Method):
            raise TypeError(f"method must be a method such as SAM(), not {method!r}; by name: steppe.wrap")
        if local and not isinstance(model, DistributedDataParallel):
            raise ValueError("local=True needs model=, wrapped in DistributedDataParallel (FSDP2 cannot look locally)")
        self.base, self.method, self.model, self.local = base, method, model, local
        self.metrics: dict[str, Any] = {}
        self._own: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)  # the method's memory, by parameter
        self._shared: dict[str, Tensor] = {}  # and what of it belongs to no parameter
        self._pending: _Pending | None = None
        self._left: list[tuple[weakref.ref, int]] = []  # gradients that the last step used up
        self._open: weakref.ref[Generator] | None = None
        self._begun: Quiet | None = None
        Optimizer.__setstate__(self, {})  # makes the hook registries; there is no super().__init__ to call
        for group in self.param_groups:
            self._check_group(group)

    # The base owns parameter groups, state and defaults

    param_groups = property(lambda self: self.base.param_groups, lambda self, v: setattr(self.base, "param_groups", v))  # pyright: ignore
    state = property(lambda self: self.base.state, lambda self, v: setattr(self.base, "state", v))  # pyright: ignore
    defaults = property(lambda self: self.base.defaults, lambda self, v: setattr(self.base, "defaults", v))  # pyright: ignore

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the base optimizer."""
        self.base.add_param_group(param_group)
        self._check_group(self.param_groups[-1])

    def _check_group(self, group: dict[str, Any]) -> None:
        rho = group.get("rho", 0.0)
        if not isinstance(rho, (int, float)) or not (math.isfinite(rho) and rho >= 0):
            raise ValueError(f"a parameter group's rho must be a finite number, not negative, got {rho!r}")
        if any(p.is_complex() for p in group["params"]):
            raise TypeError("complex parameters are not supported; keep torch.view_as_real(p) as the parameter")
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in group["params"]):
            import warnings

            warnings.warn(
                "half-precision parameters round most of a small perturbation away; keep them in float32 and use "
                "torch.autocast (or FSDP2's MixedPrecisionPolicy), or take a much larger rho",
                stacklevel=3,
            )

    @property
    def steps(self) -> int:
        """Steps taken so far; a step that a GradScaler skipped does not count."""
        return self.param_groups[0].setdefault(_STEP, 0)

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
        """
        self._close()
        self._refuse_leftover_gradients()
        return self._start(scaler)

    def gradient(
        self,
        closure: Closure | Sequence[Closure],
        *,
        scaler: GradScaler | None = None,
        first_done: bool = False,
    ) -> Tensor:
        """Run the method's looks with a closure; leave the direction in ``p.grad``; return the loss at w.

        The closure returns the loss. It may call backward itself (then scaled by the scaler, if there is one)
        or leave that to the optimizer. It must use the same data each time. A list of closures is a list of
        micro-batches: their losses and gradients add up.

        With ``first_done=True`` the gradient at w is in ``p.grad`` already (a framework accumulated it; call
        `begin` before it does, so that dropout can be replayed) and the closure runs in the extra looks only.
        """
        self._close()
        if not first_done:
            self._refuse_leftover_gradients()
        elif all(p.grad is None for p in self._trainable()):
            raise RuntimeError("first_done=True, but no parameter has a gradient: run backward first")
        closures = [closure] if callable(closure) else list(closure)
        if not closures:
            raise ValueError("the list of closures is empty")
        first_loss = torch.zeros(())
        with torch.enable_grad(), contextlib.closing(self._start(scaler, first_done)) as looks:
            for look in looks:
                if look.index == 0 and first_done:
                    continue
                look.loss = self._evaluate(closures, scaler)
                if look.index == 0:
                    first_loss = look.loss
        return first_loss

    def begin(self) -> None:
        """Call before a pass that a framework runs itself, when `gradient` will follow with ``first_done=True``."""
        self._begun = Quiet(self.model, self._trainable())

    def _start(self, scaler: GradScaler | None, first_done: bool = False) -> Generator[Pass, None, None]:
        self._pending = None
        run = self._run(scaler, first_done)
        self._open = weakref.ref(run)  # weak: a loop that is left early must end, and restore, at once
        return run

    def _run(self, scaler: GradScaler | None, first_done: bool) -> Generator[Pass, None, None]:
        """One step's looks. Whatever happens, the weights are back when this ends."""
        space = self._space()
        weights, home = space.weights(), None
        scale = None if scaler is None else scaler.scale(torch.ones((), device=weights.tensors[0].device))
        ctx = Context(self.steps, self.param_groups[0]["lr"], lambda: home or weights, self._recall(space))
        asks = self.method.at(ctx.step, ctx.lr, self._rho_by_group(space)).looks(ctx)
        quiet = (self._begun if first_done else None) or Quiet(self.model, space.params)
        self._begun = None
        used = [False] * len(space.params)
        index, direction = 0, None
        try:
            look = next(asks)
            while direction is None:
                if index > 0:
                    quiet.rewind()
                with torch.no_grad():
                    if home is not None:
                        weights.copy_(home)
                    if look.offset is not None:
                        home = home or weights.clone()
                        weights.add_(look.offset.perturbed())
                if look.offset is not None or home is not None:
                    quiet.weights_moved()
                report = Pass(index, look.batch)
                del look  # a look may hold a vector as large as the model
                if not (first_done and index == 0):
                    for p in space.params:
                        p.grad = None
                with self._looking():
                    yield report
                try:
                    look = asks.send(Seen(self._collect(space, used, scale), report.loss))
                except StopIteration as end:
                    direction = end.value
                index += 1
        except BaseException:  # also GeneratorExit: the loop around `passes` was left early
            self._clear_gradients(space.params)
            quiet.undo()
            raise
        finally:
            if home is not None:
                with torch.no_grad():
                    weights.copy_(home)
                quiet.weights_moved()
        quiet.settle()
        ctx.metrics["looks"] = index
        self._leave(direction, space, used, scale, ctx)

    def _leave(self, direction: Vector, space: Space, used: list[bool], scale: Tensor | None, ctx: Context) -> None:
        """Put the direction into p.grad, apart from anything the method keeps: others will change it in place."""
        if not isinstance(direction, Vector):
            raise TypeError(f"{self.method.name}.looks must return a Vector, not {direction!r}")
        kept = {id(t) for v in (*ctx.memory.values(), *ctx.remembered.values()) if isinstance(v, Vector) for t in v.tensors}
        with torch.no_grad():
            if any(id(t) in kept for t in direction.tensors):
                direction = direction.clone()
            if self.local:
                self._average(direction.tensors)
            if scale is not None:
                direction.mul_(scale)
            for p, grad, has in zip(space.params, space.wrap(direction), used, strict=True):
                p.grad = grad if has else None  # no look saw a gradient: the base must not touch it
        self._pending = _Pending(space.params, ctx.remembered, ctx.metrics)

    # Second half: step

    def step(self, closure: Closure | Sequence[Closure] | None = None) -> Any:  # pyright: ignore
        """Take the base optimizer's step along the direction in ``p.grad``.

        ``step(closure)`` looks around first: it is `gradient` and ``step()`` in one, and returns the loss at w.
        (Directly after `gradient` or `passes`, a closure is only called, as trainers expect.)
        """
        self._close()
        loss = None
        if self._pending is None and closure is not None:
            loss = self.gradient(closure)
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()  # pyright: ignore
        if self._pending is None:
            return self._make_state()
        pending, self._pending = self._pending, None
        if not _same(pending.params, self._trainable()):
            raise RuntimeError("the base optimizer's parameters changed between looking around and step()")
        self.base.step()
        self._remember(pending)
        self.metrics = pending.metrics
        self.param_groups[0][_STEP] = self.steps + 1
        self._left = [(weakref.ref(p.grad), p.grad._version) for p in pending.params if p.grad is not None]
        return loss

    def _make_state(self) -> None:
        """A step with nothing to step on: what distributed checkpointing does, at lr 0, to have state created."""
        if any(float(group["lr"]) != 0 for group in self.param_groups):
            raise RuntimeError(
                "step() needs a direction: call step(closure), or run your forward and backward in "
                "`for _ in opt.passes():` first"
            )
        self._recall(self._space())
        self.base.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them a direction that was not stepped along."""
        if not self._is_open():
            self._pending, self._left = None, []
            if not set_to_none:
                self.base.zero_grad(set_to_none=False)
                self._left = [(weakref.ref(p.grad), p.grad._version) for p in self._trainable() if p.grad is not None]
                return
        self.base.zero_grad(set_to_none=set_to_none)

    # Looking: one gradient

    def _evaluate(self, closures: Sequence[Closure], scaler: GradScaler | None) -> Tensor:
        """Loss and gradients of the micro-batches, whether or not the closures call backward."""
        total, calls_backward = None, None
        for i, closure in enumerate(closures):
            last = i == len(closures) - 1
            sync = contextlib.nullcontext() if last or not self._ddp() else self._ddp().no_sync()  # pyright: ignore
            with sync:
                loss = closure()
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
                    raise TypeError(f"the closure must return the loss, a tensor with one element; it returned {what}")
                if calls_backward is None:
                    calls_backward = any(p.grad is not None for p in self._trainable())
                if not calls_backward:
                    if not loss.requires_grad:
                        raise RuntimeError(
                            "the closure's loss has no graph and it left no gradients: return the loss itself, "
                            "not a number or a detached tensor, or call backward inside"
                        )
                    (loss if scaler is None else scaler.scale(loss)).backward()
            loss = loss.detach().reshape(())
            total = loss if total is None else total + loss
        assert total is not None
        return total

    @contextlib.contextmanager
    def _looking(self) -> Generator[None, None, None]:
        """Around one look: with local=True, DDP keeps the gradients to itself."""
        ddp = self._ddp()
        if not self.local or ddp is None or (ddp.static_graph and self.steps == 0):
            yield  # a static graph is recorded in the first iteration, which must be synchronised
            return
        with ddp.no_sync():
            yield

    def _collect(self, space: Space, used: list[bool], scale: Tensor | None) -> Vector:
        """Take the gradients out of the parameters, as a vector that nothing else writes to."""
        grads: list[Tensor | None] = []
        for i, p in enumerate(space.params):
            grad = p.grad
            if grad is not None:
                used[i] = True
                if grad.is_sparse:
                    raise TypeError("sparse gradients are not supported: use nn.Embedding(sparse=False)")
                if local(grad)._is_view():  # DDP's gradient_as_bucket_view: the next look would overwrite it
                    grad = grad.clone()
                grad = grad.detach()
            grads.append(grad)
            p.grad = None
        vector = space.vector(grads)
        if scale is not None:
            with torch.no_grad():
                vector.mul_(1 / scale)
        return vector

    def _average(self, tensors: list[Tensor]) -> None:
        group = self._ddp().process_group  # pyright: ignore
        works = [torch.distributed.all_reduce(t, group=group, async_op=True) for t in tensors]
        for work in works:
            work.wait()  # pyright: ignore
        torch._foreach_div_(tensors, torch.distributed.get_world_size(group))

    # Parameters

    def _trainable(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _by_group(self, key: str, default: Any) -> list[Any]:
        return [g.get(key, default) for g in self.param_groups for p in g["params"] if p.requires_grad]

    def _space(self) -> Space:
        params = self._trainable()
        if not params:
            raise RuntimeError("the base optimizer has no parameter that requires a gradient")
        return Space(params, [bool(moves) for moves in self._by_group("perturb", True)])

    def _rho_by_group(self, space: Space) -> Each | None:
        if not any("rho" in group for group in self.param_groups):
            return None
        rho = getattr(self.method.at(self.steps, self.param_groups[0]["lr"]), "rho", 0.0)
        return Each(self._by_group("rho", rho))

    def _ddp(self) -> DistributedDataParallel | None:
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    def _clear_gradients(self, params: Iterable[Tensor]) -> None:
        for p in params:
            p.grad = None

    def _is_open(self) -> bool:
        return self._open is not None and self._open() is not None

    def _close(self) -> None:
        """End a loop over `passes` that is still under way, as if it had been left."""
        run = self._open and self._open()
        if run is not None and not run.gi_running:
            run.close()
        self._open = None

    def _refuse_leftover_gradients(self) -> None:
        """Gradients from an unfinished accumulation would be lost silently; those of the last step are fine."""
        left = {id(ref()): version for ref, version in self._left}
        fresh = [p.grad for p in self._trainable() if p.grad is not None and left.get(id(p.grad)) != p.grad._version]
        if any(bool(local(grad).any()) for grad in fresh):
            raise RuntimeError(
                "parameters hold gradients that no step has used, and looking around would drop them. To "
                "accumulate, loop over the micro-batches inside the closure or the passes() body, or give a "
                "list of closures; if the gradient at w is there already, use gradient(closure, "
                "first_done=True); otherwise call zero_grad() first"
            )

    # Memory and checkpoints

    def _recall(self, space: Space) -> Memory:
        """The method's memory, made where it is missing, on the devices where the parameters are."""
        if any(p not in self._own for p in space.params):
            for name, value in self.method.memory(space).items():
                if isinstance(value, Vector):
                    for p, t in zip(space.params, value.tensors, strict=True):
                        self._own[p].setdefault(name, t)
                else:
                    self._shared.setdefault(name, value)
            for p in space.params:
                self._own[p]  # an entry even if the method keeps nothing: it has been asked
        memory: Memory = dict(self._shared)
        for name in self._own[space.params[0]]:
            memory[name] = Vector([self._own[p][name].to(local(p).device) for p in space.params], space)
        return memory

    def _remember(self, pending: _Pending) -> None:
        for name, value in pending.remembered.items():
            if isinstance(value, Vector):
                for p, t in zip(pending.params, value.tensors, strict=True):
                    self._own[p][name] = t
            else:
                self._shared[name] = value.detach()

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, with the method's memory inside."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self.steps  # make sure the counter is there
        state_dict = self.base.state_dict()
        state = {key: dict(entry) for key, entry in state_dict["state"].items()}  # the entries are the base's own
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved_ids, params, strict=True):
            own = Space([p])
            for name, value in self._own.get(p, {}).items():
                kept = own.wrap(Vector([value]))[0] if isinstance(p, DTensor) else value
                state.setdefault(i, {})[_OWN + name] = kept
        for name, value in self._shared.items():
            state.setdefault(saved_ids[0], {})[_SHARED + name] = value
        state_dict = {**state_dict, "state": state}
        for hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class, or of the plain base optimizer."""
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        ours = {key: entry for key, entry in state_dict["state"].items() if isinstance(entry, dict)}
        base_state = {
            key: {k: v for k, v in entry.items() if not k.startswith((_OWN, _SHARED))} if key in ours else entry
            for key, entry in state_dict["state"].items()
        }
        base_state = {key: entry for key, entry in base_state.items() if entry or key not in ours}
        self.base.load_state_dict({**state_dict, "state": base_state})
        self._own.clear()
        self._shared.clear()
        self._pending, self._left = None, []
        for i, p in zip(saved_ids, params, strict=True):
            for key, value in ours.get(i, {}).items():
                if key.startswith(_OWN):  # in the saved precision: torch would cast to the parameter's
                    self._own[p][key.removeprefix(_OWN)] = local(value).detach().clone().to(local(p).device)
                elif key.startswith(_SHARED):
                    self._shared[key.removeprefix(_SHARED)] = value.detach().clone().to(local(p).device)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        # Schedulers and trainers leave a patched `step`, bound to this object, in __dict__.
        drop = {"step", "_opt_called", "_open", "_begun", "_left", "_pending"}
        state = {k: v for k, v in self.__dict__.items() if k not in drop and not k.startswith("_optimizer_")}
        return {**state, "_open": None, "_begun": None, "_left": [], "_pending": None}

    def __repr__(self) -> str:
        return f"SharpnessAware(method={self.method!r}, base={self.base!r})"


def wrap(base: Optimizer, method: str | Method, model: nn.Module | None = None, **settings: Any) -> SharpnessAware:
    """Wrap a base optimizer by a method's name.

    >>> model = nn.Linear(2, 1)
    >>> opt = wrap(torch.optim.SGD(model.parameters(), lr=0.1), "gsam", model=model, rho=0.1)
    >>> opt.method
    GSAM(rho=0.1, alpha=0.4, objective='fp-h', ascent='plain', eta=0.01)
    """
    local = settings.pop("local", False)
    if isinstance(method, Method):
        if settings:
            raise TypeError(f"give these to {method.name} itself: {', '.join(settings)}")
        return SharpnessAware(base, method, model, local=local)
    return SharpnessAware(base, by_name(method, **settings), model, local=local)


from .methods import by_name  # noqa: E402  (the methods know nothing of this file)


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
