"""Records for tests of statistics and reports, as a run writes them. Numbers are arithmetic, not results."""

from __future__ import annotations

import io
import math
from typing import Any

RECIPE: dict[str, Any] = {
    "data": "digits", "model": "digits-mlp", "method": "plain", "base": "sgd", "lr": 0.1, "momentum": 0.9,
    "weight_decay": 5e-4, "batch": 32, "epochs": 10, "schedule": "cosine", "warmup": 0, "augmentation": "none",
    "mixup": 0.0, "precision": "float32", "compile": False, "clip": 0.0, "share": 1.0, "label_noise": 0.0,
    "hold_out": 0.0, "seed": 0, "auxiliary": "fresh", "model_settings": {},
}  # fmt: skip


def record(
    label: str,
    accuracy: float | None,
    seed: int = 0,
    *,
    role: str = "method",
    cost: float = 1.0,
    status: str = "done",
    epochs: int = 4,
    reached: int | None = None,
    curvature: dict[str, Any] | None = None,
    gamma: list[float] | None = None,
    verdict: str = "",
    **recipe: Any,
) -> dict[str, Any]:
    """One run. Its curve falls to the final accuracy; 100 gradients and half a second an epoch, times the cost."""
    method = recipe.pop("method", "plain" if role != "method" else label.lower())
    final = accuracy if accuracy is not None else 0.1
    curve = []
    for k in range(1, (reached or epochs) + 1):
        metrics = {"surrogate_gap": 0.1 / k}
        if gamma is not None:
            metrics["gamma"] = [k / epochs * g for g in gamma]  # type: ignore[assignment]
        curve.append(
            {
                "epoch": k, "train_loss": 2.0 / k**2, "train_accuracy": final, "test_loss": 2.0 / k,
                "test_accuracy": final * (1 - 0.5 ** (2 * k)) / (1 - 0.5 ** (2 * epochs)), "lr": 0.1,
                "seconds": 0.5 * cost * k, "gradients": 100 * cost * k, "metrics": metrics,
            }
        )  # fmt: skip
    return {
        "format": "steppe-run/1",
        "key": f"{label}-{seed}",
        "status": status,
        "recipe": {**RECIPE, "method": method, "seed": seed, "epochs": epochs, **recipe},
        "label": label,
        "role": role,
        "method": {"name": label.split()[0], "settings": {}, "cost": cost},
        "parameters": 4810,
        "train_examples": 1437,
        "test_examples": 360,
        "environment": {"steppe": "0.1.0", "commit": "0123456789abcdef", "torch": "2", "python": "3", "device": "cpu"},
        "epochs": curve,
        "final": {
            "test_accuracy": accuracy, "test_loss": 0.5, "train_accuracy": accuracy, "train_loss": 2.0 / epochs**2,
            "seconds": 0.5 * cost * epochs, "gradients": 100 * cost * epochs,
        } if status == "done" else None,
        "curvature": curvature,
        "verdict": verdict,
        "started": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T00:01:00+00:00",
    }  # fmt: skip


def diverged(label: str, seed: int = 0, why: str = "loss became NaN in epoch 3: lower lr or rho", **rest: Any) -> Any:
    """A run that came to nothing after two epochs."""
    return record(label, None, seed, status="diverged", reached=2, verdict=why, **rest)


def flat(scale: float = 1.0, points: int = 9) -> dict[str, Any]:
    """Curvature as measured: a spectrum with one outlier, and a bowl for a landscape."""
    axis = [2 * k / (points - 1) - 1 for k in range(points)]
    grid = [scale * k / 20 for k in range(-2, 41)]
    return {
        "top": {"value": 2 * scale, "error": 0.01},
        "trace": {"value": 9 * scale, "error": 0.2},
        "sharpness": {"value": 0.004 * scale, "rho": 0.05},
        "density": {
            "grid": grid,
            "density": [
                math.exp(-200 * (x / scale) ** 2) + 1e-4 * math.exp(-200 * (x / scale - 1.9) ** 2) for x in grid
            ],
        },
        "landscape": {"axis": axis, "loss": [[0.01 + scale * (x * x + 2 * y * y) for x in axis] for y in axis]},
    }


def comparison(seeds: int = 3) -> list[dict[str, Any]]:
    """A base, the base twice as long, SAM that gains over both, GAM that learns coefficients."""
    made = []
    for seed in range(seeds):
        bump = (0.0, 0.004, 0.001, 0.003, 0.002)[seed % 5]
        made.append(record("SGD", 0.94 + bump, seed, role="base", curvature=flat(2.0)))
        made.append(record("SGD, 2x longer", 0.945 + bump / 2, seed, role="equal-cost", epochs=8, curvature=flat(1.8)))
        made.append(record("SAM rho=0.1", 0.96 + 1.1 * bump, seed, cost=2.0, curvature=flat(1.0)))
        made.append(
            record("GAM T=2", 0.955 + bump * bump, seed, cost=6.0, gamma=[0.2, 0.04 + bump], curvature=flat(0.8))
        )
    return made


def many(methods: int, seeds: int = 3) -> list[dict[str, Any]]:
    """A base and as many methods as asked for."""
    made = [record("SGD", 0.94 + 0.001 * seed, seed, role="base", curvature=flat()) for seed in range(seeds)]
    for k in range(methods):
        for seed in range(seeds):
            accuracy = 0.93 + 0.001 * k + 0.0007 * ((3 * k + seed) % 5)
            made.append(record(f"Method {k}", accuracy, seed, cost=1 + k % 4, curvature=flat(1 + k / 10)))
    return made


def rows(*args: Any, **settings: Any) -> dict[str, Any]:
    """The rows of a summary by their labels."""
    from steppe.lab.statistics import summarise

    return {row.label: row for row in summarise(*args, **settings)}


def printed(records: list[Any], width: int = 160) -> str:
    """The table as a terminal shows it."""
    from steppe.lab.report import table

    return printed_table(table(records), width)


def printed_table(table: Any, width: int = 160) -> str:
    """A rich table as a terminal shows it."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


LONG = "A method with a very long name rho=0.123456789,alpha=0.987654321 " + "x" * 60


def uneven():
    """What reports meet: lost runs, a long name, no curvature for some, a failure far below the others."""
    made = [record("SGD", 0.94 + s / 500, s, role="base", curvature=flat()) for s in range(3)]
    made += [record(LONG, 0.95 + s / 400, s, cost=2.0) for s in range(3)]
    made += [
        record("SAM", 0.95, 0, cost=2.0, curvature=flat(0.5)),
        diverged("SAM", 1, cost=2.0),
        diverged("SAM", 2, cost=2.0),
    ]
    made += [diverged("GAM", s, cost=6.0) for s in range(3)]
    made += [record("<b>bold</b>", 0.1 + s / 100, s, curvature=flat(0.3)) for s in range(3)]
    return made


def with_settings() -> list[dict[str, Any]]:
    """A comparison whose methods name their settings, as a run writes them."""
    found = {"SAM rho=0.1": {"rho": 0.1, "adaptive": False}, "GAM T=2": {"T": 2, "period": 1}}
    return [{**r, "method": {**r["method"], "settings": found.get(r["label"], {})}} for r in comparison(3)]


SCENES = {
    "comparison": lambda: comparison(3),
    "one run": lambda: [record("SGD", 0.9, 0, role="base", epochs=1, curvature=flat())],
    "one seed": lambda: comparison(1),
    "forty": lambda: many(40),
    "uneven": uneven,
    "all diverged": lambda: [
        diverged(name, s, role=role) for name, role in (("SGD", "base"), ("SAM", "method")) for s in (0, 1)
    ],
    "bare": lambda: [{**r, "epochs": [], "curvature": None} for r in comparison(3)],
    "two problems": lambda: comparison(3) + [{**r, "recipe": {**r["recipe"], "data": "mnist"}} for r in comparison(2)],
    "settings": with_settings,
    "nothing": list,
}
