"""The training loop: any method, any base, any model.

A `Run` trains one recipe. Its `train` yields after every step of the optimizer, so that several runs can alternate in
one process (`round_robin.train_round_robin`), each on its own CUDA stream. It writes its record after every epoch and
a checkpoint every few seconds. A stopped run resumes from its checkpoint and ends with bit-identical results.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...averaging import Averaging, averaging
from ...graphs.capture import capture
from ...graphs.replayed import Replayed
from ...method import Method
from ...methods.late import for_steps
from ...optimizer import SharpnessAware
from ...support.devices import default_generator
from ...support.errors import UserError, describe
from ...support.files import whole_file
from ..data import DataSet, prepare
from ..models import build
from ..models.fast import Whitening
from ..recipe.recipe import Recipe
from ..records import Epoch, Record, new_record, now, write_record
from .base_optimizers import make_base
from .batches import Batches, data_for, seed_for
from .checkpoints import read_checkpoint, write_weights
from .precision import autocast, parameter_dtype, scaler, set_precision
from .ranks import ALONE, Ranks
from .tasks import task_of

PAUSE = 15.0  # seconds between two checkpoints: writing one takes 0.4 s for 20 million weights, more than some epochs


def average_of(recipe: Recipe, net: nn.Module, steps: int, ranks: Ranks) -> Averaging | None:
    """The average of the weights that a recipe requests; None without one."""
    if recipe.average and ranks.kind == "fsdp2":
        raise UserError("--average needs whole copies of the weights: train with ddp, or without it")
    return averaging(net, recipe.average, steps) if recipe.average else None


def fit_whitening(net: nn.Module, data: DataSet, most: int = 5000) -> None:
    """Fit the whitening layers of a net, which come first in it, to the first training examples."""
    for layer in net.modules():
        if isinstance(layer, Whitening):
            inputs, _ = data.train.take(torch.arange(min(most, len(data.train))))
            layer.fit(prepare(inputs, data, layer.weight.dtype))


def epoch_means(sums: dict[str, Any], name: str, value: Tensor, numbers: int = 0) -> None:
    """Add a metric to its sum over an epoch. Only numbers are summed; of a vector (GAM's γ) the last value is kept.

    A number is a tensor with `numbers` dimensions: 0, or 1 if it has an entry for each member of a stack.
    """
    total, count = sums.get(name, (0.0, 0))
    vector = value.dim() > numbers
    sums[name] = (value if vector else total + value, 1 if vector else count + 1)


class Run:
    """The training of one recipe.

    `folder` is where its record is written (None: nowhere); `logger` has ``add_scalar(name, value, step)`` and
    ``close()``; `measure` is called with the finished run and returns its curvature.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path | None = None,
        *,
        device: str = "cpu",
        data: DataSet | None = None,
        data_root: Path | None = None,
        role: str = "method",
        label: str | None = None,
        ranks: Ranks = ALONE,
        logger: Any = None,
        measure: Any = None,
        keep_weights: bool = False,
    ):
        self.recipe, self.folder, self.device, self.ranks = recipe, folder, torch.device(device), ranks
        self.logger, self.measure, self.keep_weights = logger, measure, keep_weights
        self.share_of_time = 1.0  # of this process; runs that are trained in round robin share it
        self.task, method = task_of(recipe), recipe.build_method()
        if "lr" in method.needs and (recipe.schedule != "constant" or recipe.warmup):
            raise UserError(f"{method.name} sets the learning rate itself: give it no schedule and no warm-up")
        set_precision(recipe.precision, self.device)
        self.data = data_for(recipe, data_root, device) if data is None else data
        torch.manual_seed(seed_for(recipe.seed, "weights"))
        self.net = self._make_net()
        self.model = ranks.wrapped(self.net, self.device, recipe.compile)
        self._forward = self._make_forward(hides_outputs="outputs" not in method.needs)
        base = make_base(recipe, self.net.parameters(), self.net)
        self.optimizer = SharpnessAware(base, method, model=self.model, seed=seed_for(recipe.seed) % 2**31)
        self._first_lrs = [group["lr"] for group in self.optimizer.param_groups]  # schedules scale them
        self.scaler = scaler(recipe.precision, self.device)
        self.batches = self._make_batches(method)
        self.optimizer.method = for_steps(method, recipe.epochs * self.batches.steps, self.batches.epoch_steps)
        self.average = average_of(recipe, self.net, recipe.epochs * self.batches.steps, ranks)
        exact = torch.float32 if self.device.type == "mps" else torch.float64
        # Sum of losses, number of correct answers, number of steps before the first non-finite loss:
        self.totals = torch.zeros(3, dtype=exact, device=self.device)
        self._test_totals = torch.zeros(2, dtype=exact, device=self.device)
        # Weak: a reference cycle with the recorded graphs would keep GPU memory until the next garbage collection.
        me = weakref.proxy(self)
        clip = (lambda: me._clip()) if recipe.clip else None
        self._step = capture(lambda *batch: me._loss(*batch), self.optimizer, scaler=self.scaler, between=clip)
        count = lambda *batch: me._count_test(*batch)  # noqa: E731
        self._test = Replayed(count) if ranks.world == 1 and self.task.of_all is None else count
        self._test_outputs: list[tuple[Tensor, Tensor]] = []  # for a metric of all outputs
        self._saved, self._looks_before = -math.inf, 0  # time of the last checkpoint; looks before this process resumed
        self._random = default_generator(self.device)
        self.record: Record = new_record(recipe, role, label, device)
        if self.task.name != "test_accuracy":
            self.record["metric"] = self.task.name
        self.record["parameters"] = sum(p.numel() for p in self.net.parameters())
        self.record["train_examples"], self.record["test_examples"] = self.batches.examples, len(self.data.test)
        if self.batches.held_out:
            self.record["held_out_examples"] = self.batches.held_out
        self._resume()

    def _make_net(self) -> nn.Module:
        recipe = self.recipe
        net = build(recipe.model, self.data.input_shape, self.data.classes, **dict(recipe.model_settings))
        net.to(self.device, parameter_dtype(recipe.precision))
        fit_whitening(net, self.data)
        if self.device.type == "cuda":
            # Convolutions are fastest in this memory format.
            net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return net

    def _make_batches(self, method: Method) -> Batches:
        batches = Batches(self.recipe, self.data, method.needs, self.device, self.ranks.rank, self.ranks.world)
        convolves = any(isinstance(layer, nn.Conv2d) for layer in self.net.modules())
        if self.device.type == "cuda" and convolves and len(self.data.input_shape) == 3:
            batches.memory_format = torch.channels_last  # for the layers before the first convolution
        return batches

    # One step

    def _make_forward(self, hides_outputs: bool) -> Callable[[Tensor, Tensor], tuple[Any, Tensor]]:
        """The outputs and the loss of a batch, compiled together if that may hide the outputs from the optimizer."""
        together = self.recipe.compile and not self.ranks.kind and not self.recipe.loss  # a user's loss may not compile
        together &= hides_outputs
        model, of = self.net if together else self.model, self.task.loss

        def forward(inputs: Tensor, targets: Tensor) -> tuple[Any, Tensor]:
            outputs = model(inputs)
            return outputs, of(outputs, targets)

        return torch.compile(forward) if together else forward

    def step(self, inputs: Tensor, targets: Tensor, auxiliary: tuple[Tensor, Tensor] | None = None) -> None:
        """One step of the optimizer. On a GPU, after a few eager steps, it replays a captured graph."""
        self._step(inputs, targets, auxiliary=auxiliary)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """A batch's loss. The first look of a step adds it to the epoch's totals, without synchronisation."""
        with autocast(self.recipe.precision, self.device):
            logits, loss = self._forward(inputs, targets)
        if self._step.look == 0:
            self.totals[0] += loss.detach()
            if self.task.count is not None:
                self.totals[1] += self.task.count(logits.detach(), targets)
            self.totals[2] += self.totals[0].isfinite()  # a sum that is not finite stays so
        return loss

    def _clip(self) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), self.recipe.clip)

    # All steps

    def train(self) -> Generator[None, None, None]:
        """Train to the end, starting from the checkpoint if there is one; yield after every step."""
        while self.record["status"] == "running" and len(self.record["epochs"]) < self.recipe.epochs:
            yield from self._epoch(len(self.record["epochs"]) + 1)
            self._save()
        self.finish()

    def _epoch(self, epoch: int) -> Iterator[None]:
        recipe, batches = self.recipe, self.batches
        self.totals.zero_()
        sums: dict[str, Any] = {}
        self.model.train()
        began = time.perf_counter()
        averaging = 0.0  # seconds that a training without an average would not take
        for step, (inputs, targets, auxiliary) in enumerate(batches.of_epoch(epoch)):
            if "lr" not in self.optimizer.method.needs:
                lr = recipe.lr_at((epoch - 1) * batches.steps + step, batches.steps)
                for group, first in zip(self.optimizer.param_groups, self._first_lrs, strict=True):
                    group["lr"] = lr if first == recipe.lr or not recipe.lr else first * lr / recipe.lr
            self._random.manual_seed(seed_for(recipe.seed, "model", epoch, step, self.ranks.rank))  # for dropout
            self.step(inputs, targets, auxiliary)
            if self.average is not None:
                averaging -= time.perf_counter()
                self.average.update()
                averaging += time.perf_counter()
            for name, value in self.optimizer.metrics.items():
                if isinstance(value, Tensor):
                    epoch_means(sums, name, value)
            yield
        finite_steps = int(self.ranks.minimum_(self.totals[2:].clone()))
        train_loss, right, _ = self.ranks.mean_(self.totals).tolist()  # the only synchronisation in an epoch
        before = self.record["epochs"][-1]["seconds"] if self.record["epochs"] else 0.0
        seconds = (time.perf_counter() - began - averaging) * self.share_of_time
        test = self.ranks.broadcast(self.evaluate())
        entry: Epoch = {
            "epoch": epoch,
            "train_loss": train_loss / batches.steps,
            "test_loss": test["test_loss"],
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "seconds": before + seconds,
            "gradients": self._looks_before + self._step.looks,
            "metrics": {name: (total / count).tolist() for name, (total, count) in sums.items()},
        }
        if self.task.count is not None:
            entry["train_accuracy"] = right * self.ranks.world / (batches.steps * recipe.batch)
        entry.update(test)  # a subclass may evaluate more
        if self.average is not None and self.average.started:
            entry["averaged"] = self.ranks.broadcast(self._evaluate_average(self.average, epoch))
        self.end_epoch(entry, finite_steps)

    def end_epoch(self, entry: Epoch, finite_steps: int) -> None:
        """Add an epoch to the record and the log. After fewer finite steps than an epoch has, the run has diverged."""
        self.record["epochs"].append(entry)
        for name in ("train_loss", "train_accuracy", "test_loss", self.task.name, "lr") if self.logger else ():
            if name in entry:
                self.logger.add_scalar(name, entry[name], entry["epoch"])
        if finite_steps < self.batches.steps or not math.isfinite(entry["test_loss"]):
            self._diverged(entry["epoch"], finite_steps + 1, entry["train_loss"])

    def evaluate(self) -> dict[str, float]:
        """Loss and metric on the test set."""
        self.model.eval()
        self._test_totals.zero_()
        self._test_outputs.clear()
        for inputs, targets in self.batches.of_test():
            self._test(inputs, targets)
        loss, right = (self._test_totals / len(self.data.test)).tolist()
        if self.task.of_all is not None:
            outputs, targets = (torch.cat(parts) for parts in zip(*self._test_outputs, strict=True))
            right = float(self.task.of_all(outputs, targets))
        elif self.task.from_loss is not None:
            right = self.task.from_loss(loss)
        return {"test_loss": loss, self.task.name: right}

    def _evaluate_average(self, average: Averaging, epoch: int) -> dict[str, float]:
        """The same for the averaged weights."""
        with autocast(self.recipe.precision, self.device):
            average.estimate_batch_norm(self.batches.for_statistics(epoch))
        with average.in_place():
            return self.evaluate()

    def _count_test(self, inputs: Tensor, targets: Tensor) -> None:
        with torch.no_grad(), autocast(self.recipe.precision, self.device):
            logits = self.net(inputs)
            if isinstance(logits, Tensor):
                logits = logits.to(self.batches.dtype)
            self._test_totals[0] += self.task.total(logits, targets)
            if self.task.count is not None:
                self._test_totals[1] += self.task.count(logits, targets)
            if self.task.of_all is not None:
                self._test_outputs.append((logits, targets))

    def _diverged(self, epoch: int, step: int, loss: float) -> None:
        radius = self.optimizer.method.radius
        advice = f"lower lr or {radius}" if radius else "lower lr"
        if step <= self.batches.steps:
            kind = "NaN" if math.isnan(loss) else "infinite"
            self.record["verdict"] = f"loss became {kind} in epoch {epoch}, step {step}: {advice}"
        else:
            self.record["verdict"] = f"test loss was not finite after epoch {epoch}: {advice}"
        self.record["status"] = "diverged"

    # Files

    @property
    def checkpoint(self) -> Path | None:
        """The path of the checkpoint, which is deleted when the run has ended."""
        return None if self.folder is None else self.folder / f"{self.recipe.key}.ckpt"

    def _save(self) -> None:
        """Write the record; before it, if it is time, the checkpoint, which contains the record of its own epoch."""
        due = time.monotonic() - self._saved >= PAUSE
        measured_next = self.measure is not None and len(self.record["epochs"]) == self.recipe.epochs
        if not self.ranks.broadcast(due or measured_next):
            if self.folder is not None and self.ranks.first:
                write_record(self.record, self.folder)
            return
        self.write_checkpoint()
        self._saved = time.monotonic()

    def write_checkpoint(self) -> None:
        """Write weights, optimizer, average and record, so that the run can go on from here."""
        weights, state = self.ranks.state(self.net, self.optimizer)
        if self.checkpoint is None or self.folder is None or not self.ranks.first:
            return
        kept: dict[str, Any] = {"record": self.record, "model": weights, "optimizer": state}
        kept["scaler"] = None if self.scaler is None else self.scaler.state_dict()
        if self.average is not None:
            kept["average"] = self.average.state_dict()
        with whole_file(self.checkpoint) as path:
            torch.save(kept, path)
        write_record(self.record, self.folder)

    def _resume(self) -> None:
        path = self.checkpoint if self.ranks.first else None
        saved = self.ranks.broadcast(None if path is None else read_checkpoint(path, self.record, self.device))
        if saved is None:
            return
        try:
            self.ranks.load(self.net, self.optimizer, saved["model"], saved["optimizer"])
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, KeyError) as error:
            misfit = f"{self.recipe.key}.ckpt in {self.folder} does not fit the model any more"
            raise UserError(f"{misfit}: delete it to start from scratch ({describe(error)})") from None
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])
        if self.average is not None:
            self.average.load_state_dict(saved["average"])
        self.continue_record(saved["record"])
        self._looks_before = self.record["epochs"][-1]["gradients"]

    def continue_record(self, then: Record) -> None:
        """Continue the record of a checkpoint."""
        record = self.record
        record["status"], record["epochs"] = then["status"], then["epochs"]
        record["verdict"], record["started"] = then["verdict"], then["started"]

    def finish(self) -> None:
        """Complete the record with the results of the last epoch and the measurements; write it, and the weights."""
        record = self.record
        last = record["epochs"][-1]
        final: Any = {
            name: last[name]
            for name in (self.task.name, "test_loss", "train_accuracy", "train_loss", "seconds", "gradients")
            if name in last
        }
        record["final"] = final
        if "averaged" in last:
            record["averaged"] = last["averaged"]
        if record["status"] == "running":
            if self.measure is not None and self.ranks.first:
                record["curvature"] = self.measure(self)
            record["status"] = "done"
        record["finished"] = now()
        if self.logger is not None:
            self.logger.close()
        if self.folder is None or self.checkpoint is None:
            return
        if self.keep_weights:
            weights = self.ranks.state(self.net, self.optimizer)[0]
            if self.ranks.first:
                write_weights(weights, self.folder, self.recipe.key)
                if self.average is not None:
                    write_weights(self.average.model.state_dict(), self.folder, f"{self.recipe.key}-averaged")
        if self.ranks.first:
            write_record(record, self.folder)
            self.checkpoint.unlink(missing_ok=True)
