"""A method on every k-th step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..method import Method, Number
from .crsam import CRSAM
from .gam import GAM
from .gsam import GSAM
from .looksam import LookSAM
from .sam import SAM
from .some_steps import PLAIN, _OnSomeSteps


@dataclass(frozen=True)
class Every(_OnSomeSteps):
    """A method on every k-th step, another (the plain gradient) on the others (Zhang et al., CVPR 2023, section 5.5).

    k may be fractional: ``Every(1 / 0.3, method)`` runs on 30% of the steps, evenly spread. Each of the two methods
    counts only its own steps. Limits: k = 1 gives the method itself.

    Args:
        k (steps, ≥ 1): The method runs on every k-th step; may be fractional.
        method (method): The method that runs on those steps.
        between (method): The method of all other steps.
    """

    k: Number
    method: Method
    between: Method = PLAIN

    paper = "arXiv 2303.03108"
    advice = "Any method at a fraction of its cost."
    ranges = "k 20, 10, 2 and 1 in its paper; k = 10 kept nearly all of the gain."

    def __post_init__(self) -> None:
        super().__post_init__()
        if callable(self.k) or self.k < 1:
            raise ValueError(f"Every: k must be a number of steps, at least 1, not {self.k!r}")

    def _example(self) -> str:
        return f"Every({self.k}, SAM())"

    @property
    def one_in(self) -> float:
        """k."""
        return self.k

    def _active(self, step: int) -> tuple[bool, int]:
        own_steps = math.floor(step / self.k)
        if step > 0 and own_steps == math.floor((step - 1) / self.k):
            return False, own_steps + 1
        return True, own_steps

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(3, GSAM()), cls(1.5, SAM(rho=0.1)), cls(2, GAM(period=2)), cls(3, CRSAM(), between=LookSAM(k=2))]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(1, GSAM()), GSAM()), (cls(2.5, SAM(), between=SAM()), SAM())]
