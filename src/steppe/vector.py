"""Vectors in weight space: one local tensor per parameter, and arithmetic.

Methods are written with `+ - * / @ norm` on vectors and never see a tensor list, a shard or a device. This
is the only file that says ``_foreach``. Nothing here waits for the device.

>>> import torch
>>> v = Vector([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
>>> v.norm()
tensor(5.)
>>> (2 * v - v) @ v
tensor(25.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

TINY = 1e-12  # guards every division by a norm
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: its shard when it is a DTensor, itself otherwise."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Space:
    """What all vectors of one step share: the parameters, who holds which shard, what may be perturbed."""

    def __init__(self, params: Iterable[Tensor], perturbed: Sequence[bool] | None = None):
        self.params = list(params)
        self.perturbed = None if perturbed is None or all(perturbed) else list(perturbed)
        groups = [_shard_groups(p) for p in self.params]
        self._shard_groups = groups if any(groups) else None

    def __reduce__(self):  # process groups cannot be pickled; they follow from the parameters
        return Space, (self.params, self.perturbed)

    def vector(self, tensors: Iterable[Tensor | None]) -> Vector:
        """Collect one tensor per parameter; a missing one is zero."""
        return Vector(
            [torch.zeros_like(local(p)) if t is None else local(t)
             for p, t in zip(self.params, tensors, strict=True)], space=self,
        )  # fmt: skip

    def zeros(self) -> Vector:
        """The zero vector."""
        return self.vector([None] * len(self.params))

    def weights(self) -> Vector:
        """The parameters themselves, not a copy: the vector changes when they do."""
        return Vector([local(p.detach()) for p in self.params], space=self)

    def wrap(self, vector: Vector) -> list[Tensor]:
        """One tensor per parameter, of the parameter's kind (shards become DTensors) and dtype."""
        return [wrap_like(t.to(p.dtype), p) for t, p in zip(vector.tensors, self.params, strict=True)]

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum of one number per parameter, over devices, shards and the ranks that hold them."""
        device = parts[0].device
        if any(part.device != device for part in parts):
            parts = [part.to(device, non_blocking=True) for part in parts]
        if self._shard_groups is None:
            return torch.stack(list(parts)).sum()
        by_groups: dict[tuple, list[Tensor]] = {}
        for part, groups in zip(parts, self._shard_groups, strict=True):
            by_groups.setdefault(groups, []).append(part)
        sums = []
        for groups, members in by_groups.items():  # one entry unless shardings differ: one all-reduce
            partial = torch.stack(members).sum()
            for group in groups:
                torch.distributed.all_reduce(partial, group=group)
            sums.append(partial)
        return torch.stack(sums).sum()


class Each:
    """One factor per parameter: how a hyperparameter that differs between parameter groups multiplies."""

    def __init__(self, factors: Sequence[float]):
        self.factors = list(factors)

    def __mul__(self, other: Vector) -> Vector:
        return other * self


Scalar = float | Tensor | Each


class Vector:
    """A vector in weight space.

    A scalar factor is carried along and multiplied in only when the entries are needed, so that
    ``rho * unit(g)`` costs no pass over memory. Reductions return 0-d tensors, in float32 or better.
    """

    __slots__ = ("_factor", "_tensors", "space")

    def __init__(self, tensors: Sequence[Tensor], space: Space | None = None, factor: float | Tensor | None = None):
        self._tensors = list(tensors)
        self._factor = factor
        self.space = Space(self._tensors) if space is None else space

    @property
    def tensors(self) -> list[Tensor]:
        """The entries, one local tensor per parameter. Treat them as read-only."""
        if self._factor is not None:
            self._tensors = _scaled(self._tensors, self._factor)
            self._factor = None
        return self._tensors

    def _new(self, tensors: Sequence[Tensor]) -> Vector:
        return Vector(tensors, self.space)

    # Arithmetic

    def __add__(self, other: Vector | float) -> Vector:
        return self._new(torch._foreach_add(self.tensors, _entries(other)))

    def __sub__(self, other: Vector | float) -> Vector:
        return self._new(torch._foreach_sub(self.tensors, _entries(other)))

    def __mul__(self, other: Vector | Scalar) -> Vector:
        if isinstance(other, Vector):
            return self._new(torch._foreach_mul(self.tensors, other.tensors))
        if isinstance(other, Each):
            return self._new(torch._foreach_mul(self.tensors, other.factors))
        _require_scalar(other)
        factor = other if self._factor is None else self._factor * other
        return Vector(self._tensors, self.space, factor)

    def __truediv__(self, other: Vector | float | Tensor) -> Vector:
        if isinstance(other, Vector):
            return self._new(torch._foreach_div(self.tensors, other.tensors))
        return self * (1 / other)

    def __pow__(self, exponent: float) -> Vector:
        return self._new(torch._foreach_pow(self.tensors, exponent))

    def __neg__(self) -> Vector:
        return self * -1.0

    __radd__ = __add__
    __rmul__ = __mul__

    def abs(self) -> Vector:
        """Absolute values, entry by entry."""
        return self._new(torch._foreach_abs(self.tensors))

    def sqrt(self) -> Vector:
        """Square roots, entry by entry."""
        return self._new(torch._foreach_sqrt(self.tensors))

    def map(self, function: Callable[[Tensor], Tensor]) -> Vector:
        """Any other function of the entries, applied tensor by tensor."""
        return self._new([function(t) for t in self.tensors])

    def perturbed(self) -> Vector:
        """This vector on the weights that looks may move, zero on the others."""
        keep = self.space.perturbed
        if keep is None:
            return self
        tensors = [t if moves else torch.zeros_like(t) for t, moves in zip(self._tensors, keep, strict=True)]
        return Vector(tensors, self.space, self._factor)

    def clone(self) -> Vector:
        """A copy with memory of its own."""
        return self._new([t.clone() for t in self.tensors])

    # Reductions

    def __matmul__(self, other: Vector) -> Tensor:
        """Inner product, over all parameters, devices and shards."""
        dots = [_dot(a, b) for a, b in zip(self._tensors, other._tensors, strict=True)]
        product = self.space.total(dots)
        for factor in (self._factor, other._factor):
            if factor is not None:
                product = product * factor
        return product

    def norm(self) -> Tensor:
        """Euclidean norm, over all parameters, devices and shards."""
        accumulate = torch.float32 if any(t.dtype in _LOW_PRECISION for t in self._tensors) else None
        norms = torch._foreach_norm(self._tensors, 2, dtype=accumulate)
        if self.space._shard_groups is None and all(n.device == norms[0].device for n in norms):
            norm = torch.linalg.vector_norm(torch.stack(norms))
        else:
            norm = self.space.total([n.square() for n in norms]).sqrt()
        return norm if self._factor is None else norm * abs(self._factor)

    # In place: for the optimizer, which owns the weights

    def copy_(self, other: Vector) -> None:
        """Take over the entries of another vector."""
        torch._foreach_copy_(self.tensors, other.tensors)

    def add_(self, other: Vector) -> None:
        """Add another vector to the entries, without room for a third one."""
        factor, mine, theirs = other._factor, self.tensors, other._tensors
        if factor is None:
            torch._foreach_add_(mine, theirs)
        elif isinstance(factor, Tensor) and all(t.is_cpu and t.dtype == factor.dtype for t in theirs):
            for a, b in zip(mine, theirs, strict=True):
                a.addcmul_(b, factor)  # one pass over memory
        else:
            for part in _parts(theirs):
                torch._foreach_add_(mine[part], _scaled(theirs[part], factor))

    def mul_(self, factor: Tensor) -> None:
        """Multiply the entries by a number."""
        torch._foreach_mul_(self.tensors, factor)

    def __repr__(self) -> str:
        return f"Vector({len(self._tensors)} tensors, {sum(t.numel() for t in self._tensors)} entries)"


def unit(v: Vector) -> Vector:
    """v/‖v‖; zero stays zero."""
    return v / (v.norm() + TINY)


def reject(v: Vector, axis: Vector) -> Vector:
    """The part of v orthogonal to an axis."""
    axis = unit(axis)
    return v - (v @ axis) * axis


def _shard_groups(param: Tensor) -> tuple:
    """The process groups whose ranks hold the other pieces of a parameter."""
    if not isinstance(param, DTensor):
        return ()
    placements = enumerate(param.placements)
    return tuple(param.device_mesh.get_group(dim) for dim, p in placements if not p.is_replicate())


def wrap_like(tensor: Tensor, param: Tensor) -> Tensor:
    """A local tensor as the same kind of tensor as a parameter: a shard becomes a DTensor."""
    if not isinstance(param, DTensor):
        return tensor
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def _entries(other: Vector | float) -> list[Tensor] | float:
    return other.tensors if isinstance(other, Vector) else other


def _require_scalar(value: object) -> None:
    if not (isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)):
        raise TypeError(f"a Vector can be multiplied by a number, a 0-d tensor or a Vector, not {value!r}")


def _scaled(tensors: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    if not isinstance(factor, Tensor):
        return list(torch._foreach_mul(tensors, factor))
    first = tensors[0]
    if all(t.device == first.device and t.dtype not in _LOW_PRECISION for t in tensors):
        return list(torch._foreach_mul(tensors, factor.to(first.device)))
    # Low precision: a 0-d factor would be rounded to the entries' dtype first, where 1e-12 is zero.
    on = {t.device: factor.to(t.device, non_blocking=True) for t in tensors}
    return [(t.to(torch.promote_types(t.dtype, torch.float32)) * on[t.device]).to(t.dtype) for t in tensors]


def _parts(tensors: list[Tensor], entries: int = 1 << 25) -> Iterator[slice]:
    """Slices of a list of tensors, each with about as many entries as given."""
    start = count = 0
    for stop, tensor in enumerate(tensors, start=1):
        count += tensor.numel()
        if count >= entries or stop == len(tensors):
            yield slice(start, stop)
            start, count = stop, 0


def _dot(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in _LOW_PRECISION or b.dtype in _LOW_PRECISION:
        a, b = a.float(), b.float()
    return torch.dot(a.reshape(-1), b.reshape(-1))
