"""Many machines that share a folder: records with the status "waiting" are the queue, and each process takes from it.

`queue_up` writes a record for every run that is to be trained. `work` trains waiting runs until none is free. A run
whose process was killed is taken over by another process, which resumes from its checkpoint.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ...support.errors import UserError, user_function
from ...support.own_objects import is_kept
from ..recipe.own_code import own_names
from ..recipe.recipe import Recipe
from ..records import Record, RecordWarning, new_record, read_record, write_record
from .claims import STALE, Claim, TakenOver
from .finished import finished_record, same_code
from .jobs import Job, Place
from .local import News, Tell, news_of, train_jobs

# Fields of a Place that are not written to the queue:
_OF_A_MACHINE = ("folder", "device", "together", "measuring", "code", "asked")


def queue_up(jobs: Sequence[Job], place: Place) -> int:
    """Write a waiting record for every job that is not finished; return their number."""
    asked = _asked(place)
    waiting = 0
    for job in jobs:
        if kept := [name for name in own_names(job.recipe) if is_kept(name)]:
            raise UserError(
                f"{kept[0]} exists only in this Python program: other machines need package.module:function"
            )
        if finished_record(job.recipe, place.folder) is not None:
            continue
        waiting += 1
        path = place.folder / f"{job.recipe.key}.json"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecordWarning)
            begun = read_record(path) if path.exists() else None
        if begun is None or begun["status"] != "running" or not same_code(begun, job.recipe):
            record = new_record(job.recipe, job.role, job.name)
            record["status"], record["asked"] = "waiting", asked
            write_record(record, place.folder)
        elif begun.get("asked") != asked:
            write_record({**begun, "asked": asked}, place.folder)
    return waiting


def work(
    folder: Path, device: str = "cpu", threads: int = 1, tell: Tell = lambda news: None, *,
    wait: bool = False, stale: float = STALE, poll: float = 1.0,
) -> list[Record]:  # fmt: skip
    """Train waiting runs until none is free; with `wait`, until all are done. Return the records of these runs."""
    done: list[Record] = []
    while True:
        left = _unfinished(folder)
        for path in left:
            record = _train_one(path, folder, device, threads, tell, stale)
            if record is not None:
                done.append(record)
                break  # the folder may have changed: list it again
        else:
            if not wait or not left:
                return done
            time.sleep(poll)


def _train_one(path: Path, folder: Path, device: str, threads: int, tell: Tell, stale: float) -> Record | None:
    claim = Claim.take(folder, path.stem, stale)
    if claim is None:
        return None
    with claim.held(stale):
        record = _queued(path)
        if record is None or record["status"] not in ("waiting", "running"):
            return None  # it ended before we claimed it
        recipe = Recipe.of(record["recipe"])
        if not same_code(record, recipe):  # the runs of before and those of now would be compared
            edited = ", ".join(record.get("own_code", {}))
            raise UserError(f"{edited} has changed since the runs were queued: run the command with --on queue again")

        def still_ours(news: News) -> None:
            if claim.lost():
                raise TakenOver
            tell(news)

        place = place_of(record.get("asked", {}), folder, device, threads)
        try:
            still_ours(news_of(record))
            return train_jobs([Job(recipe, record["role"], record["label"])], place, still_ours)[0]
        except TakenOver:
            return None


def _unfinished(folder: Path) -> list[Path]:
    """The records of queued runs that are not finished: first the waiting, then the running ones."""
    found = {path: record["status"] for path in sorted(folder.glob("*.json")) if (record := _queued(path))}
    return [path for status in ("waiting", "running") for path, is_ in found.items() if is_ == status]


def _queued(path: Path) -> Record | None:
    """The record in a file, if it was queued."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)  # other files may be there
        record = read_record(path) if path.exists() else None
    return record if record is not None and "asked" in record else None


def counts(folder: Path) -> dict[str, int]:
    """How many queued runs there are, by status."""
    found: dict[str, int] = {}
    for path in folder.glob("*.json"):
        if (record := _queued(path)) is not None:
            found[record["status"]] = found.get(record["status"], 0) + 1
    return found


def _asked(place: Place) -> dict[str, Any]:
    """The fields of a place that a process on another machine needs, as JSON."""
    asked = {f.name: getattr(place, f.name) for f in fields(place) if f.name not in _OF_A_MACHINE}
    asked["data_root"] = None if place.data_root is None else str(place.data_root.resolve())
    measuring = place.measuring
    if measuring is not None:
        kind = type(measuring)
        if not is_dataclass(measuring):
            raise UserError(f"runs that {kind.__name__} measures cannot be queued for other machines")
        asked["measuring"] = {"class": f"{kind.__module__}:{kind.__qualname__}", "settings": asdict(measuring)}
    return asked


def place_of(asked: dict[str, Any], folder: Path, device: str, threads: int) -> Place:
    """The place to train a queued run in, on this machine."""
    known = {f.name for f in fields(Place)} - set(_OF_A_MACHINE)
    given = {name: value for name, value in asked.items() if name in known}
    if given.get("data_root"):
        given["data_root"] = Path(given["data_root"])
    place = Place(folder, device, **{**given, "threads": threads}, asked=asked)
    measuring = asked.get("measuring")
    if measuring is None:
        return place
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in measuring["settings"].items()}
    return replace(place, measuring=user_function("measuring", measuring["class"])(**settings))
