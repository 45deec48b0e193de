"""The curvature of the loss at the end of a run: a few numbers and two figures, on a fixed part of the training data.

The work is bounded by a number of Hessian-vector products, not by time, so that the same weights give the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...curvature import Hessian, Krylov, Objective, eigenvalues, plane, spectrum, surrogate_gap, trace, zeroth_order
from ...curvature.trace import FEWEST_PRODUCTS
from ..data import prepare
from .batches import generator_for

if TYPE_CHECKING:
    from .run import Run


def check_products(products: int) -> None:
    """Raise if there are too few products for an error bar. It is called before training, not after it."""
    if products < FEWEST_PRODUCTS:
        raise ValueError(f"products must be at least {FEWEST_PRODUCTS}, got {products}")


@dataclass(frozen=True)
class Measuring:
    """What to measure at the end of a run. Called with the run, it returns the entry "curvature" of its record."""

    rho: float = 0.05
    samples: int = 512  # the same examples for every run on the same data
    probes: int = 8
    dimension: int = 64  # products for the density; the top eigenvalue and the trace start from these
    products: int = 200  # the most additional products for each of the two
    points: int = 11  # per side of the landscape; 0: no landscape
    reach: float = 0.5

    def __post_init__(self):
        check_products(self.products)

    def __call__(self, run: Run) -> dict[str, Any] | None:
        """Top eigenvalue, trace, sharpness, density and landscape; None if the model is sharded over processes."""
        if run.ranks.kind == "fsdp2":
            return None
        objective = Objective(run.net, run.task.loss, self.examples(run))
        loss = float(objective.loss(finite=False))
        if not math.isfinite(loss):
            return None
        krylov = Krylov(Hessian(objective), block=min(self.probes, objective.size))
        density = spectrum(krylov, dimension=self.dimension, progress=False)
        top = eigenvalues(krylov, 1, rtol=1e-2, bound="gap", max_matvecs=self.products, progress=False)
        whole = trace(krylov, rtol=0.03, max_matvecs=self.products, progress=False)
        sharp = zeroth_order(objective, self.rho, restarts=1, steps=20, progress=False)
        gap = surrogate_gap(objective, self.rho)
        grid, height, _ = density.density(grid=200)
        found: dict[str, Any] = {
            "examples": min(self.samples, len(run.data.train)),
            "loss": {"value": loss},
            "top": {"value": float(top.values[0]), "error": float(top.errors[0])},
            "trace": {"value": whole.value, "error": whole.standard_error, "low": whole.low, "high": whole.high},
            "sharpness": {"value": sharp.value, "rho": self.rho},
            "surrogate_gap": {"value": gap.gap, "rho": self.rho},
            "density": {"grid": grid.tolist(), "density": height.tolist()},
        }
        if self.points:
            found["landscape"] = self.landscape(objective)
        return found

    def landscape(self, objective: Objective) -> dict[str, Any]:
        """The loss on a plane through the weights: the points of an axis, and the losses."""
        slice_ = plane(objective, reach=self.reach, points=self.points, progress=False)
        return {"axis": slice_.across.tolist(), "loss": slice_.losses.tolist()}

    def examples(self, run: Run) -> list[Any]:
        """Batches of prepared examples, without augmentation."""
        count = min(self.samples, len(run.data.train))
        rows = torch.randperm(len(run.data.train), generator=generator_for("measured"))[:count]
        batches = run.data.batches("train", 512, rows.to(run.device))
        return [(prepare(inputs, run.data, run.batches.dtype), targets) for inputs, targets in batches]
