"""Figures of measurements. Every function returns a matplotlib Figure; `save` writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..support.drawing import new_figure
from ..support.files import whole_file
from .density import LogDet, Spectrum
from .flatness import transformed
from .landscape import Line, Plane
from .monitor import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Distinguishable without colour vision:
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def density_figure(spectra: Spectrum | Mapping[str, Spectrum], width: float | None = None) -> Figure:
    """Spectral density on a log axis, with a band of one standard error; outliers as ticks."""
    figure, axes = _blank("eigenvalue", "density")
    named = _named(spectra)
    width = width or max(one.width for one in named.values()) or 1.0
    lowest, highest = float("inf"), 0.0
    for colour, (name, one) in zip(_cycle(), named.items(), strict=False):
        grid, density, error = one.density(width=width)
        lowest = min(lowest, 0.1 / (one.size * width))  # a quarter of the peak of one eigenvalue
        highest = max(highest, float(density.max()))
        axes.plot(grid, density, color=colour, label=name, linewidth=1.4)
        low = (density - error).clamp_min(lowest / 100)
        axes.fill_between(grid, low, density + error, color=colour, alpha=0.25, linewidth=0)
        outliers = one.nodes[one.exact].tolist()
        axes.plot(
            outliers, [0.02] * len(outliers), "|", color=colour, markersize=9, transform=axes.get_xaxis_transform()
        )
    axes.set_yscale("log")
    axes.set_ylim(lowest, 3 * highest)
    return _finished(figure, axes, spectra)


def top_figure(values: Tensor | Mapping[str, Tensor], bins: int = 30) -> Figure:
    """A histogram of the largest eigenvalues, on one set of bins (Zhang et al. 2023, Figure 3)."""
    named = _named(values)
    figure, axes = _blank("eigenvalue", f"how many of the top {len(next(iter(named.values())))}")
    low, high = min(float(one.min()) for one in named.values()), max(float(one.max()) for one in named.values())
    edges = torch.linspace(low, high + 1e-9 * abs(high) + 1e-300, bins + 1, dtype=torch.float64).tolist()
    for colour, (name, one) in zip(_cycle(), named.items(), strict=False):
        label = f"{name}: λ₁ = {float(one.max()):.3g}"
        axes.hist(one.tolist(), bins=edges, color=colour, alpha=0.55, label=label, edgecolor="white", linewidth=0.5)
    axes.legend(frameon=False)
    return figure


def log_det_figure(curves: LogDet | Mapping[str, LogDet]) -> Figure:
    """log|det| of the part above a cut, over cuts."""
    figure, axes = _blank("cut: eigenvalues with |λ| above it are counted", "log |det|")
    for colour, (name, one) in zip(_cycle(), _named(curves).items(), strict=False):
        axes.plot(one.cuts, one.values, color=colour, label=name, linewidth=1.4)
        low, high = one.values - one.standard_errors, one.values + one.standard_errors
        axes.fill_between(one.cuts, low, high, color=colour, alpha=0.25, linewidth=0)
    axes.set_xscale("log")
    return _finished(figure, axes, curves)


def history_figure(histories: Sequence[Record] | Mapping[str, Sequence[Record]]) -> Figure:
    """The top eigenvalue over training."""
    figure, axes = _blank("step", "largest eigenvalue")
    for colour, (name, records) in zip(_cycle(), _named(histories).items(), strict=False):
        steps, tops, errors = ([getattr(r, key) for r in records] for key in ("step", "top", "top_error"))
        axes.errorbar(steps, tops, yerr=errors, color=colour, label=name, marker="o", markersize=3, linewidth=1.2)
    return _finished(figure, axes, histories)


def transformation_figure(gammas: Mapping[str, Tensor], largest: float = 1.0) -> Figure:
    """P(λ), how generalization-aware minimization sees an eigenvalue, for learned coefficients."""
    figure, axes = _blank("eigenvalue λ", "P(λ)")
    values = torch.linspace(0, largest, 200, dtype=torch.float64)
    axes.plot(values, values, color="0.6", linestyle="--", linewidth=1, label="P(λ) = λ")
    for colour, (name, gamma) in zip(_cycle(), gammas.items(), strict=False):
        axes.plot(values, transformed(values, gamma.double()), color=colour, label=name, linewidth=1.4)
    axes.legend(frameon=False)
    return figure


def line_figure(slice: Line) -> Figure:
    """Loss along a line. Steps where the loss is not finite are marked on the axis."""
    figure, axes = _blank(slice.axis, "loss")
    for colour, (name, losses) in zip(_cycle(), slice.losses.items(), strict=False):
        axes.plot(slice.steps, losses, color=colour, label=name, linewidth=1.4)
        broken = slice.steps[~losses.isfinite()].tolist()
        if broken:
            label = f"{name}: not a number"
            axes.plot(
                broken, [0.01] * len(broken), "x", color=colour, label=label, transform=axes.get_xaxis_transform()
            )
    if len(slice.losses) > 1 or len(axes.lines) > 1:
        axes.legend(frameon=False)
    return figure


def contour_figure(plane: Plane) -> Figure:
    """Loss on a plane as contours, evenly spaced in the logarithm, with the optimizer's path if there is one.

    A loss of zero is drawn as the smallest positive loss. If any loss is negative, contours are evenly spaced in the
    loss itself.
    """
    figure, axes = _blank(*plane.axes)
    (shown,), label = _heights([plane])
    figure.colorbar(_contours(axes, plane, shown, 24), ax=axes, label=label, format="%.2g")
    return figure


def contours_figure(planes: Mapping[str, Plane]) -> Figure:
    """Several planes side by side, with one scale of colours, so that they can be compared."""
    figure = new_figure(0.9 + 3.6 * len(planes), 3.9)
    several: Any = figure.subplots(1, len(planes), squeeze=False)[0]
    heights, label = _heights(list(planes.values()))
    finite = torch.cat([one[one.isfinite()] for one in heights])
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    levels = torch.linspace(low, high if high > low else low + 1, 25).tolist()
    filled: Any = None
    for axes, (name, plane), shown in zip(several, planes.items(), heights, strict=True):
        filled = _contours(axes, plane, shown, levels)
        axes.set(title=name, xlabel=plane.axes[0], ylabel=plane.axes[1])
    figure.colorbar(filled, ax=list(several), label=label, format="%.2g")
    return figure


def _heights(planes: Sequence[Plane]) -> tuple[list[Tensor], str]:
    """The losses to draw: their logarithms, unless any is negative; and what they are called."""
    shown = [torch.where(plane.losses.isfinite(), plane.losses, torch.nan) for plane in planes]
    every = torch.cat([one.flatten() for one in shown])
    positive = every[every > 0]
    if len(positive) and not bool((every < 0).any()):
        return [one.clamp_min(positive.min()).log10() for one in shown], "log₁₀ loss"
    return shown, "loss"


def _contours(axes: Any, plane: Plane, shown: Tensor, levels: Any) -> Any:
    axes.set_facecolor("0.85")  # visible where the loss is not finite
    filled = axes.contourf(plane.across, plane.up, shown, levels=levels, cmap="viridis")
    lines = {"colors": "white", "linestyles": "solid", "linewidths": 0.3, "alpha": 0.6}
    axes.contour(plane.across, plane.up, shown, levels=levels, **lines)
    if len(plane.path):
        axes.plot(plane.path[:, 0], plane.path[:, 1], color="white", linewidth=1.2, marker="o", markersize=2.5)
    axes.plot(0, 0, "*", color="#E69F00", markersize=11, markeredgecolor="white")
    return filled


def surface_figure(plane: Plane) -> Figure:
    """Loss on a plane as a surface."""
    figure = new_figure(6, 4.6)
    axes: Any = figure.add_subplot(projection="3d", computed_zorder=False)
    across, up = torch.meshgrid(plane.across, plane.up, indexing="xy")
    losses = plane.losses.clone()
    losses[~losses.isfinite()] = torch.nan
    axes.plot_surface(across.numpy(), up.numpy(), losses.numpy(), cmap="viridis", rstride=1, cstride=1, linewidth=0)
    axes.set(xlabel=plane.axes[0], ylabel=plane.axes[1], zlabel="loss")
    for part in (axes.xaxis, axes.yaxis, axes.zaxis):
        part.label.set_size(8)
        part.set_tick_params(labelsize=7)
    axes.view_init(elev=32, azim=-55)
    axes.set_box_aspect(None, zoom=0.88)
    return figure


def surface_html(plane: Plane, path: str | os.PathLike[str]) -> None:
    """An interactive surface in one HTML file that needs no network. Needs plotly."""
    import plotly.graph_objects as go

    losses = [
        [value if value == value and abs(value) != float("inf") else None for value in row]
        for row in plane.losses.tolist()
    ]
    first, second = plane.axes
    hover_text = f"loss %{{z:.5g}}<br>{first} %{{x:.3g}}<br>{second} %{{y:.3g}}<extra></extra>"
    shown: dict[str, Any] = {"colorscale": "Viridis", "hovertemplate": hover_text}
    shown["colorbar"] = {"len": 0.75, "title": {"text": "loss"}}  # short, because the buttons are above it
    figure = go.Figure(go.Surface(x=plane.across.tolist(), y=plane.up.tolist(), z=losses, **shown))
    scene: dict[str, Any] = {"xaxis_title": plane.axes[0], "yaxis_title": plane.axes[1], "zaxis_title": "loss"}
    # As wide as it is deep; the camera sees all of it, and looks over the rim into the valley.
    scene |= {"aspectmode": "manual", "aspectratio": {"x": 1, "y": 1, "z": 0.8}}
    scene["camera"] = {"eye": {"x": -1.0, "y": -1.35, "z": 1.0}, "center": {"x": 0, "y": 0, "z": -0.15}}
    figure.update_layout(scene=scene, margin={"l": 0, "r": 0, "t": 0, "b": 0}, template="plotly_white", autosize=True)
    options: dict[str, Any] = {"config": {"displaylogo": False}, "default_height": "96vh"}
    with whole_file(Path(path)) as temporary:
        figure.write_html(os.fspath(temporary), include_plotlyjs=True, full_html=True, **options)


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure: PNG, SVG or PDF, by the name."""
    path = Path(path)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=130, format=path.suffix[1:] or "png")
    return path


def _blank(x: str, y: str) -> tuple[Figure, Any]:
    figure = new_figure(6, 3.8)
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _finished(figure: Figure, axes: Any, given: Any) -> Figure:
    """The figure, with a legend if there are several curves."""
    if isinstance(given, Mapping) and len(given) > 1:
        axes.legend(frameon=False)
    return figure


def _named(given: Any) -> Mapping[str, Any]:
    """One curve per name. A single curve, without a name, is "model"."""
    return given if isinstance(given, Mapping) else {"model": given}


def _cycle() -> list[str]:
    return list(_COLOURS * 4)
