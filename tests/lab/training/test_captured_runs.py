"""On a GPU: runs whose steps are recorded equal runs whose steps are not, one at a time or several at once."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from steppe.lab.data import Split
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training import run as train
from steppe.lab.training.batches import data_for
from steppe.lab.training.round_robin import train_round_robin

METHODS = ["plain", "sam", "gam:period=2", "looksam:k=3", "ssam:samples=4,every=5"]


@pytest.fixture
def exact():
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def recipe(method, seed=0):
    return Recipe(data="digits", model="digits-mlp", method=method, base="adam", lr=1e-3, batch=64, epochs=2, seed=seed)


def results(run):
    entries = [{k: v for k, v in epoch.items() if k != "seconds"} for epoch in run.record["epochs"]]
    return entries, [t.cpu() for t in run.net.state_dict().values()]


def same(a, b):
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def trained(*runs):
    train_round_robin(runs)
    return [results(run) for run in runs]


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
def test_recorded_steps_change_nothing(method, exact, monkeypatch):
    run = train.Run(recipe(method), device="cuda")
    [recorded] = trained(run)
    assert run._step.how.startswith("replayed")
    monkeypatch.setattr(sys.modules["steppe.graphs.capture"], "WARM_UP", 10**9)  # `graphs.capture` is also a function
    [as_ever] = trained(train.Run(recipe(method), device="cuda"))
    assert same(recorded, as_ever)


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS[:3])
def test_several_at_once_equal_one_at_a_time(method, exact):
    alone = [trained(train.Run(recipe(method, seed), device="cuda"))[0] for seed in range(3)]
    together = trained(*(train.Run(recipe(method, seed), device="cuda") for seed in range(3)))
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize(("model", "expected"), [("cnn-3", torch.channels_last), ("mlp-6", torch.contiguous_format)])
def test_images_have_the_memory_format_of_the_first_convolution(model, expected):
    """In the other format the layers before it take longer; an MLP would copy such images in each look."""
    grey = data_for(recipe("plain"))
    whole = [part.take(torch.arange(len(part))) for part in (grey.train, grey.test)]
    colour = [Split(inputs.expand(-1, 3, -1, -1).contiguous(), targets) for inputs, targets in whole]
    data = replace(grey, train=colour[0], test=colour[1]).to("cuda")
    run = train.Run(replace(recipe("plain"), model=model), device="cuda", data=data)
    training, test = next(iter(run.batches.of_epoch(1))), next(iter(run.batches.of_test()))
    assert training[0].shape[1:] == test[0].shape[1:] == (3, 8, 8)
    assert training[0].is_contiguous(memory_format=expected) and test[0].is_contiguous(memory_format=expected)
