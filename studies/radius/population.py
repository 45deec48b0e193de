"""Many small nets trained as one: their weights are the rows of one matrix.

A steppe method is arithmetic on vectors, so the same method object drives a whole population if the vectors it is
given are matrices and the numbers are columns: `Rows` is such a vector. Every member has its own seed, labels and
(where a method's number is a tensor) hyperparameters; what the program is, is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from steppe import SAM
from steppe.engine.finite_difference import by_difference
from steppe.method import Context, Look, Method, Seen
from steppe.vector import Vector

Losses = Callable[[Tensor, Any, bool], Tensor]  # weights (members x size), a batch, is it the step's first look


class Rows(Vector):
    """One vector a member: members x size. Numbers are 0-d, or one a member."""

    __slots__ = ("matrix",)

    def __init__(self, matrix: Tensor):
        self.matrix = matrix

    def __add__(self, other: Any) -> Rows:
        return Rows(self.matrix + (other.matrix if isinstance(other, Rows) else _column(other)))

    def __sub__(self, other: Any) -> Rows:
        return Rows(self.matrix - (other.matrix if isinstance(other, Rows) else _column(other)))

    def __mul__(self, other: Any) -> Rows:
        return Rows(self.matrix * (other.matrix if isinstance(other, Rows) else _column(other)))

    def __truediv__(self, other: Any) -> Rows:
        return Rows(self.matrix / (other.matrix if isinstance(other, Rows) else _column(other)))

    def __neg__(self) -> Rows:
        return Rows(-self.matrix)

    __radd__ = __add__
    __rmul__ = __mul__

    def __matmul__(self, other: Vector) -> Tensor:
        return torch.linalg.vecdot(self.matrix, other.matrix)

    def norm(self) -> Tensor:
        """One a member."""
        return torch.linalg.vector_norm(self.matrix, dim=1)

    def perturbed(self) -> Rows:
        """All weights may be moved."""
        return self

    def settled(self) -> Rows:
        """It always is."""
        return self

    def clone(self, room: Any = None) -> Rows:
        """A copy."""
        return Rows(self.matrix.clone())


def _column(number: Any) -> Any:
    return number[:, None] if isinstance(number, Tensor) and number.dim() else number


class Population:
    """Members that share a program: weights, the method's memory, the base optimizer's state."""

    def __init__(
        self,
        weights: Tensor,
        method: Method,
        base: Base,
        losses: Losses,
        precision: str = "float32",
        average: float | None = None,
    ):
        self.weights, self.method, self.base, self.losses, self.precision = weights, method, base, losses, precision
        self.average, self.averaged = average, weights.clone()  # an exponential moving average of the weights
        zero = weights.new_zeros(len(weights))
        room = SimpleNamespace(zero=lambda: zero.clone(), zeros=lambda: Rows(torch.zeros_like(weights)))
        self.memory: dict[str, Any] = method.memory(room)  # type: ignore[arg-type]
        self.steps = self.looks = 0
        self.metrics: dict[str, Any] = {}

    def step(self, batch: Any, auxiliary: Any = None) -> Tensor:
        """One step of all members; returns their losses at w. Without held-out examples ρ stays as it is."""
        w = Rows(self.weights)
        method = SAM(rho=self.memory["rho"]) if auxiliary is None else self.method
        ctx = Context(self.steps, self.base.lr, lambda: w, None, self.memory)  # type: ignore[arg-type]
        asks = by_difference(method.looks(ctx), w.norm(), lambda: self.precision)
        ask: Look = next(asks)
        first = None
        try:
            while True:
                seen = self._seen(ask, batch, auxiliary, first is None)
                first = seen.loss if first is None else first
                ctx.losses.append(seen.loss)
                ask = asks.send(seen)
        except StopIteration as end:
            direction = end.value
        self.weights = self.base.step(self.weights, direction.matrix)
        if self.average is not None:
            self.averaged.lerp_(self.weights, 1 - self.average)
        self.memory = {**self.memory, **ctx.remembered}
        self.metrics = ctx.metrics
        self.steps += 1
        return first

    def _seen(self, ask: Look, batch: Any, auxiliary: Any, first: bool) -> Seen:
        self.looks += 1
        at = self.weights if ask.offset is None else self.weights + ask.offset.matrix
        at = at.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.losses(at, batch if ask.batch == "main" else auxiliary, first)
            (grad,) = torch.autograd.grad(loss.sum(), at)
        return Seen(Rows(grad), loss.detach())


class Replayed:
    """A population's steps on a GPU, each phase of the method recorded once as a CUDA graph and then replayed."""

    def __init__(self, population: Population):
        self.population = population
        self._kept: dict[str, Any] = {}  # where recorded steps read and write
        self._recorded: dict[Any, tuple[Any, Any, Any, Tensor, int]] = {}
        self._runs: dict[Any, int] = {}

    def step(self, batch: Tensor, auxiliary: Tensor | None) -> Tensor:
        """As `Population.step`."""
        population = self.population
        held_shape = None if auxiliary is None else auxiliary.shape
        key = population.method.phase(population.steps), batch.shape, held_shape
        if self._runs.setdefault(key, 0) < 2:
            self._runs[key] += 1
            loss = population.step(batch, auxiliary)
            self._settle()
            return loss
        if key not in self._recorded:
            before = population.weights, population.memory, population.steps, population.looks
            try:
                self._recorded[key] = self._record(batch, auxiliary)
            except RuntimeError as error:
                population.weights, population.memory, population.steps, population.looks = before
                self._runs[key] = -(10**9)
                print("steps are not recorded:", error, flush=True)
                return self.step(batch, auxiliary)
        graph, rows, held, loss, looks = self._recorded[key]
        rows.copy_(batch)
        if auxiliary is not None:
            held.copy_(auxiliary)
        graph.replay()
        population.steps += 1
        population.looks += looks
        return loss

    def _record(self, batch: Tensor, auxiliary: Tensor | None) -> tuple[Any, Any, Any, Tensor, int]:
        population, graph = self.population, torch.cuda.CUDAGraph()
        rows, held = batch.clone(), None if auxiliary is None else auxiliary.clone()
        steps, looks = population.steps, population.looks
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            loss = population.step(rows, held)
            self._settle()
        taken, population.steps, population.looks = population.looks - looks, steps, looks
        return graph, rows, held, loss, taken

    def _settle(self) -> None:
        """Copy what the step made to where recorded steps look for it."""
        population = self.population
        now = {"weights": Rows(population.weights), **population.memory}
        for name, value in now.items():
            if name not in self._kept:
                self._kept[name] = value.clone()
            elif isinstance(value, Rows):
                self._kept[name].matrix.copy_(value.matrix)
            else:
                self._kept[name].copy_(value)
        population.weights = self._kept["weights"].matrix
        population.memory = {name: self._kept[name] for name in population.memory}


class Base:
    """SGD with momentum, Adam or AdamW, as torch computes them, on a matrix."""

    def __init__(self, name: str, lr: float, momentum: float = 0.9, decay: float = 0.0):
        self.name, self.lr, self.momentum, self.decay = name, lr, momentum, decay
        self.state: list[Tensor] = []

    def step(self, w: Tensor, d: Tensor) -> Tensor:
        """The weights after a step."""
        if self.name == "sgd":
            d = d + self.decay * w if self.decay else d
            self.state = [d.clone() if not self.state else self.state[0].mul_(self.momentum).add_(d)]
            return w - self.lr * self.state[0]
        if not self.state:
            count = torch.zeros((), dtype=torch.float64, device=w.device)
            self.state = [torch.zeros_like(w), torch.zeros_like(w), count]
        m, v, count = self.state
        count.add_(1)
        m.lerp_(d, 0.1)
        v.mul_(0.999).addcmul_(d, d, value=0.001)
        size = (v / (1 - 0.999**count)).sqrt_().add_(1e-8)
        w = w * (1 - self.lr * self.decay) if self.decay else w
        return w - (m / size) * (self.lr / (1 - 0.9**count))
