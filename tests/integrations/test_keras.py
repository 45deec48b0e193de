"""Keras on torch: with a plain method a run is Keras's own, logs included; with SAM it is the plain loop."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import steppe
from helpers.plain_loop import METHODS, plain_loop
from integrations.recipes import SIZE, data

os.environ.setdefault("KERAS_BACKEND", "torch")  # read when Keras is imported
keras = pytest.importorskip("keras")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")  # Keras's, on NumPy 2

from steppe.integrations.keras import SharpnessAwareMixin  # noqa: E402


@pytest.fixture(autouse=True)
def _float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def network(base: Any = keras.Sequential, **options: Any) -> Any:
    """BatchNorm, and dropout with a generator of its own."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    hidden = [layers.Dense(16), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.2, seed=3)]
    model = base([layers.Input((64,)), *hidden, layers.Dense(10)])
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9, **options),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def sharp(method: steppe.Method) -> Any:
    return type("Sharp", (SharpnessAwareMixin, keras.Sequential), {"method": method})


def fit(model: Any, epochs: int = 1) -> Any:
    x, y = (part.numpy() for part in data())
    return model.fit(x, y, batch_size=SIZE, epochs=epochs, shuffle=False, verbose=0).history


def test_training_is_keras_s():
    ours, theirs = (network(base, clipnorm=0.5) for base in (sharp(steppe.Plain()), keras.Sequential))
    assert fit(ours, epochs=2) == fit(theirs, epochs=2)
    assert all((mine == its).all() for mine, its in zip(ours.get_weights(), theirs.get_weights(), strict=True))


@pytest.mark.parametrize("name", ["SAM", "LookSAM"])
def test_training_is_the_plain_loop(name: str):
    model, expected = network(sharp(METHODS[name])), network()
    fit(model)
    base = torch.optim.SGD([weight.value for weight in expected.trainable_weights], lr=0.1, momentum=0.9)
    optimizer = steppe.SharpnessAware(base, METHODS[name], model=expected)
    x, y = data()
    windows = [[batch] for batch in zip(x.double().split(SIZE), y.split(SIZE), strict=True)]
    plain_loop(optimizer, windows, lambda batch: F.cross_entropy(expected(batch[0], training=True), batch[1]))
    for mine, its in zip(model.get_weights(), expected.get_weights(), strict=True):
        assert abs(mine - its).max() < 1e-12


def test_a_held_out_batch_is_the_second_one():
    """A loop that ignores which batch a look is on would take the batch that is trained on."""
    method = steppe.GapSAM(period=1, least=0.05)
    x, y = data()
    held_out = (x[:SIZE].numpy(), y[:SIZE].numpy())
    ends = []
    for auxiliary in (held_out, [held_out]):
        model = network(
            type("Net", (SharpnessAwareMixin, keras.Sequential), {"method": method, "auxiliary": auxiliary})
        )
        fit(model)
        ends.append(model.get_weights())
    expected = network()
    base = torch.optim.SGD([weight.value for weight in expected.trainable_weights], lr=0.1, momentum=0.9)
    optimizer = steppe.SharpnessAware(base, method, model=expected)
    windows = [[batch] for batch in zip(x.double().split(SIZE), y.split(SIZE), strict=True)]
    loss = lambda batch: F.cross_entropy(expected(batch[0], training=True), batch[1])  # noqa: E731
    plain_loop(optimizer, windows, loss, held_out=(x[:SIZE].double(), y[:SIZE]))
    for end in ends:
        for mine, its in zip(end, expected.get_weights(), strict=True):
            assert abs(mine - its).max() < 1e-12


def test_what_cannot_be_right_is_refused():
    with pytest.raises(RuntimeError, match="GapSAM looks at a second batch: set auxiliary in the class"):
        fit(network(sharp(steppe.GapSAM())))
    with pytest.raises(RuntimeError, match="of the Keras optimizer are not supported"):
        fit(network(sharp(METHODS["SAM"]), gradient_accumulation_steps=2))
