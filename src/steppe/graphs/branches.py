"""Side streams of a recording: looks that do not depend on each other become parallel branches of one CUDA graph."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch

MOST = 3  # side streams; further looks take turns on them


class Branches:
    """The first look stays on the recording's own stream; each of the others forks off and joins it again.

    Made once for all recordings of a step: each stream has a cuBLAS workspace of its own.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._streams: list[Any] = []
        self._start: Any = None
        self._used: set[int] = set()
        self.forks = 0  # how often looks were recorded side by side

    def fork(self, count: int) -> None:
        """Looks begin after what the recording's stream has so far."""
        while len(self._streams) < min(count - 1, MOST):
            self._streams.append(torch.cuda.Stream(self._device))
        self._start = torch.cuda.current_stream(self._device).record_event()
        self._used = set()
        self.forks += 1

    @contextlib.contextmanager
    def branch(self, number: int) -> Generator[None, None, None]:
        """Kernels of the first look go to the recording's stream, those of another to one of the side streams."""
        if number == 0:
            yield
            return
        at = (number - 1) % len(self._streams)
        stream = self._streams[at]
        if at not in self._used:
            stream.wait_event(self._start)
            self._used.add(at)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """The recording's stream goes on after all of them."""
        main = torch.cuda.current_stream(self._device)
        for at in sorted(self._used):
            main.wait_stream(self._streams[at])
