"""Grids of tests on two ranks: a few combinations run always, the others are marked slow."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, product
from typing import Any

import pytest

from helpers.ranks import all_methods


def grid(names: str, *dimensions: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrises over all combinations. A few contain every value of every dimension; the others are marked slow.

    >>> [bool(param.marks) for param in grid("kind, base", "abc", "xy").args[1]]
    [False, True, True, False, False, True]
    """
    values = [list(dimension) for dimension in dimensions]
    longest = max(range(len(values)), key=lambda i: len(values[i]))
    fast: set[tuple[int, ...]] = set()
    for step in count():
        if all({chosen[i] for chosen in fast} == set(range(len(each))) for i, each in enumerate(values)):
            break
        rest, chosen = step, []  # the longest dimension cycles; the others count through their combinations
        for i, each in enumerate(values):
            chosen.append((step if i == longest else rest) % len(each))
            rest = rest if i == longest else rest // len(each)
        fast.add(tuple(chosen))
    params = []
    for places in product(*(range(len(each)) for each in values)):
        picked = [each[place] for each, place in zip(values, places, strict=True)]
        marks = () if places in fast else pytest.mark.slow
        params.append(pytest.param(*picked, id="-".join(map(_label, picked)), marks=marks))
    return pytest.mark.parametrize(names, params)


def _label(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)


def each_method(**others: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrises over every setting of every method, and over another dimension if one is given.

    Fast: the first setting of each method, with the values of the other dimension in turn.
    """
    ((name, values),) = others.items() or (("", [""]),)
    values, methods, params = list(values), all_methods(), []
    firsts = [key for key in methods if key.endswith("-0")]
    for key, method in methods.items():
        for value in values:
            fast = key in firsts and value == values[firsts.index(key) % len(values)]
            picked, marks = (method, value)[: 2 if name else 1], () if fast else pytest.mark.slow
            params.append(pytest.param(*picked, id="-".join(filter(None, (key, value))), marks=marks))
    return pytest.mark.parametrize(f"method, {name}" if name else "method", params)
