"""Testing a trained net on ImageNet-Real, -v2, -R and -C (S1, Table 1), if these test sets are present."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..lab.data import DataSet, prepare
from ..lab.data.imagenet_sets import MAIN_CORRUPTIONS, OF_ALL, OTHER_SETS, ImageNet, OtherSet, TestPart
from ..lab.training.final_curvature import Measuring
from ..lab.training.precision import autocast
from ..lab.training.run import Run

BATCH = 250  # a few batches are decoded ahead: a quarter of a gigabyte of 224x224 images


@dataclass(frozen=True)
class OtherSets(Measuring):
    """Accuracy on ImageNet's other test sets; the record has no entry for one that is not beside ImageNet."""

    samples: int = 0  # images of each part at most; 0: all
    gives: ClassVar[None] = None  # a run without these measurements still counts for its table

    def before(self, data: DataSet) -> str:
        """A note before a run about sets that are missing; damaged sets raise."""
        if (imagenet := ImageNet.of(data)) is not None:
            for other in OTHER_SETS:
                next(other.parts(imagenet), None)
        return missing_text(data)

    def __call__(self, run: Run) -> dict[str, Any] | None:
        """The accuracy on each set, for ImageNet-C also on every part; None if the model is sharded over processes."""
        if run.ranks.kind == "fsdp2":
            return None
        found: dict[str, Any] = {}
        if (imagenet := ImageNet.of(run.data)) is not None:
            with _testing(run.net):
                for other in OTHER_SETS:
                    if other.found(imagenet) is not None:
                        found |= self._tested(run, other, imagenet)
        if note := missing_text(run.data):
            _print(run, note)
        return found or None

    def _tested(self, run: Run, other: OtherSet, imagenet: ImageNet) -> dict[str, Any]:
        shares: dict[str, list[float]] = {}
        total, whole = 0, None
        for asked in other.parts(imagenet):
            images, right, right_of_all = self._count(run, asked)
            kind = asked.part.split("/")[0]
            shares.setdefault(kind, []).append(right / images)
            total += images
            whole = right_of_all / images if asked.among else None
            if kind and asked.part.endswith("/5"):
                far = f"{len(shares)} of {len(MAIN_CORRUPTIONS)}"
                _print(run, f"{other.name}, {kind}: {100 * _mean(shares[kind]):.2f} % ({far})")
        value = _mean([_mean(of_kind) for of_kind in shares.values()])
        _print(run, f"{other.name}: {100 * value:.2f} % of {total} images")
        entry: dict[str, Any] = {"value": value, "images": total}
        if "" not in shares:
            entry["corruptions"] = shares  # by severity, from 1
        return {other.metric: entry} | ({} if whole is None else {OF_ALL: {"value": whole, "images": total}})

    def _count(self, run: Run, asked: TestPart) -> tuple[int, int, int]:
        """The numbers of images, and of correct answers among the set's classes and among all classes."""
        count = min(len(asked.images), self.samples or len(asked.images))
        among = torch.tensor(asked.among, dtype=torch.int64, device=run.device)
        begin = right = right_of_all = 0
        for inputs, _ in asked.images.stream(torch.arange(count).split(BATCH)):
            logits = _logits(run, inputs)
            of_all = logits.argmax(1)
            answers = among[logits[:, among].argmax(1)] if asked.among else of_all
            right += asked.right(answers.tolist(), begin)
            right_of_all += asked.right(of_all.tolist(), begin) if asked.among else 0
            begin += len(inputs)
        return count, right, right_of_all


def _logits(run: Run, inputs: Tensor) -> Tensor:
    """The outputs as in the run's own evaluation, but with the unwrapped `run.net`: only the first rank measures."""
    with torch.no_grad(), autocast(run.recipe.precision, run.device):
        return run.net(prepare(inputs, run.data, run.batches.dtype))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@contextmanager
def _testing(net: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode; afterwards in its previous mode."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def missing_text(data: DataSet) -> str:
    """A line that names the missing sets; "" if none is missing."""
    imagenet = ImageNet.of(data)
    if imagenet is None:
        return f"not tested on ImageNet's other sets: {data.name} is not a folder of images"
    missing = [other for other in OTHER_SETS if other.found(imagenet) is None]
    names = ", ".join(f"{other.name} ({other.places[0]})" for other in missing)
    return f"not tested on these sets, which are not in {imagenet.beside}: {names}" if missing else ""


def _print(run: Run, text: str) -> None:
    print(f"{run.record['label']}, seed {run.recipe.seed}: {text}", file=sys.stderr, flush=True)
