"""The eighth round: a small vision transformer with AdamW. Trainings by the lab, because populations have no attention.

    python studies/radius/vit.py --data FOLDER [--worker 0 --workers 2]

A line of `records/vit-WORKER.jsonl` is a regime and a candidate, with lists over the seeds, as in the other records.
What a record file holds already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from run import done

from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training.run import Run

RECORDS = Path(__file__).parent / "records"
SEEDS = range(100, 105)
RADII = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
BASE = Recipe.of({
    "data": "fashion-mnist", "share": 0.1, "model": "vit-tiny", "base": "adamw", "lr": 1e-3, "weight_decay": 0.05,
    "model_settings": {"patch": 7, "width": 48, "depth": 3, "heads": 3}, "batch": 64, "epochs": 30,
    "schedule": "cosine", "warmup": 100,
})  # fmt: skip
REGIMES = {"fashion-clean-adamw": 0.0, "fashion-40-adamw": 0.4}  # the share of wrong labels
POINTS = 5  # how often a base is tested during its training, to stop it early
IN_TURNS = "window times=2 leap=2.0 quarter=0.125 half=0.25 hold=300 scheme=double"
ALWAYS = "gap rate=0.2 times=2 start=0.001 cap=0.8 hold=64"


class Seldom(Run):
    """A run that is tested a few times only: testing takes as long as half an epoch."""

    points = 1

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy, or no accuracy and a loss of 0."""
        done_so_far, every = len(self.record["epochs"]) + 1, self.recipe.epochs // self.points
        return {"test_loss": 0.0} if done_so_far % every else super().evaluate()


def jobs() -> Iterator[tuple[str, str, Recipe]]:
    """Regime, candidate, and the recipe without its seed. The longer base is one of 60 epochs, not a part of it."""
    for regime, noise in REGIMES.items():
        base = replace(BASE, label_noise=noise)
        yield regime, "plain", replace(base, average="ema:0.99")
        yield regime, "longer", replace(base, average="ema:0.99", epochs=2 * base.epochs)
        yield regime, IN_TURNS, replace(base, method="gapsam", auxiliary="in-turns")
        yield regime, ALWAYS, replace(base, method="gapsam", auxiliary="held-out:64")
        for rho in RADII:
            yield regime, f"sam rho={rho:g}", replace(base, method=f"sam:rho={rho}")


def trained(recipe: Recipe, root: Path) -> dict[str, Any]:
    """The record of a finished training."""
    run = Seldom(recipe, data_root=root)
    run.points = POINTS if recipe.average else 1
    for _ in run.train():
        pass
    return dict(run.record)


def line_of(regime: str, candidate: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """One line: accuracies in percent by epoch, ρ and the training loss along the training."""
    epochs = [record["epochs"] for record in records]
    accuracy: dict[str, list[float]] = {}
    for own in epochs:
        for row in own:
            if "test_accuracy" in row:
                accuracy.setdefault(str(row["epoch"]), []).append(percent(row["test_accuracy"]))
            if "test_accuracy" in row.get("averaged", {}):
                averaged = percent(row["averaged"]["test_accuracy"])
                accuracy.setdefault(f"{row['epoch']} averaged", []).append(averaged)
    rho = (
        [[row["metrics"]["rho"] for row in own] for own in epochs] if "gapsam" in records[0]["recipe"]["method"] else []
    )
    where = records[0]["environment"]
    return {
        "regime": regime, "candidate": candidate, "seeds": [*SEEDS], "accuracy": accuracy,
        "train_loss": means([[row["train_loss"] for row in own] for own in epochs]),
        "seconds": round(sum(own[-1]["seconds"] for own in epochs), 1), "stage": "vit", "precision": "float32",
        "hardware": platform.machine(), "commit": (where["commit"] or "")[:7],
        **({"rho": means(rho)} if rho else {}),
    }  # fmt: skip


def means(rows: list[list[float]]) -> list[float]:
    """Means over the seeds, epoch by epoch."""
    return [round(fmean(values), 4) for values in zip(*rows, strict=True)]


def percent(share: float) -> float:
    """A share in percent, without rounding noise."""
    return round(100 * share, 4)


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RECORDS)
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    there = done(options.out)
    for regime, candidate, recipe in list(jobs())[options.worker :: options.workers]:
        if (regime, candidate, ",".join(map(str, SEEDS))) in there:
            continue
        records = [trained(replace(recipe, seed=seed), options.data) for seed in SEEDS]
        line = line_of(regime, candidate, records)
        with (options.out / f"vit-{options.worker}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        print(time.strftime("%H:%M:%S"), regime, candidate, line["accuracy"], flush=True)


if __name__ == "__main__":
    main()
