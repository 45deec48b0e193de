"""Regimes: data, model, base optimizer, length. All of a regime's examples are on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from steppe.lab.data import load, prepare
from steppe.lab.models import build


@dataclass(frozen=True)
class Regime:
    """Trainings of the protocol's table. With a constant learning rate a long training holds the shorter ones: `marks`
    are the epochs after which it is evaluated as if it ended there. `first` limits the training examples, `hold` is
    how many of them are held out."""

    name: str
    data: str
    model: str
    noise: float
    base: str
    lr: float
    batch: int
    marks: tuple[int, ...]
    hold: int
    first: int | None = None

    @property
    def shared(self) -> tuple:
        """What members of one population have in common."""
        return (self.data, self.model, self.base, self.lr, self.batch, self.marks, self.hold, self.first)


def _digits() -> list[Regime]:
    made = []
    for base, lr in (("sgd", 0.1), ("adam", 1e-3)):
        shared = ("digits", "digits-mlp")
        for label, noise in (("clean", 0.0), ("40", 0.4), ("60", 0.6)):
            made.append(Regime(f"digits-{label}-{base}", *shared, noise, base, lr, 64, (20, 40, 120), 64))
        made.append(Regime(f"digits-tenth-{base}", *shared, 0.0, base, lr, 32, (20, 40, 120), 16, 143))
    return made


REGIMES = {
    regime.name: regime
    for regime in (
        *_digits(),
        Regime("mnist-clean", "mnist", "cnn-3", 0.0, "adam", 1e-3, 100, (30,), 100, 5000),
        Regime("mnist-40", "mnist", "cnn-3", 0.4, "adam", 1e-3, 100, (30,), 100, 5000),
        Regime("cifar-clean", "cifar-10", "cnn-5", 0.0, "adam", 1e-3, 100, (20,), 500),
        Regime("cifar-40", "cifar-10", "cnn-5", 0.4, "adam", 1e-3, 100, (20,), 500),
        Regime("mlp3-clean", "cifar-10", "mlp-3", 0.0, "adam", 1e-3, 100, (20,), 500),
        Regime("mlp3-40", "cifar-10", "mlp-3", 0.4, "adam", 1e-3, 100, (20,), 500),
    )
}


@dataclass(frozen=True)
class Examples:
    """A regime's examples as numbers, on the device: images as height x width x channels, or flat for an MLP."""

    train: Tensor
    targets: Tensor
    test: Tensor
    test_targets: Tensor
    shape: tuple[int, ...]
    classes: int


@lru_cache(maxsize=2)
def examples(name: str, model: str, first: int | None, root: Path | None, device: str) -> Examples:
    """The examples, with right labels."""
    data = load(name, root)
    parts = []
    for split, limit in ((data.train, first), (data.test, None)):
        inputs = prepare(split.inputs[:limit].to(device), data)
        flat = "mlp" in model
        parts += [inputs.flatten(1) if flat else inputs.permute(0, 2, 3, 1).contiguous()]
        parts += [split.targets[:limit].to(device)]
    return Examples(*parts, data.input_shape, data.classes)  # type: ignore[arg-type]


def noisy(targets: Tensor, share: float, classes: int, seed: int) -> Tensor:
    """Exactly this share of the labels moved to another class, another draw for each seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    chosen = torch.randperm(len(targets), generator=generator)[: round(share * len(targets))]
    step = torch.randint(1, classes, (len(chosen),), generator=generator)
    new = targets.cpu().clone()
    new[chosen] = (new[chosen] + step) % classes
    return new.to(targets.device)


def initial_weights(model: str, shape: tuple[int, ...], classes: int, seed: int) -> Tensor:
    """The model's weights as a row."""
    torch.manual_seed(seed)
    made = build(model, shape, classes)
    return torch.cat([p.detach().flatten() for p in made.parameters()])
