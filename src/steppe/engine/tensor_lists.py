"""Arithmetic on lists of tensors, which `Vector` is made of. Nothing here synchronises with the device."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

# What a list is multiplied by: a number, a 0-d tensor, or for stacked members a tensor with one number each.
Factor = float | Tensor
LOW_PRECISION = frozenset((torch.float16, torch.bfloat16))
LARGE = 1 << 20  # a tensor with this many entries gets a kernel of its own
SMALL = 1 << 18  # a tensor with fewer entries is reduced together with others
LARGEST = 1 << 25  # lists are processed in parts of about this many entries, to bound the size of temporaries
_RELEASED = torch.empty(0)  # takes the place of a tensor in a list, so that its memory can be reused


def is_one(factor: Factor) -> bool:
    """Whether a factor is the number 1."""
    return not isinstance(factor, Tensor) and factor == 1  # reading a tensor's value would synchronise


def times(a: Factor, b: Factor) -> Factor:
    """The product of two factors."""
    return b if is_one(a) else a if is_one(b) else a * b


def along_members(factor: Any, tensor: Tensor) -> Any:
    """A factor in the shape in which it multiplies a tensor: one number per member goes along the first dimension."""
    return factor.view(-1, *[1] * (tensor.dim() - 1)) if isinstance(factor, Tensor) and factor.dim() else factor


def linear_combination(terms: list[tuple[Factor, list[Tensor]]], factor: Factor) -> list[Tensor]:
    """factor · Σ fᵢ tensorsᵢ, as new tensors. (A single term with factor 1 is returned as it is.)

    It works in parts and releases the inputs of each part, so that the result can reuse the memory of gradients to
    which there is no other reference. For that it empties the list of terms: the caller's frame may hold a reference to
    it until this returns.
    """
    if len(terms) == 1 and is_one(times(factor, terms[0][0])):
        return terms[0][1]
    own = [(f, list(tensors)) for f, tensors in terms]  # copies of the lists: their entries are released below
    terms.clear()
    first = own[0][1]
    total: list[Tensor] = []
    for part in list(_parts(first, SMALL if first[0].is_cpu else LARGEST)):
        total += _combine([(f, tensors[part]) for f, tensors in own], factor)
        for _, tensors in own:
            tensors[part] = [_RELEASED] * len(tensors[part])
    return total


def _combine(terms: list[tuple[Factor, list[Tensor]]], factor: Factor) -> list[Tensor]:
    (first, tensors), *rest = terms
    if not rest:
        return _scaled(tensors, times(factor, first))
    if is_one(first):
        total = [torch.empty_like(t) for t in tensors]
        add_scaled(total, tensors, rest[0][1], rest[0][0])
        rest = rest[1:]
    else:
        total = _scaled(tensors, first, fresh=True)
    for f, tensors in rest:
        add_scaled(total, total, tensors, f)
    return _scaled(total, factor, in_place=True)


def add_scaled(targets: list[Tensor], sources: list[Tensor], tensors: list[Tensor], factor: Factor) -> None:
    """targets = sources + factor · tensors, without temporaries of that size. Targets and sources may be one list.

    In place it takes one kernel. Otherwise large tensors, and all tensors on a CPU, are processed one by one, each in
    one pass over memory; small tensors on a GPU are processed together, in a few kernels.
    """
    in_place = targets is sources
    if in_place and isinstance(factor, Tensor):
        targets, tensors = _add_by_fused_kernel(targets, tensors, factor)
        sources = targets
    together: list[int] = []
    for i, (target, source, tensor) in enumerate(zip(targets, sources, tensors, strict=True)):
        if not _has_own_kernel(tensor, factor):
            together.append(i)
        elif isinstance(factor, Tensor):
            torch.addcmul(source, tensor, along_members(factor, tensor), out=target)
        else:
            torch.add(source, tensor, alpha=factor, out=target)
    if not together:
        return
    targets, sources, tensors = ([list_[i] for i in together] for list_ in (targets, sources, tensors))
    if not in_place:
        torch._foreach_copy_(targets, sources)
    if not isinstance(factor, Tensor):
        torch._foreach_add_(targets, tensors, alpha=factor)
        return
    for part in _parts(tensors):
        torch._foreach_add_(targets[part], _scaled(tensors[part], factor))


def _add_by_fused_kernel(
    targets: list[Tensor], tensors: list[Tensor], factor: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Add factor · tensors in place to those targets that have the same memory layout; return the remaining ones.

    The kernel is that of a fused SGD step: the only one for lists of tensors that reads its factor from the device.
    """
    dtype, device = factor.dtype, factor.device
    readable = dtype is torch.float32 or (dtype is torch.float64 and factor.is_cpu)  # a GPU's kernel reads float32
    if not readable or factor.dim():
        return targets, tensors
    fit = [
        t.dtype is dtype and v.dtype is dtype and t.device == device and t.shape == v.shape
        and ((t.is_contiguous() and v.is_contiguous()) or (_channels_last(t) and _channels_last(v)))
        for t, v in zip(targets, tensors, strict=True)
    ]  # fmt: skip
    left: tuple[list[Tensor], list[Tensor]] = [], []
    if not all(fit):
        misfit = [not fits for fits in fit]
        left = list(compress(targets, misfit)), list(compress(tensors, misfit))
        targets, tensors = list(compress(targets, fit)), list(compress(tensors, fit))
    if targets:
        torch._fused_sgd_(
            targets, tensors, [], lr=factor, maximize=True,
            momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.0, is_first_step=False,
        )  # fmt: skip
        torch.autograd.graph.increment_version(targets)  # the kernel does not do this itself
    return left


def _channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _has_own_kernel(tensor: Tensor, factor: Factor) -> bool:
    """Whether a tensor is processed by a kernel of its own, in one pass over memory."""
    if isinstance(factor, Tensor) and (factor.dtype != tensor.dtype or factor.device != tensor.device):
        return False
    by_member = isinstance(factor, Tensor) and factor.dim() > 0  # kernels for lists take one factor for all
    return by_member or tensor.is_cpu or tensor.numel() >= LARGE


def _scaled(tensors: list[Tensor], factor: Factor, fresh: bool = False, in_place: bool = False) -> list[Tensor]:
    """The tensors times a factor, as new tensors. Exceptions: `in_place`; and factor 1 without `fresh`, a no-op."""
    if is_one(factor) and not fresh:
        return tensors
    first = tensors[0]
    if isinstance(factor, Tensor):
        factor = factor.to(first.device)
    if not isinstance(factor, Tensor) or (
        not factor.dim() and all(t.device == first.device and t.dtype not in LOW_PRECISION for t in tensors)
    ):
        if in_place:
            torch._foreach_mul_(tensors, factor)
            return tensors
        return list(torch._foreach_mul(tensors, factor))
    # Low precision: a 0-d factor would be rounded to the entries' dtype first, in which 1e-12 is zero.
    on = {t.device: factor.to(t.device) for t in tensors}
    return [
        (t.to(torch.promote_types(t.dtype, torch.float32)) * along_members(on[t.device], t)).to(t.dtype)
        for t in tensors
    ]


def _parts(tensors: list[Tensor], entries: int = LARGEST) -> Iterator[slice]:
    """Consecutive slices of a list of tensors. Each ends as soon as its tensors have `entries` entries or more."""
    start = count = 0
    for stop, tensor in enumerate(tensors, start=1):
        count += tensor.numel()
        if count >= entries or stop == len(tensors):
            yield slice(start, stop)
            start, count = stop, 0


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor, in float32 or better."""
    accumulate = torch.float32 if _any_low_precision(tensors) else None
    return list(torch._foreach_norm(tensors, 2, dtype=accumulate))


def norm(tensors: list[Tensor]) -> Tensor:
    """Euclidean norm of a list of tensors on one device."""
    # A GPU reduces a list in a few kernels. A CPU reduces tensors one by one; small ones are faster concatenated.
    large, small = _by_size(tensors) if tensors[0].is_cpu else (tensors, [])
    parts = norms(large) if large else []
    for part in _parts(small):
        parts += norms([_flatten_dense_tensors(small[part])])
    return parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts))


def dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Inner product of two lists of tensors on one device, in float32 or better."""
    if _any_low_precision(a) or _any_low_precision(b):
        a, b = [t.float() for t in a], [t.float() for t in b]
    (large, small), (their_large, their_small) = _by_size(a), _by_size(b)
    dots = [torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(large, their_large, strict=True)]
    for part in _parts(small):
        dots.append(torch.dot(_flatten_dense_tensors(small[part]), _flatten_dense_tensors(their_small[part])))
    return dots[0] if len(dots) == 1 else torch.stack(dots).sum()


def norm_by_member(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of each member's part of a list, in float32 or better. The first dimension counts members."""
    accumulate = torch.float32 if _any_low_precision(tensors) else None
    parts = [torch.linalg.vector_norm(t.flatten(1), dim=1, dtype=accumulate) for t in tensors]
    return parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), dim=0)


def dot_by_member(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """The inner product of each member's parts of two lists, in float32 or better."""
    if _any_low_precision(a) or _any_low_precision(b):
        a, b = [t.float() for t in a], [t.float() for t in b]
    dots = [torch.linalg.vecdot(x.flatten(1), y.flatten(1)) for x, y in zip(a, b, strict=True)]
    return dots[0] if len(dots) == 1 else torch.stack(dots).sum(0)


def _by_size(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The large tensors, and the small ones, which are faster to reduce concatenated than one by one."""
    small = [t for t in tensors if t.numel() < SMALL]
    return [t for t in tensors if t.numel() >= SMALL] if len(small) < len(tensors) else [], small


def _any_low_precision(tensors: list[Tensor]) -> bool:
    return not LOW_PRECISION.isdisjoint([t.dtype for t in tensors])
