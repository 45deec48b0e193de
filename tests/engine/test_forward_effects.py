"""Forward passes that change more than the values of buffers: a step with several looks leaves what one leaves."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import steppe


class Reassigns(nn.Module):
    """Gives its counter other memory."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(1))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.count.item())
        self.count.data = self.count.data + 1
        return self.layer(x)


class Resizes(Reassigns):
    """Has no counter to begin with: a buffer without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(self.count.sum()))
        if not len(self.count):
            self.count.resize_(1).zero_()
        self.count += 1
        return self.layer(x)


class Registers(Reassigns):
    """Makes its counter when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        del self.count

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(1))
        self.seen.append(self.count.item())
        self.count += 1
        return self.layer(x)


@pytest.mark.parametrize("kind", [Reassigns, Resizes, Registers])
@pytest.mark.parametrize("method", [steppe.SAM(), steppe.CRSAM()], ids=["two", "three"])
def test_buffers_in_other_memory_or_places_change_once_a_step(kind, method):
    model, x = kind(), torch.ones(2, 4)
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), method, model=model)
    for step in range(4):
        model.seen.clear()
        opt.step(lambda: model(x).square().sum())
        assert model.seen == [step] * int(method.cost)
        assert model.count.tolist() == [step + 1]


@pytest.mark.parametrize("kind", [Reassigns, Resizes, Registers])
def test_buffers_in_other_memory_are_restored_after_an_exception(kind):
    model, x = kind(), torch.ones(2, 4)
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.SAM(), model=model)

    def closure() -> Tensor:
        loss = model(x).square().sum()
        if len(model.seen) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    assert {name: value.tolist() for name, value in model.named_buffers()} == {
        name: value.tolist() for name, value in kind().named_buffers()
    }


def test_an_expanded_buffer_is_restored():
    model = cast(Any, nn.Linear(4, 3))
    model.register_buffer("scale", torch.full((1,), 2.0).expand(3))
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.SAM(), model=model)

    def closure() -> Tensor:
        model.scale[0].add_(1)
        return (model(torch.ones(2, 4)) * model.scale.clone()).square().sum()

    opt.step(closure)
    assert model.scale.tolist() == [3.0] * 3


class Averages(nn.Module):
    """As contrastive learning does: a second net follows the trained one, in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trained = nn.Linear(4, 3, dtype=torch.float64)
        self.following = nn.Linear(4, 3, dtype=torch.float64).requires_grad_(False)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.following.weight.clone())
        with torch.no_grad():
            for mine, its in zip(self.following.parameters(), self.trained.parameters(), strict=True):
                mine.lerp_(its, 0.1)
        return self.trained(x) + self.following(x)


def test_parameters_that_a_forward_changes_change_once_a_step():
    """From the second step on every look sees what the first one saw: that they change is not known before."""
    model, x = Averages(), torch.ones(2, 4, dtype=torch.float64)
    opt = steppe.SharpnessAware(torch.optim.SGD(model.trained.parameters(), lr=0.01), steppe.CRSAM(), model=model)
    for step in range(4):
        model.seen.clear()
        before, expected = model.following.weight.clone(), model.following.weight.lerp(model.trained.weight, 0.1)
        opt.step(lambda: model(x).square().sum())
        assert torch.equal(model.following.weight, expected)
        assert len(model.seen) == 3 and torch.equal(model.seen[0], before)
        assert step == 0 or all(torch.equal(seen, before) for seen in model.seen)


def test_parameters_that_a_forward_changes_are_restored_after_an_exception():
    model, x = Averages(), torch.ones(2, 4, dtype=torch.float64)
    opt = steppe.SharpnessAware(torch.optim.SGD(model.trained.parameters(), lr=0.01), steppe.SAM(), model=model)
    opt.step(lambda: model(x).square().sum())
    before = model.following.weight.clone()

    def closure() -> Tensor:
        loss = model(x).square().sum()
        if len(model.seen) == 4:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    assert torch.equal(model.following.weight, before)


def test_a_conjugate_buffer_changes_once_a_step():
    """torch marks the memory of the original: `mH` of a Fourier transform's matrix is such a buffer."""

    class Marked(nn.Module):
        conjugate: Tensor
        negative: Tensor

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.register_buffer("conjugate", torch.tensor([[1 + 2j, 3j]]).mH)
            self.register_buffer("negative", torch.tensor([1 + 2j, 3j]).conj().imag)

        def forward(self, x):
            self.conjugate += 1j
            self.negative += 1
            return self.linear(x)

    model = Marked()
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.SAM(), model)
    opt.step(lambda: model(torch.ones(3, 2)).square().mean())
    assert model.conjugate.is_conj() and model.negative.is_neg()
    assert model.conjugate.tolist() == [[1 - 1j], [-2j]]
    assert model.negative.tolist() == [-1, -2]
