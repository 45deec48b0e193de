"""The trainings of both situations, one after another, on one core.

    python studies/situations/run.py fine-tuning|once --data FOLDER

Each finished run is a line in `records/`; a run that has one is not repeated. Pretrained nets are kept in `--nets`.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from arms import BASE, SITUATIONS, STAGES, Job, jobs
from torch import Tensor

from steppe.lab.data import DataSet, load, subset, with_targets
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training.run import Run

RECORDS = Path(__file__).parent / "records"
OLD, NEW = range(5), range(5, 10)  # classes of CIFAR-10: the net is pretrained on five and fine-tuned on the others
NETS = 5  # pretrained nets; seed s starts from net s mod 5
PRETRAINING = replace(BASE, lr=1e-3, batch=100, epochs=4, average="")
HELD = 2500  # training images that the choosing runs are tested on


class Seldom(Run):
    """A run that is tested after some epochs only: testing takes longer than an epoch of 1 000 images."""

    stops: frozenset[int] = frozenset()

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy, or no accuracy and a loss of 0."""
        return super().evaluate() if len(self.record["epochs"]) + 1 in self.stops else {"test_loss": 0.0}


def only(data: DataSet, classes: range) -> DataSet:
    """The images of these classes, which then count from 0."""
    parts = []
    for split in (data.train, data.test):
        part = subset(split, torch.isin(split.targets, torch.tensor(classes)).nonzero().flatten())
        parts.append(with_targets(part, part.targets - classes.start))
    return replace(data, train=parts[0], test=parts[1], classes=len(classes))


def sample(data: DataSet, seed: int, examples: int, choosing: bool) -> DataSet:
    """Training images drawn with the seed; a choosing run is tested on others of them, not on the test set."""
    rows = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    test = subset(data.train, rows[examples:][:HELD]) if choosing else data.test
    return replace(data, train=subset(data.train, rows[:examples]), test=test)


def trained(recipe: Recipe, data: DataSet, stops: frozenset[int], start: Mapping[str, Tensor] | None = None) -> Run:
    """A finished run, from the weights of a pretrained net if there is one; the last layer is always new."""
    run = Seldom(recipe, data=data)
    run.stops = stops
    if start is not None:
        last = f"{len(list(run.net.children())) - 1}."
        kept = {name: value for name, value in start.items() if not name.startswith(last)}
        run.net.load_state_dict(kept, strict=False)
    for _ in run.train():
        pass
    return run


def pretrained(number: int, data: DataSet, folder: Path, out: Path) -> Mapping[str, Tensor]:
    """The weights of a net that was trained on the first five classes; it is trained when it is first needed."""
    path = folder / f"net-{number}.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        recipe = replace(PRETRAINING, seed=number)
        run = trained(recipe, only(data, OLD), frozenset({recipe.epochs}))
        write(line_of(run, "fine-tuning", "pretraining", "net"), out)
        torch.save(run.net.state_dict(), path)
    return torch.load(path, weights_only=True)


def line_of(run: Run, situation: str, stage: str, arm: str) -> dict[str, Any]:
    """The run in a line: accuracies in percent after the epochs `stops`."""
    record, recipe = run.record, run.recipe
    tested = [epoch for epoch in record["epochs"] if "test_accuracy" in epoch]
    averaged = [epoch["averaged"]["test_accuracy"] for epoch in tested if "averaged" in epoch]
    last, where = record["epochs"][-1], record["environment"]
    return {
        "situation": situation, "stage": stage, "arm": arm, "method": recipe.method, "seed": recipe.seed,
        "lr": recipe.lr, "examples": record.get("train_examples"), "epochs": recipe.epochs, "status": record["status"],
        "gradients": last["gradients"], "train_loss": round(last["train_loss"], 4),
        "stops": [epoch["epoch"] for epoch in tested],
        "accuracy": [percent(epoch["test_accuracy"]) for epoch in tested], "averaged": [*map(percent, averaged)],
        "seconds": round(last["seconds"], 1), "commit": (where["commit"] or "")[:7], "torch": where["torch"],
        "hardware": f"{platform.processor() or platform.machine()}, {where['threads']} thread",
    }  # fmt: skip


def percent(share: float) -> float:
    """A share in percent, without rounding noise."""
    return round(100 * share, 4)


def write(line: Mapping[str, Any], path: Path) -> None:
    """Append a line to the records, and show it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")
    print(time.strftime("%H:%M:%S"), *(line[name] for name in ("stage", "arm", "seed", "accuracy")), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """All lines of a record file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def carry_out(job: Job, data: DataSet, nets: Path, out: Path) -> None:
    """Train one job and write its line."""
    own = only(data, NEW) if job.situation.name == "fine-tuning" else data
    start = pretrained(job.recipe.seed % NETS, data, nets, out) if job.pretrained else None
    mine = sample(own, job.recipe.seed, job.examples, choosing=job.stage != "final")
    run = trained(job.recipe, mine, job.stops, start)
    write(line_of(run, job.situation.name, job.stage, job.arm), out)


def main() -> None:
    """Run what is missing of a situation, stage by stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("situation", choices=SITUATIONS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--nets", type=Path, default=Path("runs/situations"))
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage to run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, out = load("cifar-10", options.data), RECORDS / f"{options.situation}.jsonl"
    for stage in STAGES[: STAGES.index(options.until) + 1]:
        there = {(line["stage"], line["arm"], line["seed"]) for line in read(out)}
        for job in jobs(SITUATIONS[options.situation], stage, read(out)):
            if job.key not in there:
                carry_out(job, data, options.nets, out)


if __name__ == "__main__":
    main()
