"""How long the tests of `tests/adversarial` look for a counterexample."""

from __future__ import annotations

import os
import random

LONGER = int(os.environ.get("STEPPE_ADVERSARIAL", "1"))  # so many times as many trials


def trials(count: int) -> range:
    """Numbers of trials: `count` of them, or as many times more as the environment asks for."""
    return range(count * LONGER)


def chance(*seed: object) -> random.Random:
    """Random numbers that are the same in every process."""
    return random.Random(repr(seed))
