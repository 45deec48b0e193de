"""The data of the page's charts: plain lists of rounded numbers, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..records import number, seed_of
from ..statistics import Group, Mean, Row, mean_of
from .settings import listed, settings
from .values import line_of, runs_of

POINTS = 200  # largest number of points of a curve
SEED_POINTS = 50  # largest number of points of the curve of one seed: there are many such curves
PROGRESS = ("epoch", "gradients", "seconds")
QUANTITIES = {
    "test_error": "test error",
    "test_loss": "test loss",
    "train_loss": "training loss",
    "lr": "learning rate",
}


def charts(rows: Sequence[Row], metric: str) -> dict[str, Any]:
    """The data of all charts of one problem."""
    groups = [
        {**_group(row, metric), "settings": listed(settings(row, rows)), "longer": is_longer(row, rows)} for row in rows
    ]
    return {
        "problem": rows[0].problem if rows else "",
        "metric": metric,
        "groups": groups,
        "quantities": _quantities(groups),
    }


def is_longer(row: Row, rows: Sequence[Row]) -> bool:
    """Whether this is the base trained longer, or an average of its weights: over epochs it is not comparable."""
    base = [one.group.recipe.get("epochs") or 0 for one in rows if one.role == "base"]
    more = bool(base) and (row.group.recipe.get("epochs") or 0) > max(base)
    return row.role == "equal-cost" or (row.role == "rival" and more)


def _group(row: Row, metric: str) -> dict[str, Any]:
    group = row.group
    return {
        "label": row.label,
        "role": row.role,
        "n": row.n,
        "diverged": row.diverged,
        "mean": _mean(row.mean),
        "gradients": rounded(row.gradients),
        "seconds": rounded(row.seconds.value) if row.seconds else None,
        "line": line_of(row, metric),
        "runs": runs_of(row),
        "seeds": {name: found for name in quantities_of(group) if (found := seed_curves(group, name))},
        "curves": {name: curve(group, name) for name in quantities_of(group)},
        "broken": {name: broken_curves(group, name) for name in quantities_of(group)} if group.diverged else {},
        "density": density(group),
        "landscape": landscape(group),
        "gamma": gamma(group),
    }


def _mean(one: Mean | None) -> list[float | None] | None:
    return None if one is None else [rounded(x) for x in (one.value, one.error, one.low, one.high)]


def _quantities(groups: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The titles, by name, of all quantities of which some group has a curve."""
    found = dict.fromkeys(name for group in groups for name in [*group["curves"], *group["broken"]])
    ordered = [name for name in QUANTITIES if name in found] + [name for name in found if name not in QUANTITIES]
    return {name: quantity_name(name) for name in ordered}


def quantity_name(name: str) -> str:
    """The title of a quantity."""
    return QUANTITIES.get(name) or {"cos": "cosine", "eta": "step size"}.get(name) or name.replace("_", " ")


def quantities_of(group: Group) -> list[str]:
    """The quantities in a group's epochs: errors, losses, and the method's own metrics."""
    found = {}
    for record in group.records:
        for epoch in record.get("epochs") or []:
            if number(epoch.get("test_accuracy")) is not None:
                found["test_error"] = True
            found.update(
                {name: True for name in ("test_loss", "train_loss", "lr") if number(epoch.get(name)) is not None}
            )
            found.update({k: True for k, v in (epoch.get("metrics") or {}).items() if number(v) is not None})
    return [name for name in QUANTITIES if name in found] + sorted(name for name in found if name not in QUANTITIES)


def quantity(epoch: Mapping[str, Any], name: str) -> float | None:
    """One quantity of one epoch; errors are in percent."""
    if name == "test_error":
        accuracy = number(epoch.get("test_accuracy"))
        return None if accuracy is None else 100 * (1 - accuracy)
    return number(epoch.get(name, (epoch.get("metrics") or {}).get(name)))


def curve(group: Group, name: str) -> list[list[Any]]:
    """[epoch, gradients, seconds, mean, low, high] over the runs that finished, at epochs that all of them have."""
    points = []
    for seen in _common_epochs(group, name):
        one = mean_of([value for e in seen.values() if (value := quantity(e, name)) is not None])
        points.append([*_progress(list(seen.values())), rounded(one.value), rounded(one.low), rounded(one.high)])
    return thinned(points)


def seed_curves(group: Group, name: str) -> dict[str, Any] | None:
    """The curve of each seed, at some points of the mean's curve; None with fewer than two seeds."""
    epochs = thinned(_common_epochs(group, name), SEED_POINTS)
    if not epochs or len(epochs[0]) < 2:
        return None
    seeds = [seed for seed in epochs[0] if all(seed in seen for seen in epochs)]
    curves = [[seed, [rounded(quantity(seen[seed], name), 4) for seen in epochs]] for seed in seeds]
    return {"at": [_progress(list(seen.values())) for seen in epochs], "curves": curves}


def _common_epochs(group: Group, name: str) -> list[dict[Any, Mapping[str, Any]]]:
    """The entries by seed of each epoch that all finished runs have: means over fewer runs would make curves jump."""
    by_epoch: dict[int, dict[Any, Mapping[str, Any]]] = {}
    for record in group.done:
        for epoch in record.get("epochs") or []:
            if quantity(epoch, name) is not None:
                by_epoch.setdefault(epoch["epoch"], {})[seed_of(record)] = epoch
    most = max(map(len, by_epoch.values()), default=0)
    return [by_epoch[index] for index in sorted(by_epoch) if len(by_epoch[index]) == most]


def broken_curves(group: Group, name: str) -> list[list[list[float | None]]]:
    """[epoch, gradients, seconds, value] of every diverged run, up to its last epoch."""
    found = []
    for record in group.diverged:
        epochs = [e for e in record.get("epochs") or [] if quantity(e, name) is not None]
        found.append(thinned([[*_progress([e]), rounded(quantity(e, name))] for e in epochs]))
    return [points for points in found if points]


def _progress(epochs: Sequence[Mapping[str, Any]]) -> list[float | None]:
    found = []
    for name in PROGRESS:
        values = [value for e in epochs if (value := number(e.get(name))) is not None]
        found.append(rounded(math.fsum(values) / len(values)) if values else None)
    return found


def density(group: Group) -> dict[str, Any] | None:
    """The spectral density of the first seed that has one; there is no mean over seeds, because their grids differ."""
    for record in group.done:
        found = (record.get("curvature") or {}).get("density")
        if found and found.get("grid"):
            pairs = [(number(x), number(y)) for x, y in zip(found["grid"], found["density"], strict=True)]
            kept = [[rounded(x), rounded(y)] for x, y in pairs if x is not None and y is not None]
            return {"seed": seed_of(record), "points": kept}
    return None


def landscape(group: Group) -> dict[str, Any] | None:
    """The loss around the final weights, for the first seed that has it."""
    for record in group.done:
        found = (record.get("curvature") or {}).get("landscape")
        if found and found.get("loss"):
            rows = [[rounded(number(x), 4) for x in row] for row in found["loss"]]
            return {"seed": seed_of(record), "axis": [rounded(number(x), 4) for x in found["axis"]], "loss": rows}
    return None


def gamma(group: Group) -> dict[str, Any] | None:
    """GAM's learned coefficients over training, one curve per coefficient, and their final polynomial.

    With normalised directions there is no polynomial: the vectors that the coefficients multiply change with each step.
    """
    runs = [epochs for record in group.done if (epochs := _gammas(record))]
    if not runs:
        return None
    size = len(runs[0][-1]["metrics"]["gamma"])
    curves = []
    for t in range(size):
        points = []
        for same in zip(*runs, strict=False):
            values = [number(e["metrics"]["gamma"][t]) for e in same]
            known = [v for v in values if v is not None]
            if known:
                one = mean_of(known)
                points.append([*_progress(same), rounded(one.value), rounded(one.low), rounded(one.high)])
        curves.append(thinned(points))
    last = [[float(g) for g in run[-1]["metrics"]["gamma"]] for run in runs]
    tops = [top for r in group.done if (top := number(((r.get("curvature") or {}).get("top") or {}).get("value")))]
    largest = max(tops) if tops and max(tops) > 0 else None
    grid = [k / 60 * (largest or 1.0) for k in range(61)]
    text = str(group.done[0]["recipe"].get("method"))
    sized = "normalize=true" in text or "directions=sized" in text  # the first direction is as long as it is
    drawn = [] if "directions=unit" in text or (size > 1 and sized) else last
    return {
        "curves": curves,
        "last": [[rounded(g) for g in one] for one in last],
        "largest": rounded(largest),
        "polynomials": [[[rounded(x), rounded(polynomial(one, x))] for x in grid] for one in drawn],
    }


def _gammas(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = [e for e in record.get("epochs") or [] if isinstance((e.get("metrics") or {}).get("gamma"), list)]
    return [e for e in found if e["metrics"]["gamma"] and all(number(g) is not None for g in e["metrics"]["gamma"])]


def polynomial(coefficients: Sequence[float], eigenvalue: float) -> float:
    """P(λ) = λ + Σ_t γ_t λ^{t+1}.

    >>> polynomial([0.5], 2.0)
    4.0
    """
    return eigenvalue + sum(g * eigenvalue ** (t + 2) for t, g in enumerate(coefficients))


def thinned(points: list[Any], most: int = POINTS) -> list[Any]:
    """At most this many of the points, evenly spaced, including the first and the last."""
    if len(points) <= most:
        return points
    return [points[round(k * (len(points) - 1) / (most - 1))] for k in range(most)]


def rounded(value: float | None, figures: int = 6) -> float | None:
    """A number rounded to significant figures; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{figures}g}")
