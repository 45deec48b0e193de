"""The batches of a run: a pure function of seed, epoch and step, and therefore the same for every method.

No random state has to be saved: every random choice (order, crops, mixup) has its own generator, seeded by its purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...auxiliary import held_and_rest, with_auxiliary
from ...support.errors import UserError
from ..data import DataSet, first, load, prepare, subset, with_label_noise
from ..recipe.recipe import Recipe


def seed_for(*what: Any) -> int:
    """A seed for a purpose that is described by numbers and words.

    >>> seed_for(0, "order", 1) == seed_for(0, "order", 1), seed_for(0, "order", 1) == seed_for(0, "order", 2)
    (True, False)
    """
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:6], "little")


def generator_for(*what: Any, device: Any = "cpu") -> torch.Generator:
    """A generator with the seed of a purpose."""
    return torch.Generator(device).manual_seed(seed_for(*what))


def data_for(recipe: Recipe, root: Path | None = None, device: Any = "cpu") -> DataSet:
    """The data of a recipe, on the device."""
    parts = (recipe.share, recipe.label_noise, recipe.hold_out)
    return cached_data(recipe.data, *parts, root, str(device), recipe.task)


@lru_cache(maxsize=2)  # consecutive runs use the same data
def cached_data(
    name: str, share: float, noise: float, hold_out: float, root: Path | None, device: str, task: str = "classification"
) -> DataSet:
    """The same as `data_for`, with the fields that it depends on as arguments, so that it can be cached."""
    data = load(name, root, task=task)
    if share < 1:
        data = first(data, share)
    clean = data.train
    if noise:
        data = with_label_noise(data, noise)
    if hold_out:
        rows = torch.randperm(len(data.train), generator=generator_for("hold out"))
        count = round(hold_out * len(rows))
        if not 0 < count < len(rows):
            raise UserError(f"holding out {hold_out:g} of {len(rows)} training examples leaves none on one side")
        train = subset(data.train, rows[count:].sort().values)
        test = subset(clean, rows[:count].sort().values)  # with clean labels: label noise is for training only
        data = replace(data, name=f"{data.name} without {hold_out:g}", train=train, test=test)
    return data.to(device)


class Batches:
    """A recipe's training batches, for a method with these needs; on several ranks, this rank's part of each."""

    def __init__(self, recipe: Recipe, data: DataSet, needs: Set[str], device: torch.device, rank: int, ranks: int):
        self.recipe, self.data, self.device, self.rank, self.ranks = recipe, data, device, rank, ranks
        self.dtype = torch.float64 if recipe.precision == "float64" else torch.float32
        self.memory_format = torch.preserve_format  # of inputs
        # Rows are held out for the second batch only if the method uses one: other methods train on all rows.
        self.auxiliary, self.held_out = recipe.second_batch(needs, len(data.train))
        self._whose_turn = torch.randperm(len(data.train), generator=generator_for(recipe.seed, "held out"))
        self.examples = len(data.train) - self.held_out
        # Per epoch. All batches are full, so an epoch leaves out the last few examples of its order:
        self.steps = self.examples // recipe.batch
        self.epoch_steps = self.steps if self.auxiliary == "in-turns" else 0  # for methods that must know turns
        if self.steps == 0:
            raise UserError(f"batch {recipe.batch} is larger than the {self.examples} training examples")
        if recipe.batch % ranks:
            raise UserError(f"batch {recipe.batch} cannot be split evenly over {ranks} processes")
        self._generator = torch.Generator(device)
        # The images that alternating-flip flips in even epochs; in odd ones, the others:
        self._even: Tensor | None = None
        if "alternating-flip" in recipe.augmentation:
            drawn = torch.rand(len(data.train), generator=generator_for(recipe.seed, "flip"))
            self._even = (drawn < 0.5).to(device)
        self._fixed: Any = None

    def of_epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor, Any]]:
        """Inputs, targets, and the auxiliary batch or None."""
        for (inputs, targets), second in self._pairs(epoch):
            yield inputs, targets, second

    def _pairs(self, epoch: int) -> Iterable[Any]:
        """Main and auxiliary batches."""
        main = self._pass(epoch, "main")
        if self.auxiliary == "fresh":
            return zip(main, self._pass(epoch, "auxiliary"), strict=True)
        if self.auxiliary == "previous":
            return with_auxiliary(main, "previous")
        if self.auxiliary == "fixed":
            self._fixed = self._fixed or next(self._pass(0, "auxiliary"))
            return ((batch, self._fixed) for batch in main)
        if self.held_out:
            return zip(main, self._pass(epoch, "held out"), strict=True)
        return ((batch, None) for batch in main)

    def _pass(self, epoch: int, purpose: str) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch's batches, in an order of its own for each purpose."""
        return self._read(self.rows(epoch, purpose), epoch, purpose)

    def rows(self, epoch: int, purpose: str) -> Tensor:
        """The rows of the training data in an epoch's batches, one batch after another."""
        held_out, trained_on = self.split(epoch)
        if purpose == "held out":
            return self._held_out_rows(epoch, held_out)
        order = torch.randperm(self.examples, generator=generator_for(self.recipe.seed, purpose, "order", epoch))
        order = order[: self.steps * self.recipe.batch]
        return trained_on[order] if self.held_out else order

    def split(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The rows that are held out in an epoch, and those that are trained on."""
        return held_and_rest(self._whose_turn, self.held_out, epoch if self.epoch_steps else 1)

    def _held_out_rows(self, epoch: int, held_out: Tensor) -> Tensor:
        """One held-out batch per step of an epoch: repeated passes over all held-out examples, each in a new order."""
        size = min(self.recipe.batch, len(held_out)) // self.ranks * self.ranks
        if size == 0:
            raise UserError(f"{len(held_out)} held-out examples cannot be split over {self.ranks} processes")
        generator = generator_for(self.recipe.seed, "held out", "order", epoch)
        whole = len(held_out) // size  # batches in one pass over them
        passes = -(-self.steps // whole)
        orders = [torch.randperm(len(held_out), generator=generator)[: whole * size] for _ in range(passes)]
        return held_out[torch.cat(orders)[: self.steps * size]]

    def _read(self, rows: Tensor, epoch: int, purpose: str) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of the batches of these rows, one batch per step."""
        seed, size = self.recipe.seed, len(rows) // self.steps // self.ranks
        rows = rows.view(self.steps, self.ranks, size)[:, self.rank].reshape(-1)
        crops = seed_for(seed, purpose, "crops", epoch) % 2**31
        rows = rows.to(self.device)
        batches = self.data.batches("train", size, rows, seed=crops)
        for step, (inputs, targets) in enumerate(batches):
            flipped = None if self._even is None else self._even[rows[step * size :][:size]] ^ bool(epoch % 2)
            yield self._augmented(inputs, targets, seed_for(seed, purpose, epoch, step, self.rank), flipped)

    def for_statistics(self, epoch: int, most: int = 50) -> Iterator[Tensor]:
        """Training inputs for BatchNorm's statistics of an averaged net: at most this many batches."""
        return (inputs for inputs, _ in islice(self._pass(epoch, "statistics"), most))

    def _augmented(self, inputs: Tensor, targets: Tensor, seed: int, flipped: Tensor | None) -> tuple[Tensor, Tensor]:
        """The batch after augmentation, scaling and mixup."""
        recipe = self.recipe
        if recipe.augmentation != "none":
            from ..data.augmentation import augment

            inputs = augment(inputs, recipe.augmentation, self._generator.manual_seed(seed), self.data, flipped)
        inputs = prepare(inputs, self.data, self.dtype, self.memory_format)
        if recipe.mixup:
            from ..data.augmentation import mixup

            return mixup(inputs, targets, recipe.mixup, self._generator.manual_seed(seed + 1), self.data.classes)
        return inputs, targets

    def of_test(self, size: int = 1000) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of the test set, in stored order."""
        for inputs, targets in self.data.batches("test", size):
            yield prepare(inputs, self.data, self.dtype, self.memory_format), targets


class StackedBatches(Batches):
    """The batches of several runs that differ only in their seed, stacked: members x batch x ..."""

    def __init__(self, members: Sequence[Batches]):
        self.__dict__.update(vars(members[0]))
        self.members, self._fixed = members, None

    def _pass(self, epoch: int, purpose: str) -> Iterator[tuple[Tensor, Tensor]]:
        rows = torch.stack([one.rows(epoch, purpose).view(self.steps, -1) for one in self.members], 1).to(self.device)
        for some in rows:
            inputs, targets = self.data.train.take(some)
            yield prepare(inputs, self.data, self.dtype), targets
