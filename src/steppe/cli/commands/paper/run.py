"""`steppe paper run`: train the cells of a table or figure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ....support.devices import best_device, require_device
from ....support.errors import UserError
from ...errors import resumable, say
from ...options import Address, Jobs, On, Together
from ...paper_options import Name, Scale
from ...prepare import how_many_jobs, make_folder, runs_at_once
from ...runs import QUEUE, address_of, leave_to_others

Cells = Annotated[list[str] | None, typer.Option(help="Only these: cifar10/cnn-5, gam, */cnn-*/gam. Several: commas.")]


def command(
    name: Name,
    scale: Scale = "full",
    seeds: Annotated[int | None, typer.Option(help="How many seeds, from 0; by default as many as the paper.")] = None,
    cells: Cells = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    together: Together = None,
    jobs: Jobs = None,
    on: On = "local",
    address: Address = "",
    threads: Annotated[int, typer.Option(help="Threads of a process on a CPU.")] = 1,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets; by default $STEPPE_DATA.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for records; by default runs/, named after the table.")
    ] = None,
    missing: Annotated[bool, typer.Option("--missing", help="Leave out runs whose results are kept already.")] = False,
    dry: Annotated[bool, typer.Option(help="Only list what would be run.")] = False,
) -> None:
    """Run a table or figure again, or some of its cells. Finished runs are not repeated, stopped runs go on.

    Several machines can each run some cells into folders of their own; `steppe paper collect` brings results together.
    With --missing a fresh machine goes on where the kept results end.
    """
    from ....lab.runner.local import Place
    from ....papers.experiment import check_scale
    from ....papers.registry import find
    from ....papers.run import plan, run, set_data_folder
    from ...progress import Display

    experiment, device = find(name), best_device() if device == "auto" else device
    planned = plan(experiment, check_scale(scale), seeds, cells or (), missing)
    set_data_folder(data_dir)
    if threads < 1:
        raise UserError(f"--threads must be at least 1, not {threads}")
    at_once = runs_at_once(together, [job.recipe for job in planned.jobs], device)
    folder = out or default_folder(experiment, scale)
    _describe(planned, folder)
    if dry:
        for job in planned.jobs:
            typer.echo(f"{job.name} seed {job.recipe.seed}: {job.recipe.key}")
        return
    require_device(device)
    make_folder(folder)
    place = Place(folder, device, data_dir, threads, at_once, experiment.measuring_at(scale))
    planned = _with_data(planned, data_dir, getattr(place.measuring, "before", None))
    trainer = _trainer(address_of(on, address), planned, place)
    with resumable(), Display(planned.jobs) as display:
        run(planned, place, how_many_jobs(jobs, device), display, trainer)
    again = f"steppe paper collect {folder} {experiment.name}" + (f" --scale {scale}" if scale != "full" else "")
    typer.echo(f"done; to keep the results: {again}")


def _trainer(address: str | None, planned: Any, place: Any) -> Any:
    """What trains the runs: processes here, or a Ray cluster. Runs for the queue are queued, and the command ends."""
    from ....lab.runner.local import perform
    from ....lab.runner.ray import perform_on_ray

    if address is None:
        return perform
    if planned.experiment.watch is not None:
        raise UserError(f"{planned.experiment.name} measures during training: run it with --on local")
    if address == QUEUE:
        leave_to_others(planned.jobs, place)
        return perform
    return lambda jobs, place, workers, tell: perform_on_ray(jobs, place, address, workers, tell)


def _describe(planned: Any, folder: Path) -> None:
    """Tell what will be run, and what the paper leaves open."""
    count, work = len(planned.jobs) + len(planned.computed), sum(job.work for job in planned.jobs)
    typer.echo(f"{planned.experiment.name}: {count} runs at {planned.scale} scale, records in {folder}", err=True)
    if work:
        typer.echo(f"the work of {work:.0f} epochs of plain training, finished runs included", err=True)
    for choice in planned.experiment.choices:
        typer.echo(f"note: {choice}", err=True)


def default_folder(experiment: Any, scale: str) -> Path:
    """Tables of one paper share a folder, and with it runs, unless they measure more than accuracy."""
    own = experiment.measuring is not None or experiment.watch is not None
    name = experiment.slug if own else experiment.paper
    return Path("runs") / (name if scale == "full" else f"{name}-{scale}")


def _with_data(planned: Any, data_dir: Path | None, before: Any = None) -> Any:
    """The plan without cells whose data is missing. Each missing data set is named; if all are, that is an error.

    `before` checks that the data has what is measured at the end of a run, and returns a note about it.
    """
    from ....lab.data import load

    names = {job.recipe.data: job.recipe.task for job in planned.jobs}
    missing: dict[str, str] = {}
    for name, task in names.items():
        try:
            data = load(name, data_dir, task=task)
        except UserError as error:
            missing[name] = str(error)
            continue
        if before is not None and (note := before(data)):
            typer.echo(f"note: {note}", err=True)
    if missing and len(missing) == len(names) and not planned.computed:
        raise UserError(next(iter(missing.values())))

    def here(cell: Any) -> bool:
        return cell.recipe is None or planned.experiment.recipe(cell, planned.scale).data not in missing

    for name, why in missing.items():
        say(f"cells of {name.split(':')[-1]} are left out, because the data is missing: {why}")
    return replace(planned, cells=tuple(cell for cell in planned.cells if here(cell)))
