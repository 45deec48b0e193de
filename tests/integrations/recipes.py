"""The lines of docs/integrations/more.md as Python, and what every trainer there is compared with."""

from __future__ import annotations

import contextlib
import re
import sys
import types
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library
from torch.utils.data import DataLoader, TensorDataset

import steppe
from helpers.plain_loop import plain_loop
from helpers.problems import batchnorm_dropout, digits, seeded

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "more.md"
SIZE, COUNT = 16, 112
LIBRARY = Library("torchvision", "FRAGMENT")


def recipe(section: str, method: steppe.Method, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the lines of a section define, with another method than SAM(rho=0.05)."""
    text = PAGE.read_text("utf-8").partition(f"\n## {section}\n")[2]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None, section
    code = found[1]
    lines = [line for line in code.partition("class ")[2].splitlines() if line]
    assert len(lines) <= 10, section
    names: dict[str, Any] = {"__name__": "page"}
    monkeypatch.setattr(steppe, "SAM", lambda rho: method)
    exec(compile(code, f"{PAGE.name}: {section}", "exec"), names)
    return names


def importable_torchvision() -> None:
    """A torchvision that was built for another torch misses the schema of two operators; nothing here uses them."""
    for operator in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def stand_in(name: str, **members: Any) -> None:
    """A module that a trainer imports and does not use here; a large one, or one with many dependencies."""
    if name not in sys.modules:
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module


@contextlib.contextmanager
def quiet() -> Generator[None, None, None]:
    """Around imports of trainers that warn about what they themselves import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def network() -> nn.Module:
    return seeded(batchnorm_dropout, dtype=torch.float32)


def data() -> tuple[Tensor, Tensor]:
    x, y = digits(torch.float32)
    return x[:COUNT], y[:COUNT]


def loader() -> DataLoader:
    return DataLoader(TensorDataset(*data()), batch_size=SIZE)


def base(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_hand(
    method: steppe.Method, micro_batches: int = 1, random_state: Tensor | None = None, **options: Any
) -> nn.Module:
    """One epoch as a plain loop. It starts from a random state, or where a loader leaves it after the seed 1."""
    model = network().train()
    optimizer = steppe.SharpnessAware(base(model), method, model=model)
    if random_state is None:
        torch.manual_seed(1)
        torch.empty((), dtype=torch.int64).random_()  # as a loader does
    else:
        torch.set_rng_state(random_state)
    windows = [
        list(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True))
        for x, y in zip(*(part.split(SIZE) for part in data()), strict=True)
    ]
    plain_loop(optimizer, windows, lambda b: F.cross_entropy(model(b[0]), b[1]) * (len(b[1]) / SIZE), **options)
    return model
