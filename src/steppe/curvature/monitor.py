"""Curvature during training: measured at regular steps, with its cost."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .eigen import eigenvalues
from .objective import Objective
from .operator import Hessian
from .trace import trace


@dataclass(frozen=True)
class Record:
    """The measurement at one step."""

    step: int
    loss: float
    top: float  # the largest eigenvalue
    top_error: float
    trace: float | None
    trace_error: float | None
    matvecs: int
    seconds: float
    converged: bool


class Monitor:
    """Call it once per step. Every `every` steps it measures the top eigenvalue and, with `trace_rtol`, the trace.

    Every search for the eigenvalue starts from a new random vector. Starting from the last eigenvector would save about
    half of the products, but would too often miss an eigenvalue that has become larger, in any mixture with a random
    vector. Use a fixed sample of the data: the objective's loss must be a function of the weights alone.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> data = torch.eye(2), torch.ones(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> monitor = Monitor(Objective(model, torch.nn.functional.mse_loss, data), every=10)
    >>> for step in range(30):
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.mse_loss(model(data[0]), data[1]).backward()
    ...     optimizer.step()
    ...     record = monitor()
    >>> [(r.step, round(r.top, 3)) for r in monitor.history]
    [(10, 3.0), (20, 3.0), (30, 3.0)]
    """

    def __init__(
        self,
        objective: Objective,
        *,
        every: int = 100,
        rtol: float = 1e-2,
        trace_rtol: float | None = None,
        seed: int = 0,
    ):
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.objective, self.every, self.rtol, self.trace_rtol, self.seed = objective, every, rtol, trace_rtol, seed
        self.history: list[Record] = []
        self.seconds = 0.0  # spent measuring
        self._calls = 0
        self._begun = time.monotonic()

    @property
    def cost(self) -> float:
        """The share of the time since the start that was spent measuring."""
        return self.seconds / max(time.monotonic() - self._begun, 1e-9)

    def __call__(self, step: int | None = None) -> Record | None:
        """Count a step, and measure if it is a multiple of `every`."""
        self._calls += 1
        step = self._calls if step is None else step
        return self.measure(step) if step % self.every == 0 else None

    def measure(self, step: int) -> Record:
        """Measure now."""
        begun = time.monotonic()
        operator = Hessian(self.objective)
        seed = self.seed + len(self.history)  # a new start each time, so that no eigenvector is missed every time
        top = eigenvalues(operator, rtol=self.rtol, seed=seed, progress=False)
        whole = trace(operator, rtol=self.trace_rtol, seed=self.seed, progress=False) if self.trace_rtol else None
        loss = float(self.objective.loss())
        seconds = time.monotonic() - begun
        self.seconds += seconds
        record = Record(
            step=step, loss=loss, top=float(top.values[0]), top_error=float(top.errors[0]),
            trace=whole.value if whole else None, trace_error=whole.standard_error if whole else None,
            matvecs=operator.matvecs, seconds=seconds,
            converged=bool(top.converged[0]) and (not whole or whole.converged),
        )  # fmt: skip
        self.history.append(record)
        return record
