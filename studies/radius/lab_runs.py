"""Rounds whose nets or lengths the populations do not have: each training is a run of the lab, one after another.

    python studies/radius/lab_runs.py STAGE --data FOLDER [--worker 0 --workers 2]

A line of `records/STAGE-WORKER.jsonl` is a regime and a candidate, with lists over the seeds, as in the other records.
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
from before import BeforeBatches
from relay import RelayBatches
from run import done

from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training import run as training
from steppe.lab.training.batches import Batches
from steppe.lab.training.run import Run
from steppe.papers.definitions.frontier import REGIMES

RECORDS = Path(__file__).parent / "records"
SEEDS = {
    "vit": range(100, 105), "size": range(100, 103), "relay": range(100, 103), "relay-all": range(3),
    "half": range(100, 103), "before": range(100, 103), "before-all": range(2), "before-mlp": range(100, 105),
    "half-mlp": range(100, 105), "mlp": range(100, 105), "relay-more": range(100, 105),
}  # fmt: skip
RADII = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
VIT = Recipe.of({
    "data": "fashion-mnist", "share": 0.1, "model": "vit-tiny", "base": "adamw", "lr": 1e-3, "weight_decay": 0.05,
    "model_settings": {"patch": 7, "width": 48, "depth": 3, "heads": 3}, "batch": 64, "epochs": 30,
    "schedule": "cosine", "warmup": 100,
})  # fmt: skip
MLP = Recipe.of({
    "data": "fashion-mnist", "share": 0.1, "model": "mlp-3", "model_settings": {"hidden": 256}, "base": "adam",
    "lr": 1e-3, "batch": 100, "epochs": 60,
})  # fmt: skip
CNN = Recipe(data="cifar-10", share=0.2, model="cnn-5", base="adam", lr=1e-3, batch=100, epochs=30)
NOISE = {"clean": 0.0, "40": 0.4}  # the share of wrong labels
POINTS = 5  # how often a base is tested during its training, to stop it early
IN_TURNS = "window times=2 leap=2.0 quarter=0.125 half=0.25 hold={} scheme=double"
ALWAYS = "gap rate=0.2 times=2 start=0.001 cap=0.8 hold={}"


class Seldom(Run):
    """A run that is tested a few times only: testing takes as long as half an epoch."""

    points = 1

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy, or no accuracy and a loss of 0."""
        done_so_far, every = len(self.record["epochs"]) + 1, self.recipe.epochs // self.points
        return {"test_loss": 0.0} if done_so_far % every else super().evaluate()


def jobs(stage: str) -> list[tuple[str, str, Recipe]]:
    """Regime, candidate, and the recipe without its seed; what a stage is about comes first."""
    first = ("relay", "half", "before") if stage.startswith(("relay", "half", "before")) else ("window", "gap")
    return sorted(_jobs(stage), key=lambda job: not job[1].startswith(first))


def _jobs(stage: str) -> Iterator[tuple[str, str, Recipe]]:
    for labels, noise in reversed(NOISE.items()) if stage.startswith(("relay", "half", "before")) else NOISE.items():
        if stage == "vit":
            yield from vit(f"fashion-{labels}-adamw", replace(VIT, label_noise=noise))
        elif stage == "mlp":
            yield from mlp(f"fashionmlp-{labels}-adam", replace(MLP, label_noise=noise))
        elif stage.startswith(("half", "before")):
            yield from offsets(stage, labels, noise)
        elif stage.startswith("relay"):
            yield from relay(stage, labels, noise)
        else:
            yield from size(f"cifar-{labels}-fifth", replace(CNN, label_noise=noise))


def vit(regime: str, base: Recipe) -> Iterator[tuple[str, str, Recipe]]:
    """The eighth round. The longer base is one of 60 epochs, because its schedule ends later."""
    yield regime, "plain", replace(base, average="ema:0.99")
    yield regime, "longer", replace(base, average="ema:0.99", epochs=2 * base.epochs)
    yield from both_forms(regime, base, 300, 64)
    for rho in RADII:
        yield regime, f"sam rho={rho:g}", replace(base, method=f"sam:rho={rho}")


def mlp(regime: str, base: Recipe) -> Iterator[tuple[str, str, Recipe]]:
    """The eleventh round: as for the small ViT; "early" is tested every second epoch, where stopping early is best."""
    yield regime, "early", replace(base, average="ema:0.99", epochs=12)
    yield regime, "plain", replace(base, average="ema:0.99")
    yield regime, "longer", replace(base, average="ema:0.99", epochs=2 * base.epochs)
    yield from both_forms(regime, base, 300, 100)
    for rho in RADII:
        yield regime, f"sam rho={rho:g}", replace(base, method=f"sam:rho={rho}")


def size(regime: str, base: Recipe) -> Iterator[tuple[str, str, Recipe]]:
    """The ninth round: both forms with as many examples as where the lab changes from one to the other."""
    yield from both_forms(regime, base, 500, 100)
    yield regime, "plain", replace(base, average="ema:0.99")
    for rho in (1.0, 0.5):
        yield regime, f"sam rho={rho:g}", replace(base, method=f"sam:rho={rho}")


def relay(stage: str, labels: str, noise: float) -> Iterator[tuple[str, str, Recipe]]:
    """The tenth round: who is held out is relieved group by group; and the bound on ρ, `backtrack`, in each form."""
    if stage == "relay-all":
        recipe = replace(next(one for one in REGIMES if one.name == f"cifar-{labels}").recipe, average="")
        for settings in ("", "backtrack=0.03"):
            yield f"cifar-{labels}", f"relay {settings} hold=1000", _relay(recipe, settings, 1000)
        return
    if stage == "relay-more":
        for regime, recipe in ((f"fashionmlp-{labels}-adam", MLP), (f"fashion-{labels}-adamw", VIT)):
            own = _relay(replace(recipe, label_noise=noise), "backtrack=0.03", 300)
            yield regime, "relay backtrack=0.03 hold=300", own
        return
    tenth = replace(next(one for one in REGIMES if one.name == "cifar-tenth").recipe, average="")
    for regime, recipe, count in (
        (f"cifar-{labels}-fifth", replace(CNN, label_noise=noise), 500), ("cifar-tenth", tenth, 250),
    ):  # fmt: skip
        if regime == "cifar-tenth" and not noise:
            continue  # once
        for settings in ("", "backtrack=0.03"):
            yield regime, f"relay {settings} hold={count}", _relay(recipe, settings, count)
        for name, held in ((IN_TURNS.format(count), f"in-turns:{count}"), (ALWAYS.format(100), "held-out:100")):
            bounded = replace(recipe, method="gapsam:backtrack=0.03", auxiliary=held)
            if regime != "cifar-tenth" or str(count) in held:  # the map has the other
                yield regime, f"{name} backtrack=0.03", bounded


def offsets(stage: str, labels: str, noise: float) -> Iterator[tuple[str, str, Recipe]]:
    """The tenth round, second and third part: in turns, where ρ falls later, or the offset is measured before."""
    method = "relay:Half:backtrack=0.03" if stage.startswith("half") else "before:Before:backtrack=0.03"
    candidate = stage.partition("-")[0] + " backtrack=0.03"
    tenth = replace(next(one for one in REGIMES if one.name == "cifar-tenth").recipe, average="")
    whole = replace(next(one for one in REGIMES if one.name == f"cifar-{labels}").recipe, average="")
    for kind, regime, recipe, count in (
        ("", f"cifar-{labels}-fifth", replace(CNN, label_noise=noise), 500),
        ("", "cifar-tenth", tenth, 250),
        ("-all", f"cifar-{labels}", whole, 500),
        ("-mlp", f"fashionmlp-{labels}-adam", replace(MLP, label_noise=noise), 300),
    ):
        if stage == candidate.split()[0] + kind and (recipe is not tenth or noise):
            yield regime, f"{candidate} hold={count}", replace(recipe, method=method, auxiliary=f"in-turns:{count}")


def _relay(recipe: Recipe, settings: str, count: int) -> Recipe:
    return replace(recipe, method=f"relay:Relay:{settings}".rstrip(":"), auxiliary=f"in-turns:{count}")


def both_forms(regime: str, base: Recipe, in_turns: int, always: int) -> Iterator[tuple[str, str, Recipe]]:
    """GapSAM with examples held out in turns, and with the same ones held out always."""
    yield regime, IN_TURNS.format(in_turns), replace(base, method="gapsam", auxiliary=f"in-turns:{in_turns}")
    yield regime, ALWAYS.format(always), replace(base, method="gapsam", auxiliary=f"held-out:{always}")


def trained(recipe: Recipe, root: Path) -> dict[str, Any]:
    """The record of a finished training."""
    own = {"relay:Relay": RelayBatches, "before:Before": BeforeBatches}
    batches = next((own[name] for name in own if recipe.method.startswith(name)), Batches)
    training.Batches = batches  # pyright: ignore[reportPrivateImportUsage]
    run = Seldom(recipe, data_root=root)
    run.points = POINTS if recipe.average else 1
    for _ in run.train():
        pass
    return dict(run.record)


def line_of(stage: str, regime: str, candidate: str, records: list[dict[str, Any]]) -> dict[str, Any]:
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
    rho = [[row["metrics"]["rho"] for row in own] for own in epochs] if "rho" in epochs[0][0].get("metrics", {}) else []
    where = records[0]["environment"]
    return {
        "regime": regime, "candidate": candidate, "seeds": [*SEEDS[stage]], "accuracy": accuracy,
        "train_loss": means([[row["train_loss"] for row in own] for own in epochs]),
        "seconds": round(sum(own[-1]["seconds"] for own in epochs), 1), "stage": stage, "precision": "float32",
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
    parser.add_argument("stage", choices=SEEDS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RECORDS)
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    there = done(options.out)
    for regime, candidate, recipe in jobs(options.stage)[options.worker :: options.workers]:
        if (regime, candidate, ",".join(map(str, SEEDS[options.stage]))) in there:
            continue
        records = [trained(replace(recipe, seed=seed), options.data) for seed in SEEDS[options.stage]]
        line = line_of(options.stage, regime, candidate, records)
        with (options.out / f"{options.stage}-{options.worker}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        print(time.strftime("%H:%M:%S"), regime, candidate, line["accuracy"], flush=True)


if __name__ == "__main__":
    main()
