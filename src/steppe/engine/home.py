"""Where the weights are kept while a look is somewhere else: beside them on the device, or in the host's memory.

Both give the same bits. The copy on the host costs the device no memory, and two transfers: the one to the host runs
beside the first look, the one back is waited for.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal, Protocol

import torch

from ..vector import Vector

Place = Literal["device", "cpu"]
PLACES = ("device", "cpu")


class Home(Protocol):
    """A copy of the weights. Its memory is used again in the next step."""

    def start(self, weights: Vector) -> None:
        """The weights will be needed: begin to copy them, if that can be done beside other work."""

    def finish(self, weights: Vector) -> None:
        """Have a copy of the weights as they are now."""

    def vector(self, weights: Vector, moved: bool) -> Vector:
        """The copied weights, on the device, in memory that does not change while the weights move."""
        ...

    def move(self, weights: Vector, offset: Vector, moved: bool) -> None:
        """Move the weights to the copied ones plus an offset. `moved` says whether they are somewhere else now."""

    def restore(self, weights: Vector) -> None:
        """Write the copied weights back."""

    def forget(self, kept: set[int]) -> None:
        """Do not write again into tensors that somebody else keeps (their ids)."""


class OnDevice:
    """A copy beside the weights."""

    def __init__(self) -> None:
        self._copy: Vector | None = None

    def start(self, weights: Vector) -> None:
        """Nothing: memory is taken only when a look needs it."""

    def finish(self, weights: Vector) -> None:
        """Copy."""
        self._copy = weights.clone(room=self._copy)

    def vector(self, weights: Vector, moved: bool) -> Vector:
        """The copy itself."""
        assert self._copy is not None
        return self._copy

    def move(self, weights: Vector, offset: Vector, moved: bool) -> None:
        """In one pass over memory."""
        weights.move_(self.vector(weights, moved), offset)

    def restore(self, weights: Vector) -> None:
        """Copy back."""
        assert self._copy is not None
        weights.copy_(self._copy)

    def forget(self, kept: set[int]) -> None:
        """A method may remember the weights: then the memory is its own."""
        if self._copy is not None and any(id(t) in kept for t in self._copy.tensors):
            self._copy = None


class OnHost:
    """A copy in the host's memory: pinned memory if the weights are on a GPU, which copies without the host's help."""

    def __init__(self, weights: Vector):
        pieces = weights.tensors
        self._copy = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda, requires_grad=False) for t in pieces]
        self._streams: dict[torch.device, Any] = {}
        for t in pieces:
            if t.is_cuda and t.device not in self._streams:
                self._streams[t.device] = torch.cuda.Stream(t.device)
        self._marks: list[tuple[int, int]] | None = None  # of the weights that the copy is of

    def start(self, weights: Vector) -> None:
        """Copy beside what the device does next."""
        self._marks = None
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        with ExitStack() as streams:
            for stream in self._streams.values():
                streams.enter_context(torch.cuda.stream(stream))
            torch._foreach_copy_(self._copy, weights.tensors, non_blocking=True)
        self._marks = _marks(weights)

    def finish(self, weights: Vector) -> None:
        """Let the device wait for the copy. If the first look has changed the weights, copy them once more."""
        if self._marks != _marks(weights):
            self.start(weights)
        self._marks = None
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def vector(self, weights: Vector, moved: bool) -> Vector:
        """A copy on the device, for as long as the method holds it."""
        twin = weights.clone()
        if moved:
            self.restore(twin)
        return twin

    def move(self, weights: Vector, offset: Vector, moved: bool) -> None:
        """Restore, then add: with two lists of the same tensors, because in place sums are rounded differently."""
        if moved:
            self.restore(weights)
        weights.move_(weights.space.live(), offset)

    def restore(self, weights: Vector) -> None:
        """Copy back. What the device does next waits for it; the host does not."""
        torch._foreach_copy_(weights.tensors, self._copy, non_blocking=True)

    def forget(self, kept: set[int]) -> None:
        """Nothing: what methods get are copies of their own."""


def home_in(place: Place, weights: Vector) -> Home:
    """A place for a copy of the weights."""
    return OnHost(weights) if place == "cpu" else OnDevice()


def _marks(weights: Vector) -> list[tuple[int, int]]:
    """What changes when the weights are written to, or get other memory."""
    return [(t._version, t.data_ptr()) for t in weights.tensors]
