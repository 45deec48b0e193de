"""What the lab asks of torch for speed: only with --compile, and only on a GPU."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from steppe.lab.training.precision import compiled, set_precision


@pytest.fixture(autouse=True)
def _as_before():
    matmul, cudnn = torch.get_float32_matmul_precision(), cast("Any", torch.backends.cudnn)
    before = cudnn.allow_tf32, cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(matmul)
    cudnn.allow_tf32, cudnn.benchmark = before


def test_the_fastest_kernels_are_chosen_only_where_asked_for():
    """A choice by trial may differ between processes, and so may the rounding: a later run must not inherit it."""
    gpu = torch.device("cuda")
    set_precision("bf16", gpu, fastest=True)
    assert torch.backends.cudnn.benchmark
    set_precision("bf16", torch.device("cpu"))
    assert torch.backends.cudnn.benchmark  # a run on a CPU has no say
    set_precision("bf16", gpu)
    assert not torch.backends.cudnn.benchmark


def test_kernels_are_joined_on_a_gpu_only(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **more: asked.append(more) or function)
    for device in ("cpu", "cuda"):
        assert compiled(nn.ReLU(), torch.device(device))(torch.tensor(-1.0)) == 0
    assert asked == [{}, {"options": {"combo_kernels": True}}]


def test_torch_knows_the_option():
    torch.compile(nn.ReLU(), options={"combo_kernels": True})  # raises on names that it does not know
