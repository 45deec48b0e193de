"""fastai: the lines on the page train as fastai does, and as the plain loop does."""

# pyright: reportMissingImports=false
from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import steppe
from helpers.plain_loop import METHODS, assert_same
from integrations.recipes import by_hand, importable_torchvision, loader, network, quiet, recipe

importable_torchvision()
pytest.importorskip("fastai")

with quiet():
    import fastai.callback.schedule  # noqa: F401  # adds fit_one_cycle
    from fastai.callback.training import GradientAccumulation, GradientClip
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

pytestmark = pytest.mark.filterwarnings("ignore")  # fastai's own


def train(*callbacks: Any, way: str = "fit", times: int = 1) -> Any:
    optimizer = partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=0.9))
    loaders = DataLoaders(loader(), loader())
    learner = Learner(loaders, network(), F.cross_entropy, opt_func=optimizer, lr=0.1, cbs=list(callbacks))
    torch.manual_seed(1)
    with learner.no_bar(), learner.no_logging():
        for _ in range(times):
            getattr(learner, way)(1)
    return learner


@pytest.mark.parametrize(("way", "times"), [("fit", 2), ("fit_one_cycle", 1)])
def test_training_is_fastai_s(way: str, times: int, monkeypatch):
    callback = recipe("fastai", steppe.Plain(), monkeypatch)["SharpnessAware"]
    same = train(callback(), GradientClip(0.5), way=way, times=times)
    plain = train(GradientClip(0.5), way=way, times=times)
    assert_same(same.model, plain.model, tolerance=0)
    assert same.recorder.values == plain.recorder.values


def test_training_is_the_plain_loop(monkeypatch):
    callback = recipe("fastai", METHODS["SAM"], monkeypatch)["SharpnessAware"]
    learner = train(callback(), GradientClip(0.5))
    assert_same(learner.model, by_hand(METHODS["SAM"], clip=0.5), tolerance=0)
    with pytest.raises(AssertionError, match="use your own loop"):
        train(callback(), GradientAccumulation(32))
