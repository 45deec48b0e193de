"""The random state of Python and NumPy, from which some models draw in their forward (SpecAugment of wav2vec2 does).

Saving and comparing it takes up to 0.1 ms, which is much for a small model. So it is done in every step only for models
that may draw: their source files import `random` or NumPy, or they were seen to draw in one of the first steps.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

FIRST_STEPS = 3  # in which every model is watched


def may_draw(modules: Iterable[nn.Module]) -> bool:
    """Whether a source file of the modules' classes imports `random` or NumPy."""
    classes = {cls for module in modules for cls in type(module).__mro__}
    names = {cls.__module__ for cls in classes if not cls.__module__.startswith("torch.")}
    files = [vars(sys.modules[name]) for name in names if name in sys.modules]
    return any(_is_generator(value) for file in files for value in file.values())


def _is_generator(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    modules = (random,) if numpy is None else (random, numpy, numpy.random)
    return any(value is module for module in modules) or isinstance(getattr(value, "__self__", None), random.Random)


class HostRandomState:
    """The state of Python's and NumPy's global generators at one moment."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random.get_state(legacy=True)

    def __eq__(self, other: object) -> bool:
        """Whether nothing was drawn between the two states."""
        return isinstance(other, HostRandomState) and self._python == other._python and self._same_numpy(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def _same_numpy(self, other: HostRandomState) -> bool:
        mine, theirs = self._numpy, other._numpy
        if mine is None or theirs is None:
            return mine is theirs
        # The generator's name, 624 numbers, the position in them, and a normal number that is cached for the next draw.
        return mine[0] == theirs[0] and mine[2:] == theirs[2:] and bool((mine[1] == theirs[1]).all())

    def restore(self) -> None:
        """Restore the state of both generators."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
