"""Figures of matplotlib as drawings that take the page's colours, kept from one build to the next."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import ROOT, inline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT = ROOT / "build" / "drawings"  # git ignores build/
EXAMPLE = ROOT / "examples" / "measure_checkpoint.py"
HERE = Path(__file__)


def kept(name: str, made_from: Iterable[str | Path], make: Callable[[], Any]) -> str:
    """A drawing by name: read if it was made from the same texts and files, else made and kept."""
    import matplotlib

    parts = [item.read_bytes() if isinstance(item, Path) else item.encode() for item in (HERE, *made_from)]
    mark = hashlib.sha256(b"\0".join([matplotlib.__version__.encode(), *parts])).hexdigest()[:16]
    path = KEPT / f"{name}-{mark}.svg"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{name}-????????????????.svg"):
            old.unlink()
        path.write_text(themed(make(), name), "utf-8")
    return inline(path.read_text("utf-8"))


def themed(figure: Figure, name: str) -> str:
    """A figure as SVG in which black is the colour of the page's text, white that of the page, and grey between."""
    import matplotlib as mpl

    written = io.StringIO()
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name}  # ids differ between drawings
    with mpl.rc_context(settings):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="(figure|axes|patch|line2d|text|matplotlib|xtick|ytick|legend|Poly)[^"]*"', "", svg)
    svg = re.sub(r"#([0-9a-f]{2})\1\1\b", _grey, svg)
    start = f'<svg class="figure" fill="currentColor" style="max-width: {96 * figure.get_figwidth():.0f}px" '
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', lambda found: start + found[1], svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _grey(found: re.Match[str]) -> str:
    share = round(100 * (1 - int(found[1], 16) / 255))
    if share == 0:
        return "var(--md-default-bg-color, white)"
    return "currentColor" if share == 100 else f"color-mix(in srgb, currentColor {share}%, transparent)"


# Curvature: examples/measure_checkpoint.py computes what is shown


def curvature(name: str) -> str:
    """One of the example's figures. They are computed together, in a quarter of a minute, when the first is missing."""
    made_from = [EXAMPLE, *sorted((ROOT / "src" / "steppe" / "curvature").glob("*.py"))]
    return kept(f"curvature-{name}", made_from, lambda: example_figures()[name])


_FIGURES: dict[str, Any] = {}


def example_figures() -> dict[str, Figure]:
    """The figures of examples/measure_checkpoint.py by name."""
    import torch

    if not _FIGURES:
        spec = importlib.util.spec_from_file_location("measure_checkpoint", EXAMPLE)
        assert spec is not None and spec.loader is not None
        example = sys.modules["measure_checkpoint"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        torch.set_num_threads(1)  # many small products: more threads take longer
        _FIGURES.update(example.draw(example.train_all()))
    return _FIGURES


# The papers' figures, from the kept results


def paper(name: str) -> str:
    """The figure of an experiment."""
    from steppe.papers.figures import described, drawable, figure_of

    results, source = paper_results(), ROOT / "src" / "steppe" / "papers"
    found = drawable(name, results)
    assert found is not None, f"nothing of {name} was run: python docs/make_papers.py"
    drawn_by = ("figures.py", "frontier_figure.py", "frontier_table.py", "plotting.py")
    made_from = [*(source / file for file in drawn_by), described(found)]
    return kept(f"papers-{found.experiment.slug}", made_from, lambda: figure_of(name, results))


@functools.cache
def paper_results() -> Any:
    """All kept results."""
    from steppe.papers.store import Results

    return Results.read()
