"""Tasks: the loss that is trained, and the metric by which methods are compared.

| task | targets | loss | metric |
|---|---|---|---|
| classification | a class each | cross-entropy | accuracy |
| regression | numbers | mean squared error | root mean squared error; lower is better |
| multi-label | 0 or 1 for each label | binary cross-entropy of logits | F1 over all labels, at a probability of 0.5 |
| language | the next tokens | cross-entropy of tokens | perplexity; lower is better |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...support.errors import UserError, describe, user_function
from ..recipe.own_code import metric_name
from ..recipe.recipe import Recipe

Function = Callable[[Any, Tensor], Any]
IGNORED = -100  # a target of cross-entropy that does not count


@dataclass(frozen=True)
class Task:
    """Loss and metric. The metric is a count over examples, or a function of the loss, or of all test outputs."""

    loss: Function  # (outputs, targets) -> mean loss of a batch
    metric: str  # "accuracy"
    larger_is_better: bool
    count: Function | None = None  # the number of correct answers in a batch
    from_loss: Callable[[float], float] | None = None
    of_all: Function | None = None  # (all outputs, all targets) -> the metric
    summed: Function | None = None  # the sum of the losses of a batch; by default the mean times the examples

    @property
    def name(self) -> str:
        """The metric's name in records. An arrow marks a metric of which larger is better, other than an accuracy."""
        arrow = "↑" if self.larger_is_better and not self.metric.endswith("accuracy") else ""
        return f"test_{self.metric}{arrow}"

    def total(self, outputs: Any, targets: Tensor) -> Tensor:
        """The sum of the losses of a batch, over its examples."""
        if self.summed is not None:
            return self.summed(outputs, targets)
        return self.loss(outputs, targets) * len(targets)


def right_answers(outputs: Tensor, targets: Tensor) -> Tensor:
    """The number of correct answers; with mixed targets, the class with the largest weight counts."""
    return (outputs.argmax(1) == (targets.argmax(1) if targets.dim() > 1 else targets)).sum()


def _like(outputs: Tensor, targets: Tensor) -> Tensor:
    """The outputs in the shape of the targets: N x 1 and N are the same numbers."""
    return outputs.reshape(targets.shape) if outputs.numel() == targets.numel() else outputs


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(_like(outputs, targets), targets.to(outputs.dtype))


def _root_mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(_like(outputs, targets).double(), targets.double()).sqrt()


def _binary(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(_like(outputs, targets), targets.to(outputs.dtype))


def _f1(outputs: Tensor, targets: Tensor) -> Tensor:
    predicted, true = _like(outputs, targets) > 0, targets > 0.5
    both = (predicted & true).sum()
    return 2 * both / (predicted.sum() + true.sum()).clamp(min=1)


def _tokens(outputs: Any, targets: Tensor) -> Tensor:
    logits = getattr(outputs, "logits", outputs)  # transformers' models return an object
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # exp would overflow


TASKS = {
    "classification": Task(
        F.cross_entropy, "accuracy", True, count=right_answers, summed=partial(F.cross_entropy, reduction="sum")
    ),
    "regression": Task(_squared, "rmse", False, of_all=_root_mean_square),
    "multi-label": Task(_binary, "f1", True, of_all=_f1),
    "language": Task(_tokens, "perplexity", False, from_loss=_perplexity),
}


def task_of(recipe: Recipe) -> Task:
    """The task of a recipe, with the user's own loss and metric."""
    task = TASKS[recipe.task]
    if recipe.label_smoothing:
        task = replace(task, loss=partial(F.cross_entropy, label_smoothing=recipe.label_smoothing))
    if recipe.loss:
        own = _own("loss", recipe.loss)
        task = replace(task, loss=own, summed=None)
        if task.from_loss is not None and not recipe.metric:  # a perplexity is made from the task's loss only
            task = replace(task, metric="loss", from_loss=lambda loss: loss)
    if recipe.metric:
        name = metric_name(recipe.metric)
        larger = not recipe.metric.endswith(":lower")
        short = name.rpartition(":")[2].rpartition(".")[2].strip("<>")
        return replace(
            task, metric=short, larger_is_better=larger, count=None, from_loss=None, of_all=_own("metric", name)
        )
    return task


def _own(kind: str, name: str) -> Function:
    """The user's own loss or metric. An exception in it, or a wrong result, becomes a `UserError`."""
    function = user_function(f"--{kind}", name)

    def called(outputs: Any, targets: Tensor) -> Tensor:
        try:
            found = function(outputs, targets)
        except Exception as error:
            raise UserError(f"{kind} {name} failed with {describe(error)}") from error
        if kind == "metric" and isinstance(found, (int, float)):
            return torch.tensor(float(found), dtype=torch.float64)
        if not isinstance(found, Tensor) and hasattr(found, "item"):  # a numpy scalar
            return torch.tensor(float(found.item()), dtype=torch.float64)
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise UserError(f"{kind} {name} must return one number for a batch, not {what}")
        if kind == "loss" and torch.is_grad_enabled() and not found.requires_grad:
            raise UserError(f"loss {name} does not depend on the model: compute it from the outputs, with torch")
        return found.reshape(())

    return called
