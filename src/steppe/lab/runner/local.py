"""Training runs on this machine, in this process or in several worker processes.

A finished run is not repeated; a stopped run resumes from its checkpoint. Worker processes exit when the process that
started them ends, even if it was killed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...support.errors import UserError, describe
from ...support.own_objects import has_any, packed, unpack
from ..recipe.own_code import code_of, own_names
from ..recipe.recipe import Recipe
from ..records import Record, RecordWarning, metric_of, value_of, write_record
from ..report.formatting import plural
from ..training.ranks import ALONE, Ranks
from .claims import TakenOver
from .finished import ended_record, finished_record, run_lock, same_code
from .jobs import Job, Place, groups_of
from .loggers import logger_maker

if TYPE_CHECKING:
    from ..training.run import Run


@dataclass(frozen=True)
class News:
    """The progress of a run."""

    key: str
    epoch: int
    ended: bool = False
    result: str = ""  # when it has ended: the result in words
    before: bool = False  # whether an earlier command had finished it
    step: int = 0  # number of finished steps of the next epoch
    steps: int = 0  # number of steps in an epoch; 0 if not known


Tell = Callable[[News], None]


def done_already(job: Job, folder: Path) -> Record | None:
    """The record of a job that is finished, with the job's name and role; None if it is not finished."""
    record = finished_record(job.recipe, folder)
    if record is not None:  # a process killed at the very end leaves its checkpoint behind
        (folder / f"{job.recipe.key}.ckpt").unlink(missing_ok=True)
    if record is not None and (record["label"], record["role"]) != (job.name, job.role):
        record["label"], record["role"] = job.name, job.role
        write_record(record, folder)
    return record


def notes(jobs: Sequence[Job], place: Place) -> list[str]:
    """Notes on finished runs: which are trained again, and which lack something that is requested now."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)  # the same warnings follow when the runs start
        records = [
            (job.recipe, record) for job in jobs if (record := ended_record(job.recipe, place.folder)) is not None
        ]
    changed = [(code_of(recipe), record) for recipe, record in records if not same_code(record, recipe)]
    found = []
    if changed:
        modules = ", ".join(sorted({name for now, record in changed for name in _edited(record, now)}))
        runs = plural(len(changed), "run")
        found.append(f"{modules} has changed since {runs} in {place.folder} ended: trained again")
    same = [record for recipe, record in records if same_code(record, recipe)]
    lacking = {what: count for what in ("curvature", "weights", "log") if (count := _number_without(what, same, place))}
    if lacking:
        counts = ", ".join(f"{plural(count, 'run')} without {what}" for what, count in lacking.items())
        found.append(
            f"already done in {place.folder}: {counts}; to get it, choose another --out or delete their .json files"
        )
    return found


def _edited(record: Record, now: Mapping[str, str]) -> list[str]:
    """The names of the user's code whose hash has changed since a run."""
    return [name for name, then in record.get("own_code", {}).items() if now.get(name) != then]


def _number_without(what: str, records: Sequence[Record], place: Place) -> int:
    """The number of these runs that lack something that `place` requests."""
    folder = place.folder
    if what == "curvature":  # a diverged run has none
        return sum(r["status"] == "done" and r["curvature"] is None for r in records) if place.measuring else 0
    if what == "weights":
        files = [[folder / f"{r['key']}.{ending}" for ending in ("safetensors", "pt")] for r in records]
        return sum(not any(file.exists() for file in either) for either in files) if place.keep_weights else 0
    logged = [r.get("log") == place.log or (folder / "logs" / r["key"]).exists() for r in records]
    return logged.count(False) if place.log else 0


def train_jobs(
    jobs: Sequence[Job],
    place: Place,
    tell: Tell = lambda news: None,
    ranks: Ranks = ALONE,
    make_run: Callable[..., Run] | None = None,
) -> list[Record]:
    """Train all jobs in this process, at once. `make_run` is called like `Run`, its default.

    If the GPU's memory is too small for all at once, half of them are trained after the other half.
    """
    import torch

    if place.device == "cpu":
        torch.set_num_threads(place.threads)
    try:
        return _train_at_once(jobs, place, tell, ranks, make_run)
    except torch.OutOfMemoryError:
        if len(jobs) == 1:
            raise
    half = len(jobs) // 2
    warnings.warn(
        f"{len(jobs)} runs at once do not fit into the memory of {place.device}: going on with {len(jobs) - half}",
        RecordWarning,
        stacklevel=2,
    )
    gc.collect()  # of the failed attempt
    torch.cuda.empty_cache()
    return [r for some in (jobs[:half], jobs[half:]) for r in train_jobs(some, place, tell, ranks, make_run)]


def _train_at_once(
    jobs: Sequence[Job], place: Place, tell: Tell, ranks: Ranks, make_run: Callable[..., Run] | None
) -> list[Record]:
    from ..training.round_robin import train_round_robin
    from ..training.run import Run
    from ..training.stack import stacked

    records: dict[str, Record] = {}
    runs: list[Run] = []
    with ExitStack() as locks:
        for job in jobs:
            if ranks.first:
                locks.enter_context(run_lock(place.folder, job.recipe.key))
            record = ranks.broadcast(done_already(job, place.folder) if ranks.first else None)
            if record is None:
                _refuse_edited_code(job.recipe, place)
                options: dict[str, Any] = {
                    "device": place.device, "data_root": place.data_root, "role": job.role, "label": job.name,
                    "ranks": ranks, "measure": place.measuring, "keep_weights": place.keep_weights,
                }  # fmt: skip
                make_logger = logger_maker(place.log) if ranks.first else None
                logger = None if make_logger is None else make_logger(str(place.folder / "logs" / job.recipe.key))
                run = (make_run or Run)(job.recipe, place.folder, logger=logger, **options)
                if place.log:
                    run.record["log"] = place.log
                if place.asked is not None:
                    run.record["asked"] = place.asked
                runs.append(run)
            else:
                records[job.recipe.key] = record
                tell(news_of(record, before=True))
        with _explain_own_failures(jobs):
            train_round_robin(stacked(runs) if place.stacked > 1 else runs, Reporter(tell).after_step)
    records |= {run.recipe.key: run.record for run in runs}
    return [records[job.recipe.key] for job in jobs]


class Reporter:
    """Reports the progress of runs: when a run begins, after every epoch, about once a second, and at the end."""

    PAUSE = 1.0  # seconds between two reports; more frequent ones would slow down small steps

    def __init__(self, tell: Tell):
        self._tell = tell
        self._at: dict[str, tuple[int, int]] = {}  # finished epochs, and steps of the next one
        self._reported: dict[str, float] = {}  # when

    def after_step(self, run: Any) -> None:
        """Report if it is time to; called after every step of a run, and when it has ended."""
        key, record = run.recipe.key, run.record
        epoch, step = self._at.get(key, (-1, 0))
        now, ended = time.monotonic(), record["status"] != "running"
        new = len(record["epochs"]) != epoch
        epoch, step = len(record["epochs"]), 0 if ended else 1 if new else step + 1
        self._at[key] = epoch, step
        if new or ended or now - self._reported[key] >= self.PAUSE:
            self._reported[key] = now
            self._tell(replace(news_of(record), step=step, steps=run.batches.steps))


def _refuse_edited_code(recipe: Recipe, place: Place) -> None:
    """Raise if the user has edited a file since the command began: what is in memory is not what would be recorded."""
    then, now = place.code.get(recipe.key), code_of(recipe)
    if then is not None and then != now:
        edited = ", ".join(name for name in now if now[name] != then.get(name)) or ", ".join(then)
        raise UserError(f"{edited} was edited during training: run the same command again to train with the new code")


@contextmanager
def _explain_own_failures(jobs: Sequence[Job]) -> Iterator[None]:
    """Turn an exception in training with the user's own code into a `UserError`; others keep their traceback."""
    import torch

    try:
        yield
    except (UserError, OSError, torch.OutOfMemoryError, TakenOver):
        raise
    except Exception as error:
        names = sorted({name for job in jobs for name in own_names(job.recipe)})
        if not names:
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        what = f"training with {', '.join(names)} failed in {where}: {describe(error)}"
        raise UserError(f"{what}; nothing is lost: correct it and run the same command again") from error


def news_of(record: Record, before: bool = False) -> News:
    """The progress of a run, from its record."""
    ended = record["status"] not in ("waiting", "running")
    result = record["verdict"] or result_of(record) if ended else ""
    return News(record["key"], len(record["epochs"]), ended, result, before)


def result_of(record: Record) -> str:
    """The result of a run in a few words."""
    metric = metric_of([record])
    value = value_of(record, metric)
    if value is None:
        last: Any = record["epochs"][-1]
        value = float(last[metric])
    name = metric.removeprefix("test_").strip("↑")
    return f"{100 * value:.2f} %" if name == "accuracy" else f"{name} {value:.4g}"


def done_before(jobs: Sequence[Job], folder: Path, tell: Tell) -> dict[str, Record]:
    """The records of the jobs that are already finished, by key; each is reported to `tell`."""
    records = {job.recipe.key: found for job in jobs if (found := done_already(job, folder)) is not None}
    for record in records.values():
        tell(news_of(record, before=True))
    return records


# Several processes


def perform(jobs: Sequence[Job], place: Place, workers: int = 1, tell: Tell = lambda news: None) -> list[Record]:
    """Train all jobs in `workers` processes; return their records in the order of the jobs."""
    records = done_before(jobs, place.folder, tell)
    waiting = [job for job in jobs if job.recipe.key not in records]
    # Within a seed the longest first, so that all workers end at about the same time:
    waiting.sort(key=lambda job: (job.recipe.seed, -job.work))
    place = replace(place, code={job.recipe.key: code_of(job.recipe) for job in waiting})
    tasks = groups_of(waiting, place, workers)
    if workers > 1 and len(tasks) > 1:
        found = _in_processes(tasks, place, min(workers, len(tasks)), tell)
    else:
        found = (train_jobs(task, place, tell) for task in tasks)
    for some in found:
        records |= {record["key"]: record for record in some}
    return [records[job.recipe.key] for job in jobs]


def _in_processes(tasks: list[list[Job]], place: Place, workers: int, tell: Tell) -> Iterator[list[Record]]:
    context = multiprocessing.get_context("spawn")
    inbox = context.SimpleQueue()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (inbox, os.getpid(), packed("more than one process")))
    try:
        with _children_ignore_interrupts(), _children_skip_main():
            going: set[Future[list[Record]]] = {pool.submit(_train_task, task, place) for task in tasks}
        while going:
            ended, going = wait(going, timeout=0.1, return_when=FIRST_COMPLETED)
            while not inbox.empty():
                tell(inbox.get())
            for future in ended:
                yield future.result()
    except BrokenProcessPool:
        raise UserError("a worker process was killed (out of memory?); run the same command again to resume") from None
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:  # their progress is on disk
            process.terminate()


@contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """Processes started in this context ignore Ctrl-C, which a terminal sends to all: only the parent handles it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _children_skip_main() -> Iterator[None]:
    """Processes started in this context do not import the user's script, so it needs no `if __name__ == "__main__"`."""
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    if has_any():
        main.__dict__.pop("__file__", None)
        main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


_inbox: Any = None


def _start_worker(inbox: Any, parent: int, own: bytes | None) -> None:
    global _inbox
    _inbox = inbox
    unpack(own)

    def exit_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _train_task(task: list[Job], place: Place) -> list[Record]:
    return train_jobs(task, place, _inbox.put)
