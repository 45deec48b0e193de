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
_LARGE = 1 << 17  # entries of a tensor that is worth a kernel of its own
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
            return _dot(a, b)
        return self.total([_dot([x], [y]) for x, y in zip(a, b, strict=True)])

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


Number = float | Tensor


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
        if not _is_one(self._factor) or len(self._terms) > 1 or not _is_one(self._terms[0][0]):
            self._terms, self._factor = [(1.0, _multiplied_out(self._terms, self._factor))], 1.0
        return self._terms[0][1]

    def _scaled(self) -> tuple[Number, list[Tensor]]:
        """The entries up to a factor: what reductions need."""
        if len(self._terms) > 1:
            return 1.0, self.tensors
        factor, tensors = self._terms[0]
        return _times(self._factor, factor), tensors

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
        return self._sum(terms) if len(terms) <= _MOST_TERMS else self._new(_multiplied_out(terms, 1.0))

    def _distributed(self) -> list[tuple[Number, list[Tensor]]]:
        return [(_times(self._factor, factor), tensors) for factor, tensors in self._terms]

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
        return self._sum(self._terms, _times(self._factor, other))

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
        return product if _is_one(factor := _times(a, b)) else product * factor

    def norm(self) -> Tensor:
        """Euclidean norm, over all parameters, devices and shards. Computed once."""
        if self._norm is None:
            factor, tensors = self._scaled()
            accumulate = torch.float32 if any(t.dtype in _LOW_PRECISION for t in tensors) else None
            norms = torch._foreach_norm(tensors, 2, dtype=accumulate)
            if self.space._in_one_place:
                norm = torch.linalg.vector_norm(torch.stack(norms))
            else:
                norm = self.space.total([n.square() for n in norms]).sqrt()
            self._norm = norm if _is_one(factor) else norm * abs(factor)
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
        _add_scaled(mine, start.tensors, theirs, factor)

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


def by_kind(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Two tensor lists, split by dtype and device: what fused kernels want."""
    kinds: dict[tuple, tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in zip(first, second, strict=True):
        pair = kinds.setdefault((a.dtype, a.device), ([], []))
        pair[0].append(a)
        pair[1].append(b)
    return list(kinds.values())


def wrap_like(tensor: Tensor, param: Tensor) -> Tensor:
    """A local tensor as the same kind of tensor as a parameter: a shard becomes a DTensor."""
    if not isinstance(param, DTensor):
        return tensor
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def _require_scalar(value: object) -> None:
    if not (isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)):
        raise TypeError(f"a Vector can be multiplied by a number, a 0-d tensor or a Vector, not {value!r}")


def _is_one(factor: Number) -> bool:
    return not isinstance(factor, Tensor) and factor == 1  # a tensor's value is not to be looked at


def _times(a: Number, b: Number) -> Number:
    return b if _is_one(a) else a if _is_one(b) else a * b


def _multiplied_out(terms: list[tuple[Number, list[Tensor]]], factor: Number) -> list[Tensor]:
    """The entries of factor · Σ fᵢ tensorsᵢ, as new tensors (or the only ones there are)."""
    (first, tensors), *rest = terms
    if not rest:
        return _scaled(tensors, _times(factor, first))
    if _is_one(first) and not isinstance(rest[0][0], Tensor) and rest[0][0] in (1, -1):
        add = torch._foreach_add if rest[0][0] == 1 else torch._foreach_sub  # exact for neighbours
        total, rest = list(add(tensors, rest[0][1])), rest[1:]
    else:
        total = _scaled(tensors, first, fresh=True)
    for f, tensors in rest:
        _add_scaled(total, total, tensors, f)
    return _scaled(total, factor, in_place=True)


def _alone(tensor: Tensor, factor: Number) -> bool:
    if isinstance(factor, Tensor) and (factor.dtype != tensor.dtype or factor.device != tensor.device):
        return False
    return tensor.is_cpu or tensor.numel() >= _LARGE


def _add_scaled(targets: list[Tensor], sources: list[Tensor], tensors: list[Tensor], factor: Number) -> None:
    """targets = sources + factor · tensors, without room for more. Targets and sources may be the same.

    Large tensors, and all on a CPU, go one by one, in one pass over memory; small ones on a GPU together, in a few
    kernels.
    """
    together: list[int] = []
    for i, (target, source, tensor) in enumerate(zip(targets, sources, tensors, strict=True)):
        if not _alone(tensor, factor):
            together.append(i)
        elif isinstance(factor, Tensor):
            torch.addcmul(source, tensor, factor, out=target)
        else:
            torch.add(source, tensor, alpha=factor, out=target)
    if not together:
        return
    targets, sources, tensors = ([list_[i] for i in together] for list_ in (targets, sources, tensors))
    if any(a is not b for a, b in zip(targets, sources, strict=True)):
        torch._foreach_copy_(targets, sources)
    for part in _parts(tensors):
        torch._foreach_add_(targets[part], _scaled(tensors[part], factor))


def _scaled(tensors: list[Tensor], factor: Number, fresh: bool = False, in_place: bool = False) -> list[Tensor]:
    """The tensors times a factor: as new ones, unless they may be used or written over."""
    if _is_one(factor) and not fresh:
        return tensors
    first = tensors[0]
    if isinstance(factor, Tensor):
        factor = factor.to(first.device)
    if not isinstance(factor, Tensor) or all(
        t.device == first.device and t.dtype not in _LOW_PRECISION for t in tensors
    ):
        if in_place:
            torch._foreach_mul_(tensors, factor)
            return tensors
        return list(torch._foreach_mul(tensors, factor))
    # Low precision: a 0-d factor would be rounded to the entries' dtype first, where 1e-12 is zero.
    on = {t.device: factor.to(t.device, non_blocking=True) for t in tensors}
    return [(t.to(torch.promote_types(t.dtype, torch.float32)) * on[t.device]).to(t.dtype) for t in tensors]


def _parts(tensors: list[Tensor], entries: int = 1 << 25) -> Iterator[slice]:
    """Slices of a list of tensors, of so many entries or little more: a temporary needs room for one of them."""
    start = count = 0
    for stop, tensor in enumerate(tensors, start=1):
        count += tensor.numel()
        if count >= entries or stop == len(tensors):
            yield slice(start, stop)
            start, count = stop, 0


def _dot(a: Sequence[Tensor], b: Sequence[Tensor], large: int = 1 << 18) -> Tensor:
    """Inner product of tensor lists on one device: large tensors one by one, small ones strung together."""
    parts: list[tuple[Tensor, Tensor]] = []
    small: tuple[list[Tensor], list[Tensor]] = ([], [])
    for x, y in zip(a, b, strict=True):
        if x.dtype in _LOW_PRECISION or y.dtype in _LOW_PRECISION:
            x, y = x.float(), y.float()
        if x.numel() >= large:
            parts.append((x.reshape(-1), y.reshape(-1)))
        else:
            small[0].append(x.reshape(-1))
            small[1].append(y.reshape(-1))
    if small[0]:
        strung = [pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in small]
        parts.append((strung[0], strung[1]))
    dots = [torch.dot(x, y) for x, y in parts]
    return dots[0] if len(dots) == 1 else torch.stack(dots).sum()
