"""Small real problems for the tests: scikit-learn's bundled digits and nets that train on them in milliseconds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import steppe

Batch = tuple[Tensor, Tensor]


@functools.cache
def _images_and_labels() -> Batch:
    """Read once: a test that trains three times would spend most of its time with reading."""
    images, labels = load_digits(return_X_y=True)
    return torch.as_tensor(images), torch.as_tensor(labels)


def digits(dtype: torch.dtype = torch.float64) -> Batch:
    images, labels = _images_and_labels()
    return images.to(dtype) / 16, labels.clone()


def batches(size: int, dtype: torch.dtype = torch.float64) -> Iterator[Batch]:
    images, labels = digits(dtype)
    for i in range(0, len(images) - size + 1, size):
        yield images[i : i + size], labels[i : i + size]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.Softplus(), nn.Linear(16, 10))


def batchnorm_dropout() -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm1d(64), nn.Linear(64, 16), nn.Softplus(), nn.Dropout(0.3), nn.BatchNorm1d(16, momentum=None),
        nn.Linear(16, 10),
    )  # fmt: skip


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Softplus(), nn.Flatten(),
        nn.Linear(36, 10),
    )  # fmt: skip


def seeded(build: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """What `build` makes, from a seed. (`Any`, since tests use the parts that each net has.)"""
    torch.manual_seed(seed)
    return build().to(dtype)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass
class Data:
    """One step's data: the main batch and the auxiliary one."""

    main: Batch
    auxiliary: Batch

    def of(self, batch: str, sample: int | None) -> Batch:
        if batch == "auxiliary":
            return self.auxiliary
        if batch == "sample":
            assert sample is not None
            return self.main[0][sample : sample + 1], self.main[1][sample : sample + 1]
        return self.main

    def closures(self, model: nn.Module, backward: bool = False) -> dict[str, Any]:
        def closure(batch: str, sample: int | None = None) -> Tensor:
            value = loss(model, self.of(batch, sample))
            if backward:
                value.backward()
            return value

        return {
            "closure": lambda: closure("main"),
            "auxiliary": lambda: closure("auxiliary"),
            "sample": lambda i: closure("sample", i),
        }


def steps(count: int, size: int = 24, dtype: torch.dtype = torch.float64) -> list[Data]:
    """Data of several steps."""
    stream = batches(size, dtype)
    return [Data(next(stream), next(stream)) for _ in range(count)]


def flat(tensors) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).clone()


def weights(model: nn.Module) -> Tensor:
    return flat(model.parameters())


def everything(model: nn.Module) -> list[Tensor]:
    """All that a step may change in a model, and the random state."""
    return [t.detach().clone() for t in model.state_dict().values()] + [torch.get_rng_state()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def by_closure(opt: steppe.SharpnessAware, model: nn.Module, data: Data) -> Tensor | None:
    return opt.step(**data.closures(model))


def by_backward_closure(opt: steppe.SharpnessAware, model: nn.Module, data: Data) -> Tensor | None:
    return opt.step(**data.closures(model, backward=True))


def by_passes(opt: steppe.SharpnessAware, model: nn.Module, data: Data) -> None:
    for look in opt.passes():
        value = loss(model, data.of(look.batch, look.sample))
        value.backward()
        look.report(value)
    opt.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def all_variants() -> list[steppe.Method]:
    """Every method of the package, in every setting it declares."""
    classes = [c for c in steppe.Method.registry.values() if c.__module__.startswith("steppe.methods")]
    return [variant for cls in classes for variant in cls.variants()]


def each_variant() -> pytest.MarkDecorator:
    """A test for every method in every setting it declares. The settings after the first are for CI (slow)."""
    variants = all_variants()
    params = [
        pytest.param(method, id=name, marks=() if name.endswith("-0") else pytest.mark.slow)
        for method, name in zip(variants, ids(variants), strict=True)
    ]
    return pytest.mark.parametrize("method", params)


def each_method(unmarked: tuple[str, ...]) -> pytest.MarkDecorator:
    """A test for every method in the first setting that it declares. All but the unmarked ones are for CI (slow)."""
    variants = all_variants()
    firsts = [method for method, name in zip(variants, ids(variants), strict=True) if name.endswith("-0")]
    marked = (() if method.name in unmarked else pytest.mark.slow for method in firsts)
    params = [pytest.param(method, id=method.name, marks=mark) for method, mark in zip(firsts, marked, strict=True)]
    return pytest.mark.parametrize("method", params)


def ids(variants: list[steppe.Method]) -> list[str]:
    """Names that are the same in every process, unlike a repr with a function in it."""
    return [f"{m.name}-{sum(other.name == m.name for other in variants[:i])}" for i, m in enumerate(variants)]
