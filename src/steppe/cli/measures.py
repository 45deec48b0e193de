"""The measures of `steppe measure`: compute them for one model; print and write those of several models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ..curvature import figures
from ..curvature.density import spectrum
from ..curvature.eigen import eigenvalues
from ..curvature.estimates import Estimate, as_json, difference
from ..curvature.flatness import first_order, surrogate_gap, zeroth_order
from ..curvature.krylov import Krylov
from ..curvature.objective import Objective
from ..curvature.operator import Hessian
from ..curvature.trace import frobenius_squared, trace
from ..support.files import whole_file
from .partial_results import Partial
from .tables import show_table

MEASURES = ("eigenvalues", "trace", "frobenius", "density", "flatness")


@dataclass(frozen=True)
class Request:
    """What to measure, and how accurately."""

    wanted: list[str]
    top: int
    rtol: float
    rho: float
    max_matvecs: int
    seed: int


@dataclass(frozen=True)
class Found:
    """The results for one model: numbers for the table, and results for figures."""

    numbers: dict[str, Estimate]
    drawn: dict[str, Any]


def measure(objective: Objective, asked: Request, partial: Partial) -> Found:
    """All requested measures of one model. They share one Krylov run."""
    found = Found({"loss": Estimate.exact(float(objective.loss()))}, {})
    block = 16 if "density" in asked.wanted else 8
    run = Krylov(Hessian(objective), block=block, seed=asked.seed, checkpoint=partial.file("run.pt"))
    products = 0
    if "density" in asked.wanted:
        density = partial.once("density", lambda: spectrum(run))
        found.drawn.update(density=density, log_det=density.log_det())
        products += density.matvecs
    if "eigenvalues" in asked.wanted:
        products += _eigenvalues(run, asked, partial, found)
    limits: dict[str, Any] = {"rtol": asked.rtol, "max_matvecs": asked.max_matvecs, "seed": asked.seed}
    for name, label, estimate in (("trace", "trace", trace), ("frobenius", "‖H‖²_F", frobenius_squared)):
        if name in asked.wanted:
            file = partial.file(f"{name}.pt")
            one = partial.once(name, lambda e=estimate, file=file: e(run, checkpoint=file, **limits))
            found.numbers[label] = one
            products += one.matvecs
    if "flatness" in asked.wanted:
        _flatness(objective, asked, partial, found)
    found.numbers["products"] = Estimate.exact(float(products))
    return found


def _eigenvalues(run: Krylov, asked: Request, partial: Partial, found: Found) -> int:
    """Add the top eigenvalues to `found`; return the number of Hessian-vector products that they took."""
    many = min(asked.top, run.size)
    best = partial.once("eigenvalues", lambda: eigenvalues(run, many, max_matvecs=asked.max_matvecs))
    found.drawn["eigenvalues"] = best
    cost = {"matvecs": best.matvecs, "seconds": best.seconds, "seed": asked.seed, "method": "lanczos"}
    rows = zip(best.values.tolist(), best.errors.tolist(), best.converged.tolist(), strict=True)
    for index, (value, error, converged) in enumerate(rows, start=1):
        found.numbers[f"λ{index}"] = Estimate(
            value, error, value - error, value + error, converged, how=best.how, **cost
        )
    return best.matvecs


def _flatness(objective: Objective, asked: Request, partial: Partial, found: Found) -> None:
    rho, gap = asked.rho, surrogate_gap(objective, asked.rho)
    found.numbers[f"surrogate gap (ρ={rho:g})"] = Estimate.exact(gap.gap)
    found.numbers["cos θ"] = Estimate.exact(gap.cosine)
    for sign, order in (("⁰", zeroth_order), ("¹", first_order)):
        bound = partial.once(order.__name__, lambda order=order: order(objective, rho, seed=asked.seed).value)
        found.numbers[f"R⁽{sign}⁾ ≥ (ρ={rho:g})"] = Estimate.exact(bound)


def _cell(one: Estimate) -> str:
    error = f" ± {one.standard_error:.1g}" if one.standard_error else ""
    return f"{one.value:.5g}{error}{'' if one.converged else ' !'}"


def print_numbers(found: dict[str, Found]) -> None:
    """Print a table with one row per measure and one column per checkpoint."""
    numbers = {name: one.numbers for name, one in found.items()}
    rows = [[name, *(_cell(one[name]) for one in numbers.values())] for name in next(iter(numbers.values()))]
    show_table(["measure", *found], rows)
    if any(not each.converged for one in numbers.values() for each in one.values()):
        typer.echo("! marks values that did not reach the requested error: raise --max-matvecs or --rtol")


def print_differences(found: dict[str, Found]) -> None:
    """Print every checkpoint minus the first; both are measured with the same random vectors."""
    first, *others = found
    rows = []
    for other in others:
        for name, one in found[first].numbers.items():
            if name != "products":
                change = difference(found[other].numbers[name], one)
                clear = "" if change.low <= 0 <= change.high else "*"
                rows.append([f"{other} − {first}", name, _cell(change), clear])
    if rows:
        typer.echo()
        show_table(["difference", "measure", "value", "interval excludes 0"], rows)


def write(found: dict[str, Found], out: Path) -> list[str]:
    """Write the results and their figures; return one line per file."""
    out.mkdir(parents=True, exist_ok=True)
    numbers = {name: one.numbers for name, one in found.items()}
    details = {name: {k: v for k, v in one.drawn.items() if k != "density"} for name, one in found.items()}
    path = out / "curvature.json"
    text = json.dumps({"measures": as_json(numbers), "details": as_json(details)}, indent=1, ensure_ascii=False)
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")
    lines = [f"wrote {path}"]
    makers: dict[str, Callable[..., Any]] = {
        "density": figures.density_figure,
        "log_det": figures.log_det_figure,
        "eigenvalues": lambda many: figures.top_figure({name: one.values for name, one in many.items()}),
    }
    try:
        for key, make in makers.items():
            many = {name: one.drawn[key] for name, one in found.items() if key in one.drawn}
            if many:
                lines.append(f"wrote {figures.save(make(many), out / f'{key}.png')}")
    except ImportError:
        lines.append("no figures: install matplotlib to get them (pip install matplotlib)")
    return lines
