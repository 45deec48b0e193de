"""Sharded tensors (DTensor): the local shard, and sums over the processes that hold the other shards.

Importing DTensor takes longer than importing the rest of steppe. A program that has a DTensor has imported it already,
so `sharded` only looks for it in `sys.modules`.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Groups = tuple[Any, ...]  # process groups
NormGroup = Any  # a process group, or a function from a parameter to one or None


def sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor: sharded over processes, or replicated on them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor itself."""
    return tensor._local_tensor if sharded(tensor) else tensor


def wrap_like(tensor: Tensor, param: Tensor) -> Tensor:
    """A local tensor with the type of a parameter: the shard of a DTensor becomes a DTensor."""
    if not sharded(param):
        return tensor
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def reduced_like(grad: Tensor, param: Tensor) -> Tensor:
    """A gradient with the placements of its parameter. Tensor parallelism (SequenceParallel) leaves partial sums."""
    if not sharded(grad) or not sharded(param) or grad.placements == param.placements:
        return grad
    return grad.redistribute(param.device_mesh, param.placements)


def shard_of(whole: Tensor, param: Tensor) -> Tensor:
    """The local shard of a whole tensor that has the shape of a parameter."""
    if not sharded(param):
        return whole
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # private: only if needed

    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))].clone()


def other_holders(param: Tensor, norm_group: NormGroup | None) -> Groups:
    """The process group whose ranks hold other parameters of the model in a parameter's place, if there is one."""
    group = norm_group(param) if callable(norm_group) else norm_group
    return () if group is None else (group,)


def shard_groups(param: Tensor, norm_group: NormGroup | None = None) -> Groups:
    """The process groups whose ranks hold the other shards of a parameter, or (`norm_group`) other parameters."""
    groups = other_holders(param, norm_group)
    if not sharded(param):
        return groups
    placements = enumerate(param.placements)
    return (*(param.device_mesh.get_group(dim) for dim, p in placements if not p.is_replicate()), *groups)


def piece_number(param: Tensor, norm_group: NormGroup | None) -> int:
    """The number of this rank's piece of the model in `norm_group`, from 1; 0 if there is no such group."""
    return sum(1 + torch.distributed.get_rank(group) for group in other_holders(param, norm_group))


def sum_over_shards(parts: Sequence[Tensor], groups: Sequence[Groups]) -> Tensor:
    """Sum of one number per parameter, over all ranks that hold shards of it."""
    left: dict[Groups, list[Tensor]] = {}  # numbers by the groups over which they must still be summed
    for part, holders in zip(parts, groups, strict=True):
        left.setdefault(holders, []).append(part)
    while True:
        # Longest first: so there is one sum over `norm_group`, the last group. Its ranks hold other parameters,
        # perhaps sharded in other ways, and all of them must call all_reduce equally often.
        holders = max(left, key=len)
        total = torch.stack(left.pop(holders)).sum()
        if not holders:
            return total
        torch.distributed.all_reduce(total, group=holders[0])
        left.setdefault(holders[1:], []).append(total)
