"""Which runs are finished already, and a lock so that two processes do not train the same run."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..recipe.method_text import settings_of
from ..recipe.own_code import code_of
from ..recipe.recipe import Recipe
from ..records import Record, RecordWarning, finite, metric_of, read_record


def same_code(record: Record, recipe: Recipe) -> bool:
    """Whether the user's own code is the same as when the record was made; True if the record has no hashes."""
    return record.get("own_code") in (None, code_of(recipe))


def finished_record(recipe: Recipe, folder: Path) -> Record | None:
    """The record of this run if it has ended, with the same settings of its method and the same own code; else None."""
    record = ended_record(recipe, folder)
    return record if record is not None and same_code(record, recipe) else None


def ended_record(recipe: Recipe, folder: Path) -> Record | None:
    """The record of this run if it has ended, even if the user's own code has changed since; else None."""
    path = folder / f"{recipe.key}.json"
    record = read_record(path) if path.exists() else None
    if record is None or record["status"] not in ("done", "diverged") or record["recipe"] != recipe.as_dict():
        return None
    if record["method"].get("settings") != finite(settings_of(recipe.build_method())):
        return None
    if not _has_results(record):
        warnings.warn(f"{path} has no results: the run is trained again", RecordWarning, stacklevel=2)
        return None
    complete: Record = {"role": "", "verdict": "", "curvature": None, **record}  # old records may lack these
    return complete


def _has_results(record: Record) -> bool:
    last, final = record["epochs"][-1] if record["epochs"] else None, record.get("final")
    if not isinstance(last, dict) or not isinstance(final, dict):
        return False
    metric = metric_of([record])
    return metric in last and {metric, "test_loss", "seconds", "gradients"} <= set(final)


@contextlib.contextmanager
def run_lock(folder: Path, key: str) -> Iterator[None]:
    """Wait until no other process trains this run. The operating system releases the lock when its process ends."""
    try:
        import fcntl
    except ImportError:  # Windows has no such locks, so there is no waiting
        yield
        return
    locks = folder / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / key).open("w") as file:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        for part in folder.glob(f".{key}.*.part"):  # left by a process that was killed
            part.unlink()
        yield
        (locks / key).unlink(missing_ok=True)  # a waiting process will find the run finished, whatever lock it gets
