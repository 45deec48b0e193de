"""A method in the last part of training."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from ..method import Method, Number
from .fsam import FSAM
from .gsam import GSAM
from .sam import SAM
from .some_steps import _OnSomeSteps


@dataclass(frozen=True)
class Late(_OnSomeSteps):
    """The plain gradient before step `start`, a method from then on (Zhou et al., ICLR 2025: SAM in the late phase).

    `start` is a whole number of steps. Where the length of training is known (in the lab, in Lightning, in the Trainer
    of transformers) it may also be a share of it, 0 < start < 1; elsewhere `for_steps` converts a share. The method
    counts only its own steps, from `start` on. The cost is that of the steps from `start` on; of all steps on average
    if `start` is a share.

    Limits: start = 0 gives the method itself.

    Args:
        method (method): The method that runs from `start` on.
        start (steps, ≥ 0; or share, 0 to 1): When the method starts; a share where the length of training is known.
    """

    method: Method
    start: Number = 0.75

    paper = "ICLR 2025, SAM in the late phase"
    advice = "Most of a method's gain for a quarter of its extra cost: start it in the last quarter of training."
    ranges = "SAM in the last 25 of 200 epochs (start 0.875) is level with SAM throughout in its paper."

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = isinstance(self.start, int) and self.start >= 0
        if not whole and not (isinstance(self.start, float) and 0 < self.start < 1):
            raise ValueError(
                "Late: start must be a whole number of steps, or a share of training between 0 and 1, "
                f"not {self.start!r}"
            )

    @property
    def one_in(self) -> float:
        """1, because it runs on all steps from `start` on; if `start` is a share, it runs on 1 − start of all steps."""
        return 1 / (1 - self.start) if isinstance(self.start, float) else 1

    def _active(self, step: int) -> tuple[bool, int]:
        if isinstance(self.start, float):
            raise RuntimeError(
                f"Late: start={self.start} is a share of training, whose number of steps is not known here: "
                "give a whole number of steps, or convert it with steppe.methods.late.for_steps"
            )
        return step >= self.start, max(step - self.start, 0)

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(GSAM(), start=2), cls(FSAM(), start=1)]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(SAM(), start=0), SAM()), (cls(FSAM(), start=0), FSAM())]


def for_steps(method: Method, steps: float, epoch_steps: int = 0) -> Method:
    """The method for a training of `steps` steps: in each `Late`, a share of training becomes a number of steps.

    If `steps` is infinite, a share stays a share, and the first step raises.

    With `epoch_steps`, a method with that setting, unless it is set, is also given the number of steps in an epoch.

    >>> for_steps(Late(SAM(), start=0.75), 1000).start
    750
    """
    values: dict[str, Any] = {}
    for f in fields(method):
        value = getattr(method, f.name)
        if isinstance(value, Method):
            values[f.name] = for_steps(value, steps, epoch_steps)
        elif f.name == "epoch_steps":
            values[f.name] = value or epoch_steps
    if isinstance(method, Late) and isinstance(method.start, float) and steps < math.inf:
        values["start"] = round(method.start * steps)
    return replace(method, **values) if values else method
