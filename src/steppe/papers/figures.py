"""The papers' figures, drawn from kept results only.

Every image file contains a digest of the results that it was drawn from, so that an outdated file can be recognised.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..lab.statistics import Group
from ..methods.gam import transformation
from ..support.files import whole_file
from . import ridge
from .definitions import s0 as s0_gam
from .definitions import s0_columns
from .definitions import s4 as s4_sasam
from .frontier_figure import charts
from .frontier_table import tables
from .plotting import FigureResults, axes_for, band, points, ticks
from .registry import find
from .store import Results

Figure = Any
GREY = "0.6"


def draw(name: str, results: Results, folder: Path) -> Path | None:
    """Draw one figure into a folder and return its path; None if nothing of it was run."""
    kept = drawable(name, results)
    figure = figure_of(name, results)
    if kept is None or figure is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kept.experiment.slug}.png"
    with whole_file(path) as beside:
        figure.savefig(beside, dpi=100, format="png", metadata={"Description": described(kept), "Software": None})
    return path


def figure_of(name: str, results: Results) -> Figure | None:
    """One figure, in memory; None if nothing of it was run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kept = drawable(name, results)
    if kept is None:
        return None
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with plt.rc_context(style):
        figure = FIGURES[name](kept)
        if figure is not None and kept.scale != "full":
            figure.suptitle(f"run at {kept.scale} scale", fontsize=9, x=0.99, ha="right")
        if figure is not None:
            plt.close(figure)
    return figure


def drawable(name: str, results: Results) -> FigureResults | None:
    """The results of a figure; None if too few of its cells were run (some cells also belong to other tables)."""
    kept = FigureResults(find(name), results)
    return kept if len(kept.groups()) >= LEAST.get(name, 1) else None


def described(kept: FigureResults) -> str:
    """The description in a figure's file: its name and the digest of its results."""
    return f"{kept.experiment.name} from results {kept.digest()}"


# S0


def _learned_transformations(kept: FigureResults) -> Figure:
    found = {name: [r["metrics"]["gamma"][-1] for r in group.done] for name, group in kept.groups().items()}
    found = {name: gammas for name, gammas in found.items() if gammas}
    if not found:
        return None
    figure, axes = axes_for(len(found))
    values = torch.linspace(0, 10, 101, dtype=torch.float64)
    for axis, (name, gammas) in zip(axes, found.items(), strict=True):
        for gamma, color in ((0.0, "0.7"), (0.01, "0.5"), (0.1, "0.2")):
            label = f"SAM {gamma}" if gamma else "SGD"
            axis.plot(values, transformation([gamma], values), color=color, lw=1, ls="--", label=label)
        band(axis, values.tolist(), [transformation(g, values).tolist() for g in gammas], color="C3", label="GAM")
        axis.set(title=f"{name.removesuffix('/gam')}, n = {len(gammas)}", xlabel="λ", ylabel="P(λ)")
    axes[0].legend()
    return figure


def _update_periods(kept: FigureResults) -> Figure:
    figure, (left, right) = axes_for(2, 3.8, 3.0)
    for axis, metric, factor, label in (
        (left, "test_accuracy", 100, "test accuracy, %"),
        (right, "seconds", 1, "seconds"),
    ):
        for end, name, color in (("", "GAM", "C3"), ("-faster", "GAM, γ lr x period", "C1")):
            periods = [k for k in s0_gam.PERIODS if k > 1 or not end]
            means = [kept.group(f"period-{k}{end}").mean(metric) for k in periods]
            points(axis, periods, means, factor, label=name, color=color, marker="o", ms=3)
        for cell, name, color in (("sgd", "SGD (Adam)", "0.5"), ("sam-0.01", "SAM 0.01", "C0")):
            if (mean := kept.group(cell).mean(metric)) is not None:
                axis.axhline(factor * mean.value, color=color, lw=1, ls="--", label=name)
        ticks(axis, s0_gam.PERIODS)
        axis.set(xlabel="γ updated every … steps", ylabel=label)
    left.legend()
    return figure


def _quadratic(kept: FigureResults) -> Figure:
    records = kept.group("quadratic").records
    values = records[0]["values"]
    figure, (axis,) = axes_for(1, 5.0, 3.4)
    line = torch.linspace(0.97, 2.03, 400, dtype=torch.float64)
    seen = line / 2 + torch.sin(10 * line) / 20
    axis.axvspan(min(values["observed"]), max(values["observed"]), color="0.95", zorder=0)
    axis.plot(seen, line, color="C0", lw=2.5, label="true: λ")
    axis.plot(seen, transformation(values["gamma"], seen), color="C3", label="learned: P(λ̃)")
    axis.plot(values["observed"], values["true"], "o", ms=4, color="C0", mec="white")
    axis.set(ylim=(0.4, 2.2), xlabel="λ̃, eigenvalue of the training loss", ylabel="eigenvalue of the test loss")
    axis.set_title(f"seed {records[0]['seed']}, the first of {len(records)}", loc="left", fontsize=9)
    axis.legend(loc="upper left")
    return figure


def _errors_by_epoch(kept: FigureResults) -> Figure:
    groups = kept.groups()
    columns = list(dict.fromkeys(name.rsplit("/", 1)[0] for name in groups))
    figure, axes = axes_for(len(columns))
    for axis, column in zip(axes, columns, strict=True):
        most = 0.0
        for number, (row, (label, _)) in enumerate(s0_columns.ROWS.items()):
            runs = [r["epochs"]["test_accuracy"] for r in groups.get(f"{column}/{row}", Group("", "", {})).done]
            if runs:
                errors = [[100 * (1 - a) for a in run] for run in runs]
                band(axis, range(1, len(errors[0]) + 1), errors, label=label, color=f"C{number}", lw=1)
                most = max(most, statistics.median(run[0] for run in errors))
        axis.set_ylim(top=1.05 * most)  # collapsed runs are cut off: they would flatten all others
        stands_for = kept.experiment.cell(f"{column}/sgd").stands_for
        title = f"{column} (for {stands_for})" if stands_for else column
        axis.set(title=title, xlabel="epoch", ylabel="test error, %")
    axes[0].legend(fontsize=7)
    return figure


def _settings(kept: FigureResults) -> Figure:
    figure, axes = axes_for(3)
    for axis, (what, values) in zip(
        axes, (("T", s0_gam.TS), ("batch", s0_gam.BATCHES), ("eps", s0_gam.EPSILONS)), strict=True
    ):
        groups = [kept.group(f"{what}/{value}") for value in values]
        points(
            axis, [float(v) for v in values], [g.mean("test_accuracy") for g in groups], color="C3", marker="o", ms=3
        )
        for value, group in zip(values, groups, strict=True):
            if group.diverged:
                axis.annotate(f"{len(group.diverged)} diverged", (float(value), 1), xycoords=("data", "axes fraction"),
                              rotation=90, va="top", ha="center", fontsize=7)  # fmt: skip
        axis.set(xlabel={"eps": "ε", "batch": "batch size"}.get(what, what), ylabel="test accuracy, %")
        if what != "T":
            ticks(axis, values)
    return figure


# S1


def _trajectories(kept: FigureResults) -> Figure:
    figure, (axis,) = axes_for(1, 5.6, 3.0)
    x, y = torch.linspace(-2.3, 3, 160), torch.linspace(-1.4, 1.4, 90)
    heights = ridge.PAPER(torch.cartesian_prod(y, x).flip(1)).reshape(len(y), len(x))
    axis.contourf(x, y, heights, levels=30, cmap="Greys", alpha=0.6)
    for number, (name, group) in enumerate(kept.groups().items()):
        path = group.records[0]["values"]["path"]
        axis.plot(*zip(*path, strict=True), color=f"C{number}", lw=1.2, label=group.label)
        axis.plot(*path[-1], "o", color=f"C{number}", ms=5, label=f"{name}'s end")
    axis.legend(fontsize=7)
    return figure


def _by_alpha(kept: FigureResults, axes: Sequence[tuple[Any, str, float, str]]) -> None:
    """Numbers of the grid over ρ and α, a line for each ρ."""
    grid: dict[str, list[tuple[float, str]]] = {}
    for name in kept.groups():
        rho, alpha = (part.split("-", 1)[1] for part in name.split("/"))
        grid.setdefault(rho, []).append((float(alpha), name))
    for axis, metric, factor, label in axes:
        for number, (rho, cells) in enumerate(grid.items()):
            means = [kept.group(name).mean(metric) for _, name in cells]
            points(axis, [a for a, _ in cells], means, factor, label=f"ρ = {rho}", color=f"C{number}", marker="o", ms=3)
        axis.set(xlabel="α", ylabel=label)


def _gap_and_top(kept: FigureResults) -> Figure:
    figure, axes = axes_for(3)
    shown = (("test_accuracy", 100.0, "test accuracy, %"), ("from_gap", 1.0, "2h/ρ²"), ("top", 1.0, "λ_max"))
    _by_alpha(kept, [(axis, *what) for axis, what in zip(axes, shown, strict=True)])
    axes[0].legend()
    return figure


def _over_training(metric: str, label: str) -> Callable[[FigureResults], Figure]:
    def picture(kept: FigureResults) -> Figure:
        figure, (axis,) = axes_for(1, 5.0, 3.2)
        for name, group in kept.groups().items():
            runs = [r["metrics"][metric] for r in group.done if metric in r.get("metrics", {})]
            if runs and name.startswith("rho-0.1/"):
                band(axis, range(1, len(runs[0]) + 1), runs, label=f"{group.label}, n = {len(runs)}")
        axis.set(xlabel="epoch", ylabel=label)
        axis.legend(fontsize=7)
        return figure

    return picture


def _bars(kept: FigureResults, metric: str = "test_accuracy") -> Figure:
    """One point per cell, where the paper has bars."""
    groups = {n: g for n, g in kept.groups().items() if g.mean(metric)}
    if not groups:
        return None
    figure, (axis,) = axes_for(1, 5.4, 0.6 + 0.24 * len(groups))
    for row, group in enumerate(groups.values()):
        mean = group.mean(metric)
        assert mean is not None
        half = 0.0 if mean.low is None else 100 * (mean.value - mean.low)
        axis.errorbar(100 * mean.value, row, xerr=half, fmt="o", ms=3, capsize=2, color="C0" if half else GREY)
        axis.annotate(f"n = {mean.n}", (1.0, row), xycoords=("axes fraction", "data"), fontsize=7)
    axis.set_yticks(range(len(groups)), list(groups))
    axis.set_ylim(len(groups) - 0.5, -0.5)
    axis.set_xlabel("test accuracy, % (95 % interval)")
    return figure


# S2


def _local_extrema(kept: FigureResults) -> Figure:
    groups = kept.groups()
    figure, axes = axes_for(len(groups))
    for axis, (name, group) in zip(axes, groups.items(), strict=True):
        found = group.done[0]["curvature"]
        for what, color in (("minima", "C0"), ("maxima", "C1")):
            axis.hist(found[what]["counts"], bins=[i - 0.5 for i in range(7)], alpha=0.5, color=color, label=what)
        axis.set(title=name, xlabel="along a direction", ylabel="directions")
    axes[0].legend()
    return figure


def _spectra(kept: FigureResults) -> Figure:
    groups = kept.groups()
    figure, axes = axes_for(len(groups))
    tops = [values for group in groups.values() for values in group.done[0]["metrics"]["top_values"] if values]
    low, high = min(map(min, tops)), max(map(max, tops))
    bins = [low + i * (high - low) / 25 for i in range(26)]  # the same for all, so that they can be compared
    for axis, (name, group) in zip(axes, groups.items(), strict=True):
        metrics = group.done[0]["metrics"]
        for number, (values, trace) in enumerate(zip(metrics["top_values"], metrics["trace"], strict=True)):
            if values:
                label = f"epoch {number + 1}, trace {trace['value']:.0f} ± {trace['error']:.0f}"
                axis.hist(values, bins=bins, alpha=0.5, label=label)
        axis.set(title=name, xlabel="eigenvalue", yscale="symlog")
        axis.set_yticks([0, 1, 3, 10, 30], ["0", "1", "3", "10", "30"])
        axis.legend(fontsize=8)
    axes[0].set_ylabel("number of eigenvalues")
    return figure


def _landscapes(kept: FigureResults) -> Figure:
    groups = {n: g for n, g in kept.groups().items() if g.done and (g.done[0]["curvature"] or {}).get("landscape")}
    if not groups:
        return None
    figure, axes = axes_for(len(groups), 2.8, 2.6)
    levels = [0.1 * 2**i for i in range(10)]  # above the middle, the same for all, so that they can be compared
    for axis, (name, group) in zip(axes, groups.items(), strict=True):
        slice_ = group.done[0]["curvature"]["landscape"]
        losses, middle = slice_["loss"], len(slice_["axis"]) // 2
        rise = [[loss - losses[middle][middle] for loss in row] for row in losses]
        shown = axis.contour(
            slice_["axis"], slice_["axis"], rise, levels=levels, linewidths=0.8, norm="log",
            vmin=levels[0], vmax=levels[-1],
        )  # fmt: skip
        axis.clabel(shown, fontsize=7, fmt="%.3g")
        axis.set_title(name)
    axes[0].set_ylabel("rise of the loss")
    return figure


def _shares(kept: FigureResults) -> Figure:
    sets = list(dict.fromkeys(name.split("/")[0] for name in kept.groups()))
    figure, axes = axes_for(len(sets), 3.8, 3.0)
    for axis, data in zip(axes, sets, strict=True):
        for name, group in kept.groups().items():
            speed, accuracy = group.mean("images_per_second"), group.mean("test_accuracy")
            if name.startswith(f"{data}/") and speed and accuracy:
                points(axis, [speed.value], [accuracy], marker="o", label=name.split("/")[1])
        axis.set(title=data, xlabel="images per second", ylabel="test accuracy, %")
        axis.locator_params(axis="x", nbins=4)
        axis.legend(fontsize=6)
    return figure


# S3, S4, extra


def _frobenius(kept: FigureResults) -> Figure:
    figure, axes = axes_for(4, 3.4, 2.8)
    for number, axis in enumerate(axes):
        kind, by_lambda = ("clean", "noisy")[number // 2], bool(number % 2)
        for name, group in kept.groups().items():
            runs = [[e["value"] for e in r["metrics"]["frobenius"]] for r in group.done if "frobenius" in r["metrics"]]
            if runs and name.startswith(f"{kind}/") and name.startswith(f"{kind}/lambda") == by_lambda:
                band(axis, range(1, len(runs[0]) + 1), runs, label=group.label)
        axis.set(title=f"{kind}, by {'λ' if by_lambda else 'method'}", xlabel="epoch", ylabel="‖H‖²", yscale="log")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=6)
    return figure


def _heat_maps(kept: FigureResults) -> Figure:
    import numpy as np

    metrics = ("test_accuracy", "shifted_accuracy", "trace", "shifted_trace", "top", "shifted_top")
    shown = {metric: s4_sasam.values(kept.experiment, kept.results, metric)[1] for metric in metrics}
    names = [name for name in s4_sasam.OPTIMIZERS if name in shown["test_accuracy"]]
    if not names:
        return None
    run = {at for by in shown["test_accuracy"].values() for at in by}
    lrs = [lr for lr in s4_sasam.LRS if any(lr == there for there, _ in run)]
    decays = [wd for wd in s4_sasam.DECAYS if any(wd == there for _, there in run)]
    figure, axes = axes_for(len(metrics) * len(names), 1.9, 1.8, most=len(names))
    for axis, (metric, name) in zip(axes, ((m, n) for m in metrics for n in names), strict=True):
        at = shown[metric].get(name, {})
        values = np.array([[at.get((lr, wd), np.nan) for wd in decays] for lr in lrs])
        ends = [abs(v) for by in shown[metric].values() for v in by.values()]  # one scale for all optimizers
        low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
        if "accuracy" not in metric:
            low, high = np.log10(low + 1e-12), np.log10(high + 1e-12)
        colours = values if "accuracy" in metric else np.log10(np.abs(values) + 1e-12)
        axis.imshow(colours, cmap="cividis", vmin=low, vmax=high, aspect="auto")
        for i, j in np.ndindex(values.shape):
            if np.isfinite(values[i, j]):
                light = colours[i, j] > (low + high) / 2
                text = f"{values[i, j]:.2f}" if "accuracy" in metric else f"{values[i, j]:.2g}"
                axis.text(j, i, text, ha="center", va="center", fontsize=6, color="black" if light else "white")
        axis.set_xticks(range(len(decays)), [f"{wd:g}" for wd in decays], fontsize=6)
        axis.set_yticks(range(len(lrs)), [f"{lr:g}" for lr in lrs], fontsize=6)
        axis.set_xlabel("weight decay", fontsize=6)
        axis.set_ylabel("learning rate", fontsize=6)
        axis.set_title(f"{s4_sasam.OPTIMIZERS[name][0]}: {_SHIFTED[metric]}", fontsize=7)
    return figure


_SHIFTED = {
    "test_accuracy": "accuracy", "shifted_accuracy": "accuracy, shifted", "trace": "Tr(H)",
    "shifted_trace": "Tr(H), shifted", "top": "λ_max", "shifted_top": "λ_max, shifted",
}  # fmt: skip


def _cost(kept: FigureResults) -> Figure:
    """Methods, and the base trained longer, by cost; among equal costs the most accurate first."""
    found = [(g, cost, mean) for g in kept.results.distinct(kept.experiment, kept.scale)
             if (cost := g.mean("gradients")) and (mean := g.mean("test_accuracy"))]  # fmt: skip
    found.sort(key=lambda row: (row[1].value, -row[2].value))
    cheapest = found[0][1].value
    names = [f"{g.label}, {c.value / cheapest:.2g}x" if g.role == "method" else g.label for g, c, _ in found]
    figure, axes = axes_for(2, 4.6, 1.2 + 0.19 * len(found))
    for axis, metric, factor in zip(axes, ("test_accuracy", "top"), (100, 1), strict=True):
        for row, (group, _, _) in enumerate(found):
            if mean := group.mean(metric):
                error = None if mean.error is None else factor * mean.error
                color = "C3" if group.role == "method" else GREY
                axis.errorbar(factor * mean.value, row, xerr=error, marker="o", ms=3, capsize=2, color=color)
        axis.set_yticks(range(len(found)), names)
        axis.tick_params(axis="y", labelsize=6)
        axis.invert_yaxis()
        axis.grid(axis="y", lw=0.3)
    axes[0].set(xlabel="test accuracy, %")
    axes[1].set(xlabel="λ_max", xscale="log", yticklabels=[])
    return figure


LEAST = {"s0/fig3": 5, "s0/fig6": 5, "s0/choices": 5, "s2/table7": 4, "s2/fig6": 4, "extra/equal-cost": 3}
FIGURES: dict[str, Callable[[FigureResults], Figure]] = {
    "s0/fig2": _learned_transformations, "s0/fig3": _update_periods, "s0/fig4": _quadratic,
    "s0/fig5": _errors_by_epoch, "s0/fig6": _settings, "s0/choices": _bars,
    "s1/fig3": _trajectories, "s1/fig4": _gap_and_top, "s1/fig5": _bars, "s1/fig6": _bars,
    "s1/fig4-cifar": _gap_and_top, "s1/fig8-cifar": _over_training("cos", "cos θ"),
    "s1/fig9-cifar": _over_training("surrogate_gap", "surrogate gap h"), "s1/table6-cifar": _bars,
    "s2/table7": _shares, "s2/fig2": _local_extrema, "s2/fig3": _spectra, "s2/fig5": _landscapes, "s2/fig6": _bars,
    "s3/fig1": _frobenius, "s4/vgg-19": _heat_maps, "s4/vit-small": _heat_maps, "extra/equal-cost": _cost,
    "extra/frontier": lambda kept: charts(tables(kept.results)),
}  # fmt: skip
