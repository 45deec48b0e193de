"""The numbers of a comparison as plain values, one dictionary per method or per run, for tables, CSV and JSON."""

from __future__ import annotations

from typing import Any

from ..records import metrics_of, seed_of, value_of
from ..statistics import Difference, Mean, Row


def line_of(row: Row, metric: str) -> dict[str, Any]:
    """One method as a dictionary: its mean with a 95 % interval, its cost, its differences and verdicts."""
    one: dict[str, Any] = {"method": row.label, "role": row.role, "problem": row.problem, "runs": row.n}
    one |= {"diverged": row.diverged, **_mean(metric, row.mean), "cost": row.cost, "time": row.time}
    one |= {"gradients": row.gradients, "seconds": row.seconds and row.seconds.value}
    one |= _difference("difference", row.difference) | _difference("at_equal_cost", row.equal_cost)
    return {**one, "verdict": row.verdict}


def _mean(name: str, mean: Mean | None) -> dict[str, Any]:
    return {name: mean and mean.value, "low": mean and mean.low, "high": mean and mean.high}


def _difference(name: str, one: Difference | None) -> dict[str, Any]:
    values = (None,) * 4 if one is None else (one.mean.value, one.mean.low, one.mean.high, one.verdict)
    return dict(zip((name, f"{name}_low", f"{name}_high", f"{name}_verdict"), values, strict=True))


def runs_of(row: Row) -> list[dict[str, Any]]:
    """The runs of a method as dictionaries: seed, status and all finite final numbers."""
    found = []
    for record in row.group.records:
        numbers = {name: value_of(record, name) for name in metrics_of(record)}
        known = {name: value for name, value in numbers.items() if value is not None}
        found.append({"seed": seed_of(record), "status": str(record.get("status", "")), **known})
    return found
