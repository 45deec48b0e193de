"""A task for tests that start processes: its data needs no other package, and its model can be told to wait.

A process that trains the model waits after `CALLS` forward passes if $STEPPE_TEST_GATE names a folder: it writes a file
`waiting-PID` there and stays. So a test can stop a process that is certainly training, whatever the load.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

CALLS = 40
_calls = 0


def data():
    """400 examples to train on and 80 to test, in four classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(480, 1, 6, 6, generator=generator)
    targets = (inputs.flatten(1) @ torch.randn(36, 4, generator=generator)).argmax(1)
    return (inputs[:400], targets[:400]), (inputs[400:], targets[400:])


def net(input_shape, classes):
    return Gated(nn.Flatten(), nn.Linear(36, 16), nn.Softplus(), nn.Dropout(0.2), nn.Linear(16, classes))


class Gated(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        global _calls
        _calls += self.training
        if _calls > CALLS and (folder := os.environ.get("STEPPE_TEST_GATE")):
            (Path(folder) / f"waiting-{os.getpid()}").touch()
            while True:
                time.sleep(1)
        return super().forward(input)


def environment(**more: str) -> dict[str, str]:
    """What a process needs in order to import this module, on one thread."""
    path = os.pathsep.join(part for part in (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}
