"""What the optimizer refuses, and the error messages."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
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


def joined(base: Any) -> Any:
    """Several base optimizers as one. Anything else is returned as it is, and checked later."""
    bases = list(cast("Iterable[Any]", base)) if isinstance(base, (list, tuple)) else []
    if not bases or not all(isinstance(one, Optimizer) for one in bases):
        return cast("Any", base)
    for one in bases:
        _refuse_base(one)
    return bases[0] if len(bases) == 1 else Together(bases)


def check_settings(base: Any, method: Any, model: Any, local: bool, hvp: str, own: type) -> None:
    """The arguments of `SharpnessAware`, whose class is `own`."""
    if not isinstance(base, Optimizer):
        raise TypeError(f"base must be a torch.optim.Optimizer, not {base!r}; build it first, then wrap it")
    if not base.param_groups:  # what Lightning makes where configure_optimizers returns None
        raise ValueError("the base optimizer has no parameters")
    if isinstance(base, own):
        raise TypeError(f"{type(base).__name__} cannot be the base: it does not step on one dense gradient")
    _refuse_base(base)
    if not isinstance(method, Method):
        raise TypeError(f"method must be a method such as SAM(), not {method!r}; by name: steppe.wrap")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be the module that is trained, not {model!r}{_stage_hint(model)}")
    check_model(model)
    if local and replicated(model) is None:
        raise ValueError("local=True needs model=, wrapped in DistributedDataParallel (FSDP2 cannot look locally)")
    if hvp not in ("forward", "central", "exact"):
        raise ValueError(f'hvp must be "forward", "central" or "exact", not {hvp!r}')


def check_home(home: Any) -> Place:
    """Where the weights are kept while a look is somewhere else."""
    if home not in PLACES:
        raise ValueError(f'home must be "device" or "cpu", not {home!r}')
    return home


def _stage_hint(model: Any) -> str:
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None or not isinstance(model, pipelining._PipelineStageBase):
        return ""
    return "; for a pipeline stage give model=stage.submod and norm_group=, the group of the stages' ranks"


def refuse_pipeline_without_group(params: list[Tensor], norm_group: Any) -> None:
    """A stage of a pipeline holds a part of the model: the norms of its vectors are not those of the whole."""
    if norm_group is None and in_a_pipeline(params):
        raise RuntimeError(
            "the parameters are a pipeline stage's, and norms would be those of the stage alone: give SharpnessAware "
            "norm_group=, the process group of the stages' ranks"
        )


def refuse_pieces_for_ddp(params: list[Tensor]) -> None:
    """torch turns a tensor-parallel model's DTensors into local tensors for DDP: norms would be those of a piece."""
    if any(hasattr(p, "_st_info") for p in params):  # the mark that torch leaves on them
        raise RuntimeError(
            "the parameters are local pieces of a tensor-parallel model that was prepared for DDP, and norms would be "
            "those of the pieces: replicate it with fully_shard on a mesh of two dimensions (HSDP) instead"
        )


def _refuse_base(base: Optimizer) -> None:
    """Bases that do not step on the one gradient in p.grad."""
    name, library = type(base).__name__, type(base).__module__.split(".")[0]
    if library == "opacus":
        raise TypeError(
            "Opacus takes gradients from grad_sample, to which every look would add, and accounts for one of them: "
            "train privately with the plain optimizer"
        )
    if library == "deepspeed":
        raise TypeError("a DeepSpeed engine keeps gradients to itself: shard with FSDP2 (fully_shard) instead")
    closure = inspect.signature(base.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    if not {"state", "param_groups"} <= base.state_dict().keys():
        raise TypeError(f"{name} cannot be the base: its state_dict has no state or no param_groups to save ours in")
    if needs_closure or name in _NOT_ONE_GRADIENT or isinstance(base, (LBFGS, SparseAdam)):
        raise TypeError(f"{name} cannot be the base: it does not step on one dense gradient")


def check_model(model: nn.Module | None) -> None:
    """The model, as it is trained."""
    if model is None:
        return
    if type(model).__module__.split(".")[0] == "deepspeed":
        raise TypeError("a DeepSpeed engine keeps gradients to itself: shard with FSDP2 (fully_shard) instead")
    if sharded_by_fsdp1(model):
        raise TypeError(
            "FullyShardedDataParallel (FSDP1) is not supported: its shards do not say what part of a weight they are. "
            "Use FSDP2: torch.distributed.fsdp.fully_shard"
        )


def refuse_copy(model: nn.Module | None) -> None:
    """torch copies no model that FSDP2 shards; an optimizer of a copy of the parameters would train nothing."""
    if model is not None and any(fully_sharded(module) for module in model.modules()):
        raise TypeError(
            "a model that FSDP2 shards cannot be copied, nor can its optimizer: copy the state_dict() of both and load "
            "it into new ones"
        )


def check_group(group: dict[str, Any]) -> None:
    """A parameter group."""
    rho = group.get("rho", 0.0)
    if not isinstance(rho, (int, float)) or not (math.isfinite(rho) and rho >= 0):
        raise ValueError(f"a parameter group's rho must be a finite number, not negative, got {rho!r}")
    if group.get("maximize"):
        raise ValueError("a method's looks ascend the loss, so maximize=True would seek sharp places: minimise -loss")
    if any(p.is_complex() for p in group["params"]):
        raise TypeError("complex parameters are not supported; keep torch.view_as_real(p) as the parameter")
    if any(is_traceable_wrapper_subclass(p) and not sharded(p) for p in group["params"]):
        raise TypeError("quantised parameters are not supported: a small perturbation would be rounded away")
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in group["params"]):
        warnings.warn(
            "half-precision parameters round most of a small perturbation away; keep them in float32 and use "
            "torch.autocast (or FSDP2's MixedPrecisionPolicy), or take a much larger rho",
            stacklevel=3,
        )


def check_lr(method: Method, groups: list[dict[str, Any]], lr_set: Any) -> None:
    """The groups' learning rates, for a method that sets them; `lr_set` is what it has set last, if it has."""
    foreign = lr_set is not None and any(group["lr"] is not lr_set for group in groups)
    if foreign or any("initial_lr" in group for group in groups):  # the mark a scheduler leaves
        raise RuntimeError(f"{method.name} sets the learning rate itself: remove the scheduler")
    if lr_set is None and any(group.get("momentum") for group in groups):
        warnings.warn(
            f"{method.name} sets the learning rate for steps without momentum: with momentum it overshoots (on digits "
            "10 to 22 % accuracy against 91 % without); use SGD(momentum=0)",
            stacklevel=2,
        )
    if len({group["lr"] for group in groups if not isinstance(group["lr"], Tensor)}) > 1:
        raise RuntimeError(
            f"{method.name} sets one learning rate for all weights: give all groups the same to start with"
        )


def mark_used(params: list[Tensor]) -> None:
    """Remember that a step has used these gradients, as they are now."""
    for p in params:
        grad = p.grad
        if grad is not None:
            grad.used_at_version = grad._version  # pyright: ignore[reportAttributeAccessIssue]


def drop_used(params: list[Tensor]) -> None:
    """Drop the last step's direction from parameters that are frozen now: the base would step along it again."""
    for p in params:
        grad = p.grad
        if grad is not None and not p.requires_grad and getattr(grad, "used_at_version", None) == grad._version:
            p.grad = None


def refuse_leftover_gradients(params: list[Tensor]) -> None:
    """Gradients of an unfinished accumulation would be lost silently. (Those that a step has used may go.)"""
    fresh = [g for p in params if (g := p.grad) is not None and getattr(g, "used_at_version", None) != g._version]
    if any(local_part(g).any() for g in fresh):
        raise RuntimeError(
            "parameters hold gradients that no step has used, and looking around would drop them. To "
            "accumulate, loop over the micro-batches inside the closure or the passes() body, or give a "
            "list of closures; if the gradient at w is there already, use gradient(closure, "
            "first_done=True); otherwise call zero_grad() first"
        )
