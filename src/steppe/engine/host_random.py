"""The random state of Python and NumPy, from which some models draw in their forward (SpecAugment of wav2vec2 does).

Besides their global generators, models may have generators of their own, in attributes of a module.

Saving and comparing it takes up to 0.1 ms, which is much for a small model. So it is done in every step only for models
that may draw: their source files import `random` or NumPy, or they were seen to draw in one of the first steps.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

import torch
from torch import nn

FIRST_STEPS = 3  # in which every model is watched
Access: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]  # functions that read and write a random state


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


def own_generators(modules: Iterable[nn.Module]) -> list[Any]:
    """Generators of torch, NumPy and Python in the modules' attributes, also in lists and dictionaries there."""
    found: dict[int, Any] = {}
    for value in [value for module in modules for value in vars(module).values()]:
        inside: Iterable[Any] = (value,)
        if isinstance(value, (dict, list, tuple)):
            inside = cast("dict[Any, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        found |= {id(one): one for one in inside if _access(one) is not None}
    return list(found.values())


def access(generators: Iterable[Any]) -> list[Access]:
    """How to read and write the state of each generator."""
    return [pair for pair in map(_access, generators) if pair is not None]


def _access(value: Any) -> Access | None:
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else (value.getstate, value.setstate)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    bits: Any = value.bit_generator if isinstance(value, numpy.random.Generator) else value
    if not isinstance(bits, numpy.random.BitGenerator):
        return None
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


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
