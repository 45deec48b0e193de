"""The benchmark of lower bounds counts what a step reads and writes, also in place: SAM needs exactly its bound."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

from steppe import SAM, Plain


@pytest.fixture(scope="module")
def bounds():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("bounds")


@pytest.mark.parametrize(
    ("operation", "tensors"),
    [
        (lambda a, b: a + b, 3),
        (lambda a, b: a.add_(b), 3),
        (lambda a, b: a.copy_(b), 2),
        (lambda a, b: a.zero_(), 1),
        (lambda a, b: torch.add(a, b, out=torch.empty(1000)), 3),
        (lambda a, b: torch._foreach_add_([a, b], [b, a]), 4),
        (lambda a, b: a.view(10, 100), 0),
    ],
)
def test_traffic_is_what_is_read_and_what_is_written(bounds, operation, tensors):
    a, b = torch.ones(1000), torch.ones(1000)
    with bounds.Traffic() as traffic:
        operation(a, b)
    assert traffic.bytes == tensors * 4000


def test_sam_reads_and_writes_the_weights_eight_times(bounds):
    """The norm reads the gradient; copy 2; move 3; restore 2."""
    model = nn.Linear(512, 512, bias=False)
    assert 8 <= bounds.bytes_beside(model, SAM()) < 8.01
    assert bounds.bytes_beside(nn.Linear(512, 512, bias=False), Plain()) == 0
