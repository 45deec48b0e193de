"""`steppe landscape`: the loss around checkpoints, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...curvature import figures
from ...curvature.eigen import eigenvalues
from ...curvature.landscape import line, plane
from ...curvature.objective import Objective
from ...curvature.operator import Hessian
from ...support.errors import UserError, require
from ...vector import Vector
from ..errors import say, user_mistakes
from ..objectives import objectives
from ..options import OBJECTIVE, Checkpoints, takes
from ..prepare import make_folder


@takes(objective=OBJECTIVE)
def command(
    objective: Any,
    checkpoints: Checkpoints,
    dimensions: Annotated[int, typer.Option(help="1 for a line, 2 for a surface.")] = 2,
    along: Annotated[str, typer.Option(help="Directions: random (filter-normalised) or eigenvectors.")] = "random",
    reach: Annotated[
        float, typer.Option(help="How far to go from the weights both ways, as a multiple of the direction.")
    ] = 1.0,
    points: Annotated[int, typer.Option(help="Points per axis; an odd number, so that one is the centre.")] = 25,
    html: Annotated[bool, typer.Option(help="Also write an interactive HTML surface (needs plotly).")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("landscape"),
) -> None:
    """Draw the loss around one or more checkpoints: PNG, SVG, and an interactive HTML surface.

    Several checkpoints are also drawn side by side, on one scale.
    """
    if dimensions not in (1, 2):
        raise UserError(f"--dimensions must be 1 or 2, not {dimensions}")
    if along not in ("random", "eigenvectors"):
        raise UserError(f"--along must be random or eigenvectors, not {along!r}")
    require("matplotlib", "matplotlib", "drawing figures")
    make_folder(out)
    how: dict[str, Any] = {"reach": reach, "points": points, "seed": objective["seed"]}
    with user_mistakes(ValueError, TypeError, ImportError):
        named = dict(objectives(checkpoints, objective))
        vectors = _eigenvectors(named, dimensions, objective["seed"]) if along == "eigenvectors" else {}
        written = _line(named, vectors, out, how) if dimensions == 1 else _surfaces(named, vectors, out, html, how)
    for path in written:
        typer.echo(f"wrote {path}")


def _eigenvectors(named: dict[str, Objective], count: int, seed: int) -> dict[str, list[Vector]]:
    found = {}
    for name, objective in named.items():
        best = eigenvalues(Hessian(objective), count, seed=seed)
        found[name] = [objective.vector(v) for v in best.vectors.T]
    return found


def _line(named: dict[str, Objective], vectors: dict[str, list[Vector]], out: Path, how: dict[str, Any]) -> list[Path]:
    axis = "top eigenvector" if vectors else "filter-normalised random direction"
    directions = {name: each[0] for name, each in vectors.items()} or None
    figure = figures.line_figure(line(named, directions, axis=axis, **how))
    return [figures.save(figure, out / f"line.{kind}") for kind in ("png", "svg")]


def _surfaces(
    named: dict[str, Objective], vectors: dict[str, list[Vector]], out: Path, html: bool, how: dict[str, Any]
) -> list[Path]:
    written = []
    axes = ("first eigenvector", "second eigenvector") if vectors else ("first direction", "second direction")
    stems = _distinct([Path(name).name for name in named])
    planes: dict[str, Any] = {}
    for stem, (name, objective) in zip(stems, named.items(), strict=True):
        directions = (vectors[name][0], vectors[name][1]) if vectors else None
        planes[stem] = found = plane(objective, directions, axes=axes, **how)
        for kind, make in (("contour", figures.contour_figure), ("surface", figures.surface_figure)):
            written += [figures.save(make(found), out / f"{stem}-{kind}.{ending}") for ending in ("png", "svg")]
        written += _interactive(found, out / f"{stem}.html") if html else []
    if len(planes) > 1:
        both = figures.contours_figure(planes)
        written += [figures.save(both, out / f"side-by-side.{ending}") for ending in ("png", "svg")]
    return written


def _distinct(names: list[str]) -> list[str]:
    """Distinct names for files: a name that occurs several times gets a number."""
    return [name if names.count(name) == 1 else f"{name}-{index}" for index, name in enumerate(names, start=1)]


def _interactive(found: Any, path: Path) -> list[Path]:
    try:
        figures.surface_html(found, path)
    except ImportError:
        say("no interactive surface: pip install plotly for it, or pass --no-html")
        return []
    return [path]
