"""Curvature as linear operators: the Hessian and the Gauss-Newton matrix of a loss over data.

>>> model = torch.nn.Linear(2, 1, bias=False).double()
>>> x, y = torch.eye(2, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
>>> H = Hessian(model, torch.nn.functional.mse_loss, (x, y))
>>> H @ torch.tensor([1.0, 2.0], dtype=torch.float64)
tensor([1., 2.], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor, nn

from ..vector import Vector
from .objective import Objective
from .parameters import Selection
from .products import (
    Product,
    central_difference,
    double_backward,
    forward_over_reverse,
    gauss_newton,
    gauss_newton_forward,
    saved_bytes,
    undifferentiable,
)

Way: TypeAlias = Literal["auto", "graph", "fresh", "forward", "difference"]
_WAYS = ("auto", "graph", "fresh", "forward", "difference")
_LEAST_BLOCK = 4  # the fewest vectors for which forward over reverse is considered
_MOST_AT_ONCE = 256
# Devices on which blocks use forward over reverse: where launching kernels takes longer than running them. On a CPU
# the kept graph is faster, one vector after another. Milliseconds per product on a CPU, one thread, a batch of 256
# digits:
#                 graph: 1    4   16   64 vectors   vmapped graph: 4   16   64   forward: 4   16   64
#         MLP-3        5.4  5.0  5.7  4.6                        6.2  6.6  7.2          8.5  6.3  6.4
#         CNN-5         19   19   19   20                         19   19   27           23   21   43
_BLOCKS_FORWARD_ON = ("cuda",)
_WORDS = {
    "auto": "double backward, graphs kept as memory allows", "graph": "double backward, graphs kept",
    "fresh": "double backward, fresh graphs", "forward": "forward over reverse",
    "difference": "central differences",
}  # fmt: skip


class Linearised(NamedTuple):
    """A batch that is ready for products. It is kept between products if memory allows."""

    product: Product
    loss: Tensor
    weight: float


class Operator:
    """A symmetric matrix, given by its products: `shape`, `@`, `dtype`, `device`.

    ``operator @ v`` takes a `Vector`, a flat tensor of n entries, or an n by k block of vectors. A block is cheaper
    than its vectors one by one if the batches are not kept in memory: each batch is loaded once per block.

    Args:
        model, loss_fn, data: What is measured: the arguments of `Objective`, or an `Objective` as `model`.
        way: How products are computed. ``"graph"``: double backward on a graph that is kept; ``"fresh"``: double
            backward, with a new graph each time; ``"forward"``: forward over reverse; ``"difference"``: central
            difference of gradients, which works with every kernel, with an error of 1e-4 (float32) or 1e-8 (float64).
            ``"auto"``: double backward, with as many graphs kept as `memory` allows. On a GPU, blocks use forward over
            reverse if it agrees with double backward in a first test. If a model cannot be differentiated twice, the
            next way that works is used. `how` says what was chosen.
        memory: Bytes for kept graphs, or for the vectors that are multiplied at once. Default: a quarter of the free
            memory on a GPU, otherwise 2 GiB.
        chunk: How many vectors of a block are multiplied at a time. Default on a GPU, where many cost little more than
            one: as many as `memory` holds, up to 256. Default on a CPU, where each costs as much as one alone: 16 for
            forward over reverse, otherwise 1. Fewer if memory or an operation does not allow it.
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
        self.chunk = chunk
        self.matvecs = 0
        self._memory = memory
        self._blocks_by: Way | None = None  # how blocks are multiplied, once it was tested
        self._at_once: dict[Way, int] = {}  # how many vectors at a time, for each way
        self._kept: dict[Way, list[Linearised]] = {}
        self._all_kept: set[Way] = set()
        self._state: Any = None
        self._loss: float | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, n) for n weights."""
        return self.objective.size, self.objective.size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of flat vectors."""
        return self.objective.dtype

    @property
    def device(self) -> torch.device:
        """The device of flat vectors."""
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
        return self._multiply(block.T).T.reshape(other.shape)

    def restricted(self, params: Selection) -> Operator:
        """The diagonal block of fewer parameters: a layer, a module, a pattern of names."""
        return type(self)(self.objective.restricted(params), way=self.way, memory=self._memory, chunk=self.chunk)

    def blocks(self) -> dict[str, Operator]:
        """One diagonal block per module with measured parameters of its own, by the module's name."""
        groups: dict[str, list[str]] = {}
        for name in self.objective.names:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
        return {module: self.restricted(names) for module, names in groups.items()}

    def dense(self) -> Tensor:
        """The whole matrix. For small models."""
        return self @ torch.eye(self.shape[0], dtype=self.dtype, device=self.device)

    def forget(self) -> None:
        """Free the kept graphs."""
        self._kept, self._all_kept = {}, set()

    @property
    def how(self) -> str:
        """How products were computed, in words: single vectors, then blocks if they are computed in another way."""
        blocks = self._blocks_by or self.way
        ways = [_WORDS[self.way]] if blocks == self.way else [_WORDS[self.way], f"blocks {_WORDS[blocks]}"]
        at_once = self._at_once.get(blocks, 1)
        return "; ".join(ways) + (f", {at_once} at a time" if at_once > 1 else "")

    # Products

    def _multiply(self, rows: Tensor) -> Tensor:
        if self._state != (state := self.objective.state()):  # the weights have changed since the last product
            self.forget()
            self._state, self._loss = state, None
        while True:
            total = self.objective.sums(*rows.shape)
            way = self.way
            try:
                way = self._way_for(rows)
                known = way in self._all_kept
                with closing(self._linearised(way)) as batches:
                    for linear in batches:
                        total.add(linear.loss, linear.weight, self._multiply_batch(way, linear.product, rows))
                break
            except (RuntimeError, NotImplementedError) as error:
                self._fall_back(way, error)
        if not known:  # the loss of a kept graph cannot change
            self._check_same(float(total.loss()))
        self.matvecs += len(rows)
        return total.mean()

    def _fall_back(self, way: Way, error: Exception) -> None:
        """After an error, use fewer vectors at once, or another way; raise the error if neither can help."""
        at_once, out_of_memory = self._at_once.get(way, 1), isinstance(error, torch.OutOfMemoryError)
        if at_once > 1 and (out_of_memory or "vmap" in str(error)):
            self._at_once[way] = at_once // 2 if out_of_memory else 1
        elif self._next_ways and undifferentiable(error):
            self.forget()
            self.way, self._blocks_by = self._next_ways.pop(0), None
        else:
            raise error

    def _way_for(self, rows: Tensor) -> Way:
        """The way for these vectors. For blocks on a GPU it is tested once, on one batch, against double backward."""
        way = self.way
        if way == "auto" and len(rows) >= _LEAST_BLOCK and self.chunk != 1 and self.device.type in _BLOCKS_FORWARD_ON:
            self._blocks_by = way = self._blocks_by or ("forward" if self._forward_agrees(rows[:2]) else "auto")
        if len(rows) > 1 and way not in self._at_once:
            self._at_once[way] = self.chunk or self._affordable(way)
        return way

    def _forward_agrees(self, rows: Tensor) -> bool:
        """Whether vmapped forward over reverse works with this model and agrees with double backward."""
        with self._first_batch() as batch:
            backward, _ = self._linearise("graph", self._weights(), batch)
            expected = torch.cat([self._multiply_batch("graph", backward, row.unsqueeze(0)) for row in rows])
            try:
                forward, _ = self._linearise("forward", self._weights(), batch)
                self._at_once["forward"] = len(rows)
                found = self._multiply_batch("forward", forward, rows)
            except (RuntimeError, NotImplementedError):  # no forward derivative, or an operation without vmap support
                return False
            finally:
                self._at_once.pop("forward", None)
        tolerance = 1e-3 if self.dtype == torch.float32 else 1e-8
        return bool((found - expected).norm() <= tolerance * expected.norm())

    def _affordable(self, way: Way) -> int:
        """How many vectors to multiply at a time."""
        if way == "difference":
            return 1
        if self.device.type == "cpu":
            return 16 if way == "forward" else 1
        with self._first_batch() as batch:
            return min(max(self._graphs_that_fit(batch), 1), _MOST_AT_ONCE)

    @contextmanager
    def _first_batch(self) -> Iterator[Any]:
        with self.objective.isolated(), closing(self.objective.batches()) as batches:
            yield next(batches)[0]

    def _weights(self) -> list[Tensor]:
        return [w.detach().requires_grad_() for w in self.objective.weights()]

    def _linearised(self, way: Way) -> Generator[Linearised, None, None]:
        """All batches, linearised. Those that fit into memory are kept for the next product."""
        objective, kept = self.objective, self._kept.setdefault(way, [])
        graph = way in ("auto", "graph")
        if way in self._all_kept:
            # Without a graph the model is called again.
            with objective.exact_kernels() if graph else objective.isolated():
                yield from kept
            return
        with objective.isolated():
            graphs_that_fit, index = 0, -1
            for index, (batch, weight) in enumerate(objective.batches()):
                if index < len(kept):
                    yield kept[index]
                    continue
                if index == 1 and way == "auto":
                    graphs_that_fit = self._graphs_that_fit(batch)
                product, loss = self._linearise(way, self._weights(), batch)
                linear = Linearised(product, loss.detach(), weight)
                yield linear
                light = way in ("forward", "difference") and objective.cached  # only the batch is held
                if light or way == "graph" or (way == "auto" and (index == 0 or graphs_that_fit > index)):
                    kept.append(linear)
            if kept and len(kept) == index + 1:
                self._all_kept.add(way)

    def _graphs_that_fit(self, batch: Any) -> int:
        """How many graphs like that of a batch fit into memory, by the bytes that one of them saves for backward."""
        memory = self._memory
        if memory is None:
            on_gpu = self.device.type == "cuda"
            memory = torch.cuda.mem_get_info(self.device)[0] // 4 if on_gpu else 2 * 2**30
        weights = self._weights()
        return memory // saved_bytes(lambda: self._linearise("graph", weights, batch), apart_from=weights)

    def _multiply_batch(self, way: Way, product: Product, rows: Tensor) -> Tensor:
        """Multiply vectors by the matrix of one batch, one after another or several at a time."""
        params = self.objective.space.params
        done = []
        for part in rows.split(self._at_once.get(way, 1)):
            batched = len(part) > 1
            pieces = part.split([p.numel() for p in params], dim=1)
            lead = (len(part),) if batched else ()
            vectors = [piece.reshape(*lead, *p.shape).to(p) for piece, p in zip(pieces, params, strict=True)]
            results = product(vectors, batched)
            flat = [
                r.detach().expand(*lead, *p.shape).reshape(len(part), -1) for r, p in zip(results, params, strict=True)
            ]
            done.append(torch.cat([r.to(self.device, self.dtype) for r in flat], dim=1))
        return done[0] if len(done) == 1 else torch.cat(done)

    def _check_same(self, loss: float) -> None:
        """Raise if the loss differs between two passes over the data."""
        if self._loss is None:
            self._loss = loss
        elif abs(loss - self._loss) > 1e-3 * max(abs(self._loss), 1e-3):
            raise ValueError(
                f"the loss was {self._loss:.6g} in one pass over the data and {loss:.6g} in another: the data or the "
                "model is random (augmentation, sampling); pass a list of batches, or a larger cache_bytes"
            )

    def _linearise(self, way: Way, weights: list[Tensor], batch: Any) -> tuple[Product, Tensor]:
        """A function that multiplies by the matrix of one batch, and the batch's loss."""
        raise TypeError("use Hessian or GaussNewton")


class Hessian(Operator):
    """The Hessian of a loss over data. Arguments: see `Operator` and `Objective`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    >>> x, y = torch.ones(5, 3), torch.zeros(5, dtype=torch.long)
    >>> H = Hessian(model, torch.nn.functional.cross_entropy, [(x, y), (x[:2], y[:2])])
    >>> H.shape, list(H.blocks())
    ((26, 26), ['0', '2'])
    """

    def _linearise(self, way: Way, weights: list[Tensor], batch: Any) -> tuple[Product, Tensor]:
        if way == "difference":
            return central_difference(self.objective, weights, batch)
        if way == "forward":
            return forward_over_reverse(self.objective, weights, batch)
        return double_backward(self.objective, weights, batch, check=self._loss is None)


class GaussNewton(Operator):
    """The generalised Gauss-Newton matrix JᵀBJ: J the model's Jacobian, B the loss's Hessian in the outputs.

    Positive semi-definite for a convex loss, and equal to the Hessian if the model is linear in its weights.
    Arguments: see `Operator` and `Objective`.
    """

    def __init__(self, *args: Any, way: Way = "auto", **options: Any):
        if way == "difference":
            raise ValueError('GaussNewton supports way="graph", "fresh" and "forward", not "difference"')
        super().__init__(*args, way=way, **options)
        self._next_ways = ["forward"] if way == "auto" else []

    def _linearise(self, way: Way, weights: list[Tensor], batch: Any) -> tuple[Product, Tensor]:
        make = gauss_newton_forward if way == "forward" else gauss_newton
        return make(self.objective, weights, batch)


class Scaled:
    """D A D for a diagonal matrix D: curvature in units of each weight's own size.

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
