"""Keeps `torch.compile` from tracing a step: between its looks a step moves weights and runs loops and generators."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from types import TracebackType
from typing import Any

import torch

from .looks import Pass

_WHY = "a step is not part of a graph: compile the model or the loss function instead, or use steppe.capture"
_disable: Any = torch.compiler.disable  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_REASON = {"reason": _WHY} if "reason" in inspect.signature(_disable).parameters else {}  # since torch 2.7


class Uncompiled(Generator[Pass, None, None]):
    """A generator of looks that a compiled function runs without tracing it. The body of the loop may be compiled."""

    def __init__(self, looks: Generator[Pass, None, None]):
        exclude_from_tracing(Uncompiled, ("send", "throw", "close"))
        self._looks = looks

    def send(self, value: None) -> Pass:
        """Go on to the next look."""
        return self._looks.send(value)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> Pass:
        """Raise an exception inside the looks."""
        return self._looks.throw(typ if val is None else val)

    def close(self) -> None:
        """End the looks and restore everything."""
        self._looks.close()


def exclude_from_tracing(owner: type, methods: tuple[str, ...]) -> None:
    """Let compiled functions call methods of a class without tracing them.

    Call it when the class is used, not when it is defined: `torch.compiler.disable` imports torch's compiler, which
    takes longer than all other imports. When there is a base optimizer, the compiler has been imported.
    """
    for name in methods:
        method = owner.__dict__[name]
        if not hasattr(method, "__wrapped__"):
            setattr(owner, name, _disable(method, **_REASON))
