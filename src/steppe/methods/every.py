"""A method on a share of the steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..method import Context, Looks, Memory, Method, Number, remembered
from ..vector import Space
from .crsam import CRSAM
from .gam import GAM
from .gsam import GSAM
from .looksam import LookSAM
from .plain import Plain
from .sam import SAM

PLAIN = Plain()


@dataclass(frozen=True)
class Every(Method):
    """Any method on every k-th step, another (the plain gradient) between (Zhang et al., CVPR 2023, section 5.5).

    k may be fractional: ``Every(1 / 0.3, method)`` runs on 30% of the steps, evenly spread. Each of the two methods
    counts only its own steps. Limits: k = 1 gives the method itself.
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
        if not isinstance(self.between, Method):
            raise ValueError(f"Every: between must be a method, for example SAM(), not {self.between!r}")
        if not isinstance(self.method, Method):
            raise ValueError(f"Every: needs a method, for example Every({self.k}, SAM()), not {self.method!r}")

    @property
    def cost(self) -> float:
        """The method's looks on one step in k, the other's on the rest."""
        return self.between.cost + (self.method.cost - self.between.cost) / self.k

    @property
    def copies(self) -> int:
        """Those of the method that needs more, and what the other remembers."""
        return max(
            self.method.copies + remembered(self.between),
            self.between.copies + remembered(self.method),
        )

    @property
    def needs(self) -> frozenset[str]:
        """What either method needs."""
        return self.method.needs | self.between.needs

    def looks(self, ctx: Context) -> Looks:
        """The method's looks when its turn has come, the other's otherwise."""
        method, turn = self._now(ctx.step)
        return (yield from method.looks(replace(ctx, step=turn)))

    def _now(self, step: int) -> tuple[Method, int]:
        """The method of a step, and how many steps of its own it has had."""
        turn = math.floor(step / self.k)
        if step > 0 and turn == math.floor((step - 1) / self.k):
            return self.between, step - turn - 1
        return self.method, turn

    def phase(self, step: int) -> int | None:
        method, turn = self._now(step)
        inner = method.phase(turn)
        return None if inner is None else 2 * inner + (method is self.method)

    def memory(self, space: Space) -> Memory:
        """That of both methods."""
        mine, theirs = self.method.memory(space), self.between.memory(space)
        if mine.keys() & theirs.keys():
            raise ValueError(f"Every: {self.method.name} and {self.between.name} would share what they remember")
        return {**mine, **theirs}

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(3, GSAM()), cls(1.5, SAM(rho=0.1)), cls(2, GAM(period=2)), cls(3, CRSAM(), between=LookSAM(k=2))]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(1, GSAM()), GSAM()), (cls(2.5, SAM(), between=SAM()), SAM())]
