"""Curvature as linear operators: the Hessian and the Gauss-Newton matrix of a loss over data.

>>> model = torch.nn.Linear(2, 1, bias=False).double()
>>> x, y = torch.eye(2, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
>>> H = Hessian(model, torch.nn.functional.mse_loss, (x, y))
>>> H @ torch.tensor([1.0, 2.0], dtype=torch.float64)
tensor([1., 2.], dtype=torch.float64)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from ..vector import Vector
from .objective import Objective, Selection

# Pieces of a vector in, pieces of its product out; batched: of several vectors, along a first dimension
Product: TypeAlias = Callable[[Sequence[Tensor], bool], Sequence[Tensor]]
Way: TypeAlias = Literal["auto", "graph", "fresh", "forward", "difference"]
_WAYS = ("auto", "graph", "fresh", "forward", "difference")


class Linearised(NamedTuple):
    """A batch whose products can be taken: what is kept between products when memory allows."""

    product: Product
    loss: Tensor
    weight: float


class Operator:
    """A symmetric matrix that is only ever multiplied: `shape`, `@`, `dtype`, `device`.

    ``operator @ v`` takes a `Vector`, a flat tensor of n entries, or an n by k block of vectors. A block costs
    less than its vectors one by one wherever the batches do not stay in memory: they are visited once.

    Args:
        model, loss_fn, data, objective: What is measured: `Objective`'s arguments, or an objective.
        way: How products are computed. ``"graph"``: double backward on a graph that is kept; ``"fresh"``: double
            backward, graph built each time; ``"forward"``: forward over reverse; ``"difference"``: central
            difference of gradients, which works with every kernel at 1e-4 (float32) or 1e-8 (float64). ``"auto"``:
            graphs are kept as far as `memory` reaches; if a model cannot be differentiated twice, the next that works.
        memory: Bytes for kept graphs. A quarter of what is free on a GPU, otherwise 2 GiB.
        chunk: How many vectors of a block are pushed through a graph at a time: 16 on a GPU, where that is up to five
            times faster, otherwise 1. Fewer where memory or an operation does not allow it.
    """

    def __init__(
        self,
        model: nn.Module | Objective,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        data: Any = None,
        *,
        way: Way = "auto",
        memory: int | None = None,
        chunk: int | None = None,
        **options: Any,
    ):
        if way not in _WAYS:
            raise ValueError(f"way must be one of {', '.join(map(repr, _WAYS))}, not {way!r}")
        if isinstance(model, Objective):
            if loss_fn is not None or data is not None or options:
                raise TypeError("an Objective already has its loss, data and options")
            self.objective = model
        elif loss_fn is None or data is None:
            raise TypeError("give a model, a loss function and data, or an Objective")
        else:
            self.objective = Objective(model, loss_fn, data, **options)
        self.way: Way = way
        self._next_ways: list[Way] = ["forward", "difference"] if way == "auto" else []
        self.chunk = chunk or (16 if self.objective.device.type == "cuda" else 1)
        self.matvecs = 0
        self._memory = memory
        self._kept: list[Linearised] = []
        self._all_kept = False
        self._state: Any = None
        self._loss: float | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, n) for n weights."""
        return self.objective.size, self.objective.size

    @property
    def dtype(self) -> torch.dtype:
        """Of flat vectors."""
        return self.objective.dtype

    @property
    def device(self) -> torch.device:
        """Where flat vectors live."""
        return self.objective.device

    @overload
    def __matmul__(self, other: Vector) -> Vector: ...
    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    def __matmul__(self, other: Vector | Tensor) -> Vector | Tensor:
        if isinstance(other, Vector):
            return self.objective.vector(self @ self.objective.flat(other))
        if not isinstance(other, Tensor) or other.dim() not in (1, 2) or other.shape[0] != self.shape[0]:
            got = tuple(other.shape) if isinstance(other, Tensor) else type(other).__name__
            raise ValueError(f"the operator multiplies a Vector or a tensor of {self.shape[0]} rows, got {got}")
        block = other.detach().to(self.device, self.dtype).reshape(self.shape[0], -1)
        return self._multiply(block).reshape(other.shape)

    def restricted(self, params: Selection) -> Operator:
        """The diagonal block of fewer parameters: a layer, a module, a pattern of names."""
        return type(self)(self.objective.restricted(params), way=self.way, memory=self._memory, chunk=self.chunk)

    def blocks(self) -> dict[str, Operator]:
        """One diagonal block for each module that has measured parameters of its own, by the module's name."""
        groups: dict[str, list[str]] = {}
        for name in self.objective.names:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
        return {module: self.restricted(names) for module, names in groups.items()}

    def dense(self) -> Tensor:
        """The whole matrix. For small models."""
        return self @ torch.eye(self.shape[0], dtype=self.dtype, device=self.device)

    def forget(self) -> None:
        """Drop kept graphs, and with them the memory they hold."""
        self._kept, self._all_kept = [], False

    # Products

    def _multiply(self, block: Tensor) -> Tensor:
        if self._state != (state := self.objective.state()):  # the model was trained on: begin afresh
            self.forget()
            self._state, self._loss = state, None
        total = self.objective.sums(*block.shape)
        while True:
            try:
                with closing(self._linearised()) as batches:
                    for linear in batches:
                        total.add(linear.loss, linear.weight, self._push(linear.product, block))
                break
            except (RuntimeError, NotImplementedError) as error:
                if self.chunk > 1 and (isinstance(error, torch.OutOfMemoryError) or "vmap" in str(error)):
                    self.chunk = self.chunk // 2 if isinstance(error, torch.OutOfMemoryError) else 1
                elif self._next_ways and _undifferentiable(error):
                    self.forget()
                    self.way = self._next_ways.pop(0)
                else:
                    raise
                total = self.objective.sums(*block.shape)
        self._check_same(float(total.loss()))
        self.matvecs += block.shape[1]
        return total.mean()

    def _linearised(self) -> Generator[Linearised, None, None]:
        objective = self.objective
        if self._all_kept:
            with objective.exact():
                yield from self._kept
            return
        with objective.quiet():
            room = None
            for index, (batch, weight) in enumerate(objective.batches()):
                if index < len(self._kept):
                    yield self._kept[index]
                    continue
                if index == 1 and self.way == "auto":
                    room = self._room(batch)
                weights = [w.detach().requires_grad_() for w in objective.weights()]
                product, loss = self._linearise(weights, batch)
                linear = Linearised(product, loss.detach(), weight)
                yield linear
                if self.way == "graph" or (self.way == "auto" and (index == 0 or (room or 0) > index)):
                    self._kept.append(linear)
            self._all_kept = len(self._kept) == index + 1 if self._kept else False

    def _room(self, batch: Any) -> int:
        """For how many batches the graphs fit into memory: the saved tensors of one are counted."""
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        weights = [w.detach().requires_grad_() for w in self.objective.weights()]
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            self._linearise(weights, batch)
        for weight in weights:
            sizes.pop(weight.untyped_storage().data_ptr(), None)
        memory = self._memory
        if memory is None:
            on_gpu = self.device.type == "cuda"
            memory = torch.cuda.mem_get_info(self.device)[0] // 4 if on_gpu else 2 * 2**30
        return memory // max(sum(sizes.values()), 1)

    def _push(self, product: Product, block: Tensor) -> Tensor:
        """The vectors of a block through one batch, one after another or several at a time."""
        several = self.chunk if self.way in ("auto", "graph", "fresh") else 1
        params = self.objective.space.params
        done = []
        for part in block.T.split(max(several, 1)):
            batched = len(part) > 1
            pieces = part.split([p.numel() for p in params], dim=1)
            lead = (len(part),) if batched else ()
            vectors = [piece.reshape(*lead, *p.shape).to(p) for piece, p in zip(pieces, params, strict=True)]
            results = product(vectors, batched)
            rows = [
                r.detach().expand(*lead, *p.shape).reshape(len(part), -1) for r, p in zip(results, params, strict=True)
            ]
            done.append(torch.cat([r.to(self.device, self.dtype) for r in rows], dim=1))
        return (done[0] if len(done) == 1 else torch.cat(done)).T

    def _check_same(self, loss: float) -> None:
        if self._loss is None:
            self._loss = loss
        elif abs(loss - self._loss) > 1e-3 * max(abs(self._loss), 1e-3):
            raise ValueError(
                f"the loss was {self._loss:.6g} in one pass over the data and {loss:.6g} in another: the data or the "
                "model is random (augmentation, sampling); pass a list of batches, or a larger cache_bytes"
            )

    def _linearise(self, weights: list[Tensor], batch: Any) -> tuple[Product, Tensor]:
        """How to multiply by one batch's matrix, and the batch's loss."""
        raise TypeError("use Hessian or GaussNewton")


def _require_twice_differentiable(grads: Sequence[Tensor]) -> None:
    """Refuse a graph through an operation that is differentiable only once: its second derivative would read zero."""
    seen: set[Any] = set()
    ahead = [g.grad_fn for g in grads]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("Error"):
            raise NotImplementedError("an operation in the model cannot be differentiated twice")
        ahead += [following for following, _ in node.next_functions]


def _undifferentiable(error: Exception) -> bool:
    """Whether an operation lacks a derivative that this way needs."""
    words = ("not implemented", "does not support", "differentiate twice", "ZeroTensors are immutable")
    return isinstance(error, NotImplementedError) or any(w in str(error) for w in words)


class Hessian(Operator):
    """The Hessian of a loss over data. Arguments: see `Operator` and `Objective`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    >>> x, y = torch.ones(5, 3), torch.zeros(5, dtype=torch.long)
    >>> H = Hessian(model, torch.nn.functional.cross_entropy, [(x, y), (x[:2], y[:2])])
    >>> H.shape, list(H.blocks())
    ((26, 26), ['0', '2'])
    """

    def _linearise(self, weights: list[Tensor], batch: Any) -> tuple[Product, Tensor]:
        objective = self.objective
        if self.way == "difference":
            return self._central_difference(weights, batch)
        if self.way == "forward":
            return self._forward_over_reverse(weights, batch)
        loss = objective.differentiable(objective.evaluate(weights, batch)[1])
        grads = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        curved = [i for i, g in enumerate(grads) if g is not None and g.requires_grad]
        if self._loss is None:
            _require_twice_differentiable([grads[i] for i in curved])

        def product(vector: Sequence[Tensor], batched: bool) -> Sequence[Tensor]:
            if not curved:  # the loss is linear in the weights
                return [torch.zeros_like(w) for w in weights]
            outer, inner = [grads[i] for i in curved], [vector[i] for i in curved]
            return torch.autograd.grad(
                outer, weights, inner,
                retain_graph=True, allow_unused=True, materialize_grads=True, is_grads_batched=batched,
            )  # fmt: skip

        return product, loss

    def _forward_over_reverse(self, weights: list[Tensor], batch: Any) -> tuple[Product, Tensor]:
        loss = self.objective.evaluate(weights, batch)[1]

        def product(vector: Sequence[Tensor], batched: bool) -> Sequence[Tensor]:
            with warnings.catch_warnings(), forward_ad.dual_level():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own use of torch.jit in here
                dual = [forward_ad.make_dual(w, v) for w, v in zip(weights, vector, strict=True)]
                moving = self.objective.differentiable(self.objective.evaluate(dual, batch)[1])
                grads = torch.autograd.grad(moving, dual, allow_unused=True, materialize_grads=True)
                tangents = [forward_ad.unpack_dual(g).tangent for g in grads]
            return [torch.zeros_like(w) if t is None else t for w, t in zip(weights, tangents, strict=True)]

        return product, loss

    def _central_difference(self, weights: list[Tensor], batch: Any) -> tuple[Product, Tensor]:
        """(g(w + hv̂) − g(w − hv̂))‖v‖/2h for three steps h, a factor of ten apart.

        The best h differs by direction by a factor of a hundred. Between two steps the truncation error falls by
        100 and the rounding error grows by 10. So if the last two differ much less than the first two, truncation
        rules and the smallest step is the best; otherwise the middle one is.
        """
        objective = self.objective
        fixed = [w.detach() for w in weights]
        size = float(torch.linalg.vector_norm(objective.flat(fixed))) or 1.0
        steps = [size * (1e-2 if objective.dtype == torch.float32 else 1e-3) / 10**k for k in range(3)]

        def gradient(point: list[Tensor]) -> Tensor:
            point = [p.detach().requires_grad_() for p in point]
            loss = objective.differentiable(objective.evaluate(point, batch)[1])
            return objective.flat(torch.autograd.grad(loss, point, allow_unused=True, materialize_grads=True))

        def product(vector: Sequence[Tensor], batched: bool) -> Sequence[Tensor]:
            length = float(torch.linalg.vector_norm(objective.flat(vector)))
            if length == 0:
                return [torch.zeros_like(v) for v in vector]
            found = []
            for step in steps:
                shift = step / length
                ahead = gradient([w + shift * v for w, v in zip(fixed, vector, strict=True)])
                behind = gradient([w - shift * v for w, v in zip(fixed, vector, strict=True)])
                found.append((ahead - behind) / (2 * shift))
            first, second = (torch.linalg.vector_norm(a - b) for a, b in pairwise(found))
            return objective.vector(found[2] if first > 10 * second else found[1]).tensors

        with torch.no_grad():
            loss = objective.evaluate(fixed, batch)[1]
        return product, loss


class GaussNewton(Operator):
    """The generalised Gauss-Newton matrix JᵀBJ: J the model's Jacobian, B the loss's Hessian in the outputs.

    Positive semi-definite for a convex loss, and the Hessian where the model is linear in its weights.
    Arguments: see `Operator` and `Objective`.
    """

    def __init__(self, *args: Any, way: Way = "auto", **options: Any):
        if way in ("forward", "difference"):
            raise ValueError(f'GaussNewton knows way "graph" and "fresh", not {way!r}')
        super().__init__(*args, way=way, **options)
        self._next_ways = []

    def _linearise(self, weights: list[Tensor], batch: Any) -> tuple[Product, Tensor]:
        objective = self.objective
        output, loss = objective.evaluate(weights, batch)
        objective.differentiable(loss)
        if not isinstance(output, Tensor):
            raise TypeError(f"GaussNewton needs a model whose output is a tensor, got {type(output).__name__}")
        (slope,) = torch.autograd.grad(loss, output, create_graph=True)
        dual = torch.zeros_like(output, requires_grad=True)  # Jᵀu as a function of u: its derivative is J
        pulled = torch.autograd.grad(
            output, weights, dual, create_graph=True, allow_unused=True, materialize_grads=True
        )
        used = [i for i, p in enumerate(pulled) if p.requires_grad]

        def product(vector: Sequence[Tensor], batched: bool) -> Sequence[Tensor]:
            if not slope.requires_grad:  # the loss is linear in the outputs
                return [torch.zeros_like(w) for w in weights]
            outer, inner = [pulled[i] for i in used], [vector[i] for i in used]
            moved = torch.autograd.grad(outer, dual, inner, retain_graph=True, is_grads_batched=batched)
            bent = torch.autograd.grad(slope, output, moved, retain_graph=True, is_grads_batched=batched)
            return torch.autograd.grad(
                output, weights, bent,
                retain_graph=True, allow_unused=True, materialize_grads=True, is_grads_batched=batched,
            )  # fmt: skip

        return product, loss


class Scaled:
    """D A D for a diagonal D: curvature measured in units of each weight's own size.

    >>> A = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> Scaled(A, torch.tensor([1.0, 10.0])) @ torch.tensor([0.0, 1.0])
    tensor([ 10., 200.])
    """

    def __init__(self, operator: Any, scale: Tensor):
        if scale.shape != (operator.shape[0],):
            raise ValueError(f"the scale must have {operator.shape[0]} entries, got {tuple(scale.shape)}")
        self.operator, self.scale = operator, scale
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device

    def __matmul__(self, other: Tensor) -> Tensor:
        scale = self.scale if other.dim() == 1 else self.scale.unsqueeze(1)
        return scale * (self.operator @ (scale * other))
