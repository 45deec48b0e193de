"""Vectors in weight space: one local tensor per parameter, and arithmetic.

Methods are written with `+ - * / @ norm` on vectors and never see a tensor list, a shard or a device. Nothing here
waits for the device.

>>> import torch
>>> v = Vector([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
>>> v.norm()
tensor(5.)
>>> (2 * v - v) @ v
tensor(25.)
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_

import torch
from torch import Tensor

from .engine import tensor_lists
from .engine.shards import NormGroup, local, other_holders, shard_groups, sum_over_shards, wrap_like
from .engine.tensor_lists import Factor, is_one, multiplied_out, times

TINY = 1e-12  # guards every division by a norm
MOST_TERMS = 4  # a sum of more terms than this is evaluated at once


class Space:
    """What all vectors of one step share: the parameters, who holds which shard, what their groups ask for.

    `perturbed` and `adaptive` say, for each parameter, whether looks may move it, and whether adaptive methods
    measure it in its own size; None stands for all. `norm_group` are the ranks that hold other parameters of the same
    model: norms and inner products are sums over them too.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        perturbed: Sequence[bool] | None = None,
        adaptive: Sequence[bool] | None = None,
        norm_group: NormGroup | None = None,
    ):
        self.params = list(params)
        self.perturbed, self.adaptive = _unless_all(perturbed), _unless_all(adaptive)
        self._dtypes, self._devices = [p.dtype for p in self.params], [p.device for p in self.params]
        self.norm_group = norm_group
        groups = [shard_groups(p, norm_group) for p in self.params]
        self._shard_groups = groups if any(groups) else None
        self._sharded = any(local(p) is not p for p in self.params)
        self._moving: int | None = None
        self._in_one_place = not any(groups) and len(set(self._devices)) <= 1

    def __reduce__(self):  # process groups cannot be pickled; they follow from the parameters
        return Space, (self.params, self.perturbed, self.adaptive, self.norm_group)

    def fits(
        self,
        params: list[Tensor],
        perturbed: Sequence[bool] | None,
        adaptive: Sequence[bool] | None,
        norm_group: NormGroup | None = None,
    ) -> bool:
        """Whether a space made of these would be this one."""
        return (
            same(params, self.params)
            and [p.device for p in params] == self._devices
            and [p.dtype for p in params] == self._dtypes
            and (_unless_all(perturbed), _unless_all(adaptive)) == (self.perturbed, self.adaptive)
            and norm_group is self.norm_group
        )

    def pieces(self) -> list[Tensor]:
        """This process's piece of each parameter."""
        return [local(p) for p in self.params] if self._sharded else self.params

    def moving(self) -> int:
        """How many weights looks may move, on all ranks that hold parameters of the model. Counted once."""
        if self._moving is None:
            moves = self.perturbed or [True] * len(self.params)
            counts = [p.numel() if moved else 0 for p, moved in zip(self.params, moves, strict=True)]
            groups = [other_holders(p, self.norm_group) for p in self.params]
            device = self._devices[0]
            parts = [torch.tensor(count, device=device) for count in counts] if any(groups) else []
            self._moving = int(sum_over_shards(parts, groups)) if parts else sum(counts)
        return self._moving

    def vector(self, tensors: Iterable[Tensor | None]) -> Vector:
        """Collect one tensor per parameter; a missing one is zero."""
        pairs = zip(self.pieces(), tensors, strict=True)
        filled = [torch.zeros_like(p) if t is None else t for p, t in pairs]
        return Vector([local(t) for t in filled] if self._sharded else filled, space=self)

    def zeros(self) -> Vector:
        """The zero vector."""
        return self.vector([None] * len(self.params))

    def live(self) -> Vector:
        """The parameters themselves, not a copy: the vector changes with them. For use without autograd."""
        return Vector(self.pieces(), space=self)

    def zero(self) -> Tensor:
        """The number zero, in the dtype and on the device of a reduction."""
        first = local(self.params[0])
        return torch.zeros((), dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)

    def wrap(self, vector: Vector) -> list[Tensor]:
        """One tensor per parameter, of the parameter's kind (shards become DTensors) and dtype."""
        tensors = vector.tensors
        if [t.dtype for t in tensors] != self._dtypes:
            tensors = [t.to(p.dtype) for t, p in zip(tensors, self.params, strict=True)]
        if self._sharded:
            tensors = [wrap_like(t, p) for t, p in zip(tensors, self.params, strict=True)]
        return tensors

    def dot(self, a: list[Tensor], b: list[Tensor]) -> Tensor:
        """Inner product of two tensor lists."""
        if self._in_one_place:
            return tensor_lists.dot(a, b)
        return self.total([tensor_lists.dot([x], [y]) for x, y in zip(a, b, strict=True)])

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum of one number per parameter, over devices, shards and the ranks that hold them."""
        device = parts[0].device
        if any(part.device != device for part in parts):
            parts = [
                part.to(device) for part in parts
            ]  # not non_blocking: a CPU would read before the copy has arrived
        if self._shard_groups is None:
            return torch.stack(list(parts)).sum()
        return sum_over_shards(parts, self._shard_groups)


class Each:
    """One factor per parameter: how a hyperparameter that differs between parameter groups multiplies."""

    def __init__(self, factors: Sequence[Factor]):
        self.factors = list(factors)

    def __mul__(self, other: Vector) -> Vector:
        return other * self


Scalar = Factor | Each


class Vector:
    """A vector in weight space.

    It is a number times a short sum of scaled tensor lists, evaluated only when its entries are needed:
    ``rho * unit(g)`` costs no pass over memory, and a method's combination of gradients becomes one new tensor per
    parameter, not one per operation. Reductions return 0-d tensors, in float32 or better.
    """

    __slots__ = ("_factor", "_norm", "_terms", "space")

    def __init__(self, tensors: Sequence[Tensor], space: Space | None = None):
        self._terms: list[tuple[Factor, list[Tensor]]] = [(1.0, list(tensors))]
        self._factor: Factor = 1.0
        self._norm: Tensor | None = None
        self.space = Space(tensors) if space is None else space

    def _sum(self, terms: list[tuple[Factor, list[Tensor]]], factor: Factor = 1.0) -> Vector:
        vector = object.__new__(Vector)
        vector._terms, vector._factor, vector._norm, vector.space = terms, factor, None, self.space
        return vector

    def _new(self, tensors: Sequence[Tensor]) -> Vector:
        return self._sum([(1.0, list(tensors))])

    @property
    def tensors(self) -> list[Tensor]:
        """The entries, one local tensor per parameter. Treat them as read-only."""
        if not is_one(self._factor) or len(self._terms) > 1 or not is_one(self._terms[0][0]):
            factor, self._factor = self._factor, 1.0
            self._terms = [(1.0, multiplied_out(self._given_up(), factor))]
        return self._terms[0][1]

    def _given_up(self) -> list[tuple[Factor, list[Tensor]]]:
        """The terms, released by this vector so that its evaluated entries can take their memory."""
        terms, self._terms = list(self._terms), []  # a multiple of this vector may have the same list
        return terms

    def _scaled(self) -> tuple[Factor, list[Tensor]]:
        """The entries up to a factor: what reductions need."""
        if len(self._terms) > 1:
            self._terms = [(1.0, multiplied_out(self._given_up(), 1.0))]
        factor, tensors = self._terms[0]
        return times(self._factor, factor), tensors

    def settled(self) -> Vector:
        """This vector, evaluated. For vectors that are kept during more looks: a sum would hold all its terms."""
        return self._new(self.tensors)

    def as_one_term(self) -> Vector:
        """This vector; a sum is evaluated now, so that nobody who shares it has to wait for who evaluates it first."""
        self._scaled()
        return self

    # Arithmetic

    def __add__(self, other: Vector | float) -> Vector:
        if not isinstance(other, Vector):
            return self._new(torch._foreach_add(self.tensors, other))
        terms: list[tuple[Factor, list[Tensor]]] = []
        for factor, tensors in (*self._distributed(), *other._distributed()):
            same = next((i for i, term in enumerate(terms) if term[1] is tensors), None)
            if same is None:
                terms.append((factor, tensors))
            else:
                terms[same] = (terms[same][0] + factor, tensors)
        # An unevaluated sum that grows with every look would hold the gradients of all of them.
        return self._sum(terms) if len(terms) <= MOST_TERMS else self._new(multiplied_out(terms, 1.0))

    def _distributed(self) -> list[tuple[Factor, list[Tensor]]]:
        return [(times(self._factor, factor), tensors) for factor, tensors in self._terms]

    def __sub__(self, other: Vector | float) -> Vector:
        return self + -other

    def __mul__(self, other: Vector | Scalar) -> Vector:
        if isinstance(other, Vector):
            (a, mine), (b, theirs) = self._scaled(), other._scaled()
            return self._sum([(1.0, list(torch._foreach_mul(mine, theirs)))], times(a, b))
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
        return self * (other.reciprocal() if isinstance(other, Tensor) else 1 / other)

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
        """A copy with memory of its own: that of the vector `room`, if one is given and fits."""
        if room is None or [t.shape for t in self.tensors] != [t.shape for t in room.tensors]:
            room = self._new([torch.empty_like(t, requires_grad=False) for t in self.tensors])
        room.copy_(self)
        return room

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
            if self.space._in_one_place:
                norm = tensor_lists.norm(tensors)
            else:
                norm = self.space.total([n.square() for n in tensor_lists.norms(tensors)]).sqrt()
            self._norm = norm if is_one(factor) else norm * abs(factor)
        return self._norm

    # In place: for the optimizer, which owns the weights

    def copy_(self, other: Vector) -> None:
        """Copy the entries of another vector."""
        self._norm = None
        torch._foreach_copy_(self.tensors, other.tensors)

    def add_(self, other: Vector) -> None:
        """Add another vector, without a temporary of that size."""
        self.move_(self, other)

    def move_(self, start: Vector, offset: Vector) -> None:
        """Become start + offset, without a temporary of that size."""
        mine, self._norm = self.tensors, None
        factor, theirs = offset._scaled()
        tensor_lists.add_scaled(mine, start.tensors, theirs, factor)

    def mul_(self, factor: Tensor | Vector) -> None:
        """Multiply the entries by a number, or each by another vector's."""
        mine, self._norm = self.tensors, None
        if isinstance(factor, Vector):
            torch._foreach_mul_(mine, factor.tensors)
        elif self.space._in_one_place:
            torch._foreach_mul_(mine, factor)
        else:
            torch._foreach_mul_(mine, [factor.to(t.device) for t in mine])

    def __repr__(self) -> str:
        tensors = self._terms[0][1]
        return f"Vector({len(tensors)} tensors, {sum(t.numel() for t in tensors)} entries)"


def unit(v: Vector) -> Vector:
    """v/‖v‖; zero stays zero."""
    return v / (v.norm() + TINY)


def reject(v: Vector, axis: Vector) -> Vector:
    """The part of v orthogonal to an axis."""
    return v - (v @ axis) / (axis.norm() ** 2 + TINY**2) * axis


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _unless_all(flags: Sequence[bool] | None) -> list[bool] | None:
    return None if flags is None or all(flags) else list(flags)


def _require_scalar(value: object) -> None:
    if not (isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)):
        raise TypeError(f"a Vector can be multiplied by a number, a 0-d tensor or a Vector, not {value!r}")
