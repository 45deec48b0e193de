"""The sections of the page with charts, and the table of curvature. The scripts draw into these elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..statistics import Row, larger_is_better
from . import formatting
from .chart_data import gamma, quantities_of
from .figures import outliers
from .html import Markup, join, tag
from .results_table import capitalised, cell, row_name, scrolling, sortable_table, sorting_head


def cost_chart(index: int, rows: Sequence[Row], metric: str) -> Markup | None:
    """The result against its cost, with the base trained longer as a line."""
    if not any(row.mean and row.gradients for row in rows):
        return None
    name = formatting.name_of(metric)
    longer = any(row.role == "equal-cost" and row.mean for row in rows)
    side = "above" if larger_is_better(metric) else "below"
    note = f"{capitalised(name)} against cost. Thick bars: one standard error. Thin bars: 95 % intervals."
    if longer:
        note += f" The dashed line is the base trained longer: a method {side} it gains more than longer training."
    if _seeds(rows):
        note += " Small dots beside a mean are its seeds."
    if outliers([row.mean.value for row in rows if row.mean]):
        note += " Arrows at the edge mark results outside the chart."
    axes = _choice("cost", {"gradients": "gradients", "seconds": "seconds"}, "Cost in")
    return _figure(index, "cost", f"{capitalised(name)} against cost", note, join(_seeds(rows), axes))


def curves(index: int, rows: Sequence[Row]) -> Markup | None:
    """Test error and losses over training."""
    if not any(quantities_of(row.group) for row in rows):
        return None
    axes = {"epoch": "epochs", "gradients": "gradients", "seconds": "seconds"}
    note = "Mean over finished runs; bands are 95 % intervals. With many curves, point at one to see its band."
    note += " Thin lines in place of bands are single seeds."
    most = max((row.n for row in rows), default=0)
    if most < 2:
        note = "One run each, so there are no bands." if most else "No run finished."
    if any(row.diverged for row in rows):
        note += " Thin lines that end in a cross are diverged runs."
    if any(row.role == "equal-cost" for row in rows):
        note += " The base trained longer is shown over gradients and over seconds."
    if any("lr" in quantities_of(row.group) for row in rows):
        note += " The learning rate is that of the last step of an epoch."
    choices = join(_choice("quantity", {}, "Show"), _seeds(rows), _choice("axis", axes, "over"))
    return _figure(index, "curves", "Training", note, choices)


def _seeds(rows: Sequence[Row]) -> Markup | None:
    """Buttons that choose between means and single seeds; None if no method has two seeds."""
    if max((row.n for row in rows), default=0) < 2:
        return None
    return _choice("runs", {"mean": "means", "seeds": "each seed"}, "Runs as")


def curvature(index: int, rows: Sequence[Row]) -> Markup | None:
    """The curvature at the end of training: numbers, spectra, landscapes."""
    measured = [row for row in rows if any(record.get("curvature") for record in row.group.done)]
    if not measured:
        return None
    names = [n for n in ("train_loss", "top", "trace", "sharpness") if any(row.group.mean(n) for row in measured)]
    radius = _radius(measured)
    titles = {
        "train_loss": "training loss",
        "top": "largest eigenvalue",
        "trace": "trace",
        "sharpness": f"sharpness{radius}",
    }
    parts: list[Any] = [tag("h3", "Curvature at the end of training", id=f"flat-{index}")]
    if names:
        head = [sorting_head("method", "text"), *(sorting_head(titles[name], "number") for name in names)]
        body = []
        for row in measured:
            means = [row.group.mean(name) for name in names]
            cells = [cell(formatting.mean(one), one and one.value) for one in means]
            body.append(tag("tr", row_name(row), *cells, class_=row.role))
        caption = (
            "Curvature of the training loss, from its Hessian: mean ± standard error over seeds. Smaller is flatter, "
            "but compare only rows with a similar training loss: a net that fits the training data confidently has a "
            "small Hessian, however well or badly it does on test data."
        )
        parts.append(scrolling(sortable_table(caption, head, body), f"flat-{index}"))
    if any(_has(row, "density") for row in measured):
        note = "Density of the Hessian’s eigenvalues for one seed per method, all rows on the same logarithmic axis."
        parts.append(_figure(index, "spectrum", "Spectrum", note))
    if any(_has(row, "landscape") for row in measured):
        note = (
            "Training loss on a plane through the trained weights (the dot) for one seed per method, all on one scale. "
            "Drag, or use the arrow keys, to rotate all of them."
        )
        views = join(
            _choice("view", {"surface": "surfaces", "map": "maps"}, "As"),
            _choice("height", {"linear": "linear", "log": "log"}, "loss"),
        )
        parts.append(_figure(index, "landscape", "Landscape", note, views))
    return tag("section", *parts, aria_labelledby=f"flat-{index}")


def _has(row: Row, name: str) -> bool:
    return any((record.get("curvature") or {}).get(name) for record in row.group.done)


def _radius(rows: Sequence[Row]) -> str:
    found = {((r.get("curvature") or {}).get("sharpness") or {}).get("rho") for row in rows for r in row.group.done}
    radii = sorted(r for r in found if r is not None)
    return f" at ρ = {radii[0]:g}" if len(radii) == 1 else ""


def coefficients(index: int, rows: Sequence[Row]) -> Markup | None:
    """The learned coefficients of generalization aware minimization."""
    learned = [found for row in rows if (found := gamma(row.group))]
    if not learned:
        return None
    over = "The learned coefficients γ over training; bands are 95 % intervals over seeds."
    seen = (
        "How the learned coefficients change an eigenvalue: P(λ) = λ + Σ γₜ λᵗ⁺¹, up to the largest measured "
        "eigenvalue (up to 1 if none was measured). Thin lines are seeds; the dashed line is P(λ) = λ."
    )
    figures = [_figure(index, "gamma", "Coefficients", over)]
    if any(found["polynomials"] for found in learned):
        figures.append(_figure(index, "polynomial", "Polynomial", seen))
    return tag(
        "section",
        tag("h3", "Learned coefficients", id=f"learned-{index}"),
        tag("div", *figures, class_="pair"),
        aria_labelledby=f"learned-{index}",
    )


def _figure(index: int, kind: str, name: str, note: str, controls: Markup | None = None) -> Markup:
    heading = tag("h3" if kind in ("cost", "curves") else "h4", name, id=f"{kind}-{index}")
    return tag(
        "figure",
        tag("div", heading, controls and tag("div", controls, class_="controls"), class_="bar"),
        tag("div", tag("p", "This chart needs JavaScript, which is disabled."), class_="chart", data_chart=kind),
        tag("figcaption", note),
        aria_labelledby=f"{kind}-{index}",
    )


def _choice(name: str, options: dict[str, str], label: str) -> Markup:
    """A group of buttons, one of them pressed; the script adds options that depend on the data."""
    buttons = [
        tag("button", text, type="button", data_value=value, aria_pressed="true" if k == 0 else "false")
        for k, (value, text) in enumerate(options.items())
    ]
    caption = tag("span", label, class_="said", aria_hidden="true")
    return tag("div", caption, *buttons, class_="choice", role="group", aria_label=label, data_choice=name)
