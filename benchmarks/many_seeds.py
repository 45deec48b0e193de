"""Trainings per minute when many seeds are trained at once: stacked as one net, or one step of each in turn.

    python benchmarks/many_seeds.py [--models mlp-3 cnn-5] [--device cuda] [--results FOLDER]

Random images with the shape of CIFAR-10, batch 100, Adam, whole steps of the lab (batches, metrics, captured steps).
After a warm-up, steps are timed until the device has finished them. All arrangements run one after another in this
process. `images per second` counts every image that a training sees, not the gradients.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from charts import Chart, Page, Record, device_of
from common import RESULTS, Spread, environment, pick_device, show_table, write_json

from steppe.lab.data.dataset import DataSet, Split
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training.run import Run
from steppe.lab.training.stack import Stack

WARM_UP, ROUNDS = 30, 7
METHODS = {"base": "plain", "SAM": "sam"}
SHAPE = (3, 32, 32)


def images(count: int, device: torch.device) -> DataSet:
    """Random images; what they show does not change the time of a step."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, *SHAPE)
    inputs = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    split = Split(inputs, torch.randint(10, (count,), generator=generator))
    return DataSet("random images", split, Split(inputs[:100], split.targets[:100]), 10).to(device)


def arrangements(recipe: Recipe, data: DataSet, device: str) -> Iterator[tuple[str, int, list[Any]]]:
    """A name, the number of seeds, and what trains them."""

    def runs(count: int) -> list[Run]:
        return [Run(replace(recipe, seed=seed), device=device, data=data) for seed in range(count)]

    yield "one at a time", 1, runs(1)
    for count in (5, 10):
        yield f"{count} in turn", count, runs(count)
    for count in (5, 10, 20, 40):  # 20 is what the lab does
        yield f"{count} stacked", count, [Stack(runs(count))]


def seconds_per_step(trained: list[Any], steps: int, device: torch.device) -> list[float]:
    """The time of one step of all, in each of several rounds of so many steps."""
    going = [(one.train(), torch.cuda.Stream(device) if device.type == "cuda" else None) for one in trained]

    def step() -> None:
        for generator, stream in going:
            with torch.cuda.stream(stream):
                next(generator)

    for _ in range(WARM_UP):
        step()
    found = []
    for _ in range(ROUNDS):
        _finish(device)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        _finish(device)
        found.append((time.perf_counter() - began) / steps)
    for generator, _ in going:
        generator.close()
    return found


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(model: str, data: DataSet, device: torch.device, steps: int) -> list[dict[str, Any]]:
    """One entry for each method and arrangement."""
    found = []
    for label, method in METHODS.items():
        recipe = Recipe(data="cifar-10", model=model, method=method, batch=100, precision="tf32", epochs=100)
        for name, count, trained in arrangements(recipe, data, str(device)):
            times = Spread.of(seconds_per_step(trained, steps, device), 1e3 / count)
            per_second = recipe.batch / (times.median / 1e3)
            found.append({"model": model, "method": label, "arrangement": name, "seeds": count,
                          "milliseconds_per_seed": vars(times), "images_per_second": per_second})  # fmt: skip
            del trained
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return found


def charts(record: Record, name: str) -> Iterator[Chart]:
    for model in dict.fromkeys(r["model"] for r in record["results"]):
        bars: dict[str, dict[str, float]] = {}
        for r in record["results"]:
            if r["model"] == model:
                bars.setdefault(r["arrangement"], {})[r["method"]] = r["milliseconds_per_seed"]["median"]
        yield Chart(f"{name}-{model}", f"{model}, {device_of(record)}", "milliseconds per step and seed", bars)


PAGE = Page(
    "Many seeds at once",
    "A comparison trains the same small net with many seeds. One such net leaves most of a GPU idle. The lab stacks "
    "the seeds: their weights become the rows of one matrix, and one step trains all of them. Nets that cannot be "
    "stacked run one captured step of each seed in turn, on streams of their own (*in turn*).",
    charts,
    place=3,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp-3", "cnn-5"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=100, help="steps in each of the seven rounds")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    device = pick_device(args.device)
    data = images(args.images, device)
    results = [entry for model in args.models for entry in measured(model, data, device, args.steps)]
    rows = [
        [f"{r['model']}, {r['method']}, {r['arrangement']}", f"{r['milliseconds_per_seed']['median']:.4f}",
         f"{r['images_per_second']:,.0f}"]
        for r in results
    ]  # fmt: skip
    show_table("Many seeds at once", ["arrangement", "ms per step and seed", "images per second"], rows)
    write_json(
        args.results / f"many_seeds-{device.type}.json", {"environment": environment(device), "results": results}
    )


if __name__ == "__main__":
    main()
