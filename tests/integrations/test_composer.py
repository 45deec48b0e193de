"""Composer: the lines on the page train as Composer does, and as the plain loop does."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import steppe
from helpers.plain_loop import METHODS, assert_same
from integrations.recipes import base, by_hand, importable_torchvision, loader, network, recipe, stand_in

pytestmark = pytest.mark.filterwarnings("ignore")  # Composer's own
importable_torchvision()
stand_in("mcli", sdk=None)  # the client of a cloud
composer = pytest.importorskip("composer")


class Net(composer.ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1])


class Watch(composer.Callback):
    """Notes the random state of the first batch, and the losses."""

    state: Any = None

    def __init__(self) -> None:
        self.losses: list[float] = []

    def before_train_batch(self, state: Any, logger: Any) -> None:
        self.state = torch.get_rng_state() if self.state is None else self.state

    def batch_end(self, state: Any, logger: Any) -> None:
        self.losses.append(float(state.loss))


def train(trainer: Any, method: steppe.Method | None, size: int) -> tuple[Any, Watch]:
    model, watch = Net(), Watch()
    optimizer = base(model) if method is None else steppe.SharpnessAware(base(model), method, model=model)
    trainer(
        model=model, train_dataloader=loader(), optimizers=optimizer, max_duration="1ep", device="cpu", seed=1,
        device_train_microbatch_size=size, callbacks=[watch], progress_bar=False,
    ).fit()  # fmt: skip
    return model.net, watch


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_training_is_composer_s_and_the_plain_loop(micro_batches: int, monkeypatch):
    sharp, size = recipe("Composer", METHODS["SAM"], monkeypatch)["SharpnessAwareTrainer"], 16 // micro_batches
    plain, logged = train(composer.Trainer, None, size)
    same, again = train(sharp, steppe.Plain(), size)
    assert_same(same, plain, tolerance=0)
    assert again.losses == logged.losses
    net, watch = train(sharp, METHODS["SAM"], size)
    assert watch.losses[0] == logged.losses[0] and len(watch.losses) == len(logged.losses)
    assert_same(net, by_hand(METHODS["SAM"], micro_batches, watch.state), tolerance=1e-7)
