"""What the papers measured beyond accuracy: after some epochs of a run (`Watch`), or at its end (`Measuring`s)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ..curvature import Hessian, Objective, eigenvalues, extrema, frobenius_squared, surrogate_gap, trace
from ..curvature.trace import FEWEST_PRODUCTS
from ..lab.data import CORRUPTIONS, SEVERITIES, corrupt, prepare
from ..lab.data.dataset import Split
from ..lab.training.final_curvature import Measuring, check_products
from ..lab.training.run import Run
from ..support.errors import UserError


@dataclass(frozen=True)
class Watch:
    """What to measure after an epoch, and after which.

    `frobenius`: ‖H‖² of the training loss by random probes (S3 Fig. 1: 1280 examples, every epoch, 100
    probes; here 200 at most: with fewer than 168 the library gives no error bar);
    `top`: that many of the largest eigenvalues, and the trace (S2 Fig. 3: 50, half way and at the end).
    """

    frobenius: bool = False
    top: int = 0
    parts: int = 0  # so many times, evenly spread over the epochs, the last one included; 0: every epoch
    samples: int = 1280
    products: int = 200

    def __post_init__(self):
        check_products(self.products)

    @property
    def gives(self) -> str:
        """The name under which it is found in an epoch's entry."""
        return "frobenius" if self.frobenius else "top_values"

    def tiny(self) -> Watch:
        """The least that runs."""
        return replace(self, samples=4, products=FEWEST_PRODUCTS, top=min(self.top, 2))

    def after(self, epoch: int, epochs: int) -> bool:
        """Whether this epoch is one to measure after."""
        parts = min(self.parts or epochs, epochs)
        return epoch in {round(epochs * (i + 1) / parts) for i in range(parts)}

    def __call__(self, run: Run) -> dict[str, Any]:
        """What there is to add to the epoch's entry."""
        hessian = Hessian(Objective(run.net, F.cross_entropy, examples_of(run, self.samples)))
        found: dict[str, Any] = {}
        if self.frobenius:
            norm = frobenius_squared(hessian, method="hutchinson", max_matvecs=self.products, progress=False)
            found["frobenius"] = {"value": norm.value, "error": norm.standard_error}
        if self.top:
            count = max(self.products, 8 * self.top)
            top = eigenvalues(hessian, self.top, rtol=1e-2, bound="gap", max_matvecs=count, progress=False)
            whole = trace(hessian, rtol=0.03, max_matvecs=self.products, progress=False)
            found["top_values"] = top.values.tolist()
            found["trace"] = {"value": whole.value, "error": whole.standard_error}
        return found


class Watched(Run):
    """A run that is measured after chosen epochs; what was found is in the record's epochs, under its name."""

    watch: Watch | None = None

    def evaluate(self) -> dict[str, Any]:
        """Loss and accuracy, and what is watched."""
        found: dict[str, Any] = super().evaluate()
        if self.watch is not None and self.watch.after(len(self.record["epochs"]) + 1, self.recipe.epochs):
            found |= self.watch(self)
        return found


def examples_of(run: Run, count: int) -> list[Any]:
    """The first training examples as the model takes them, without augmentation."""
    rows = torch.arange(min(count, len(run.data.train)), device=run.device)
    batches = run.data.batches("train", 512, rows)
    return [(prepare(inputs, run.data, run.batches.dtype), targets) for inputs, targets in batches]


@dataclass(frozen=True)
class AtOwnRadius(Measuring):
    """The lab's measures, the surrogate gap at the radius of the run's own method (S1 Fig. 4: 2h/ρ²)."""

    points: int = 0
    gives: ClassVar[str] = "from_gap"

    def __call__(self, run: Run) -> dict[str, Any] | None:
        """As the lab's, with `own_gap`."""
        found = super().__call__(run)
        rho = getattr(run.optimizer.method, "rho", None)
        if found is not None and isinstance(rho, (int, float)) and rho > 0:
            objective = Objective(run.net, F.cross_entropy, self._examples(run))
            gap = surrogate_gap(objective, rho)
            found["own_gap"] = {"value": gap.gap, "rho": rho}
            found["from_gap"] = {"value": 2 * gap.gap / rho**2, "rho": rho}
        return found


@dataclass(frozen=True)
class Landscape(Measuring):
    """The loss on a plane through the end of training, and nothing else (S2 Fig. 5)."""

    points: int = 21
    reach: float = 1.0
    gives: ClassVar[str] = "landscape"

    def __call__(self, run: Run) -> dict[str, Any] | None:
        """Where on the axis, and the losses."""
        objective = Objective(run.net, F.cross_entropy, self._examples(run))
        return {"landscape": self._landscape(objective)}


@dataclass(frozen=True)
class Turns(Measuring):
    """Local minima and maxima along random directions (S2 Fig. 2: 100 directions, 10 steps of 0.01)."""

    samples: int = 1024
    directions: int = 100
    gives: ClassVar[str] = "minima"

    def __call__(self, run: Run) -> dict[str, Any] | None:
        """Counts by direction."""
        objective = Objective(run.net, F.cross_entropy, self._examples(run))
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
    images: int = 0  # that are corrupted, the first of the test set; 0: all
    gives: ClassVar[str] = "shifted_accuracy"

    def __call__(self, run: Run) -> dict[str, Any] | None:
        """In distribution the clean test images, out of it all corruptions at all severities."""
        test = run.data.test
        if not isinstance(test, Split):
            raise UserError(f"{run.data.name} is not held in memory, and so cannot be corrupted")
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
