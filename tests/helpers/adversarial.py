"""How many random trials the tests of `tests/adversarial` run, and their random numbers."""

from __future__ import annotations

import os
import random

LONGER = int(os.environ.get("STEPPE_ADVERSARIAL", "1"))  # multiplies the number of trials


def trials(count: int) -> range:
    """The numbers of the trials: `count` of them, times the factor that the environment sets."""
    return range(count * LONGER)


def chance(*seed: object) -> random.Random:
    """Random numbers that are the same in every process."""
    return random.Random(repr(seed))
