"""Sharpness-aware training with Keras 3 on its torch backend, by a mixin class:

class Net(SharpnessAwareMixin, keras.Sequential):
    method = steppe.SAM(rho=0.05)
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import torch

from ..auxiliary import held_out_batches
from ..method import Method
from ..optimizer import SharpnessAware


class KerasOptimizer(torch.optim.Optimizer):
    """The optimizer that a Keras model was compiled with, as a `torch.optim.Optimizer`."""

    def __init__(self, model: Any):
        self.model = model
        super().__init__([weight.value for weight in model.trainable_weights], {})

    def step(self, closure: Any = None) -> Any:
        """Let the Keras optimizer step along ``p.grad``."""
        weights = self.model.trainable_weights
        with torch.no_grad():
            self.model.optimizer.apply([weight.value.grad for weight in weights], weights)


class SharpnessAwareMixin:
    """A mixin that makes the ``fit`` of a Keras model sharpness-aware. It must be the first base class.

    The optimizer of ``compile`` is the base: its schedule, clipping and saving work as usual, and it steps once per
    batch, along the method's direction. The loss and the metrics are those of the first look.

    Set ``method``, for example ``SAM(rho=0.05)``, in the class; for a method that looks at a second batch, also
    ``auxiliary``: a batch ``(x, y)`` that is held out of training, or a loader of such batches.
    """

    method: Method
    auxiliary: Any = None

    def train_step(self, data: Any) -> Any:
        """Keras's training step, with all looks of the method."""
        model: Any = self
        optimizer, held_out = self._sharpness_aware(model)
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        first, second = None, None
        for look in optimizer.passes():
            if look.batch == "main":
                batch = x, y, weight
            else:
                batch = second = second or _unpacked(next(held_out))  # the same in all looks of the step
            predicted = model(batch[0], training=True)
            loss = model.compute_loss(x=batch[0], y=batch[1], y_pred=predicted, sample_weight=batch[2])
            loss.backward()
            look.report(loss)
            first = first or (loss.detach(), keras.tree.map_structure(torch.Tensor.detach, predicted))
        optimizer.step()
        optimizer.zero_grad()
        assert first is not None
        loss, predicted = first
        model._loss_tracker.update_state(loss, sample_weight=keras.tree.flatten(x)[0].shape[0])
        return model.compute_metrics(x, y, predicted, sample_weight=weight)

    def _sharpness_aware(self, model: Any) -> tuple[SharpnessAware, Iterator[Any]]:
        """The `SharpnessAware` optimizer around the model's own, and held-out batches.

        Both are made again after another ``compile``.
        """
        kept = vars(self).get("_steppe")
        if kept is None or kept[0] is not model.optimizer:
            if keras.backend.backend() != "torch":
                raise RuntimeError('SharpnessAwareMixin needs Keras\'s torch backend: set KERAS_BACKEND="torch"')
            if model.optimizer.gradient_accumulation_steps or hasattr(model.optimizer, "inner_optimizer"):
                raise RuntimeError(
                    "gradient accumulation and loss scaling of the Keras optimizer are not supported, because it gets "
                    "one direction per step: use neither, or write your own loop with opt.passes()"
                )
            if "auxiliary" in self.method.needs and self.auxiliary is None:
                raise RuntimeError(
                    f"{self.method.name} looks at a second batch: set auxiliary in the class, to a batch (x, y) that "
                    "is held out of training, or to a loader of such batches"
                )
            optimizer = SharpnessAware(KerasOptimizer(model), self.method, model=model)
            kept = model.optimizer, optimizer, held_out_batches(self.auxiliary)
            vars(self)["_steppe"] = kept
        return kept[1:]


def _unpacked(batch: Any) -> Any:
    """Inputs, targets and weights of a batch, as tensors on Keras's device."""
    batch = keras.tree.map_structure(keras.ops.convert_to_tensor, batch)
    return keras.utils.unpack_x_y_sample_weight(batch)
