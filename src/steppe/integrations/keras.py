"""Sharpness-aware training with Keras 3 on its torch backend, by a mixin class:

class Net(SharpnessAwareMixin, keras.Sequential):
    method = steppe.SAM(rho=0.05)
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import keras
import torch

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

    Set ``method``, for example ``SAM(rho=0.05)``, in the class.
    """

    method: Method

    def train_step(self, data: Any) -> Any:
        """Keras's training step, with all looks of the method."""
        model: Any = self
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        optimizer = self._sharpness_aware(model)
        first: Any = None
        for look in optimizer.passes():
            predicted = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)
            loss.backward()
            look.report(loss)
            first = first or (loss.detach(), keras.tree.map_structure(torch.Tensor.detach, predicted))
        optimizer.step()
        optimizer.zero_grad()
        loss, predicted = first
        model._loss_tracker.update_state(loss, sample_weight=keras.tree.flatten(x)[0].shape[0])
        return model.compute_metrics(x, y, predicted, sample_weight=weight)

    def _sharpness_aware(self, model: Any) -> SharpnessAware:
        """The `SharpnessAware` optimizer around the model's own. It is made again after another ``compile``."""
        kept = vars(self).get("_steppe")
        if kept is None or kept[0] is not model.optimizer:
            if keras.backend.backend() != "torch":
                raise RuntimeError('SharpnessAwareMixin needs Keras\'s torch backend: set KERAS_BACKEND="torch"')
            if model.optimizer.gradient_accumulation_steps or hasattr(model.optimizer, "inner_optimizer"):
                raise RuntimeError(
                    "gradient accumulation and loss scaling of the Keras optimizer are not supported, because it gets "
                    "one direction per step: use neither, or write your own loop with opt.passes()"
                )
            kept = model.optimizer, SharpnessAware(KerasOptimizer(model), self.method, model=model)
            vars(self)["_steppe"] = kept
        return kept[1]
