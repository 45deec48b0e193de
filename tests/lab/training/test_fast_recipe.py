"""The recipe of fast-cnn: its schedule, flips, smoothing, learning rates of biases, and steps typed by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from helpers.image_excerpt import cifar10
from steppe.lab.models import build
from steppe.lab.preparing import recipe_for
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training.base_optimizers import make_base
from steppe.lab.training.batches import Batches, generator_for
from steppe.lab.training.run import Run
from steppe.lab.training.tasks import task_of
from steppe.support.errors import UserError

FAST = recipe_for({"data": "cifar-10", "model": "fast-cnn"})
TINY = replace(FAST, batch=32, epochs=2, precision="float64", model_settings={"widths": (8, 8, 8)})


def test_the_model_brings_its_recipe():
    assert (FAST.base, FAST.nesterov, FAST.batch, FAST.schedule) == ("sgd", True, 1024, "onecycle")
    assert pytest.approx(11.5) == FAST.lr * (1 + 1 / (1 - FAST.momentum))  # as the paper counts
    other = recipe_for({"data": "cifar-10", "model": "fast-cnn", "base": "adamw"})
    assert (other.lr, other.momentum, other.nesterov, other.bias_lr) == (1e-3, 0.0, False, 1.0)


def test_the_triangle_rises_over_23_percent_and_falls_to_7_percent():
    recipe = Recipe(lr=2.0, epochs=10, schedule="triangle")
    rates = [recipe.lr_at(step, 10) for step in range(101)]
    assert rates[0] == pytest.approx(0.4) and rates[23] == 2.0 == max(rates) and rates[100] == pytest.approx(0.14)
    rising = [b - a for a, b in pairwise(rates[:24])]
    falling = [b - a for a, b in pairwise(rates[23:])]
    assert rising == pytest.approx([1.6 / 23] * 23) and falling == pytest.approx([-1.86 / 77] * 77)


def test_each_image_is_flipped_in_every_other_epoch_and_half_of_them_in_the_first():
    data = cifar10()
    recipe = replace(TINY, augmentation="alternating-flip", seed=5)
    plain = replace(recipe, augmentation="none")
    flips = []
    for epoch in (1, 2, 3):
        seen, stored = (
            torch.cat([x for x, _, _ in Batches(r, data, frozenset(), torch.device("cpu"), 0, 1).of_epoch(epoch)])
            for r in (recipe, plain)
        )
        turned, same = (seen == stored.flip(-1)).flatten(1).all(1), (seen == stored).flatten(1).all(1)
        assert (turned ^ same).all()
        order = torch.randperm(len(data.train), generator=generator_for(5, "main", "order", epoch))[: len(turned)]
        flips.append(dict(zip(order.tolist(), turned.tolist(), strict=True)))
    first, second, third = flips
    assert all(first[row] is not second[row] for row in first.keys() & second.keys())
    assert all(first[row] is third[row] for row in first.keys() & third.keys())
    assert 0.2 < sum(first.values()) / len(first) < 0.8


def test_label_smoothing_is_torchs_in_training_and_absent_from_the_test():
    task = task_of(Recipe(label_smoothing=0.2))
    logits, targets = torch.tensor([[1.0, 2.0, -1.0], [0.0, 0.5, 3.0]]).double(), torch.tensor([1, 0])
    logs = logits.log_softmax(1)
    smoothed = -(0.8 * logs[[0, 1], targets] + 0.2 * logs.mean(1)).mean()
    torch.testing.assert_close(task.loss(logits, targets), smoothed)
    assert torch.equal(task.total(logits, targets), F.cross_entropy(logits, targets, reduction="sum"))
    mistakes: list[dict[str, Any]] = [{"task": "regression"}, {"loss": "mine:loss"}]
    for wrong in mistakes:
        with pytest.raises(UserError, match="label_smoothing is for the cross-entropy of classification"):
            Recipe(label_smoothing=0.1, **wrong)


def test_biases_of_normalisation_layers_have_their_own_rate_and_the_same_decay():
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4))
    recipe = Recipe(base="sgd", lr=0.5, weight_decay=0.01, bias_lr=64.0)
    rest, biases = make_base(recipe, net.parameters(), net).param_groups
    assert [id(p) for p in biases["params"]] == [id(net[i].bias) for i in (1, 2, 3)] and len(rest["params"]) == 5
    assert (rest["lr"], biases["lr"]) == (0.5, 32.0)
    assert biases["lr"] * biases["weight_decay"] == pytest.approx(rest["lr"] * rest["weight_decay"])
    plain = nn.Linear(2, 2)
    assert len(make_base(recipe, plain.parameters(), plain).param_groups) == 1
    with pytest.raises(UserError, match=r"bias_lr needs .* base muon\+adamw is a function"):
        make_base(replace(recipe, base="muon+adamw"), net.parameters(), net)
    with pytest.raises(UserError, match="bias_lr must be above 0"):
        Recipe(bias_lr=0)


def by_hand(net: nn.Module, recipe: Recipe, batches: list[Any], rho: float) -> dict[str, torch.Tensor]:
    """SAM over Nesterov's SGD, one weight decay and learning rate for each parameter, in plain tensors."""
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    velocity = {name: torch.zeros_like(p) for name, p in weights.items()}
    norm_bias = {name for name, p in weights.items() if name.endswith("bias") and name != "0.bias"}

    def gradient(at, x, y):
        at = {name: p.clone().requires_grad_() for name, p in at.items()}
        logs = functional_call(net, {**at, **buffers}, (x,)).log_softmax(1)
        loss = -(0.8 * logs[torch.arange(len(y)), y] + 0.2 * logs.mean(1)).mean()
        return dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))

    for step, (x, y, _) in enumerate(batches):
        here = gradient(weights, x, y)
        length = torch.sqrt(sum(g.square().sum() for g in here.values()))  # type: ignore[arg-type]
        there = gradient({name: p + rho * here[name] / length for name, p in weights.items()}, x, y)
        lr = recipe.lr_at(step, len(batches))
        for name, p in weights.items():
            factor = 64.0 if name in norm_bias else 1.0
            g = there[name] + recipe.weight_decay / factor * p
            velocity[name] = recipe.momentum * velocity[name] + g
            p -= lr * factor * (g + recipe.momentum * velocity[name])
    return weights


def test_two_steps_of_sam_equal_those_typed_by_hand():
    data = cifar10()
    recipe = replace(TINY, method="sam:rho=0.1", epochs=1, batch=len(data.train) // 2, lr=0.05)
    run = Run(recipe, data=data)
    start = build("fast-cnn", (3, 32, 32), 10, widths=(8, 8, 8)).double()
    start.load_state_dict(run.net.state_dict())
    batches = list(Batches(recipe, data, frozenset(), torch.device("cpu"), 0, 1).of_epoch(1))
    assert len(batches) == 2
    expected = by_hand(start.train(), recipe, batches, rho=0.1)
    for _ in run.train():
        pass
    for name, p in run.net.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], atol=1e-10, rtol=1e-8, msg=name)
