"""What the papers measured at the end of a run besides accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ..curvature import Hessian, Objective, eigenvalues, extrema, surrogate_gap, trace
from ..lab.data import CORRUPTIONS, SEVERITIES, corrupt, prepare
from ..lab.data.dataset import Split
from ..lab.training.final_curvature import Measuring
from ..lab.training.run import Run
from ..support.errors import UserError


@dataclass(frozen=True)
class AtOwnRadius(Measuring):
    """The lab's measures, and the surrogate gap at the radius of the run's own method (S1 Fig. 4: 2h/ρ²)."""

    points: int = 0
    gives: ClassVar[str] = "from_gap"

    def __call__(self, run: Run) -> dict[str, Any] | None:
        """The lab's measurements, with `own_gap` and `from_gap` added."""
        found = super().__call__(run)
        rho = getattr(run.optimizer.method, "rho", None)
        if found is not None and isinstance(rho, (int, float)) and rho > 0:
            objective = Objective(run.net, F.cross_entropy, self.examples(run))
            gap = surrogate_gap(objective, rho)
            found["own_gap"] = {"value": gap.gap, "rho": rho}
            found["from_gap"] = {"value": 2 * gap.gap / rho**2, "rho": rho}
        return found


@dataclass(frozen=True)
class Landscape(Measuring):
    """The loss on a plane through the trained weights, and nothing else (S2 Fig. 5)."""

    points: int = 21
    reach: float = 1.0
    gives: ClassVar[str] = "landscape"

    def __call__(self, run: Run) -> dict[str, Any] | None:
        """The points of an axis, and the losses."""
        objective = Objective(run.net, F.cross_entropy, self.examples(run))
        return {"landscape": self.landscape(objective)}


@dataclass(frozen=True)
class LocalExtrema(Measuring):
    """Local minima and maxima along random directions (S2 Fig. 2: 100 directions, 10 steps of 0.01)."""

    samples: int = 1024
    directions: int = 100
    gives: ClassVar[str] = "minima"

    def __call__(self, run: Run) -> dict[str, Any] | None:
        """Mean counts, and the count of each direction."""
        objective = Objective(run.net, F.cross_entropy, self.examples(run))
        found = extrema(objective, directions=self.directions, progress=False)
        minima, maxima = found.minima.double(), found.maxima.double()
        return {
            "minima": {"value": float(minima.mean()), "counts": found.minima.tolist()},
            "maxima": {"value": float(maxima.mean()), "counts": found.maxima.tolist()},
        }


@dataclass(frozen=True)
class Shifted(Measuring):
    """Accuracy, top eigenvalue and trace on the test images, clean and corrupted (S4's grid)."""

    samples: int = 1000
    images: int = 0  # corrupt this many test images, the first ones; 0: all
    gives: ClassVar[str] = "shifted_accuracy"

    def __call__(self, run: Run) -> dict[str, Any] | None:
        """In distribution: the clean test images. Out of distribution: all corruptions at all severities."""
        test = run.data.test
        if not isinstance(test, Split):
            raise UserError(f"{run.data.name} is not in memory, so its images cannot be corrupted")
        count = min(self.images or len(test), len(test))
        tiny = self.samples < 100  # at smoke scale
        kinds = tuple(CORRUPTIONS)[:2] if tiny else tuple(CORRUPTIONS)
        severities = SEVERITIES[:1] if tiny else SEVERITIES
        right, clean, changed = [], [], []
        per_kind = max(self.samples // (len(kinds) * len(severities)), 1)
        for number, (kind, severity) in enumerate((k, s) for k in kinds for s in severities):
            images = corrupt(test.inputs[:count], kind, severity)
            right.append(self._accuracy(run, images, test.targets[:count]))
            start = number * per_kind % count
            rows = slice(start, min(start + per_kind, count))
            changed.append((prepare(images[rows], run.data, run.batches.dtype), test.targets[rows]))
            clean.append((prepare(test.inputs[rows], run.data, run.batches.dtype), test.targets[rows]))
        accuracy = {"value": sum(right) / len(right), "kinds": len(kinds), "images": count}
        found: dict[str, Any] = {"shifted_accuracy": accuracy}
        for name, parts in (("", clean), ("shifted_", changed)):
            batch = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
            hessian = Hessian(Objective(run.net, F.cross_entropy, [batch]))
            top = eigenvalues(hessian, 1, rtol=1e-2, bound="gap", max_matvecs=self.products, progress=False)
            whole = trace(hessian, rtol=0.05, max_matvecs=self.products, progress=False)
            found[f"{name}top"] = {"value": float(top.values[0]), "error": float(top.errors[0])}
            found[f"{name}trace"] = {"value": whole.value, "error": whole.standard_error}
        return found

    @staticmethod
    def _accuracy(run: Run, images: Any, targets: Any) -> float:
        run.net.eval()
        with torch.no_grad():
            right = sum(
                int((run.net(prepare(x, run.data, run.batches.dtype)).argmax(1) == y).sum())
                for x, y in zip(images.split(1000), targets.split(1000), strict=True)
            )
        return right / len(targets)
