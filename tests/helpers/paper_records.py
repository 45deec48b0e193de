"""Records with numbers of the test's choosing, in the form that the lab writes and `collect` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steppe.lab.records import new_record, write_record
from steppe.papers.registry import find
from steppe.papers.store import Results, collect

CURVATURE = {
    "top": {"value": 3.0, "error": 0.01},
    "trace": {"value": 30.0, "error": 1.0},
    "own_gap": {"value": 0.01, "rho": 0.1},
    "from_gap": {"value": 2.0, "rho": 0.1},
    "minima": {"value": 1.5, "counts": [1, 2]},
    "maxima": {"value": 1.0, "counts": [1, 1]},
    "shifted_accuracy": {"value": 0.5, "kinds": 19},
    "rounded": {"value": 0.6, "bits": 4},
    "shifted_top": {"value": 4.0, "error": 0.1},
    "shifted_trace": {"value": 40.0, "error": 2.0},
    "landscape": {"axis": [-1.0, 0.0, 1.0], "loss": [[3.0, 2.0, 3.0], [2.0, 1.0, 2.0], [3.0, 2.0, 3.0]]},
}


def record(experiment: str, cell: str, seed: int, accuracy: float, scale: str = "full", **more: Any) -> Any:
    """A finished run of a cell. `more`: metrics of every epoch, further entries, seconds, curvature, status."""
    found = find(experiment)
    recipe = found.recipe(found.cell(cell), scale, seed)
    made: Any = new_record(recipe, found.cell(cell).role, cell)
    seconds, metrics, entries = more.get("seconds", 10.0), more.get("metrics", {}), more.get("entries", {})
    made["epochs"] = [
        {
            "epoch": e, "train_loss": 1 / e, "train_accuracy": 0.5, "test_loss": 1.0, "test_accuracy": accuracy * e / 2,
            "lr": 0.1, "seconds": seconds * e / 2, "gradients": 100 * e, "metrics": metrics, **entries,
        }
        for e in (1, 2)
    ]  # fmt: skip
    names = ("test_accuracy", "test_loss", "train_accuracy", "train_loss", "seconds", "gradients")
    made |= {"parameters": 10, "train_examples": 1000, "test_examples": 100, "status": more.get("status", "done")}
    made |= {"final": {name: made["epochs"][-1][name] for name in names}, "finished": made["started"]}
    made["curvature"] = more.get("curvature")
    return made


def fill(folder: Path, experiment: str, cells: Mapping[str, Sequence[float]], scale: str = "full", **more: Any) -> None:
    """Runs of some cells, one a seed, with these accuracies, in a folder."""
    for cell, accuracies in cells.items():
        for seed, accuracy in enumerate(accuracies):
            write_record(record(experiment, cell, seed, accuracy, scale, **more), folder)


def kept(
    folder: Path, experiment: str, cells: Mapping[str, Sequence[float]], scale: str = "full", **more: Any
) -> Results:
    """The same, collected and read back."""
    runs, results = folder / "runs", folder / "results"
    fill(runs, experiment, cells, scale, **more)
    collect(runs, find(experiment), scale, results)
    return Results.read(results)
