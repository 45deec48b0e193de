"""Vectors in weight space: one local tensor per parameter, with arithmetic.

Methods are written with `+ - * / @ norm` on vectors and never see a list of tensors, a shard or a device. Nothing here
synchronises with the device.

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
from .engine.tensor_lists import Factor, is_one, linear_combination, times

TINY = 1e-12  # guards every division by a norm
MOST_TERMS = 4  # a sum with more terms than this is evaluated immediately


class Space:
    """What all vectors of one step share: the parameters, which ranks hold their shards, and settings of their groups.

    `perturbed` and `adaptive` say, for each parameter, whether looks may move it, and whether adaptive methods scale
    its perturbation by the size of its weights; None means that all are. `norm_group` is the process group whose ranks
    hold other parameters of the same model: norms and inner products are summed over these ranks too.

    With `members` the parameters are those of so many independent models, stacked along the first dimension. Reductions
    then give one number per member, and a vector can be multiplied by one number per member.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        perturbed: Sequence[bool] | None = None,
        adaptive: Sequence[bool] | None = None,
        norm_group: NormGroup | None = None,
        members: int | None = None,
    ):
        self.params = list(params)
        self.members = members
        self.perturbed, self.adaptive = _none_if_all(perturbed), _none_if_all(adaptive)
        self._dtypes, self._devices = [p.dtype for p in self.params], [p.device for p in self.params]
        self.norm_group = norm_group
        groups = [shard_groups(p, norm_group) for p in self.params]
        self._shard_groups = groups if any(groups) else None
        self._sharded = any(local(p) is not p for p in self.params)
        self._moving: int | None = None
        self._in_one_place = not any(groups) and len(set(self._devices)) <= 1

    def __reduce__(self):  # process groups cannot be pickled; they follow from the parameters
        return Space, (self.params, self.perturbed, self.adaptive, self.norm_group, self.members)

    def fits(
        self,
        params: list[Tensor],
        perturbed: Sequence[bool] | None,
        adaptive: Sequence[bool] | None,
        norm_group: NormGroup | None = None,
        members: int | None = None,
    ) -> bool:
        """Whether a space made of these would be this one."""
        return (
            same(params, self.params)
            and [p.device for p in params] == self._devices
            and [p.dtype for p in params] == self._dtypes
            and (_none_if_all(perturbed), _none_if_all(adaptive)) == (self.perturbed, self.adaptive)
            and norm_group is self.norm_group
            and members == self.members
        )

    def pieces(self) -> list[Tensor]:
        """The local part of each parameter: its shard if it is sharded, else the parameter itself."""
        return [local(p) for p in self.params] if self._sharded else self.params

    def moving(self) -> int:
        """The number of weights that looks may move, over all ranks that hold parameters of the model; cached."""
        if self._moving is None:
            moves = self.perturbed or [True] * len(self.params)
            counts = [p.numel() if moved else 0 for p, moved in zip(self.params, moves, strict=True)]
            groups = [other_holders(p, self.norm_group) for p in self.params]
            device = self._devices[0]
            parts = [torch.tensor(count, device=device) for count in counts] if any(groups) else []
            self._moving = int(sum_over_shards(parts, groups)) if parts else sum(counts)
        return self._moving

    def vector(self, tensors: Iterable[Tensor | None]) -> Vector:
        """A vector of one tensor per parameter. None stands for zeros."""
        pairs = zip(self.pieces(), tensors, strict=True)
        filled = [torch.zeros_like(p) if t is None else t for p, t in pairs]
        return Vector([local(t) for t in filled] if self._sharded else filled, space=self)

    def zeros(self) -> Vector:
        """The zero vector."""
        return self.vector([None] * len(self.params))

    def live(self) -> Vector:
        """The parameters themselves as a vector, not a copy: it changes with them. Use it under `torch.no_grad`."""
        return Vector(self.pieces(), space=self)

    def zero(self) -> Tensor:
        """A zero with the dtype, device and shape of a reduction: 0-d, or one for each member."""
        first = local(self.params[0])
        shape = () if self.members is None else (self.members,)
        return torch.zeros(shape, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)

    def wrap(self, vector: Vector) -> list[Tensor]:
        """The entries as tensors of the parameters' type (shards become DTensors) and dtype."""
        tensors = vector.tensors
        if [t.dtype for t in tensors] != self._dtypes:
            tensors = [t.to(p.dtype) for t, p in zip(tensors, self.params, strict=True)]
        if self._sharded:
            tensors = [wrap_like(t, p) for t, p in zip(tensors, self.params, strict=True)]
        return tensors

    def dot(self, a: list[Tensor], b: list[Tensor]) -> Tensor:
        """Inner product of two tensor lists."""
        if self.members is not None:
            return tensor_lists.dot_by_member(a, b)
        if self._in_one_place:
            return tensor_lists.dot(a, b)
        return self.total([tensor_lists.dot([x], [y]) for x, y in zip(a, b, strict=True)])

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum of one number per parameter, over devices, shards and the ranks that hold them."""
        device = parts[0].device
        if any(part.device != device for part in parts):
            # Not with non_blocking: a CPU would read before the copy has arrived.
            parts = [part.to(device) for part in parts]
        if self._shard_groups is None:
            return torch.stack(list(parts)).sum()
        return sum_over_shards(parts, self._shard_groups)


class Each:
    """One factor per parameter, to multiply a vector with: a hyperparameter that differs between parameter groups."""

    def __init__(self, factors: Sequence[Factor]):
        self.factors = list(factors)

    def __mul__(self, other: Vector) -> Vector:
        return other * self


Scalar = Factor | Each


class Vector:
    """A vector in weight space.

    It is evaluated lazily. Inside it is a factor times a short sum of scaled lists of tensors, which is materialised
    only when the entries are needed: ``rho * unit(g)`` takes no pass over memory, and a method's combination of
    gradients becomes one new tensor per parameter, not one per operation. Reductions return 0-d tensors (or one number
    per member: see `Space`), in float32 or better.
    """

    __slots__ = ("_factor", "_norm", "_terms", "space")

    def __init__(self, tensors: Sequence[Tensor], space: Space | None = None):
        self._terms: list[tuple[Factor, list[Tensor]]] = [(1.0, list(tensors))]
        self._factor: Factor = 1.0
        self._norm: Tensor | None = None
        self.space = Space(tensors) if space is None else space

    def _from_terms(self, terms: list[tuple[Factor, list[Tensor]]], factor: Factor = 1.0) -> Vector:
        vector = object.__new__(Vector)
        vector._terms, vector._factor, vector._norm, vector.space = terms, factor, None, self.space
        return vector

    def _from_tensors(self, tensors: Sequence[Tensor]) -> Vector:
        return self._from_terms([(1.0, list(tensors))])

    @property
    def tensors(self) -> list[Tensor]:
        """The entries, one local tensor per parameter. Treat them as read-only."""
        if not is_one(self._factor) or len(self._terms) > 1 or not is_one(self._terms[0][0]):
            factor, self._factor = self._factor, 1.0
            self._terms = [(1.0, linear_combination(self._release_terms(), factor))]
        return self._terms[0][1]

    def _release_terms(self) -> list[tuple[Factor, list[Tensor]]]:
        """The terms, which this vector no longer references, so that their memory can be reused for the result."""
        terms, self._terms = list(self._terms), []  # a new list: a multiple of this vector may share the old one
        return terms

    def _factor_and_tensors(self) -> tuple[Factor, list[Tensor]]:
        """The vector as one factor times one list of tensors: what reductions need. A sum is evaluated first."""
        if len(self._terms) > 1:
            self._terms = [(1.0, linear_combination(self._release_terms(), 1.0))]
        factor, tensors = self._terms[0]
        return times(self._factor, factor), tensors

    def settled(self) -> Vector:
        """This vector, evaluated. For a vector that is kept during further looks: a sum would hold all its terms."""
        return self._from_tensors(self.tensors)

    def as_one_term(self) -> Vector:
        """This vector; a sum is evaluated now. For a vector that several streams read: else the first evaluates it."""
        self._factor_and_tensors()
        return self

    # Arithmetic

    def __add__(self, other: Vector | float) -> Vector:
        if not isinstance(other, Vector):
            return self._from_tensors(torch._foreach_add(self.tensors, other))
        terms: list[tuple[Factor, list[Tensor]]] = []
        for factor, tensors in (*self._multiplied_terms(), *other._multiplied_terms()):
            same = next((i for i, term in enumerate(terms) if term[1] is tensors), None)
            if same is None:
                terms.append((factor, tensors))
            else:
                terms[same] = (terms[same][0] + factor, tensors)
        if len(terms) <= MOST_TERMS:
            return self._from_terms(terms)
        # An unevaluated sum that grows with every look would hold the gradients of all looks.
        return self._from_tensors(linear_combination(terms, 1.0))

    def _multiplied_terms(self) -> list[tuple[Factor, list[Tensor]]]:
        """The terms, each multiplied by the common factor."""
        return [(times(self._factor, factor), tensors) for factor, tensors in self._terms]

    def __sub__(self, other: Vector | float) -> Vector:
        return self + -other

    def __mul__(self, other: Vector | Scalar) -> Vector:
        if isinstance(other, Vector):
            (a, mine), (b, theirs) = self._factor_and_tensors(), other._factor_and_tensors()
            return self._from_terms([(1.0, list(torch._foreach_mul(mine, theirs)))], times(a, b))
        if isinstance(other, Each):
            numbers = [factor for factor in other.factors if not isinstance(factor, Tensor)]
            if len(numbers) < len(other.factors):
                return self._from_tensors([t * f for t, f in zip(self.tensors, other.factors, strict=True)])
            return self._from_tensors(torch._foreach_mul(self.tensors, numbers))
        _require_scalar(other, self.space.members)
        return self._from_terms(self._terms, times(self._factor, other))

    def __truediv__(self, other: Vector | float | Tensor) -> Vector:
        if isinstance(other, Vector):
            return self._from_tensors(torch._foreach_div(self.tensors, other.tensors))
        return self * (other.reciprocal() if isinstance(other, Tensor) else 1 / other)

    def __pow__(self, exponent: float) -> Vector:
        return self._from_tensors(torch._foreach_pow(self.tensors, exponent))

    def __neg__(self) -> Vector:
        return self * -1.0

    __radd__ = __add__
    __rmul__ = __mul__

    def abs(self) -> Vector:
        """Absolute values, entry by entry."""
        return self._from_tensors(torch._foreach_abs(self.tensors))

    def sqrt(self) -> Vector:
        """Square roots, entry by entry."""
        return self._from_tensors(torch._foreach_sqrt(self.tensors))

    def map(self, function: Callable[[Tensor], Tensor]) -> Vector:
        """A function applied to the entries, tensor by tensor."""
        return self._from_tensors([function(t) for t in self.tensors])

    def perturbed(self) -> Vector:
        """This vector with zeros in the place of weights that looks may not move."""
        keep = self.space.perturbed
        if keep is None:
            return self
        factor, tensors = self._factor_and_tensors()
        kept = [t if moves else torch.zeros_like(t) for t, moves in zip(tensors, keep, strict=True)]
        return self._from_terms([(factor, kept)])

    def clone(self, room: Vector | None = None) -> Vector:
        """A copy. It is written into the memory of the vector `room`, if one is given and has the same shapes."""
        if room is None or [t.shape for t in self.tensors] != [t.shape for t in room.tensors]:
            room = self._from_tensors([torch.empty_like(t, requires_grad=False) for t in self.tensors])
        room.copy_(self)
        return room

    # Reductions

    def __matmul__(self, other: Vector) -> Tensor:
        """Inner product, over all parameters, devices and shards."""
        (a, mine), (b, theirs) = self._factor_and_tensors(), other._factor_and_tensors()
        product = self.space.dot(mine, theirs)
        return product if is_one(factor := times(a, b)) else product * factor

    def norm(self) -> Tensor:
        """Euclidean norm, over all parameters, devices and shards; cached."""
        if self._norm is None:
            factor, tensors = self._factor_and_tensors()
            if self.space.members is not None:
                norm = tensor_lists.norm_by_member(tensors)
            elif self.space._in_one_place:
                norm = tensor_lists.norm(tensors)
            else:
                norm = self.space.total([n.square() for n in tensor_lists.norms(tensors)]).sqrt()
            self._norm = norm if is_one(factor) else norm * abs(factor)
        return self._norm

    # In place: for the optimizer, which moves the weights

    def copy_(self, other: Vector) -> None:
        """Overwrite the entries with those of another vector."""
        self._norm = None
        torch._foreach_copy_(self.tensors, other.tensors)

    def add_(self, other: Vector) -> None:
        """Add another vector in place, without a temporary of its size."""
        self.move_(self, other)

    def move_(self, start: Vector, offset: Vector) -> None:
        """Overwrite the entries with start + offset, without a temporary of that size."""
        mine, self._norm = self.tensors, None
        factor, theirs = offset._factor_and_tensors()
        tensor_lists.add_scaled(mine, start.tensors, theirs, factor)

    def mul_(self, factor: Tensor | Vector) -> None:
        """Multiply the entries in place by a number, or by the entries of another vector."""
        mine, self._norm = self.tensors, None
        if isinstance(factor, Vector):
            torch._foreach_mul_(mine, factor.tensors)
        elif factor.dim():
            torch._foreach_mul_(mine, [tensor_lists.along_members(factor, t) for t in mine])
        elif self.space._in_one_place:
            torch._foreach_mul_(mine, factor)
        else:
            torch._foreach_mul_(mine, [factor.to(t.device) for t in mine])

    def __repr__(self) -> str:
        tensors = self._terms[0][1]
        return f"Vector({len(tensors)} tensors, {sum(t.numel() for t in tensors)} entries)"


def unit(v: Vector) -> Vector:
    """v/‖v‖; the zero vector stays zero."""
    return v / (v.norm() + TINY)


def reject(v: Vector, axis: Vector) -> Vector:
    """The part of v that is orthogonal to an axis."""
    return v - (v @ axis) / (axis.norm() ** 2 + TINY**2) * axis


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists hold the same objects, compared by identity."""
    return len(some) == len(others) and all(map(is_, some, others))


def _none_if_all(flags: Sequence[bool] | None) -> list[bool] | None:
    return None if flags is None or all(flags) else list(flags)


def _require_scalar(value: object, members: int | None) -> None:
    by_member = isinstance(value, Tensor) and members is not None and value.shape == (members,)
    if not (isinstance(value, (int, float)) or by_member or (isinstance(value, Tensor) and value.dim() == 0)):
        raise TypeError(f"a Vector can be multiplied by a number, a 0-d tensor or a Vector, not {value!r}")
