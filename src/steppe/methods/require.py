"""Checks of settings that methods share. Each raises a ValueError that names the method and the setting."""

from __future__ import annotations

from numbers import Integral

from ..method import Method


def whole_number(method: Method, name: str, least: int = 1) -> None:
    """Make a setting a Python int. Raise if it is not a whole number, or is less than `least`."""
    value = getattr(method, name)
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise ValueError(f"{method.name}: {name} must be a whole number, at least {least}, not {value!r}")
    object.__setattr__(method, name, int(value))  # methods are frozen; integers of NumPy overflow


def one_of(method: Method, name: str, *choices: str) -> None:
    """Raise if a setting is not one of several texts."""
    value = getattr(method, name)
    if value not in choices:
        first, last = ", ".join(f'"{choice}"' for choice in choices[:-1]), f'"{choices[-1]}"'
        raise ValueError(f"{method.name}: {name} must be {first} or {last}, not {value!r}")
