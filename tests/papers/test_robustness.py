"""What is measured of a trained net beyond its accuracy: rounded weights, calibration, changed images."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steppe.lab.data import load
from steppe.lab.data.dataset import Split
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training.run import Run
from steppe.papers.robustness import (
    POINTWISE,
    Robustness,
    calibration_error,
    changed,
    kinds_for,
    rounded,
    rounded_tensor,
)


def test_four_bits_by_hand():
    """One scale for each row: 7/7 = 1 and 3.5/7 = 0.5."""
    weight = torch.tensor([[7.0, 3.4, -0.6, -6.6], [-3.5, 0.2, 0.3, 1.24]])
    by_hand = torch.tensor([[7.0, 3.0, -1.0, -7.0], [-3.5, 0.0, 0.5, 1.0]])
    assert torch.equal(rounded_tensor(weight, 4), by_hand)
    assert torch.equal(rounded_tensor(torch.zeros(2, 3)), torch.zeros(2, 3))
    kernel = weight.view(2, 2, 1, 2)
    assert torch.equal(rounded_tensor(kernel), by_hand.view(2, 2, 1, 2))


def test_two_bits_leave_three_values():
    weight = torch.tensor([[0.9, 0.46, 0.44, -1.0]])
    assert torch.equal(rounded_tensor(weight, 2), torch.tensor([[1.0, 0.0, 0.0, -1.0]]))


def test_weights_are_rounded_in_between_only_and_biases_never():
    net = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    before = [p.detach().clone() for p in net.parameters()]
    with contextlib.suppress(KeyError), rounded(net, 4):
        for p, old in zip(net.parameters(), before, strict=True):
            assert torch.equal(p, rounded_tensor(old) if p.dim() > 1 else old)
        raise KeyError  # an evaluation that fails must not leave rounded weights
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("norm", [nn.LayerNorm([2, 2]), nn.RMSNorm([2, 2])], ids=["layer", "rms"])
def test_normalisation_layers_are_not_rounded_where_they_hold_matrices(norm):
    net = nn.Sequential(nn.Conv2d(1, 2, 2), norm)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.rand(p.shape) + 0.5)
    before = [p.detach().clone() for p in net.parameters()]
    with rounded(net, 2):
        same = [torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True)]
    assert same == [False] + [True] * (len(before) - 1)


def test_calibration_error_by_hand():
    """In ten bins: .95 (right) and .91 (wrong) share one, |1 − 1.86|/4; .74 (right) and .72 (wrong), |1 − 1.46|/4."""
    confidences = torch.tensor([0.95, 0.91, 0.74, 0.72], dtype=torch.float64)
    logits = torch.stack([confidences.log(), (1 - confidences).log()], 1)
    targets = torch.tensor([0, 1, 0, 1])
    assert calibration_error(logits, targets, bins=10) == pytest.approx((0.86 + 0.46) / 4, abs=1e-12)


def test_confident_and_right_is_calibrated_and_confident_and_wrong_is_not():
    logits = torch.tensor([[1000.0, 0.0], [0.0, 1000.0]])
    assert calibration_error(logits, torch.tensor([0, 1])) == 0.0
    assert calibration_error(logits, torch.tensor([1, 0])) == 1.0
    assert calibration_error(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])) == 0.0  # half right at one half


def test_corrupted_digits_stay_grey_images():
    data: Any = load("digits")
    assert kinds_for(data) == (POINTWISE, 5)
    for kind in POINTWISE:
        made = changed(data, kind, 5, 20)
        assert made.shape == (20, 1, 8, 8) and float(made.min()) >= 0 and float(made.max()) <= 1
        assert changed(data, kind, 5, 20) is made  # made once for all runs
    clean = data.test.inputs[:20].float() / 16
    noise = changed(data, "gaussian-noise", 5, 20) - clean
    inside = (clean > 0.35) & (clean < 0.65)  # where nothing is cut off; σ is 0.1
    assert float(noise[inside].std()) == pytest.approx(0.1, abs=4 * 0.1 / math.sqrt(2 * int(inside.sum())))


def grey(images: Tensor, peak: int = 255) -> Any:
    return SimpleNamespace(test=Split(images, torch.zeros(len(images), dtype=torch.long)), peak=peak)


def test_images_at_the_address_of_others_are_corrupted_themselves():
    """Without the cache keeping the images, the allocator gives their address to the next ones of the same size."""
    for value in range(40, 240, 20):
        made = changed(grey(torch.full((100, 3, 16, 16), value, dtype=torch.uint8)), "gaussian-noise", 1, 100)
        assert float(made.mean()) == pytest.approx(value / 255, abs=0.01)


def test_the_range_of_the_values_decides_what_is_corrupted():
    images = torch.full((20, 3, 8, 8), 10, dtype=torch.uint8)
    dark, bright = (changed(grey(images, peak), "gaussian-noise", 1, 20) for peak in (255, 16))
    assert float(dark.mean()) < 0.1 and float(bright.mean()) == pytest.approx(10 / 16, abs=0.01)


def test_a_run_is_measured_at_its_end():
    recipe = Recipe(base="sgd", lr=0.1, batch=64, epochs=1)
    run = Run(recipe, measure=Robustness(images=50))
    for _ in run.train():
        pass
    found = run.record["curvature"]
    assert found is not None and set(found) == {"rounded", "calibration_error", "corrupted"}
    assert found["corrupted"] == {"value": found["corrupted"]["value"], "kinds": 4, "severity": 5, "images": 50}
    x, y = next(iter(run.batches.of_test()))
    plain = run.net(x)
    assert found["calibration_error"]["value"] == pytest.approx(calibration_error(plain.detach(), y))
    with rounded(run.net), torch.no_grad():
        accuracy = float((run.net(x).argmax(1) == y).double().mean())
    assert found["rounded"]["value"] == pytest.approx(accuracy, abs=1e-12)
    assert torch.equal(run.net(x), plain)
