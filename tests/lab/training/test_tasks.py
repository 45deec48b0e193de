"""Tasks: losses and metrics against plain arithmetic, in runs too; own losses and metrics."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import nn

from steppe.lab.preparing import recipe_for, try_out
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.records import metric_of, read_record, value_of
from steppe.lab.runner.finished import finished_record
from steppe.lab.runner.jobs import Job, Place
from steppe.lab.runner.local import result_of, train_jobs
from steppe.lab.training.batches import cached_data, data_for
from steppe.lab.training.tasks import TASKS, task_of
from steppe.support.errors import UserError


@pytest.fixture
def mine(monkeypatch):
    x, y = (torch.tensor(array).float() for array in load_diabetes(return_X_y=True))
    x, y = x / x.std(), (y - y.mean()) / y.std()
    module = types.ModuleType("mine_tasks")
    module.__dict__.update(
        numbers=lambda: ((x[:300], y[:300]), (x[300:], y[300:])),
        labels=lambda: ((x[:300], (x[:300, :3] > 0).float()), (x[300:], (x[300:, :3] > 0).float())),
        text=lambda: (torch.arange(200).view(20, 10) % 7, torch.arange(70).view(7, 10) % 7),
        line=lambda shape, outputs: nn.Linear(shape[0], outputs),
        word=lambda: nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)),
        absolute=lambda out, target: (out.flatten() - target).abs().mean(),
        worst=lambda out, target: float((out.flatten() - target).abs().max()),
        broken=lambda out, target: {}["loss"],
        pair=lambda out, target: out.flatten()[:2],
        constant=lambda out, target: torch.tensor(1.0),
        word_only=lambda out, target: "high",
    )
    monkeypatch.setitem(sys.modules, "mine_tasks", module)
    cached_data.cache_clear()
    yield module
    cached_data.cache_clear()


def recipe(**settings) -> Recipe:
    given = {"data": "mine_tasks:numbers", "model": "mine_tasks:line", "batch": 50, "epochs": 2, "task": "regression"}
    return recipe_for({**given, **settings})


def trained(folder: Path, **settings) -> Any:
    """The record of a run, and the weights that it ends with."""
    one = recipe(**settings)
    (record,) = train_jobs([Job(one)], Place(folder, keep_weights=True))
    written = json.loads((folder / f"{one.key}.json").read_text("utf-8"))
    assert written["final"] == record["final"] and finished_record(one, folder) is not None
    return record


def test_regression_is_compared_by_its_root_mean_squared_error(mine, tmp_path):
    record = trained(tmp_path)
    from safetensors.torch import load_file

    weights = load_file(tmp_path / f"{record['key']}.safetensors")
    x, y = mine.numbers()[1]
    error = x.double() @ weights["weight"].double().T.flatten() + weights["bias"].double() - y.double()
    assert metric_of([record]) == "test_rmse"
    assert value_of(record, "test_rmse") == pytest.approx(float((error**2).mean().sqrt()), rel=1e-5)
    assert value_of(record, "test_loss") == pytest.approx(float((error**2).mean()), rel=1e-5)
    assert "test_accuracy" not in record["final"] and result_of(record) == f"rmse {record['final']['test_rmse']:.4g}"
    read = read_record(tmp_path / f"{record['key']}.json")
    assert read is not None and metric_of([read]) == "test_rmse"


def test_labels_are_compared_by_f1(mine, tmp_path):
    record = trained(tmp_path, task="multi-label", data="mine_tasks:labels")
    assert metric_of([record]) == "test_f1↑" and 0 <= record["final"]["test_f1↑"] <= 1
    outputs = torch.tensor([[3.0, -1.0], [0.5, 2.0], [-4.0, -1.0]])
    targets = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])  # two hits, one false alarm, one miss
    f1 = TASKS["multi-label"].of_all
    assert f1 is not None and float(f1(outputs, targets)) == pytest.approx(2 / 3)


def test_language_is_compared_by_perplexity(mine, tmp_path):
    record = trained(tmp_path, task="language", data="mine_tasks:text", model="mine_tasks:word", batch=5)
    assert record["final"]["test_perplexity"] == pytest.approx(math.exp(record["final"]["test_loss"]), rel=1e-9)
    outputs, targets = (
        torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[1, 2, -100]] * 2),
    )
    wanted = F.cross_entropy(outputs[:, :2].reshape(4, 7), targets[:, :2].flatten())
    assert float(TASKS["language"].loss(outputs, targets)) == pytest.approx(float(wanted), rel=1e-6)


def test_own_loss_and_own_metric(mine, tmp_path):
    record = trained(tmp_path, loss="mine_tasks:absolute", metric="mine_tasks:worst:lower")
    assert metric_of([record]) == "test_worst" and record["final"]["test_worst"] > record["final"]["test_loss"]
    larger = task_of(recipe(metric="mine_tasks:worst"))
    assert larger.name == "test_worst↑" and larger.larger_is_better


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "mine_tasks:broken"}, "loss mine_tasks:broken failed with KeyError: 'loss'"),
        ({"loss": "mine_tasks:pair"}, r"must return one number for a batch, not a tensor of shape \(2,\)"),
        ({"metric": "mine_tasks:word_only"}, "metric mine_tasks:word_only must return one number for a batch, not str"),
        ({"loss": "mine_tasks:absent"}, "has no function 'absent'"),
        ({"task": "classification"}, "gives|does not fit|target"),
        ({"mixup": 0.2}, "mixup and label_noise are for classification"),
        ({"task": "guessing"}, "no task 'guessing'"),
        ({"data": "digits", "model": "mlp-3"}, "digits is for classification"),
        ({"model": "mine_tasks:word"}, "does not fit data"),
    ],
)
def test_mistakes_are_reported_before_training(mine, settings, message):
    def begin() -> None:
        one = recipe(**settings)
        try_out(one, data_for(one))

    with pytest.raises(UserError, match=message):
        begin()


def test_a_loss_that_does_not_depend_on_the_model_is_reported(mine, tmp_path):
    with pytest.raises(UserError, match="does not depend on the model"):
        trained(tmp_path, loss="mine_tasks:constant")
