"""Side streams of a recording: independent looks become parallel branches of one CUDA graph."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch

MOST = 3  # side streams; further looks share them


class Branches:
    """Records the first look on the recording's own stream and the others on side streams, which fork and join.

    It is made once for all recordings of a step, because each stream has its own cuBLAS workspace.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._streams: list[Any] = []
        self._start: Any = None
        self._used: set[int] = set()
        self.forks = 0  # how often looks were recorded side by side

    def fork(self, count: int) -> None:
        """Start branches, which run after everything on the recording's stream so far."""
        while len(self._streams) < min(count - 1, MOST):
            self._streams.append(torch.cuda.Stream(self._device))
        self._start = torch.cuda.current_stream(self._device).record_event()
        self._used = set()
        self.forks += 1

    @contextlib.contextmanager
    def branch(self, number: int) -> Generator[None, None, None]:
        """A context that records on the recording's stream for the first look, and on a side stream for the others."""
        if number == 0:
            yield
            return
        index = (number - 1) % len(self._streams)
        stream = self._streams[index]
        if index not in self._used:
            stream.wait_event(self._start)
            self._used.add(index)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Let the recording's stream wait for all branches."""
        main = torch.cuda.current_stream(self._device)
        for index in sorted(self._used):
            main.wait_stream(self._streams[index])
