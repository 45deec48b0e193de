"""Real images for the lab's tests: see images.md."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from steppe.lab.data import DataSet, Readable, Split


@cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).with_name("images.npz")) as file:
        return {key: file[key] for key in file}


def images(name: str, count: int | None = None) -> Tensor:
    """Bytes, N x C x H x W; name is mnist, fashion or cifar10."""
    x = torch.from_numpy(arrays()[name][:count].copy())
    return x if x.dim() == 4 else x.unsqueeze(1)


def labels(name: str, count: int | None = None) -> Tensor:
    return torch.from_numpy(arrays()[f"{name}_labels"][:count].astype(np.int64))


def cifar10(train: int = 100) -> DataSet:
    """A small CIFAR-10: the first images train, the others test."""
    x, y = images("cifar10"), labels("cifar10")
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return DataSet("cifar-10", Split(x[:train], y[:train]), Split(x[train:], y[train:]), 10, mean, std)


def inputs_of(split: Readable) -> Tensor:
    """The inputs of a split that is in memory."""
    assert isinstance(split, Split)
    return split.inputs
