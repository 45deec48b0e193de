"""A method on a random share of the steps."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

from ..engine.random_vectors import seed_of
from ..method import Method, Number
from .fsam import FSAM
from .gsam import GSAM
from .plain import Plain
from .sam import SAM
from .some_steps import _OnSomeSteps


@dataclass(frozen=True)
class Random(_OnSomeSteps):
    """A method with probability p, the plain gradient otherwise (Randomized Sharpness-Aware Training).

    Whether the method runs depends on `seed` and the number of the step only: it is the same on all ranks and after
    every resume, and known before the step begins, so that steps can be recorded. The method counts only its own
    steps. The cost is the expected one.

    Limits: p = 1 gives the method itself, p = 0 the base optimizer.

    Its paper also lets p change during training; here p is one number. `Every` spreads the same share evenly.

    Args:
        method (method): The method that runs on the chosen steps.
        p (probability, 0 to 1): How probable it is that a step is chosen.
        seed (whole number): Decides which steps are chosen.
    """

    method: Method
    p: Number = 0.5
    seed: int = 0

    paper = "OpenReview 8foynpwwRb"
    advice = "Any method at a fraction of its cost, on steps chosen at random. Every spreads them evenly."
    ranges = "p 0.5 in its paper, and p that rises or falls during training."

    def __post_init__(self) -> None:
        super().__post_init__()
        if callable(self.p) or not 0 <= self.p <= 1:
            raise ValueError(f"Random: p is a probability, at least 0 and at most 1, not {self.p!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"Random: seed must be a whole number, not {self.seed!r}")

    @property
    def one_in(self) -> float:
        """1/p, on average."""
        return 1 / self.p if self.p else math.inf

    def _active(self, step: int) -> tuple[bool, int]:
        return chosen(step, self.p, self.seed), chosen_before(step, self.p, self.seed)

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(GSAM(), seed=3), cls(FSAM(), p=0.75, seed=8)]  # 6 and 9 of the first 12 steps are chosen

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(FSAM(), p=1.0), FSAM()), (cls(SAM(), p=0.0), Plain())]


def chosen(step: int, p: float, seed: int) -> bool:
    """Whether a step is one of those that are chosen with probability p."""
    return random.Random(seed_of(seed, step)).random() < p


def chosen_before(step: int, p: float, seed: int) -> int:
    """How many of the steps before this one are chosen."""
    counts = _counts(p, seed)
    while len(counts) <= step:
        counts.append(counts[-1] + chosen(len(counts) - 1, p, seed))
    return counts[step]


@functools.cache
def _counts(p: float, seed: int) -> list[int]:
    """A cached list of the numbers of steps chosen before each step. `chosen_before` extends it."""
    return [0]
