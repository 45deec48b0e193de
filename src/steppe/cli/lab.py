"""The lab's commands: `compare`, `train`, `sweep`, `report`, `list`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..support.errors import UserError, unknown
from .errors import OneLine, helpful
from .options import at_once, command_for, how_many_jobs, make_place, make_recipe, trains

Method = Annotated[str, typer.Option(help="What to train with: sam:rho=0.1. `steppe list methods` has them all.")]
Seed = Annotated[int, typer.Option(help="Of the first weights, the batches and every other random draw.")]
Seeds = Annotated[int, typer.Option(help="How many seeds, from 0.")]
Out = Annotated[Path, typer.Option(help="The folder for records and the report.")]
Jobs = Annotated[int | None, typer.Option(help="Processes at a time. On a CPU by default one a core.")]


def register(app: typer.Typer) -> None:
    """Add the commands to an app."""
    for command in (compare, train, sweep, report):
        app.command(cls=OneLine)(command)
    app.command("list", cls=OneLine)(list_)


@trains
def compare(
    recipe: Any,
    place: Any,
    more: Annotated[list[str] | None, typer.Argument(metavar="[METHODS]...", help="More methods.")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="sam:rho=0.1,gsam,gam:T=3")] = None,
    seeds: Seeds = 3,
    equal_cost: Annotated[bool, typer.Option(help="Also train the base as much longer as the methods cost.")] = True,
    jobs: Jobs = None,
    together: Annotated[
        int | None, typer.Option(help="Runs at once in one process: on a GPU by default 5 of a small net, else 1.")
    ] = None,
    out: Out = Path("runs"),
) -> None:
    """Train one model on one data set with several methods and seeds; report accuracy, sharpness and cost.

    Without any option: the digits that come with scikit-learn, a small net, six methods, three seeds, about two
    minutes on two cores. What is done already is not done again.
    """
    from dataclasses import replace

    from ..lab.recipe.method_text import split_methods
    from ..lab.report import table
    from ..lab.runner.comparison import DEFAULT_METHODS, notes, plan
    from .progress import other_measures

    wanted = split_methods([*(methods or ()), *(more or ())]) or list(DEFAULT_METHODS)
    if seeds < 1 or (together is not None and together < 1):
        raise UserError("--seeds and --together must be at least 1")
    base = make_recipe(recipe, place["compile"])
    planned = plan(base, wanted, range(seeds), equal_cost)
    where = make_place(place, base, out)
    for note in notes(base, planned):
        typer.echo(f"steppe: {note}", err=True)
    records = do(
        planned, replace(where, together=together or at_once(base, where.device)), how_many_jobs(jobs, where.device)
    )
    show(records, out / "report.html", table(records), other_measures(records))


def do(planned: list[Any], where: Any, workers: int, address: str | None = None) -> list[Any]:
    """Train what is planned, with a progress display: here, or at the address of a Ray cluster ("": a new one)."""
    from ..lab.runner.local import notes, perform
    from ..lab.runner.sweep import perform_on_ray
    from .progress import Display

    for note in notes(planned, where):
        typer.echo(f"steppe: {note}", err=True)
    with Display(planned) as display:
        if address is not None:
            return perform_on_ray(planned, where, address, workers, display)
        return perform(planned, where, workers, display)


def show(records: list[Any], page: Path, *tables: Any, metric: str = "test_accuracy") -> None:
    """Tables on the terminal, the page on disk."""
    from rich.console import Console

    from ..lab.report import write_report

    for table in tables:
        if table is not None:
            Console().print(table)
    write_report(records, page, command="steppe " + shlex.join(sys.argv[1:]), metric=metric)
    typer.echo(f"wrote {page}")


@trains
def train(
    recipe: Any,
    place: Any,
    method: Method = "plain",
    seed: Seed = 0,
    distributed: Annotated[str, typer.Option(help="ddp or fsdp2, under torchrun.")] = "",
    out: Out = Path("runs"),
) -> None:
    """Train one model once. Under torchrun, on several processes."""
    from dataclasses import replace

    from ..lab.runner import comparison as comparing
    from ..lab.runner.local import Job, notes, train_jobs
    from ..lab.training.ranks import ALONE, join
    from .progress import Display

    asked = make_recipe(recipe, place["compile"])
    one = replace(comparing.with_method(asked, method), seed=seed)
    ranks = join(distributed, place["device"]) if distributed else ALONE
    job = Job(one, "base" if one.method == "plain" else "method")
    where = make_place(place, one, out)
    for note in [*comparing.notes(asked, [job]), *notes([job], where)] if ranks.first else ():
        typer.echo(f"steppe: {note}", err=True)
    with Display([job], quiet=not ranks.first) as display:
        record = train_jobs([job], where, display, ranks)[0]
    if ranks.first:
        end = record["final"]
        said = record["verdict"] or f"test accuracy {end['test_accuracy']:.4f}, loss {end['test_loss']:.4f}"
        typer.echo(f"{record['label']}: {said}, {end['seconds']:.1f} s, {end['gradients']} gradients")
        typer.echo(f"{'done before:' if display.before else 'wrote'} {out / (record['key'] + '.json')}")
    if distributed:
        import gc

        import torch.distributed

        gc.collect()  # what still holds the group, such as DDP's reducer, must go before it
        torch.distributed.barrier()  # and nobody leaves while others still talk
        torch.distributed.destroy_process_group()


@trains
def sweep(
    recipe: Any,
    place: Any,
    method: Method = "sam",
    grid: Annotated[list[str] | None, typer.Option(help="lr=1e-3,1e-2 or sam.rho=0.05,0.1")] = None,
    range_: Annotated[list[str] | None, typer.Option("--range", help="lr=1e-4..1e-1, for a sampler.")] = None,
    sampler: Annotated[str, typer.Option(help="tpe or random, with --range.")] = "tpe",
    trials: Annotated[int, typer.Option(help="How many, with --range.")] = 20,
    storage: Annotated[str, typer.Option(help="Database of the trials; by default SQLite in --out.")] = "",
    study: Annotated[str, typer.Option(help="Name of the study in the database; by default one for each search.")] = "",
    hold_out: Annotated[float, typer.Option(help="Share of the training data to judge by; 0: the test data.")] = 0.2,
    seeds: Seeds = 1,
    jobs: Jobs = None,
    on: Annotated[str, typer.Option(help="local or ray.")] = "local",
    address: Annotated[str, typer.Option(help="Of a Ray cluster; by default a local one is started.")] = "",
    out: Out = Path("runs"),
) -> None:
    """Search for settings, over a grid or by sampling, on training data held out for it."""
    from dataclasses import replace

    from ..lab.runner import sweep as searching
    from ..lab.runner.comparison import notes, with_method
    from ..lab.runner.local import Job

    asked = make_recipe(recipe, place["compile"])
    template = replace(with_method(asked, method), hold_out=hold_out)
    space = searching.read_space(grid or [], range_ or [], template)
    if seeds < 1 or trials < 1:
        raise UserError("--seeds and --trials must be at least 1")
    if on not in ("local", "ray"):
        raise UserError(f"--on is local or ray, not {on!r}")
    where = make_place(place, template, out)
    workers = how_many_jobs(jobs, where.device)
    for note in notes(asked, [Job(template)]):
        typer.echo(f"steppe: {note}", err=True)

    def run(planned: Any) -> Any:
        return do(planned, where, workers, address=address if on == "ray" else None)

    if range_:
        url = storage or searching.sqlite_url(out / "sweep.db")
        records = searching.sample(
            template, space, range(seeds), trials, sampler, url, study, max(workers // seeds, 1), run, out
        )
    else:
        records = searching.over_grid(template, space, range(seeds), run)
    show(records, out / "report.html", searching.table_of(records))
    if all(record["status"] == "diverged" for record in records):
        typer.echo("every run diverged: none is the best")
    else:
        typer.echo(f"the best, on all training data: {command_for(searching.best(records))}")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Records, or folders of them.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; by default beside the records.")] = None,
    metric: Annotated[str, typer.Option(help="test_accuracy, test_loss, top, trace, ...")] = "test_accuracy",
) -> None:
    """Draw table and page of finished runs again."""
    from ..lab.records import read_records
    from ..lab.report import table
    from .progress import other_measures

    with helpful():
        records = read_records(runs)
        if not records:
            raise UserError(f"there are no records in {' '.join(map(str, runs))}")
        first = runs[0] if runs[0].is_dir() else runs[0].parent
        page = out or first / "report.html"
        if page.is_dir():
            raise UserError(f"--out {page} is a folder: name the page")
        check_metric(records, metric)
        show(records, page, table(records, metric=metric), other_measures(records), metric=metric)


def check_metric(records: list[Any], metric: str) -> None:
    """A name that no record has is a mistake; before any run has ended, one that none ever has."""
    from ..lab.report.wording import NAMES
    from ..lab.statistics import metrics_of

    known = {name for record in records for name in metrics_of(record)} or set(NAMES)
    if metric not in known:
        raise unknown("metric", metric, known)


def list_(
    what: Annotated[str, typer.Argument(help="data, models, methods or recipes.")],
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are.")] = None,
) -> None:
    """List what can be trained: data sets, models, methods, and the papers' tables as recipes."""
    with helpful():
        if what == "methods":
            from .app import methods

            methods(None, False)
            return
        if what == "recipes":
            from .paper import list_ as recipes

            recipes(None, None)
            return
        from rich.console import Console
        from rich.table import Table

        if what == "data":
            from ..lab.data import data_names

            table = Table("data", "about", "found here")
            for listing in data_names(data_dir):
                table.add_row(listing.name, listing.about, "yes" if listing.found else "no")
        elif what == "models":
            from ..lab.models import model_names

            table = Table("model", "about")
            for name, about in model_names():
                table.add_row(name, about)
        else:
            raise unknown("list of", what, ("data", "models", "methods", "recipes"))
        Console(emoji=False).print(table)
