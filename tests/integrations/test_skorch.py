"""skorch: the lines on the page train as skorch does, and as the plain loop does."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import pytest
import torch

import steppe
from helpers.plain_loop import METHODS, assert_same
from integrations.recipes import SIZE, by_hand, data, network, recipe

skorch = pytest.importorskip("skorch")


def train(net_class: Any) -> Any:
    net = net_class(
        network(), criterion=torch.nn.CrossEntropyLoss, optimizer=torch.optim.SGD, optimizer__momentum=0.9, lr=0.1,
        max_epochs=1, batch_size=SIZE, train_split=None, verbose=0,
    )  # fmt: skip
    torch.manual_seed(1)
    return net.fit(*data())


def test_training_is_skorch_s_and_the_plain_loop(monkeypatch):
    plain = train(skorch.NeuralNetClassifier)
    same = train(recipe("skorch", steppe.Plain(), monkeypatch)["SharpnessAwareClassifier"])
    assert_same(same.module_, plain.module_, tolerance=0)
    assert same.history[:, "train_loss"] == plain.history[:, "train_loss"]
    net = train(recipe("skorch", METHODS["SAM"], monkeypatch)["SharpnessAwareClassifier"])
    assert_same(net.module_, by_hand(METHODS["SAM"]), tolerance=0)
    assert net.history[0, "batches", 0, "train_loss"] == plain.history[0, "batches", 0, "train_loss"]
