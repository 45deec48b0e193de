"""What `torch.compile` must not trace: a step moves weights, and runs loops and generators, between its looks."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from types import TracebackType
from typing import Any

import torch

from .looks import Pass

_INSTEAD = "a step is not part of a graph: compile the model or the loss function instead, or use steppe.capture"
_disable: Any = torch.compiler.disable  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_REASON = {"reason": _INSTEAD} if "reason" in inspect.signature(_disable).parameters else {}  # torch 2.7


class Uncompiled(Generator[Pass, None, None]):
    """A generator that runs as it is in a function that is compiled. What its loop's body calls may be compiled."""

    def __init__(self, looks: Generator[Pass, None, None]):
        run_as_they_are(Uncompiled, ("send", "throw", "close"))
        self._looks = looks

    def send(self, value: None) -> Pass:
        """Go on to the next look."""
        return self._looks.send(value)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> Pass:
        """Raise an exception where the looks stand."""
        return self._looks.throw(typ if val is None else val)

    def close(self) -> None:
        """End the looks, and restore everything."""
        self._looks.close()


def run_as_they_are(owner: type, methods: tuple[str, ...]) -> None:
    """Let compiled functions call methods of a class without tracing them.

    For when the class is used, not for its import: torch's compiler takes longer to import than everything else. Every
    base optimizer has imported it.
    """
    for name in methods:
        method = owner.__dict__[name]
        if not hasattr(method, "__wrapped__"):
            setattr(owner, name, _disable(method, **_REASON))
