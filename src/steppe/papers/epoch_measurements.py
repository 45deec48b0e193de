"""What the papers measured during a run, after chosen epochs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..curvature import Hessian, Objective, eigenvalues, frobenius_squared, trace
from ..curvature.trace import FEWEST_PRODUCTS
from ..lab.data import prepare
from ..lab.training.final_curvature import check_products
from ..lab.training.run import Run


@dataclass(frozen=True)
class Watch:
    """What to measure after an epoch, and after which epochs.

    `frobenius`: ‖H‖² of the training loss by random probes (S3 Fig. 1: 1280 examples, every epoch, 100
    probes; here at most 200, because the library gives no error bar for fewer than 168);
    `top`: that many of the largest eigenvalues, and the trace (S2 Fig. 3: 50, half way and at the end).
    """

    frobenius: bool = False
    top: int = 0
    parts: int = 0  # number of measurements, evenly spread over the epochs, including the last; 0: every epoch
    samples: int = 1280
    products: int = 200

    def __post_init__(self):
        check_products(self.products)

    @property
    def gives(self) -> str:
        """The name of the measurement in an epoch's entry."""
        return "frobenius" if self.frobenius else "top_values"

    def tiny(self) -> Watch:
        """The smallest measurement that runs."""
        return replace(self, samples=4, products=FEWEST_PRODUCTS, top=min(self.top, 2))

    def after(self, epoch: int, epochs: int) -> bool:
        """Whether to measure after this epoch."""
        parts = min(self.parts or epochs, epochs)
        return epoch in {round(epochs * (i + 1) / parts) for i in range(parts)}

    def __call__(self, run: Run) -> dict[str, Any]:
        """The measurements to add to the epoch's entry."""
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


class WatchedRun(Run):
    """A run that is measured after chosen epochs. The measurements are in the record's epochs."""

    def __init__(self, *arguments: Any, watch: Watch | None = None, **options: Any):
        self.watch = watch
        super().__init__(*arguments, **options)

    def evaluate(self) -> dict[str, Any]:
        """Loss and accuracy, and the measurements."""
        found: dict[str, Any] = super().evaluate()
        if self.watch is not None and self.watch.after(len(self.record["epochs"]) + 1, self.recipe.epochs):
            found |= self.watch(self)
        return found


def examples_of(run: Run, count: int) -> list[Any]:
    """The first training examples, prepared for the model, without augmentation."""
    rows = torch.arange(min(count, len(run.data.train)), device=run.device)
    batches = run.data.batches("train", 512, rows)
    return [(prepare(inputs, run.data, run.batches.dtype), targets) for inputs, targets in batches]
