"""Vectors in weight space: one local tensor per parameter, and arithmetic.

Methods are written with `+ - * / @ norm` on vectors and never see a tensor list, a shard or a device. Only this
file, `lists` below it and `quiet` say ``_foreach``. Nothing here waits for the device.

>>> import torch
>>> v = Vector([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
>>> v.norm()
tensor(5.)
>>> (2 * v - v) @ v
tensor(25.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .lists import LOW_PRECISION, Number, add_scaled, dot, is_one, multiplied_out, times

TINY = 1e-12  # guards every division by a norm
_MOST_TERMS = 4  # that a vector keeps apart before it multiplies them out


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: its shard when it is a DTensor, itself otherwise."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Space:
    """What all vectors of one step share: the parameters, who holds which shard, what their groups ask for.

    `perturbed` and `adaptive` say, for each parameter, whether looks may move it, and whether adaptive methods
    measure it in its own size; None stands for all.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        perturbed: Sequence[bool] | None = None,
        adaptive: Sequence[bool] | None = None,
    ):
        self.params = list(params)
        self.perturbed = None if perturbed is None or all(perturbed) else list(perturbed)
        self.adaptive = None if adaptive is None or all(adaptive) else list(adaptive)
        groups = [_shard_groups(p) for p in self.params]
        self._shard_groups = groups if any(groups) else None
        self._devices = [p.device for p in self.params]
        self._in_one_place = not any(groups) and len(set(self._devices)) <= 1

    def __reduce__(self):  # process groups cannot be pickled; they follow from the parameters
        return Space, (self.params, self.perturbed, self.adaptive)

    def fits(self, params: list[Tensor], perturbed: Sequence[bool] | None, adaptive: Sequence[bool] | None) -> bool:
        """Whether a space made of these would be this one."""
        same = len(params) == len(self.params) and all(a is b for a, b in zip(params, self.params, strict=True))
        plain = (perturbed, adaptive, self.perturbed, self.adaptive) == (None, None, None, None)
        return same and plain and [p.device for p in params] == self._devices

    def vector(self, tensors: Iterable[Tensor | None]) -> Vector:
        """Collect one tensor per parameter; a missing one is zero."""
        return Vector(
            [torch.zeros_like(local(p)) if t is None else local(t)
             for p, t in zip(self.params, tensors, strict=True)], space=self,
        )  # fmt: skip

    def zeros(self) -> Vector:
        """The zero vector."""
        return self.vector([None] * len(self.params))

    def live(self) -> Vector:
        """The parameters themselves, not a copy: the vector changes when they do. For use without autograd."""
        return Vector([local(p) for p in self.params], space=self)

    def zero(self) -> Tensor:
        """The number zero, in the dtype and on the device of a reduction."""
        first = local(self.params[0])
        return torch.zeros((), dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)

    def wrap(self, vector: Vector) -> list[Tensor]:
        """One tensor per parameter, of the parameter's kind (shards become DTensors) and dtype."""
        pairs = zip(vector.tensors, self.params, strict=True)
        return [wrap_like(t if t.dtype == p.dtype else t.to(p.dtype), p) for t, p in pairs]

    def dot(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        """Inner product of two tensor lists."""
        if self._in_one_place:
            return dot(a, b)
        return self.total([dot([x], [y]) for x, y in zip(a, b, strict=True)])

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum of one number per parameter, over devices, shards and the ranks that hold them."""
        device = parts[0].device
        if any(part.device != device for part in parts):
            parts = [part.to(device) for part in parts]  # non_blocking would let a CPU read what is not there yet
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

    def __init__(self, factors: Sequence[Number]):
        self.factors = list(factors)

    def __mul__(self, other: Vector) -> Vector:
        return other * self


Scalar = Number | Each


class Vector:
    """A vector in weight space.

    It is kept as a number times a short sum of scaled tensor lists and multiplied out only when its entries are
    needed: ``rho * unit(g)`` costs no pass over memory, and a method's combination of gradients becomes one new
    tensor per parameter and not one per operation. Reductions return 0-d tensors, in float32 or better.
    """

    __slots__ = ("_factor", "_norm", "_terms", "space")

    def __init__(self, tensors: Sequence[Tensor], space: Space | None = None):
        self._terms: list[tuple[Number, list[Tensor]]] = [(1.0, list(tensors))]
        self._factor: Number = 1.0
        self._norm: Tensor | None = None
        self.space = Space(tensors) if space is None else space

    def _sum(self, terms: list[tuple[Number, list[Tensor]]], factor: Number = 1.0) -> Vector:
        vector = object.__new__(Vector)
        vector._terms, vector._factor, vector._norm, vector.space = terms, factor, None, self.space
        return vector

    def _new(self, tensors: Sequence[Tensor]) -> Vector:
        return self._sum([(1.0, list(tensors))])

    @property
    def tensors(self) -> list[Tensor]:
        """The entries, one local tensor per parameter. Treat them as read-only."""
        if not is_one(self._factor) or len(self._terms) > 1 or not is_one(self._terms[0][0]):
            self._terms, self._factor = [(1.0, multiplied_out(self._terms, self._factor))], 1.0
        return self._terms[0][1]

    def _scaled(self) -> tuple[Number, list[Tensor]]:
        """The entries up to a factor: what reductions need."""
        if len(self._terms) > 1:
            self._terms = [(1.0, multiplied_out(self._terms, 1.0))]
        factor, tensors = self._terms[0]
        return times(self._factor, factor), tensors

    # Arithmetic

    def __add__(self, other: Vector | float) -> Vector:
        if not isinstance(other, Vector):
            return self._new(torch._foreach_add(self.tensors, other))
        terms: list[tuple[Number, list[Tensor]]] = []
        for factor, tensors in (*self._distributed(), *other._distributed()):
            same = next((i for i, term in enumerate(terms) if term[1] is tensors), None)
            if same is None:
                terms.append((factor, tensors))
            else:
                terms[same] = (terms[same][0] + factor, tensors)
        # A sum that grew with every look would hold all that was ever seen.
        return self._sum(terms) if len(terms) <= _MOST_TERMS else self._new(multiplied_out(terms, 1.0))

    def _distributed(self) -> list[tuple[Number, list[Tensor]]]:
        return [(times(self._factor, factor), tensors) for factor, tensors in self._terms]

    def __sub__(self, other: Vector | float) -> Vector:
        return self + -other

    def __mul__(self, other: Vector | Scalar) -> Vector:
        if isinstance(other, Vector):
            return self._new(torch._foreach_mul(self.tensors, other.tensors))
        if isinstance(other, Each):
            numbers = [factor for factor in other.factors if not isinstance(factor, Tensor)]
            if len(numbers) < len(other.factors):
                return self._new([t * f for t, f in zip(self.tensors, other.factors, strict=True)])
            return self._new(torch._foreach_mul(self.tensors, numbers))
        _require_scalar(other)
        return self._sum(self._terms, times(self._factor, other))

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
        factor, tensors = self._scaled()
        kept = [t if moves else torch.zeros_like(t) for t, moves in zip(tensors, keep, strict=True)]
        return self._sum([(factor, kept)])

    def clone(self, room: Vector | None = None) -> Vector:
        """A copy with memory of its own: that of another vector, if one is given and fits."""
        mine, theirs = self.tensors, [] if room is None else room.tensors
        fits = len(mine) == len(theirs) and all(
            a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
            for a, b in zip(mine, theirs, strict=True)
        )
        theirs = theirs if fits else [torch.empty_like(t, requires_grad=False) for t in mine]
        torch._foreach_copy_(theirs, mine)
        return self._new(theirs)

    # Reductions

    def __matmul__(self, other: Vector) -> Tensor:
        """Inner product, over all parameters, devices and shards."""
        (a, mine), (b, theirs) = self._scaled(), other._scaled()
        product = self.space.dot(mine, theirs)
        return product if is_one(factor := times(a, b)) else product * factor

    def norm(self) -> Tensor:
        """Euclidean norm, over all parameters, devices and shards. Computed once."""
        if self._norm is None:
            factor, tensors = self._scaled()
            accumulate = torch.float32 if any(t.dtype in LOW_PRECISION for t in tensors) else None
            norms = torch._foreach_norm(tensors, 2, dtype=accumulate)
            if self.space._in_one_place:
                norm = torch.linalg.vector_norm(torch.stack(norms))
            else:
                norm = self.space.total([n.square() for n in norms]).sqrt()
            self._norm = norm if is_one(factor) else norm * abs(factor)
        return self._norm

    # In place: for the optimizer, which owns the weights

    def copy_(self, other: Vector) -> None:
        """Take over the entries of another vector."""
        self._norm = None
        torch._foreach_copy_(self.tensors, other.tensors)

    def add_(self, other: Vector) -> None:
        """Add another vector to the entries, without room for a third one."""
        self.move_(self, other)

    def move_(self, start: Vector, offset: Vector) -> None:
        """Become start + offset, without room for a third vector."""
        mine, self._norm = self.tensors, None
        factor, theirs = offset._scaled()
        add_scaled(mine, start.tensors, theirs, factor)

    def mul_(self, factor: Tensor) -> None:
        """Multiply the entries by a number."""
        self._norm = None
        torch._foreach_mul_(self.tensors, factor)

    def __repr__(self) -> str:
        tensors = self._terms[0][1]
        return f"Vector({len(tensors)} tensors, {sum(t.numel() for t in tensors)} entries)"


def unit(v: Vector) -> Vector:
    """v/‖v‖; zero stays zero."""
    return v / (v.norm() + TINY)


def reject(v: Vector, axis: Vector) -> Vector:
    """The part of v orthogonal to an axis."""
    return v - (v @ axis) / (axis.norm() ** 2 + TINY**2) * axis


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


def _require_scalar(value: object) -> None:
    if not (isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)):
        raise TypeError(f"a Vector can be multiplied by a number, a 0-d tensor or a Vector, not {value!r}")
