"""A method on a share of the steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..method import HERE, Context, Looks, Memory, Method, Number
from ..vector import Space
from .gam import GAM
from .gsam import GSAM
from .sam import SAM


@dataclass(frozen=True)
class Every(Method):
    """Any method on every k-th step, the plain gradient between (Zhang et al., CVPR 2023, section 5.5).

    k may be fractional: ``Every(1 / 0.3, method)`` runs on 30% of the steps, evenly spread. The inner method
    counts only its own steps. Limits: k = 1 gives the method itself.
    """

    k: Number
    method: Method

    paper = "arXiv 2303.03108"
    advice = "Any method at a fraction of its cost."
    ranges = "k 20, 10, 2 and 1 in its paper; k = 10 kept nearly all of the gain."

    def __post_init__(self) -> None:
        super().__post_init__()
        if callable(self.k) or self.k < 1:
            raise ValueError(f"Every: k must be a number of steps, at least 1, not {self.k!r}")
        if not isinstance(self.method, Method):
            raise ValueError(f"Every: needs a method, for example Every({self.k}, SAM()), not {self.method!r}")

    @property
    def cost(self) -> float:
        """The method's extra looks, spread over k steps."""
        return 1 + (self.method.cost - 1) / self.k

    @property
    def copies(self) -> int:
        """As many as the method."""
        return self.method.copies

    @property
    def needs(self) -> frozenset[str]:
        """What the method needs."""
        return self.method.needs

    def looks(self, ctx: Context) -> Looks:
        """The method's looks when its turn has come, one look otherwise."""
        turn = self._turn(ctx.step)
        if turn is None:
            return (yield HERE).grad
        return (yield from self.method.looks(replace(ctx, step=turn)))

    def _turn(self, step: int) -> int | None:
        """How many turns the method has had, if it has one now."""
        turn = math.floor(step / self.k)
        return None if step > 0 and turn == math.floor((step - 1) / self.k) else turn

    def phase(self, step: int) -> int | None:
        turn = self._turn(step)
        inner = -1 if turn is None else self.method.phase(turn)
        return None if inner is None else inner + 1

    def memory(self, space: Space) -> Memory:
        """The method's."""
        return self.method.memory(space)

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(3, GSAM()), cls(1.5, SAM(rho=0.1)), cls(2, GAM(period=2))]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(1, GSAM()), GSAM())]
