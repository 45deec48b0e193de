"""`steppe compare`: several methods on the same data, model and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...support.errors import UserError
from ..errors import resumable, say
from ..options import PLACE, RECIPE, Address, Jobs, Json, On, Out, Together, takes
from ..prepare import how_many_jobs, make_place, make_recipe, with_runs_at_once
from ..runs import address_of, report_runs, train_all


@takes(recipe=RECIPE, place=PLACE)
def command(
    recipe: Any,
    place: Any,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[METHODS]...", help="Methods to compare, as with --methods.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(help="Methods to compare, with their settings: sam:rho=0.1,gsam,gam:T=3. Default: four methods."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds. Default: 3; without any option 10.")] = None,
    equal_cost: Annotated[
        bool, typer.Option(help="Also train the base optimizer longer, until it has cost as much as each method.")
    ] = True,
    rivals: Annotated[
        list[str] | None,
        typer.Option(
            help="Variants of the base that methods must beat at equal cost: average=ema:10%, nesterov=true or "
            "weight_decay=5e-4; none for no variant. Repeatable. Default: these three, where they apply."
        ),
    ] = None,
    jobs: Jobs = None,
    together: Together = None,
    on: On = "local",
    address: Address = "",
    as_json: Json = False,
    out: Out = Path("runs"),
) -> None:
    """Train one model on one data set with several methods and seeds; report accuracy, sharpness and cost.

    Without any option: the digits that come with scikit-learn, with clean and with 60 % wrong labels, a small net, four
    methods, ten seeds; about a minute on two cores. Finished runs in --out are not repeated.
    """
    from ...lab.recipe.method_text import split_methods
    from ...lab.records import metric_of
    from ...lab.report import headline, table
    from ...lab.runner.comparison import DEFAULT_METHODS, FIRST_SEEDS, notes, plan_all
    from ..progress import other_measures

    wanted = split_methods([*(methods or ()), *(more or ())])
    first = not wanted and all(value is None for value in recipe.values())
    count = seeds if seeds is not None else FIRST_SEEDS if first else 3
    if count < 1:
        raise UserError(f"--seeds must be at least 1, not {count}")
    asked = make_recipe(recipe, place["compile"])
    planned = plan_all(asked, wanted or DEFAULT_METHODS, range(count), equal_cost, _rivals(rivals), first)
    where = make_place(place, asked, out)
    where = with_runs_at_once(where, together, [asked])
    for note in notes(asked, planned):
        say(note)
    with resumable():
        records = train_all(planned, where, how_many_jobs(jobs, where.device), address_of(on, address))
        metric = metric_of(records)
        shown = headline(records, metric), table(records, metric), other_measures(records)
        report_runs(records, out / "report.html", *shown, metric=metric, as_json=as_json)


def _rivals(texts: list[str] | None) -> list[dict[str, Any]] | None:
    """The rivals of the base, one per text; None if none was given."""
    from ...lab.recipe.recipe import read_settings

    if texts is None:
        return None
    return [read_settings([text], "--rivals") for text in texts if text != "none"]
