"""`steppe measure`: the curvature of the loss at checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ...curvature.trace import FEWEST_PRODUCTS
from ...support.errors import UserError
from ..errors import resumable, user_mistakes
from ..measures import MEASURES, Request, measure, print_differences, print_numbers, write
from ..objectives import objectives
from ..options import OBJECTIVE, Checkpoints, takes
from ..partial_results import partial_results
from ..prepare import make_folder


@takes(objective=OBJECTIVE)
def command(
    objective: Any,
    checkpoints: Checkpoints,
    what: Annotated[
        list[str] | None,
        typer.Option(help=f"What to measure: {', '.join(MEASURES)}. Repeatable. Default: all but flatness."),
    ] = None,
    top: Annotated[int, typer.Option(help="Number of largest eigenvalues.")] = 5,
    rtol: Annotated[
        float, typer.Option(help="Relative standard error at which an estimate is accurate enough.")
    ] = 0.01,
    rho: Annotated[float, typer.Option(help="Radius of the flatness measures, a distance in weight space.")] = 0.05,
    max_matvecs: Annotated[int, typer.Option(help="Largest number of Hessian-vector products per measure.")] = 2000,
    out: Annotated[Path, typer.Option(help="Folder for JSON and figures.")] = Path("curvature"),
    resume: Annotated[bool, typer.Option(help="Resume if the same command was interrupted before.")] = True,
) -> None:
    """Measure the curvature of the loss at one or more checkpoints, with error bars."""
    wanted = list(what or ()) or [name for name in MEASURES if name != "flatness"]
    asked = Request(wanted, top, rtol, rho, max_matvecs, objective["seed"])
    _check(asked)
    make_folder(out)
    found, partials = {}, []
    again = f"Run the same command again to resume from {out / '.partial'}, or with --no-resume to start over."
    with resumable(again), user_mistakes(ValueError, TypeError, ImportError):
        for path, (name, loss) in zip(checkpoints, objectives(checkpoints, objective), strict=True):
            typer.echo(f"measuring {name}: {loss.size:,} weights", err=True)
            question = {"asked": asked, "objective": objective, "checkpoints": checkpoints}
            partials.append(partial_results(out, path, loss, question, resume))
            found[name] = measure(loss, asked, partials[-1])
        written = write(found, out)
        print_numbers(found)
        print_differences(found)
    typer.echo("\n".join(written))
    for partial in partials:
        partial.remove()


def _check(asked: Request) -> None:
    """Raise for a wrong option before any measure is computed, which may take hours."""
    for name in asked.wanted:
        if name not in MEASURES:
            raise UserError(f"--what is one of {', '.join(MEASURES)}, not {name}")
    positive = {"--rtol": asked.rtol, "--rho": asked.rho, "--top": asked.top, "--max-matvecs": asked.max_matvecs}
    for option, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{option} must be positive, not {value}")
    if asked.max_matvecs < FEWEST_PRODUCTS and {"trace", "frobenius"} & set(asked.wanted):
        raise UserError(f"--max-matvecs must be at least {FEWEST_PRODUCTS} for trace and frobenius")
