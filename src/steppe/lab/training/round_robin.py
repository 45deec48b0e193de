"""Several runs or stacks in one process, one step of each in turn: small models leave much of a GPU idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .run import Run
from .stack import Stack

_END = object()


def train_round_robin(trained: Sequence[Run | Stack], after_step: Callable[[Run], None] = lambda run: None) -> None:
    """Train all runs to the end, one step of each run or stack in turn, each on its own CUDA stream."""
    runs = [runs_of(one) for one in trained]
    for one in trained:
        one.share_of_time = 1 / sum(map(len, runs))
    going = [(mine, one.train(), _stream(one.device)) for one, mine in zip(trained, runs, strict=True)]
    while going:
        for one in list(going):
            mine, steps, stream = one
            with torch.cuda.stream(stream):  # does nothing if the stream is None
                if next(steps, _END) is _END:
                    going.remove(one)
            for run in mine:
                after_step(run)


def runs_of(trained: Run | Stack) -> list[Run]:
    """The runs of a stack; a run itself."""
    return trained.runs if isinstance(trained, Stack) else [trained]


def _stream(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the model and its data were made on the current stream
    return stream
