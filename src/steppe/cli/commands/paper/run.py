"""`steppe paper run`: train the cells of a table or figure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ....support.devices import best_device, require_device
from ....support.errors import UserError
from ...errors import resumable, say
from ...options import DEVICE, THREADS, Address, Jobs, On, Together
from ...paper_options import Name, Scale
from ...prepare import how_many_jobs, make_folder, with_runs_at_once
from ...runs import QUEUE, address_of, leave_to_others

Cells = Annotated[
    list[str] | None,
    typer.Option(
        help="Only these cells, separated by commas: whole names, beginnings (cifar10/cnn-5), parts (gam) or patterns "
        "(*/cnn-*/gam)."
    ),
]


def command(
    name: Name,
    scale: Scale = "full",
    seeds: Annotated[int | None, typer.Option(help="Number of seeds. Default: as many as the paper.")] = None,
    cells: Cells = None,
    device: Annotated[str, typer.Option(help=DEVICE)] = "auto",
    together: Together = None,
    jobs: Jobs = None,
    on: On = "local",
    address: Address = "",
    threads: Annotated[int, typer.Option(help=THREADS)] = 1,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data sets. Default: $STEPPE_DATA, else ~/.cache/steppe.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the records. Default: a folder in runs/, named after the paper.")
    ] = None,
    missing: Annotated[bool, typer.Option("--missing", help="Only runs whose results are not kept yet.")] = False,
    dry: Annotated[bool, typer.Option(help="Only list the runs; train nothing.")] = False,
) -> None:
    """Train the cells of a table or figure, or some of them. Finished runs are not repeated; stopped runs resume.

    Several machines can each run some cells into folders of their own; `steppe paper collect` merges the results. With
    --missing a new machine runs only what the kept results lack.
    """
    from ....lab.runner.jobs import Place
    from ....papers.experiment import check_scale
    from ....papers.registry import find
    from ....papers.run import plan, run, set_data_folder
    from ...progress import Display

    experiment, device = find(name), best_device() if device == "auto" else device
    planned = plan(experiment, check_scale(scale), seeds, cells or (), missing)
    set_data_folder(data_dir)
    if threads < 1:
        raise UserError(f"--threads must be at least 1, not {threads}")
    folder = out or default_folder(experiment, scale)
    place = Place(folder, device, data_dir, threads, measuring=experiment.measuring_at(scale))
    place = with_runs_at_once(place, together, [job.recipe for job in planned.jobs])
    _describe(planned, folder)
    if dry:
        for job in planned.jobs:
            typer.echo(f"{job.name} seed {job.recipe.seed}: {job.recipe.key}")
        return
    require_device(device)
    make_folder(folder)
    planned = _with_data(planned, data_dir, getattr(place.measuring, "before", None))
    trainer = _trainer(address_of(on, address), planned, place)
    with resumable(), Display(planned.jobs) as display:
        run(planned, place, how_many_jobs(jobs, device), display, trainer)
    again = f"steppe paper collect {folder} {experiment.name}" + (f" --scale {scale}" if scale != "full" else "")
    typer.echo(f"done; to keep the results, run: {again}")


def _trainer(address: str | None, planned: Any, place: Any) -> Any:
    """The function that trains the runs: in local processes or on a Ray cluster.

    With the queue, the runs are written to the folder and the command ends.
    """
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
    """Print what will be run, and the choices that the paper leaves open."""
    count, work = len(planned.jobs) + len(planned.computed), sum(job.work for job in planned.jobs)
    typer.echo(f"{planned.experiment.name}: {count} runs at {planned.scale} scale, records in {folder}", err=True)
    if work:
        typer.echo(f"as much work as {work:.0f} epochs of plain training, finished runs included", err=True)
    for choice in planned.experiment.choices:
        typer.echo(f"note: {choice}", err=True)


def default_folder(experiment: Any, scale: str) -> Path:
    """The default --out: tables of one paper share a folder, and so their runs, unless they measure more."""
    own = experiment.measuring is not None or experiment.watch is not None
    name = experiment.slug if own else experiment.paper
    return Path("runs") / (name if scale == "full" else f"{name}-{scale}")


def _with_data(planned: Any, data_dir: Path | None, before: Any = None) -> Any:
    """The plan without the cells whose data is missing. Missing data sets are reported; if all are, it raises.

    `before` checks before training that the data has what is measured at the end of a run, and returns a note.
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
