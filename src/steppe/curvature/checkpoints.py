"""Saved states of long measurements: complete files, each with the identity of its measurement."""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..support.files import whole_file

SAVE_EVERY = 60.0  # seconds between two saves of a long run


def write(state: Any, path: Path) -> None:
    """Write a file completely or not at all: a process killed while writing leaves the previous file."""
    with whole_file(path) as temporary:
        torch.save(state, temporary)


class Checkpoint:
    """A file for the state of one measurement. A saved state is loaded only if its identity is the same."""

    def __init__(self, path: str | os.PathLike[str] | None, identity: Callable[[], dict[str, Any]]):
        self.path = None if path is None else Path(path)
        self._identity_of, self._identity = identity, None
        self._saved_at = time.monotonic()

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the measurement. Computed on first use: it may take a pass over the data."""
        if self._identity is None:
            self._identity = self._identity_of()
        return self._identity

    def load(self) -> dict[str, Any] | None:
        """The saved state, or None if nothing was saved."""
        if self.path is None or not self.path.exists():
            return None
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        saved = state.pop("of") if isinstance(state, dict) and "of" in state else None
        if saved != self.identity:
            raise ValueError(f"{self.path} holds another measurement: {saved} was saved, this one is {self.identity}")
        return state

    def save(self, state: Callable[[], dict[str, Any]], now: bool = False) -> None:
        """Save if `now`, or if the last save was `SAVE_EVERY` seconds ago."""
        if self.path is None or (not now and time.monotonic() - self._saved_at < SAVE_EVERY):
            return
        write({**state(), "of": self.identity}, self.path)
        self._saved_at = time.monotonic()


def fingerprint(operator: Any) -> str | None:
    """A text that differs for other weights, data and matrices. None for an operator that only offers products."""
    kind, objective = type(operator).__name__, getattr(operator, "objective", None)
    if objective is not None:  # loss and gradient: the digits on which all machines agree
        names = hashlib.sha256(", ".join(objective.names).encode()).hexdigest()[:8]
        weights = digest(objective.flat(objective.weights()))
        loss, gradient = objective.gradient()  # with a last layer of zeros, the loss is the same for all data
        slope = torch.linalg.vector_norm(objective.flat(gradient), dtype=torch.float64)
        return f"{kind} of {names}, weights {weights}, loss {float(loss):.5g}, gradient {float(slope):.3g}"
    if isinstance(operator, Tensor):
        return f"{kind} {digest(operator)}"
    if isinstance(scale := getattr(operator, "scale", None), Tensor):
        return f"{kind} by {digest(scale)} of {fingerprint(operator.operator)}"
    return None


def digest(tensor: Tensor) -> str:
    """A short hash of a tensor's entries."""
    tensor = tensor.detach().cpu().contiguous()
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return hashlib.sha256(memory).hexdigest()[:8]
