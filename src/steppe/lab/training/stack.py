"""Runs that differ only in their seed, trained as one: small nets leave most of a GPU idle.

The nets become one `StackedNet`, and one optimizer with members steps them all. Each run keeps its own batches, record
and results, which agree with those of the run alone up to the rounding of other kernels.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...averaging import Averaging
from ...graphs.capture import capture
from ...graphs.replayed import Replayed
from ...optimizer import SharpnessAware
from ...support.files import whole_file
from ..data.dataset import Split
from ..models.stacked import StackedNet, stackable
from ..recipe.recipe import Recipe
from ..records import write_record
from .base_optimizers import make_base
from .batches import StackedBatches
from .checkpoints import read_checkpoint
from .run import PAUSE, Run, average_of, epoch_means

# Nets that are faster stacked: only small ones. Others keep a core of a CPU busy alone; on a GPU, captured steps of
# several runs at once are as fast or faster (benchmarks/many_seeds.py).
_NETS = {"cpu": ("digits-mlp",), "cuda": ("digits-mlp", "cnn-3")}
_BASES = ("sgd", "adam", "adamw")  # they treat every weight alone, so that members do not mix
_PRECISIONS = ("float32", "tf32", "float64")
_TEST_BATCH = 500  # test examples at a time, for every member


def worth_stacking(recipe: Recipe, device: str) -> bool:
    """Whether runs of this recipe that differ only in their seed can be trained as one, and faster so."""
    plain = recipe.augmentation == "none" and not (recipe.mixup or recipe.clip or recipe.compile or recipe.loss)
    known = recipe.base in _BASES and recipe.bias_lr == 1 and recipe.precision in _PRECISIONS
    usual = recipe.task == "classification" and not recipe.metric
    fast = recipe.model in _NETS.get(device.partition(":")[0], ())
    return fast and plain and known and usual and recipe.build_method().stackable


def stacked(runs: Sequence[Run]) -> list[Run | Stack]:
    """The runs, with a stack in the place of those that are faster as one.

    On a CPU a stack of one has the same bits as a larger one: there, results do not depend on how many are trained at
    once, also if one run is left alone. On a GPU a larger stack may run other kernels.
    """
    alone: list[Run | Stack] = []
    alike: dict[Any, list[Run]] = {}
    for run in runs:
        fits = worth_stacking(run.recipe, run.device.type) and stackable(run.net, run.data.input_shape)
        begun = bool(run.record["epochs"])  # its checkpoint is of a run alone
        if fits and not begun and not run.ranks.kind and type(run) is Run and isinstance(run.data.train, Split):
            alike.setdefault((replace(run.recipe, seed=0), id(run.data)), []).append(run)
        else:
            alone.append(run)
    stacks = [Stack(group) if len(group) > 1 or group[0].device.type == "cpu" else group[0] for group in alike.values()]
    return alone + stacks


class Stack:
    """Runs that are trained as one. Like a `Run`, `train` yields after every step."""

    def __init__(self, runs: Sequence[Run]):
        first = runs[0]
        self.runs, self.recipe, self.device = list(runs), first.recipe, first.device
        self.share_of_time = 1.0
        self.net = StackedNet([run.net for run in runs])
        self.batches = StackedBatches([run.batches for run in runs])
        base = make_base(self.recipe, self.net.parameters(), self.net)
        self.optimizer = SharpnessAware(base, first.optimizer.method, model=self.net, members=len(runs))
        self.average = average_of(self.recipe, self.net, self.recipe.epochs * self.batches.steps, first.ranks)
        # By member: sum of losses, number of correct answers, number of steps before the first non-finite loss.
        self._totals = torch.zeros(3, len(runs), dtype=torch.float64, device=self.device)
        self._test_totals = torch.zeros(2, len(runs), dtype=torch.float64, device=self.device)
        me = weakref.proxy(self)  # as in `Run`: a reference cycle would keep GPU memory
        self._step = capture(lambda *batch: me._losses(*batch), self.optimizer)
        self._test = Replayed(lambda *batch: me._count_test(*batch))
        self._saved, self._looks_before = -math.inf, 0  # time of the last checkpoint; looks before this process resumed
        for run in runs:
            run.record["environment"]["stacked"] = len(runs)
        self._resume()

    # One step

    def _losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The losses of a batch, one for each member. The first look of a step adds them to the epoch's totals."""
        logits = self.net(inputs)
        losses = self._each_loss(logits, targets, self.recipe.label_smoothing).mean(1)
        if self._step.look == 0:
            self._totals[0] += losses.detach()
            self._totals[1] += (logits.detach().argmax(2) == targets).sum(1)
            self._totals[2] += self._totals[0].isfinite()  # a sum that is not finite stays so
        return losses

    def _each_loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """The loss of each example: members x batch."""
        flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing)
        return flat.view(targets.shape)

    # All steps

    def train(self) -> Generator[None, None, None]:
        """Train all runs to the end, starting from the checkpoint if there is one; yield after every step."""
        done = max(len(run.record["epochs"]) for run in self.runs)
        for epoch in range(done + 1, self.recipe.epochs + 1):
            if not self._running():
                break
            yield from self._epoch(epoch)
            self._save()
        self.net.write_to([run.net for run in self.runs])
        if self.average is not None:
            averages = [run.average.model for run in self.runs if run.average is not None]
            self.average.model.write_to(averages)
        if any(run.measure is not None for run in self.runs):  # if that is interrupted, each run can be finished alone
            for run in self.runs:
                run.write_checkpoint()
        if self.checkpoint is not None:
            self.checkpoint.unlink(missing_ok=True)
        for run in self.runs:
            run.finish()

    def _running(self) -> list[tuple[int, Run]]:
        """The members that have not diverged, with their numbers."""
        return [(member, run) for member, run in enumerate(self.runs) if run.record["status"] == "running"]

    def _epoch(self, epoch: int) -> Iterator[None]:
        recipe, batches = self.recipe, self.batches
        self._totals.zero_()
        sums: dict[str, Any] = {}
        self.net.train()
        began = time.perf_counter()
        averaging = 0.0  # seconds that a training without an average would not take
        for step, (inputs, targets, auxiliary) in enumerate(batches.of_epoch(epoch)):
            for group in self.optimizer.param_groups:
                group["lr"] = recipe.lr_at((epoch - 1) * batches.steps + step, batches.steps)
            self._step(inputs, targets, auxiliary=auxiliary)
            if self.average is not None:
                averaging -= time.perf_counter()
                self.average.update()
                averaging += time.perf_counter()
            self._add_metrics(sums)
            yield
        losses, right, finite_steps = self._totals.tolist()  # the only synchronisation in an epoch
        seconds = (time.perf_counter() - began - averaging) * self.share_of_time
        test = self.evaluate()
        averaged = None if self.average is None else self._evaluate_average(self.average, epoch)
        means = {name: (total / count).tolist() for name, (total, count) in sums.items()}
        for member, run in self._running():
            before = run.record["epochs"][-1]["seconds"] if run.record["epochs"] else 0.0
            entry: Any = {
                "epoch": epoch, "train_loss": losses[member] / batches.steps,
                "lr": float(self.optimizer.param_groups[0]["lr"]), "seconds": before + seconds,
                "gradients": self._looks_before + self._step.looks,
                "metrics": {name: _of_member(value, member) for name, value in means.items()},
                "train_accuracy": right[member] / (batches.steps * recipe.batch), **test[member],
            }  # fmt: skip
            if averaged is not None:
                entry["averaged"] = averaged[member]
            run.end_epoch(entry, int(finite_steps[member]))

    def _add_metrics(self, sums: dict[str, Any]) -> None:
        """Numbers, one for each member, are averaged over the epoch; of a vector (GAM's γ) the last value is kept."""
        for name, value in self.optimizer.metrics.items():
            if isinstance(value, Tensor):
                epoch_means(sums, name, value.expand(len(self.runs)) if value.dim() == 0 else value, numbers=1)

    # Evaluation

    def evaluate(self) -> list[dict[str, float]]:
        """Loss and accuracy on the test set, for each member."""
        self.net.eval()
        self._test_totals.zero_()
        for inputs, targets in self.batches.of_test(_TEST_BATCH):
            self._test(inputs, targets)
        losses, right = (self._test_totals / len(self.batches.data.test)).tolist()
        return [{"test_loss": loss, "test_accuracy": share} for loss, share in zip(losses, right, strict=True)]

    def _count_test(self, inputs: Tensor, targets: Tensor) -> None:
        with torch.no_grad():
            logits = self.net(self.net.shared(inputs))
            self._test_totals[0] += self._each_loss(logits, self.net.shared(targets)).sum(1)
            self._test_totals[1] += (logits.argmax(2) == targets).sum(1)

    def _evaluate_average(self, average: Averaging, epoch: int) -> list[dict[str, float]] | None:
        if not average.started:
            return None
        average.estimate_batch_norm(self.batches.for_statistics(epoch))
        with average.in_place():
            return self.evaluate()

    # Files

    @property
    def checkpoint(self) -> Path | None:
        """The path of the checkpoint of all members, which is deleted when they have ended."""
        folder = self.runs[0].folder
        return None if folder is None else folder / f"{self.recipe.key}-and-{len(self.runs) - 1}-more.ckpt"

    def _save(self) -> None:
        """Write the records; before them, if it is time, the checkpoint."""
        if self.checkpoint is None:
            return
        if time.monotonic() - self._saved >= PAUSE:
            kept: dict[str, Any] = {
                "record": self.runs[0].record, "records": [run.record for run in self.runs],
                "model": self.net.state_dict(), "optimizer": self.optimizer.state_dict(),
                "average": None if self.average is None else self.average.state_dict(),
            }  # fmt: skip
            with whole_file(self.checkpoint) as path:
                torch.save(kept, path)
            self._saved = time.monotonic()
        for run in self.runs:
            if run.folder is not None:
                write_record(run.record, run.folder)

    def _resume(self) -> None:
        path = self.checkpoint
        saved = None if path is None else read_checkpoint(path, self.runs[0].record, self.device)
        if saved is None or [then["key"] for then in saved["records"]] != [run.recipe.key for run in self.runs]:
            return
        self.net.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(saved["average"])
        for run, then in zip(self.runs, saved["records"], strict=True):
            run.continue_record(then)
        self._looks_before = max(run.record["epochs"][-1]["gradients"] for run in self.runs)


def _of_member(value: Any, member: int) -> Any:
    """A member's part of a metric: its entry of the last dimension."""
    if isinstance(value[0], list):
        return [_of_member(part, member) for part in value]
    number = value[member]
    return number if math.isfinite(number) else float(number)
