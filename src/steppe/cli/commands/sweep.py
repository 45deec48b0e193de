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

Grid = Annotated[
    list[str] | None,
    typer.Option(help="Values to try: lr=1e-3,1e-2 or sam.rho=0.05,0.1. Repeatable: all combinations are trained."),
]
Range = Annotated[
    list[str] | None,
    typer.Option(
        "--range",
        help="Range to sample from: lr=1e-4..1e-1 or sam.rho=0.01..0.5, on a logarithmic scale if it spans a factor of "
        "10. Repeatable.",
    ),
]
Sampler = Annotated[str, typer.Option(help="With --range: how Optuna samples, tpe or random.")]
Trials = Annotated[int, typer.Option(help="With --range: number of settings to try.")]
TRIALS = 20
Storage = Annotated[str, typer.Option(help="With --range: URL of Optuna's database. Default: an SQLite file in --out.")]
Study = Annotated[
    str, typer.Option(help="With --range: name of the study in the database. Default: a name for this search.")
]
HoldOut = Annotated[
    float, typer.Option(help="Share of the training data that settings are compared on; 0 compares on the test data.")
]


@takes(recipe=RECIPE, place=PLACE)
def command(
    recipe: Any,
    place: Any,
    method: Method = "sam",
    grid: Grid = None,
    range_: Range = None,
    sampler: Sampler = "tpe",
    trials: Trials = TRIALS,
    storage: Storage = "",
    study: Study = "",
    hold_out: HoldOut = 0.2,
    seeds: Seeds = 3,
    jobs: Jobs = None,
    on: On = "local",
    address: Address = "",
    out: Out = Path("runs"),
) -> None:
    """Search for settings, over a grid or by sampling, judged on held-out training data.

    Settings that cannot be told apart from the best are tied with it. The last line is the command that compares the
    best setting with its base on the test data.
    """
    from ...lab.runner import sweep
    from ...lab.runner.comparison import notes, with_method
    from ...lab.runner.jobs import Job

    asked = make_recipe(recipe, place["compile"])
    template = replace(with_method(asked, method), hold_out=hold_out)
    space = sweep.read_space(grid or [], range_ or [], template)
    if seeds < 1 or trials < 1:
        raise UserError("--seeds and --trials must be at least 1")
    if not range_:
        _refuse({"trials": trials != TRIALS, "sampler": sampler != "tpe", "storage": storage, "study": study})
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
        typer.echo("every run diverged, so there is no best setting")
    else:
        if same := sweep.tied(records):
            typer.echo(f"tied with the best: {', '.join(same)}")
        best = sweep.best(records)
        typer.echo(f"to train with the best setting on all training data: {command_for(best)}")
        typer.echo(f"to see whether it helps: {_comparison(best)}")


def _refuse(given: dict[str, Any]) -> None:
    """Raise for options that a grid would ignore."""
    if first := next((name for name, value in given.items() if value), ""):
        raise UserError(f"--{first} is for a --range: a --grid has all its settings tried")


def _comparison(recipe: Any) -> str:
    """The `steppe compare` command that compares a recipe's method with its base."""
    words = shlex.split(command_for(recipe))
    words[words.index("--method")] = "--methods"
    return shlex.join(["steppe", "compare", *words[2 : words.index("--seed")], "--seeds", "10"])
