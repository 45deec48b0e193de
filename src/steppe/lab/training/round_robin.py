"""Several runs in one process, taking turns: on a GPU small nets leave room for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .run import Run

_END = object()


def train_round_robin(runs: Sequence[Run], after_step: Callable[[Run], None] = lambda run: None) -> None:
    """Train runs to their ends in turns, a step each, every one on a CUDA stream of its own."""
    for run in runs:
        run.share_of_time = 1 / len(runs)
    going = [(run, run.train(), _stream(run.device)) for run in runs]
    while going:
        for one in list(going):
            run, steps, stream = one
            with torch.cuda.stream(stream):  # does nothing where there is none
                if next(steps, _END) is _END:
                    going.remove(one)
            after_step(run)


def _stream(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # what was made so far was made there
    return stream
