"""The interface between an optimizer and a CUDA graph that records its steps: see graphs.capture."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch

from ..method import Method
from ..vector import Space
from .groups import Groups
from .random_vectors import seed_of
from .side_by_side import LookBranches
from .state import MethodState
from .step import Outcome, Step


class Recordable(ABC):
    """The part of `SharpnessAware` that recorded steps use. Recording runs the Python code once; replays never do."""

    method: Method
    metrics: dict[str, Any]
    under_way: Step
    _groups: Groups
    _memory: MethodState
    _lr_set: Any

    @abstractmethod
    def _space(self) -> Space: ...

    def count_step(self, metrics: dict[str, Any]) -> None:
        """Count a step that was taken, and keep its metrics. A step that is being recorded is not counted."""
        if self.under_way.recording:
            self.under_way.recorded_metrics = metrics
            return
        self.metrics = metrics
        self._groups.count_step()

    def prepare_recording(self) -> list[torch.Generator]:
        """Pin the method's memory, before a CUDA graph records a step: from now on it keeps its addresses.

        Returns the generators of the method's random vectors, which must be registered with the graph.
        """
        self._space()  # makes the method's memory, if there was no step yet
        self._memory.pin()
        return self.seed_generators()

    def seed_generators(self) -> list[torch.Generator]:
        """Seed the generators of the method's random vectors for the coming step."""
        seed, step = self._groups.seed, self._groups.steps
        sources = enumerate(self.under_way.generators.items())
        return [g.manual_seed(seed_of(seed, step, place, piece)) for place, ((_, piece), g) in sources]

    @contextlib.contextmanager
    def recording(
        self, look_states: list[torch.Generator], branches: LookBranches | None = None
    ) -> Generator[None, None, None]:
        """A context in which a CUDA graph records a step: it is not counted, and each look has its own random state.

        With `branches`, independent looks are recorded side by side.
        """
        self.under_way.draw_looks_from(look_states)
        self.under_way.recording, self.under_way.branches = True, branches
        try:
            yield
        finally:
            self.under_way.recording, self.under_way.branches = False, None
            self.under_way.draw_looks_from([])

    def recorded(self) -> Outcome:
        """What the recorded step, or its looks alone, left behind in Python. Call it after recording."""
        params, ready = self._groups.trainable(), self.under_way.ready
        metrics = self.under_way.recorded_metrics if ready is None else ready.ctx.metrics
        lr = self._groups.first()["lr"] if "lr" in self.method.needs else None
        return Outcome(params, [p.grad for p in params], ready, metrics, lr)

    def replayed(self, outcome: Outcome, metrics: dict[str, Any]) -> None:
        """Update the Python side after a replay, as if the step had run eagerly, with these metrics."""
        for p, grad in zip(outcome.params, outcome.grads, strict=True):
            p.grad = grad
        if outcome.ready is not None:
            ready = outcome.ready
            self.under_way.resume(replace(ready, ctx=replace(ready.ctx, metrics=metrics)))
            return
        if outcome.lr is not None:
            self._lr_set = self._groups.set_lr(outcome.lr)
        self.count_step(metrics)
