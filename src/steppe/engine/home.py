"""Where the weights are kept while a look is elsewhere: in a copy on the device, or in a copy in the host's memory.

Both give the same bits. The copy on the host takes no memory of the device, but two transfers: the one to the host
overlaps with the first look, the one back is waited for.
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
    """A copy of the weights. Its memory is reused in the next step."""

    def start(self, weights: Vector) -> None:
        """Start to copy the weights, if the copy can overlap with other work."""

    def finish(self, weights: Vector) -> None:
        """Make sure that there is a copy of the weights as they are now."""

    def vector(self, weights: Vector, moved: bool) -> Vector:
        """The copied weights, on the device, in memory that does not change while the weights move."""
        ...

    def move(self, weights: Vector, offset: Vector, moved: bool) -> None:
        """Move the weights to the copied ones plus an offset. `moved` says whether they have been moved before."""

    def restore(self, weights: Vector) -> None:
        """Write the copied weights back."""

    def forget(self, kept: set[int]) -> None:
        """Do not reuse the memory of tensors with these ids: a method keeps them."""


class OnDevice:
    """A copy on the device of the weights."""

    def __init__(self) -> None:
        self._copy: Vector | None = None

    def start(self, weights: Vector) -> None:
        """Do nothing: memory is allocated only when a look needs it."""

    def finish(self, weights: Vector) -> None:
        """Copy the weights."""
        self._copy = weights.clone(room=self._copy)

    def vector(self, weights: Vector, moved: bool) -> Vector:
        """The copy itself, not a copy of it."""
        assert self._copy is not None
        return self._copy

    def move(self, weights: Vector, offset: Vector, moved: bool) -> None:
        """Move the weights in one pass over memory."""
        weights.move_(self.vector(weights, moved), offset)

    def restore(self, weights: Vector) -> None:
        """Copy the weights back."""
        assert self._copy is not None
        weights.copy_(self._copy)

    def forget(self, kept: set[int]) -> None:
        """Give the copy's memory away if a method remembers the weights."""
        if self._copy is not None and any(id(t) in kept for t in self._copy.tensors):
            self._copy = None


class OnHost:
    """A copy in the host's memory, which is pinned if the weights are on a GPU, so that transfers are asynchronous."""

    def __init__(self, weights: Vector):
        pieces = weights.tensors
        self._copy = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda, requires_grad=False) for t in pieces]
        self._streams: dict[torch.device, Any] = {}
        for t in pieces:
            if t.is_cuda and t.device not in self._streams:
                self._streams[t.device] = torch.cuda.Stream(t.device)
        self._copied: list[tuple[int, int]] | None = None  # which weights were copied: see `_identity`

    def start(self, weights: Vector) -> None:
        """Copy the weights on a stream of its own, so that the device can go on with other work."""
        self._copied = None
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        with ExitStack() as streams:
            for stream in self._streams.values():
                streams.enter_context(torch.cuda.stream(stream))
            torch._foreach_copy_(self._copy, weights.tensors, non_blocking=True)
        self._copied = _identity(weights)

    def finish(self, weights: Vector) -> None:
        """Let the device wait for the copy. If the first look has changed the weights, copy them again."""
        if self._copied != _identity(weights):
            self.start(weights)
        self._copied = None
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def vector(self, weights: Vector, moved: bool) -> Vector:
        """A new copy on the device, which lives as long as the method holds it."""
        twin = weights.clone()
        if moved:
            self.restore(twin)
        return twin

    def move(self, weights: Vector, offset: Vector, moved: bool) -> None:
        """Restore the weights if they have moved, then add the offset."""
        if moved:
            self.restore(weights)
        # From another list of the same tensors: the kernel for sums in place rounds differently.
        weights.move_(weights.space.live(), offset)

    def restore(self, weights: Vector) -> None:
        """Copy the weights back. The device waits for the transfer; the host does not."""
        torch._foreach_copy_(weights.tensors, self._copy, non_blocking=True)

    def forget(self, kept: set[int]) -> None:
        """Do nothing: methods get copies of their own."""


def home_in(place: Place, weights: Vector) -> Home:
    """A new home of the given kind."""
    return OnHost(weights) if place == "cpu" else OnDevice()


def _identity(weights: Vector) -> list[tuple[int, int]]:
    """Versions and addresses: they change when the weights are written to, or get other memory."""
    return [(t._version, t.data_ptr()) for t in weights.tensors]
