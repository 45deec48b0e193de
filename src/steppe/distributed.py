"""What replicas must agree on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


def average_(tensors: Sequence[Tensor], model: nn.Module | None) -> None:
    """Average tensors over a DDP model's replicas, in place."""
    assert isinstance(model, DistributedDataParallel)
    works = [torch.distributed.all_reduce(t, group=model.process_group, async_op=True) for t in tensors]
    for work in works:
        work.wait()  # pyright: ignore[reportOptionalMemberAccess]
    torch._foreach_div_(list(tensors), torch.distributed.get_world_size(model.process_group))


def mean(value: Tensor, model: nn.Module | None) -> Tensor:
    """A number that each replica computed on its own data, averaged, so that all decide alike."""
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
    elif isinstance(model, FSDPModule):
        group = None  # all ranks
    else:
        return value
    value = value.clone()
    torch.distributed.all_reduce(value, group=group)
    return value / torch.distributed.get_world_size(group)
