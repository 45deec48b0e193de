"""`steppe paper`: list, run, show, collect, figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..support.errors import UserError, one_line, require, unknown
from .errors import GO_ON, OneLine, helpful
from .options import at_once, how_many_jobs

Name = Annotated[str, typer.Argument(help="A table or figure: s0/table1. `steppe paper list` has them all.")]
Scale = Annotated[str, typer.Option(help="full: as in the paper; small: fewer epochs; smoke: a step or two.")]
Cells = Annotated[list[str] | None, typer.Option(help="Only these: cifar10/cnn-5, gam, */cnn-*/gam. Several: commas.")]
Kept = Annotated[Path | None, typer.Option(help="Folder of kept results; by default those of the package.")]


class Helpful(TyperGroup):
    """A group whose mistyped commands get one line with the nearest name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """What typer does, or one line."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            typer.echo(f"steppe: {one_line(unknown('paper command', args[0], self.commands))}", err=True)
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)


def register(app: typer.Typer) -> None:
    """Add the commands to an app."""
    paper = typer.Typer(cls=Helpful, no_args_is_help=True, add_completion=False, help=__doc__)
    for name, command in (("list", list_), ("run", run), ("show", show), ("collect", collect), ("figures", figures)):
        paper.command(name, cls=OneLine)(command)
    app.add_typer(paper, name="paper", help="The papers' tables and figures, run again.")


def list_(
    name: Annotated[str | None, typer.Argument(help="Of one table or figure: its cells.")] = None, results: Kept = None
) -> None:
    """List the papers' tables and figures, or the cells of one, and what of them has been run."""
    with helpful():
        from rich.console import Console
        from rich.table import Table

        from ..papers import find
        from ..papers.run import Results
        from ..papers.show import overview

        kept = Results.read(_folder(results))
        if name is None:
            table = Table("name", "what", "cells", "results")
            for one, title, cells, _, state in overview(kept):
                table.add_row(one, title, str(cells), state)
        else:
            experiment = find(name)
            table = Table("cell", "method", "data", "model", "epochs", "runs kept")
            for cell in experiment.cells:
                recipe = cell.recipe
                what = ("-",) * 3 if recipe is None else (recipe.data.split(":")[-1], recipe.model, str(recipe.epochs))
                method = cell.label if recipe is None else recipe.method
                table.add_row(cell.name, method, *what, str(len(kept.best(experiment, cell)[1].records)))
        Console(emoji=False).print(table)


def run(
    name: Name,
    scale: Scale = "full",
    seeds: Annotated[int | None, typer.Option(help="How many seeds, from 0; by default as many as the paper.")] = None,
    cells: Cells = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    together: Annotated[
        int | None, typer.Option(help="Runs at once in one process: on a GPU by default 5 of a small net, else 1.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes at a time. On a CPU by default one a core.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of a process on a CPU.")] = 1,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are; by default $STEPPE_DATA.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for records; by default runs/, named after the table.")
    ] = None,
    dry: Annotated[bool, typer.Option(help="Only say what would be run.")] = False,
) -> None:
    """Run a table or figure again, or some of its cells. What is done is not done again; what was stopped goes on.

    Several machines can each run some cells into folders of their own; `steppe paper collect` puts results together.
    """
    with helpful(GO_ON):
        from ..papers import find
        from ..papers.experiment import check_scale
        from ..papers.run import plan, set_data_folder
        from ..papers.run import run as perform
        from .progress import Display

        experiment = find(name)
        planned = plan(experiment, check_scale(scale), seeds, cells or ())
        set_data_folder(data_dir)
        if (together is not None and together < 1) or threads < 1:
            raise UserError("--together and --threads must be at least 1")
        folder = out or default_folder(experiment, scale)
        count = len(planned.jobs) + len(planned.computed)
        work = sum(job.work for job in planned.jobs)
        typer.echo(f"{experiment.name}: {count} runs at {scale} scale, records in {folder}", err=True)
        if work:
            typer.echo(f"the work of {work:.0f} epochs of plain training, what is done already included", err=True)
        for choice in experiment.choices:
            typer.echo(f"note: {choice}", err=True)
        if dry:
            for job in planned.jobs:
                typer.echo(f"{job.name} seed {job.recipe.seed}: {job.recipe.key}")
            return
        together = together or min((at_once(job.recipe, device) for job in planned.jobs), default=1)
        place = _place(planned, folder, device, data_dir, threads, together)
        planned = _with_data(planned, data_dir, getattr(place.measuring, "before", None))
        with Display(planned.jobs) as display:
            perform(planned, place, how_many_jobs(jobs, device), display)
        again = f"steppe paper collect {folder} {experiment.name}" + (f" --scale {scale}" if scale != "full" else "")
        typer.echo(f"done; to keep the results: {again}")


def default_folder(experiment: Any, scale: str) -> Path:
    """Tables of one paper share a folder, and so runs, unless they measure more than accuracy."""
    own = experiment.measuring is not None or experiment.watch is not None
    name = experiment.slug if own else experiment.paper
    return Path("runs") / (name if scale == "full" else f"{name}-{scale}")


def _place(planned: Any, folder: Path, device: str, data_dir: Path | None, threads: int, together: int) -> Any:
    """Where to train; what cannot be is said before anything begins."""
    import torch

    from ..lab.runner.local import Place

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from None
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    measuring = planned.experiment.measuring_at(planned.scale)
    return Place(folder, device, data_dir, threads, together, measuring)


def _with_data(planned: Any, data_dir: Path | None, before: Any = None) -> Any:
    """Without the cells whose data is not here, which are named; none left is an error.

    `before` looks whether the data will do for what is measured at the end, and has a line to say of it.
    """
    from dataclasses import replace

    from ..lab.data import load

    names = dict.fromkeys(job.recipe.data for job in planned.jobs)
    missing: dict[str, str] = {}
    for name in names:
        try:
            data = load(name, data_dir)
        except UserError as error:
            missing[name] = str(error)
            continue
        if before is not None and (said := before(data)):
            typer.echo(f"note: {said}", err=True)
    if missing and len(missing) == len(names) and not planned.computed:
        raise UserError(next(iter(missing.values())))

    def here(cell: Any) -> bool:
        return cell.recipe is None or planned.experiment.recipe(cell, planned.scale).data not in missing

    for name, why in missing.items():
        typer.echo(f"steppe: left out, for want of {name.split(':')[-1]}: {why}", err=True)
    return replace(planned, cells=tuple(cell for cell in planned.cells if here(cell)))


def show(
    name: Name, results: Kept = None, scale: Annotated[str | None, typer.Option(help="Of one scale alone.")] = None
) -> None:
    """Our numbers beside the paper's: difference in combined standard errors, verdict."""
    with helpful():
        from ..papers import find
        from ..papers.experiment import check_scale
        from ..papers.run import Results
        from ..papers.show import print_experiment

        experiment = find(name)
        print_experiment(experiment, Results.read(_folder(results)), check_scale(scale) if scale else None)


def collect(
    folder: Annotated[Path, typer.Argument(help="Where `steppe paper run` left its records.")],
    name: Name,
    scale: Scale = "full",
    results: Kept = None,
) -> None:
    """Add the finished runs of a folder to the kept results: one small line a run, each run once."""
    with helpful():
        from ..papers import find
        from ..papers.experiment import check_scale
        from ..papers.run import RESULTS
        from ..papers.run import collect as put_together

        experiment = find(name)
        if check_scale(scale) == "smoke" and results is None:
            raise UserError(
                "smoke runs say nothing worth keeping; to collect them all the same, name a folder: --results"
            )
        into = results or RESULTS
        total, new = put_together(folder, experiment, scale, into)
        path = into / f"{experiment.slug}.jsonl"
        typer.echo(f"{path}: {total} runs, {new} of them new" if total else f"no finished runs of {name} in {folder}")


def figures(
    out: Annotated[Path, typer.Argument(help="The folder to draw into.")] = Path("figures"),
    names: Annotated[list[str] | None, typer.Option("--name", help="Only these: s0/fig2.")] = None,
    results: Kept = None,
) -> None:
    """Draw the figures from kept results. Those without any say so."""
    with helpful():
        from ..papers import find
        from ..papers.figures import FIGURES, draw
        from ..papers.run import Results

        wanted = [find(name).name for name in names or ()] or list(FIGURES)
        for name in wanted:
            if name not in FIGURES:
                raise unknown("figure", name, FIGURES)
        kept = Results.read(_folder(results))
        require("matplotlib", "matplotlib", "drawing figures")
        for name in wanted:
            path = draw(name, kept, out)
            typer.echo(f"{name}: {path or 'not run'}")


def _folder(results: Path | None) -> Path | None:
    if results is not None and not results.is_dir():
        raise UserError(f"there is no folder {results}")
    return results
