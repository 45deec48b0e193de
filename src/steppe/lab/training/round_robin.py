"""Several runs in one process, one step of each in turn: small models leave much of a GPU idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .run import Run

_END = object()


def train_round_robin(runs: Sequence[Run], after_step: Callable[[Run], None] = lambda run: None) -> None:
    """Train all runs to the end, one step of each in turn, each on its own CUDA stream."""
    for run in runs:
        run.share_of_time = 1 / len(runs)
    going = [(run, run.train(), _stream(run.device)) for run in runs]
    while going:
        for one in list(going):
            run, steps, stream = one
            with torch.cuda.stream(stream):  # does nothing if the stream is None
                if next(steps, _END) is _END:
                    going.remove(one)
            after_step(run)


def _stream(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the model and its data were made on the current stream
    return stream
