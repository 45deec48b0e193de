"""`steppe compare`: several methods on the same data, model and seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ...support.errors import UserError
from ..errors import resumable, say
from ..options import PLACE, RECIPE, Jobs, Out, Seeds, Together, takes
from ..prepare import how_many_jobs, make_place, make_recipe, runs_at_once
from ..runs import report_runs, train_all


@takes(recipe=RECIPE, place=PLACE)
def command(
    recipe: Any,
    place: Any,
    more: Annotated[list[str] | None, typer.Argument(metavar="[METHODS]...", help="More methods.")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="sam:rho=0.1,gsam,gam:T=3")] = None,
    seeds: Seeds = 3,
    equal_cost: Annotated[
        bool, typer.Option(help="Also train the base longer, until it has cost as much as a method.")
    ] = True,
    jobs: Jobs = None,
    together: Together = None,
    out: Out = Path("runs"),
) -> None:
    """Train one model on one data set with several methods and seeds; report accuracy, sharpness and cost.

    Without any option: the digits that come with scikit-learn, a small net, six methods, three seeds; about two
    minutes on two cores. Runs that are done already are not repeated.
    """
    from ...lab.recipe.method_text import split_methods
    from ...lab.report import headline, table
    from ...lab.runner.comparison import DEFAULT_METHODS, notes, plan
    from ..progress import other_measures

    wanted = split_methods([*(methods or ()), *(more or ())]) or list(DEFAULT_METHODS)
    if seeds < 1:
        raise UserError(f"--seeds must be at least 1, not {seeds}")
    base = make_recipe(recipe, place["compile"])
    planned = plan(base, wanted, range(seeds), equal_cost)
    where = make_place(place, base, out)
    where = replace(where, together=runs_at_once(together, [base], where.device))
    for note in notes(base, planned):
        say(note)
    with resumable():
        records = train_all(planned, where, how_many_jobs(jobs, where.device))
        report_runs(records, out / "report.html", headline(records), table(records), other_measures(records))
