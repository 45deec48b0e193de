"""Checks of what the optimizer is given, with error messages that say what to do instead."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Iterable
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..method import Method
from .bases import Together
from .home import PLACES, Place
from .replicas import fully_sharded, in_a_pipeline, replicated, sharded_by_fsdp1
from .shards import local as local_part
from .shards import sharded

# Optimizers of other libraries that need more than a gradient: second derivatives, or a loss to evaluate themselves.
_NOT_ONE_GRADIENT = frozenset({"AdaHessian", "Adahessian", "SophiaH", "AliG", "BSAM", "bSAM"})
_DEEPSPEED = "a DeepSpeed engine does not expose the gradients: shard with FSDP2 (fully_shard) instead"
_FSDP1 = (
    "FullyShardedDataParallel (FSDP1) is not supported, because its shards do not show which part of a weight "
    "they hold: use FSDP2, torch.distributed.fsdp.fully_shard"
)


def combine_bases(base: Any) -> Any:
    """Several base optimizers as one. Anything else is returned unchanged, and checked later."""
    bases = list(cast("Iterable[Any]", base)) if isinstance(base, (list, tuple)) else []
    if not bases or not all(isinstance(one, Optimizer) for one in bases):
        return cast("Any", base)
    for one in bases:
        _refuse_base(one)
    return bases[0] if len(bases) == 1 else Together(bases)


def check_settings(base: Any, method: Any, model: Any, local: bool, hvp: str, own: type) -> None:
    """Check the arguments of `SharpnessAware`, whose class is `own`."""
    if not isinstance(base, Optimizer):
        raise TypeError(f"base must be a torch.optim.Optimizer, not {base!r}; build it first, then wrap it")
    if not base.param_groups:  # what Lightning makes where configure_optimizers returns None
        raise ValueError("the base optimizer has no parameters")
    if isinstance(base, own):
        raise TypeError(f"{type(base).__name__} cannot be the base: it does not step on one dense gradient")
    _refuse_base(base)
    if not isinstance(method, Method):
        raise TypeError(f"method must be a method such as SAM(), not {method!r}; to give a name use steppe.wrap")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be the module that is trained, not {model!r}{_stage_hint(model)}")
    check_model(model)
    if local and replicated(model) is None:
        raise ValueError("local=True needs model=, wrapped in DistributedDataParallel (it is not possible with FSDP2)")
    if hvp not in ("forward", "central", "exact"):
        raise ValueError(f'hvp must be "forward", "central" or "exact", not {hvp!r}')


def check_home(home: Any) -> Place:
    """Check the setting `home`."""
    if home not in PLACES:
        raise ValueError(f'home must be "device" or "cpu", not {home!r}')
    return home


def check_stacked(params: list[Tensor], members: int | None) -> None:
    """Raise if a parameter does not stack the weights of so many members along its first dimension."""
    if members is None:
        return
    for p in params:
        if p.dim() == 0 or len(p) != members:
            raise ValueError(
                f"members={members}, but a parameter has the shape {tuple(p.shape)}: stack the weights of all members "
                "along the first dimension of every parameter (torch.func.stack_module_state)"
            )


def check_members(members: int | None, method: Method, model: nn.Module | None, scaler: Any) -> None:
    """Raise for what cannot be done with several members at once: it would mix them, or not treat them alike."""
    if members is None:
        return
    if not method.stackable:
        raise ValueError(f"{method.name} cannot train several members at once: train them one by one")
    if scaler is not None:
        raise ValueError("members have no GradScaler: one overflow would skip the step of all; use bfloat16")
    if replicated(model) is not None or (model is not None and any(fully_sharded(m) for m in model.modules())):
        raise ValueError("members are trained on one device: neither DistributedDataParallel nor FSDP2")


def _stage_hint(model: Any) -> str:
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None or not isinstance(model, pipelining._PipelineStageBase):
        return ""
    return "; for a pipeline stage give model=stage.submod and norm_group=, the group of the stages' ranks"


def refuse_pipeline_without_group(params: list[Tensor], norm_group: Any) -> None:
    """Raise for a pipeline stage without `norm_group`: norms would be those of the stage, not of the whole model."""
    if norm_group is None and in_a_pipeline(params):
        raise RuntimeError(
            "the parameters are a pipeline stage's, and norms would be those of the stage alone: give SharpnessAware "
            "norm_group=, the process group of the stages' ranks"
        )


def refuse_pieces_for_ddp(params: list[Tensor]) -> None:
    """Raise for shards that torch has made local tensors for DDP: norms would be those of the shards."""
    if any(hasattr(p, "_st_info") for p in params):  # an attribute that torch sets on them
        raise RuntimeError(
            "the parameters are local shards of a tensor-parallel model that was prepared for DDP, and norms would be "
            "those of the shards: replicate it with fully_shard on a mesh of two dimensions (HSDP) instead"
        )


def _refuse_base(base: Optimizer) -> None:
    """Raise for bases that do more than step along the gradient in p.grad."""
    name, libraries = type(base).__name__, _libraries(base)
    if "opacus" in libraries:
        raise TypeError(
            "Opacus takes gradients from grad_sample, where those of all looks would add up, and accounts for one "
            "gradient per step: train privately with the plain optimizer"
        )
    if "deepspeed" in libraries:
        raise TypeError(_DEEPSPEED)
    arguments = list(inspect.signature(type(base).step).parameters.values())[1:]  # schedulers replace base.step
    required = [a for a in arguments if a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    known = any(cls.__name__ in _NOT_ONE_GRADIENT for cls in type(base).__mro__)
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(base).__mro__):
        raise TypeError("ZeroRedundancyOptimizer cannot be the base: shard the optimizer's state with FSDP2")
    if not {"state", "param_groups"} <= base.state_dict().keys():
        raise TypeError(f"{name} cannot be the base: its state_dict must have the keys state and param_groups")
    if required or known or isinstance(base, (LBFGS, SparseAdam)):
        raise TypeError(f"{name} cannot be the base: it does not step on one dense gradient")


def _libraries(instance: object) -> set[str]:
    """The top-level packages of an object's class and of its base classes."""
    return {cls.__module__.split(".")[0] for cls in type(instance).__mro__}


def check_model(model: nn.Module | None) -> None:
    """Raise for models that are wrapped in a way that is not supported."""
    if model is None:
        return
    if any(type(m).__name__.endswith("Engine") and "deepspeed" in _libraries(m) for m in model.modules()):
        raise TypeError(_DEEPSPEED)
    if sharded_by_fsdp1(model):
        raise TypeError(_FSDP1)


def refuse_copy(model: nn.Module | None) -> None:
    """Raise for a model that FSDP2 shards: torch cannot copy it, and a copied optimizer would train nothing."""
    if model is not None and any(fully_sharded(module) for module in model.modules()):
        raise TypeError(
            "a model that FSDP2 shards cannot be copied, and neither can its optimizer: copy the state_dict() of both, "
            "and load it into new ones"
        )


def check_group(group: dict[str, Any]) -> None:
    """Check a parameter group."""
    check_group_settings(group)
    if any(p.is_complex() for p in group["params"]):
        raise TypeError("complex parameters are not supported: use torch.view_as_real(p) as the parameter")
    if any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in group["params"]):  # attributes that ZeRO sets
        raise TypeError(_DEEPSPEED)
    if any(hasattr(p, "_fsdp_flattened") for p in group["params"]):  # an attribute that FSDP1 sets
        raise TypeError(_FSDP1)
    if any(is_traceable_wrapper_subclass(p) and not sharded(p) for p in group["params"]):
        raise TypeError("quantised parameters are not supported: a small perturbation would be rounded away")
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in group["params"]):
        warnings.warn(
            "most of a small perturbation of half-precision parameters is rounded away: keep the parameters in float32 "
            "and use torch.autocast (or FSDP2's MixedPrecisionPolicy), or a much larger rho",
            stacklevel=3,
        )


def check_group_settings(group: dict[str, Any]) -> None:
    """Check what a parameter group, or that of a checkpoint, says besides its parameters."""
    radius(group)
    if group.get("maximize"):
        raise ValueError("maximize=True is not supported, because perturbations ascend the loss: minimise -loss")


def check_loaded(state_dict: dict[str, Any]) -> None:
    """Check the parameter groups of a state_dict, before it is loaded."""
    for group in state_dict["param_groups"]:
        check_group_settings(group)


def radius(group: dict[str, Any]) -> Any:
    """The radius that a parameter group sets, as a float or a tensor; None if it sets none."""
    rho = group.get("rho")
    if rho is None or isinstance(rho, Tensor):
        return rho
    if callable(rho):
        raise ValueError("a parameter group's rho must be a number, which may change: give a schedule to the method")
    number = float(rho) if isinstance(rho, Real) and rho is not True else math.nan  # numbers of NumPy are Real too
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"a parameter group's rho must be a finite number, not negative, got {rho!r}")
    return number


def called_by_scaler() -> bool:
    """Whether a GradScaler's `step` is under way further up."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    return frame is not None


def refuse_closure_of_scaler() -> None:
    """Raise where a GradScaler gives its step a closure: it would not unscale what that leaves."""
    raise RuntimeError(
        "scaler.step(opt, closure) would step along scaled gradients: call opt.gradient(closure, scaler=scaler) first, "
        "then scaler.step(opt)"
    )


def check_lr(method: Method, groups: list[dict[str, Any]], lr_set: Any) -> None:
    """Check the groups' learning rates for a method that sets them. `lr_set` is the last one that it has set."""
    if any("lr" not in group for group in groups):
        raise RuntimeError(f"{method.name} sets the learning rate, but the base optimizer has none: use another base")
    changed = lr_set is not None and any(group["lr"] is not lr_set for group in groups)
    if changed or any("initial_lr" in group for group in groups):  # a key that schedulers add
        raise RuntimeError(f"{method.name} sets the learning rate itself: remove the scheduler")
    if lr_set is None and any(group.get("momentum") for group in groups):
        warnings.warn(
            f"{method.name} sets the learning rate for steps without momentum: with momentum it overshoots (on digits "
            "10 to 22 % accuracy against 91 % without); use SGD(momentum=0)",
            stacklevel=2,
        )
    if len({group["lr"] for group in groups if not isinstance(group["lr"], Tensor)}) > 1:
        raise RuntimeError(
            f"{method.name} sets one learning rate for all weights: start with the same learning rate in all groups"
        )


def mark_used(params: list[Tensor]) -> None:
    """Mark these gradients, in their current version, as used by a step."""
    for p in params:
        grad = p.grad
        if grad is not None:
            grad.used_at_version = grad._version  # pyright: ignore[reportAttributeAccessIssue]


def drop_used(params: list[Tensor]) -> None:
    """Drop the last step's direction from parameters that are frozen now. The base would step along it again."""
    for p in params:
        grad = p.grad
        if grad is not None and not p.requires_grad and getattr(grad, "used_at_version", None) == grad._version:
            p.grad = None


def refuse_leftover_gradients(params: list[Tensor]) -> None:
    """Raise for gradients that no step has used: those of an unfinished accumulation would be lost silently."""
    fresh = [g for p in params if (g := p.grad) is not None and getattr(g, "used_at_version", None) != g._version]
    if any(local_part(g).any() for g in fresh):
        raise RuntimeError(
            "parameters hold gradients that no step has used, and the looks would drop them. To accumulate, loop over "
            "the micro-batches inside the closure or the body of passes(), or pass a list of closures; if they are the "
            "gradient at w, use gradient(closure, first_done=True); otherwise call zero_grad() first"
        )
