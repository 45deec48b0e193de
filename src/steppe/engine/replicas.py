"""Models that are replicated or sharded over processes (DDP, FSDP2, pipelines): how, and what ranks must agree on."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..support.wrappers import uncompiled
from .shards import sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from ..vector import Space


def distributed() -> bool:
    """Whether this process is one of a process group. A torch that was built without distributed training is not."""
    return dist.is_available() and dist.is_initialized()


def fully_sharded(module: object) -> TypeGuard[FSDPModule]:
    """Whether FSDP2's `fully_shard` was applied to a module. This does not import FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def reshard(modules: Iterable[Any]) -> None:
    """Let FSDP2 drop gathered weights, which also an evaluation leaves behind, so that modules have their shards."""
    for module in modules:
        if fully_sharded(module):
            module.reshard()


def sharded_by_fsdp1(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is wrapped by FSDP1's FullyShardedDataParallel."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules())


def in_a_pipeline(params: Sequence[Tensor]) -> bool:
    """Whether one of these parameters belongs to a stage of a pipeline over several ranks.

    A module does not know its stage, so all objects of the process are searched, but only if there are several ranks.
    """
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None or not distributed() or dist.get_world_size() == 1:
        return False
    stages: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), pipelining._PipelineStageBase)]
    ours = {id(p) for p in params}
    return any(s.group_size > 1 and any(id(p) in ours for p in s.submod.parameters()) for s in stages)


def replicated(model: nn.Module | None) -> DistributedDataParallel | None:
    """The model if it is a DDP model, also inside `torch.compile`; else None."""
    inner = uncompiled(model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def average_(tensors: Sequence[Tensor], model: nn.Module | None) -> None:
    """Average tensors over the replicas of a model that is, or has inside, a DDP model; in place."""
    ddp = data_parallel(model)
    assert ddp is not None
    works: list[Any] = [dist.all_reduce(t, group=ddp.process_group, async_op=True) for t in tensors]
    for work in works:
        work.wait()
    group: Any = ddp.process_group
    torch._foreach_div_(list(tensors), dist.get_world_size(group))


def mean(value: Tensor, model: nn.Module | None, space: Space, group: Any, method: str) -> Tensor:
    """The mean over ranks of a number that each computed on its own data, so that all ranks decide alike."""
    if not distributed() or dist.get_world_size() == 1:
        return value
    group = _group_of_losses(model, space, method) if group is None else group
    value = value.clone()
    dist.all_reduce(value, group=group)
    return value / dist.get_world_size(group)


def _group_of_losses(model: nn.Module | None, space: Space, method: str) -> Any:
    """The process group of the ranks that share a loss (None: all ranks). By their own losses, ranks would diverge."""
    if (ddp := data_parallel(model)) is not None:
        return ddp.process_group
    modules = [] if model is None else list(uncompiled(model).modules())
    ranks = dist.get_world_size()
    if any(fully_sharded(m) or any(map(sharded, m.parameters(recurse=False))) for m in modules):
        # On a part of the ranks, the others may train another model. The stages of a pipeline report one loss.
        largest = max((p.device_mesh.size() for p in space.params if sharded(p)), default=0)
        if largest == ranks or space.norm_group is not None:
            return None
    raise RuntimeError(
        f"{method} uses the loss, there are {ranks} processes, and model= does not show how they share it: give "
        "SharpnessAware the model as DDP or FSDP2 has wrapped it, or loss_group="
    )


def data_parallel(model: nn.Module | None) -> DistributedDataParallel | None:
    """The DDP object of a model or of a part of it; None if there is none."""
    for module in [] if model is None else uncompiled(model).modules():
        ddp = module if isinstance(module, DistributedDataParallel) else _inside_replicate(module)
        if ddp is not None:
            return ddp
    return None


def _inside_replicate(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP object that the composable `replicate` has made for a module."""
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")
    state = None if composable is None else composable.replicate.state(module)
    return None if state is None else state._ddp


def can_skip_sync(model: nn.Module | None) -> bool:
    """Whether DDP can skip the synchronisation of a pass. It cannot in the first pass of a static graph."""
    ddp = replicated(model)
    if ddp is None:
        return False
    return not ddp.static_graph or getattr(ddp, "_static_graph_delay_allreduce_enqueued", True)


def no_sync(model: nn.Module | None) -> contextlib.AbstractContextManager[None]:
    """A context in which DDP does not synchronise gradients, if possible."""
    ddp = replicated(model)
    return ddp.no_sync() if ddp is not None and can_skip_sync(model) else contextlib.nullcontext()


def sync_buffers_next(model: nn.Module | None) -> None:
    """Let DDP broadcast the buffers of rank 0 in the next forward, as it does in each step of plain training."""
    _require_replicated(model).require_forward_param_sync = True


def used_anywhere(used: list[bool], model: nn.Module | None) -> list[bool]:
    """Which parameters were used on any replica. They differ only if DDP was told that some may be unused."""
    ddp = _require_replicated(model)
    if not (ddp.find_unused_parameters or ddp.static_graph):
        return [True] * len(used)  # DDP requires that all are used
    flags = torch.tensor(used, dtype=torch.int32, device=next(ddp.parameters()).device)
    dist.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=ddp.process_group)
    found: list[int] = flags.tolist()
    return [bool(flag) for flag in found]


def _require_replicated(model: nn.Module | None) -> DistributedDataParallel:
    ddp = replicated(model)
    assert ddp is not None
    return ddp
