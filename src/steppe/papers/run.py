"""Running the cells of an experiment. Records are written to a folder, from which `store.collect` takes the results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..lab.records import environment, now
from ..lab.runner.jobs import Job, Place, groups_of
from ..lab.runner.local import Tell, done_already, perform, train_jobs
from ..support.errors import UserError
from .epoch_measurements import Watch, WatchedRun
from .experiment import Cell, Experiment, select
from .store import FORMAT, Line, computed_key, kept_keys, read_computed, write_computed


@dataclass(frozen=True)
class Planned:
    """The runs that an experiment asks for."""

    experiment: Experiment
    scale: str
    seeds: Sequence[int]
    cells: tuple[Cell, ...]
    own: bool = False  # whether a cell with its own number of seeds is run with only that many
    kept: frozenset[str] = frozenset()  # keys of runs that are left out, because their results are kept

    def of_seed(self, seed: int) -> list[Cell]:
        """The cells that are run with this seed."""
        return [cell for cell in self.cells if not self.own or not cell.seeds or seed < cell.seeds]

    @property
    def jobs(self) -> list[Job]:
        """The training runs; cells with the same recipe share one."""
        found: dict[str, Job] = {}
        for seed in self.seeds:
            for cell in self.of_seed(seed):
                if cell.recipe is not None:
                    job = Job(self.experiment.recipe(cell, self.scale, seed), cell.role, cell.name)
                    found.setdefault(job.recipe.key, job)
        return [job for key, job in found.items() if key not in self.kept]

    @property
    def computed(self) -> list[tuple[Cell, int]]:
        """The results that the experiment computes itself, without training."""
        return [(cell, seed) for seed in self.seeds for cell in self.of_seed(seed) if cell.recipe is None]


def plan(
    experiment: Experiment, scale: str, seeds: int | None = None, cells: Iterable[str] = (), missing: bool = False
) -> Planned:
    """The runs of an experiment, or of some of its cells.

    With `missing`, only those whose results are not kept yet, for this or for another table.
    """
    if seeds is not None and seeds < 1:
        raise UserError(f"--seeds must be at least 1, not {seeds}")
    chosen = select(experiment, cells)
    most = max((cell.seeds or experiment.seeds for cell in chosen), default=1)
    kept = kept_keys(experiment) if missing else frozenset[str]()
    return Planned(experiment, scale, range(seeds or most), chosen, seeds is None, kept)


def run(planned: Planned, place: Place, workers: int = 1, tell: Tell = lambda news: None, train: Any = perform) -> None:
    """Train and compute what is planned and not yet done. `train` may train elsewhere, for example on a cluster."""
    experiment, jobs = planned.experiment, planned.jobs
    watch = experiment.watch_at(planned.scale)
    for job in jobs:
        record = done_already(job, place.folder)
        if record is not None and record["status"] == "done" and not experiment.measured_in(record):
            what = f"{record['key']} in {place.folder} was trained for another table and lacks measurements"
            raise UserError(f"{what}: choose another --out")
    if watch is None:
        train(jobs, place, workers, tell)
    else:
        _perform_watched(jobs, place, watch, tell)
    for cell, seed in planned.computed:
        key = computed_key(experiment, cell, planned.scale, seed)
        if read_computed(place.folder / f"{key}.json") is None:
            write_computed(_computed(experiment, cell, planned.scale, seed), place.folder)


def _perform_watched(jobs: list[Job], place: Place, watch: Watch, tell: Tell) -> None:
    """Train in this process, with measurements during training: the lab's worker processes cannot make them."""
    for group in groups_of(jobs, replace(place, stacked=1)):
        train_jobs(group, place, tell, make_run=partial(WatchedRun, watch=watch))


def _computed(experiment: Experiment, cell: Cell, scale: str, seed: int) -> Line:
    assert experiment.compute is not None
    began = now()
    values = experiment.compute(cell.name, scale, seed)
    return {
        "format": FORMAT, "key": computed_key(experiment, cell, scale, seed), "cell": cell.name, "scale": scale,
        "seed": seed, "status": "done", "values": values, "environment": environment("cpu"),
        "started": began, "finished": now(),
    }  # fmt: skip


def set_data_folder(folder: Path | None) -> None:
    """Set the data folder for data functions that take no argument, in this process and in worker processes."""
    if folder is not None:
        os.environ["STEPPE_DATA"] = str(folder)
