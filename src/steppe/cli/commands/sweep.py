"""`steppe sweep`: search for settings."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ...support.errors import UserError
from ..errors import resumable, say
from ..options import PLACE, RECIPE, Address, Jobs, Method, On, Out, Seeds, takes
from ..prepare import command_for, how_many_jobs, make_place, make_recipe
from ..runs import address_of, report_runs, train_all


@takes(recipe=RECIPE, place=PLACE)
def command(
    recipe: Any,
    place: Any,
    method: Method = "sam",
    grid: Annotated[list[str] | None, typer.Option(help="lr=1e-3,1e-2 or sam.rho=0.05,0.1")] = None,
    range_: Annotated[list[str] | None, typer.Option("--range", help="lr=1e-4..1e-1, for a sampler.")] = None,
    sampler: Annotated[str, typer.Option(help="tpe or random, with --range.")] = "tpe",
    trials: Annotated[int, typer.Option(help="How many trials, with --range.")] = 20,
    storage: Annotated[str, typer.Option(help="Database of the trials; by default SQLite in --out.")] = "",
    study: Annotated[str, typer.Option(help="Name of the study in the database; by default one for each search.")] = "",
    hold_out: Annotated[
        float, typer.Option(help="Share of the training data to compare settings on; 0: use the test data.")
    ] = 0.2,
    seeds: Seeds = 3,
    jobs: Jobs = None,
    on: On = "local",
    address: Address = "",
    out: Out = Path("runs"),
) -> None:
    """Search for settings, over a grid or by sampling, on training data held out for it.

    Settings that cannot be told apart from the best are tied with it. At the end stands the command that compares the
    best with its base, on the test data.
    """
    from ...lab.runner import sweep
    from ...lab.runner.comparison import notes, with_method
    from ...lab.runner.local import Job

    asked = make_recipe(recipe, place["compile"])
    template = replace(with_method(asked, method), hold_out=hold_out)
    space = sweep.read_space(grid or [], range_ or [], template)
    if seeds < 1 or trials < 1:
        raise UserError("--seeds and --trials must be at least 1")
    where_to = address_of(on, address)
    if on == "queue" and range_:
        raise UserError("--on queue is for a --grid: the trials of a --range depend on each other")
    where = make_place(place, template, out)
    workers = how_many_jobs(jobs, where.device)
    for note in notes(asked, [Job(template)]):
        say(note)

    def run(planned: Any) -> Any:
        return train_all(planned, where, workers, where_to)

    with resumable():
        if range_:
            url = storage or sweep.sqlite_url(out / "sweep.db")
            at_once = max(workers // seeds, 1)
            records = sweep.sample(template, space, range(seeds), trials, sampler, url, study, at_once, run, out)
        else:
            records = sweep.over_grid(template, space, range(seeds), run)
        report_runs(records, out / "report.html", sweep.table_of(records))
    if all(record["status"] == "diverged" for record in records):
        typer.echo("every run diverged: none is the best")
    else:
        if same := sweep.tied(records):
            typer.echo(f"tied with the best: {', '.join(same)}")
        best = sweep.best(records)
        typer.echo(f"the best, on all training data: {command_for(best)}")
        typer.echo(f"whether it helps: {_comparison(best)}")


def _comparison(recipe: Any) -> str:
    """The `steppe compare` command of a recipe's method and its base."""
    words = shlex.split(command_for(recipe))
    words[words.index("--method")] = "--methods"
    return shlex.join(["steppe", "compare", *words[2 : words.index("--seed")], "--seeds", "10"])
