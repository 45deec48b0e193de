"""Small nets on real data, and their dense Hessians computed another way."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn.attention import SDPBackend, sdpa_kernel

from steppe.curvature import Estimate

IGNORED = -100
SEEDS = range(90_000, 90_200)  # not those with which the constants of the estimators were chosen
NAMES = [
    "mlp", "mlp ragged", "mlp summed", "class weights", "squared error", "cnn, running statistics",
    "cnn, batch statistics", "attention", "tied", "unused", "tokens, some ignored",
]  # fmt: skip


def some_slow(*fast: str) -> pytest.MarkDecorator:
    """Parametrises `index` over all problems. All but the named ones are marked slow."""
    assert set(fast) <= set(NAMES)
    marks = {name: () if name in fast else pytest.mark.slow for name in NAMES}
    return pytest.mark.parametrize("index", [pytest.param(i, id=n, marks=marks[n]) for i, n in enumerate(NAMES)])


def symmetric(values: Tensor, seed: int = 0) -> Tensor:
    """A matrix with given eigenvalues and random eigenvectors."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return (q * values) @ q.T


def calibration(estimates: list[Estimate], truth: float) -> tuple[float, float]:
    """How often the truth is in the 95% interval, and how often it is within three standard errors."""
    covered = sum(e.low <= truth <= e.high for e in estimates)
    near = sum(abs(e.value - truth) <= 3 * e.standard_error for e in estimates)
    return covered / len(estimates), near / len(estimates)


_pixels_and_labels = functools.cache(functools.partial(load_digits, return_X_y=True))  # reading takes 20 ms


def digits(count: int, side: int = 8) -> tuple[Tensor, Tensor]:
    """The first digits of scikit-learn's set, as float64 images of side 8 or pooled to 4."""
    pixels, labels = _pixels_and_labels()
    images = torch.tensor(pixels[:count] / 16.0).reshape(-1, 1, 8, 8)
    return F.avg_pool2d(images, 8 // side), torch.tensor(labels[:count])


@dataclass(frozen=True)
class Problem:
    name: str
    model: Any
    loss_fn: Callable[..., Tensor]
    batches: list[Any]
    mode: str = "eval"
    total: Callable[[nn.Module, dict[str, Tensor]], Tensor] | None = (
        None  # the loss over all data, where batching matters
    )

    def dense(self) -> Tensor:
        """The Hessian of the loss over all data at once, by torch.func: nothing of the library is used."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        params = dict(self.model.named_parameters())
        sizes = [params[name].numel() for name in names]
        flat = torch.cat([params[name].detach().reshape(-1) for name in names])

        def loss(flat: Tensor) -> Tensor:
            pieces = zip(names, flat.split(sizes), strict=True)
            replaced = {name: piece.reshape(params[name].shape) for name, piece in pieces}
            if self.total is not None:
                return self.total(self.model, replaced)
            x, y = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
            return self.loss_fn(functional_call(self.model, replaced, (x,)), y)

        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.func's own use of torch.jit
            return hessian(loss)(flat)


class Attention(nn.Module):
    """Rows of the image as tokens, one head of attention, mean over tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.query_key_value = nn.Linear(6, 18)
        self.head = nn.Linear(6, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images.squeeze(1))
        query, key, value = self.query_key_value(tokens).chunk(3, dim=-1)
        return self.head((tokens + F.scaled_dot_product_attention(query, key, value)).mean(1))


class Tied(nn.Module):
    """An autoencoder-like stack that uses one weight twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.second = nn.Linear(8, 16)
        self.second.weight = nn.Parameter(torch.zeros(16, 8))
        self.again = nn.Linear(16, 8)
        self.again.weight = self.first.weight
        self.head = nn.Linear(8, 10)
        nn.init.normal_(self.second.weight, std=0.3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(images.flatten(1)))))
        return self.head(torch.tanh(self.again(hidden)))


class Unused(nn.Module):
    """A parameter that the loss never sees, and one that it sees linearly."""

    def __init__(self):
        super().__init__()
        self.never = nn.Parameter(torch.ones(5))
        self.body = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images.flatten(1))


class Tokens(nn.Module):
    """Predicts the next pixel level of a row: one loss per token, some of them ignored."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens).cumsum(1))))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.Softplus(), nn.Linear(width, 10))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Softplus(), nn.Flatten(), nn.Linear(4, 10),
    )  # fmt: skip


def _settled(model: nn.Module, images: Tensor) -> nn.Module:
    """Give BatchNorm running statistics that differ from those of any one batch."""
    model.train()
    for part in images.split(16):
        model(part)
    return model


def trained(
    model: nn.Module, loss_fn: Callable[..., Tensor], data: tuple[Tensor, Tensor], steps: int = 150
) -> nn.Module:
    """Some steps of gradient descent with momentum, all data at once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model(data[0]), data[1]).backward()
        optimizer.step()
    return model


def ragged(data: tuple[Tensor, Tensor], *sizes: int) -> list[tuple[Tensor, Tensor]]:
    x, y = data
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def problems() -> list[Problem]:
    """Eleven problems, all float64, all on digits, most of them on ragged batches."""
    torch.manual_seed(0)
    small = digits(60, side=4)
    onehot = (small[0], F.one_hot(small[1], 10).double())
    levels = (digits(12)[0].reshape(-1, 8) * 4.99).long()[:40]
    targets = levels[:, 1:].clone()
    targets[::3, 2:] = IGNORED
    sequences = [(levels[:7, :-1], targets[:7]), (levels[7:40, :-1], targets[7:40])]
    batchwise = ragged(small, 20, 40)
    weights = torch.linspace(0.5, 2, 10, dtype=torch.float64)

    def batchnorm_total(model: nn.Module, replaced: dict[str, Tensor]) -> Tensor:
        losses = [
            len(y) * F.cross_entropy(functional_call(_WrittenOut(model), _prefixed(replaced), (x,)), y)
            for x, y in batchwise
        ]
        return sum(losses) / 60  # type: ignore[return-value]

    net = mlp().double()
    found = [
        Problem("mlp", trained(net, F.cross_entropy, small), F.cross_entropy, [small]),
        Problem("mlp ragged", mlp(5).double(), F.cross_entropy, ragged(small, 7, 30, 23)),
        Problem("mlp summed", mlp(5).double(), nn.CrossEntropyLoss(reduction="sum"), ragged(small, 7, 30, 23)),
        Problem("class weights", mlp(4).double(), nn.CrossEntropyLoss(weight=weights), ragged(small, 7, 30, 23)),
        Problem("squared error", mlp(5).double(), F.mse_loss, ragged(onehot, 11, 49)),
        Problem("cnn, running statistics", _settled(cnn().double(), small[0]), F.cross_entropy, batchwise),
        Problem("cnn, batch statistics", _settled(cnn().double(), small[0]), F.cross_entropy, batchwise,
                mode="batch", total=batchnorm_total),
        Problem("attention", Attention().double(), F.cross_entropy, ragged(small, 13, 47)),
        Problem("tied", Tied().double(), F.cross_entropy, ragged(small, 30, 30)),
        Problem("unused", Unused().double(), F.cross_entropy, ragged(small, 59, 1)),
        Problem("tokens, some ignored", Tokens().double(), token_loss, sequences),
    ]  # fmt: skip
    assert [problem.name for problem in found] == NAMES
    for problem in found:
        if problem.mode == "eval":
            problem.model.eval()
    return found


class _WrittenOut(nn.Module):
    """A sequential net with BatchNorm as its formula: torch.func's Hessian of BatchNorm in train mode is wrong."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.model.children():
            if isinstance(layer, nn.BatchNorm2d):
                centred = images - images.mean((0, 2, 3), keepdim=True)
                variance = centred.square().mean((0, 2, 3), keepdim=True)
                weight, bias = (t.reshape(1, -1, 1, 1) for t in (layer.weight, layer.bias))
                images = centred / (variance + layer.eps).sqrt() * weight + bias
            else:
                images = layer(images)
        return images


def _prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"model." + name: tensor for name, tensor in tensors.items()}
