"""Models that are replicated or sharded over processes: what their ranks must agree on."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def fully_sharded(module: object) -> TypeGuard[FSDPModule]:
    """Whether FSDP2's `fully_shard` was applied to a module. FSDP2 is not imported to find out."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def average_(tensors: Sequence[Tensor], model: nn.Module | None) -> None:
    """Average tensors over a DDP model's replicas, in place."""
    assert isinstance(model, DistributedDataParallel)
    works: list[Any] = [torch.distributed.all_reduce(t, group=model.process_group, async_op=True) for t in tensors]
    for work in works:
        work.wait()
    group: Any = model.process_group
    torch._foreach_div_(list(tensors), torch.distributed.get_world_size(group))


def mean(value: Tensor, model: nn.Module | None) -> Tensor:
    """A number that each replica computed on its own data, averaged, so that all take the same decision."""
    if not isinstance(model, DistributedDataParallel) and not fully_sharded(model):
        return value
    group: Any = getattr(model, "process_group", None)  # of FSDP2: all ranks
    value = value.clone()
    torch.distributed.all_reduce(value, group=group)
    return value / torch.distributed.get_world_size(group)


def can_skip_sync(model: nn.Module | None) -> bool:
    """Whether DDP can skip the synchronisation of a pass: not in the first pass of a static graph, which it records."""
    if not isinstance(model, DistributedDataParallel):
        return False
    return not model.static_graph or getattr(model, "_static_graph_delay_allreduce_enqueued", True)


def no_sync(model: nn.Module | None) -> contextlib.AbstractContextManager[None]:
    """A pass whose gradients DDP does not synchronise, where that is possible."""
    if isinstance(model, DistributedDataParallel) and can_skip_sync(model):
        return model.no_sync()
    return contextlib.nullcontext()


def sync_buffers_next(model: nn.Module | None) -> None:
    """Let DDP broadcast rank 0's buffers in the next forward, as it does in each step of plain training."""
    assert isinstance(model, DistributedDataParallel)
    model.require_forward_param_sync = True


def used_anywhere(used: list[bool], model: nn.Module | None) -> list[bool]:
    """Which parameters any replica used. DDP itself finds out only if it was told that some may be unused."""
    assert isinstance(model, DistributedDataParallel)
    if not (model.find_unused_parameters or model.static_graph):
        return [True] * len(used)  # DDP requires it
    flags = torch.tensor(used, dtype=torch.int32, device=next(model.parameters()).device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=model.process_group)
    found: list[int] = flags.tolist()
    return [bool(flag) for flag in found]
