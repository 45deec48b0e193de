"""Records: one JSON file per run.

A file is written completely or not at all (under another name, then renamed), so a process may be killed at any moment.
A file that is not a record (from another program, or truncated) is skipped with a warning.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
import warnings
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

import torch

from .. import __version__
from ..averaging import parse as parse_average
from ..support.errors import UserError, one_line
from ..support.files import whole_file
from .recipe.base_names import base_label
from .recipe.method_text import label_of, settings_of
from .recipe.own_code import code_of
from .recipe.recipe import Recipe, filled

FORMAT = "steppe-run/1"


class RecordWarning(UserWarning):
    """A record or checkpoint is not used, or a comparison is limited in a way that the user should know."""


class MethodEntry(TypedDict):
    """The method of a run: its name, all its settings, its looks per step."""

    name: str
    settings: dict[str, Any]
    cost: float


class _Accuracies(TypedDict, total=False):
    train_accuracy: float  # of classification only
    test_accuracy: float


class _Averages(_Accuracies, total=False):
    averaged: dict[str, float]  # the test results of the averaged weights, once averaging has started


class Epoch(_Averages):
    """One epoch of a run. `seconds` and `gradients` count from the start of the run."""

    epoch: int
    train_loss: float
    test_loss: float
    lr: float
    seconds: float
    gradients: int
    metrics: dict[str, Any]  # the method's own metrics: means over the epoch; of a vector, its last value


class Final(_Accuracies):
    """The results of the last epoch."""

    test_loss: float
    train_loss: float
    seconds: float
    gradients: int


class _Always(TypedDict):
    format: str
    key: str
    status: str  # "waiting", "running", "done" or "diverged"
    recipe: dict[str, Any]
    label: str  # its name in tables
    role: str  # "base", "equal-cost" or "method"
    method: MethodEntry
    environment: dict[str, Any]
    epochs: list[Epoch]
    final: Final | None  # None until the run has ended
    curvature: dict[str, Any] | None  # None if it was not measured
    verdict: str  # why a run diverged
    started: str
    finished: str | None


class Record(_Always, total=False):
    """A run: what was trained, on which machine, and the results. The keys below may be missing."""

    own_code: dict[str, str]  # hashes of the user's own modules
    parameters: int
    train_examples: int
    test_examples: int
    asked: dict[str, Any]  # of a queued run: how it is to be trained (see runner/shared_folder.py)
    metric: str  # what the run is compared by, if not by its test accuracy; ends with ↑ if larger is better
    averaged: dict[str, float]  # the test results of the averaged weights at the end
    held_out_examples: int  # kept for the second batch of a method that uses two: neither trained nor tested on
    log: str  # name of the logger


def new_record(recipe: Recipe, role: str = "method", label: str | None = None, device: str = "cpu") -> Record:
    """The record of a run that is about to start."""
    method = recipe.build_method()
    record: Record = {
        "format": FORMAT,
        "key": recipe.key,
        "status": "running",
        "recipe": recipe.as_dict(),
        "label": label or label_for(recipe),
        "role": role,
        "method": {"name": method.name, "settings": settings_of(method), "cost": float(method.cost)},
        "environment": environment(device),
        "epochs": [],
        "final": None,
        "curvature": None,
        "verdict": "",
        "started": now(),
        "finished": None,
    }
    if own_code := code_of(recipe):
        record["own_code"] = own_code
    return record


def with_average(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A run and, if its weights were averaged too, the averaged net as a run of its own, which is a rival of the base.

    Both come from one training, so gradients and seconds are the same.
    """
    kind = record["recipe"].get("average")
    if not kind:
        return [dict(record)]
    raw = {**record, "recipe": {**record["recipe"], "average": ""}}
    if record.get("final") is None or not record.get("averaged"):
        return [raw]
    epochs = [{**epoch, **epoch["averaged"]} for epoch in record["epochs"] if epoch.get("averaged")]
    mean = {**record, "label": f"{record['label']}, {_average_name(kind)}", "epochs": epochs, "curvature": None}
    mean["final"] = {**record["final"], **record["averaged"]}
    if record.get("role") in ("base", "equal-cost"):
        mean["role"] = "rival"
    return [raw, mean]


def _average_name(kind: str) -> str:
    name, number = parse_average(kind)
    names = {"ema": f"EMA {number:g}", "ema%": f"EMA over {100 * number:g} %", "swa": f"SWA from {100 * number:g} %"}
    return names[name]


def label_for(recipe: Recipe) -> str:
    """The name of a run in tables: the method's, or for plain training the base optimizer's."""
    return base_label(recipe.base) if recipe.method == "plain" else label_of(recipe.method)


def environment(device: str) -> dict[str, Any]:
    """Versions, device and threads: what a result may depend on besides its recipe."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu"
    return {
        "steppe": __version__,
        "commit": _commit(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": f"{device} ({name})",
        "threads": torch.get_num_threads(),
    }


@cache
def _commit() -> str | None:
    """The git commit of the running source tree, if it is in git."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def now() -> str:
    """The current time in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


# The numbers in a record


def seed_of(record: Mapping[str, Any]) -> Any:
    """The seed of a run."""
    return record["recipe"].get("seed", 0)


def value_of(record: Mapping[str, Any], metric: str) -> float | None:
    """A final number of training or curvature; None if it is missing or not finite."""
    final = record.get("final") or {}
    if metric in final:
        return number(final[metric])
    found = (record.get("curvature") or {}).get(metric)
    return number(found.get("value") if isinstance(found, Mapping) else found)


def metric_of(records: Iterable[Mapping[str, Any]]) -> str:
    """The metric that these runs are compared by: that of the first record that names one, else the test accuracy."""
    return next((record["metric"] for record in records if record.get("metric")), "test_accuracy")


def metrics_of(record: Mapping[str, Any]) -> list[str]:
    """The names for which a record has a number, finite or not."""
    final, curvature = record.get("final") or {}, record.get("curvature") or {}
    measured = [name for name, found in curvature.items() if not isinstance(found, Mapping) or "value" in found]
    return [*final, *measured]


def number(value: Any) -> float | None:
    """The value as a float if it is a finite number, else None: records have text for NaN and infinities."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


# Files


def write_record(record: Record, folder: Path) -> Path:
    """Write a run's record, replacing an earlier record of the same run."""
    path = folder / f"{record['key']}.json"
    with whole_file(path) as beside:
        beside.write_text(json.dumps(finite(record), indent=1, allow_nan=False, ensure_ascii=False), "utf-8")
    return path


def finite(value: Any) -> Any:
    """The value in a form that JSON can represent: NaN and infinities become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def read_record(path: Path) -> Record | None:
    """The record in a file; None, with a warning, if it is not a valid record."""
    record: Any = None
    try:
        record = json.loads(path.read_text("utf-8"))
        problem = _problem(record)
    except (OSError, ValueError) as error:
        problem = one_line(error)
    if problem:
        warnings.warn(f"{path} is not a record and is skipped: {problem}", RecordWarning, stacklevel=2)
        return None
    record["recipe"] = filled(record["recipe"])
    return record


def _problem(record: Any) -> str:
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return f"its format is not {FORMAT}"
    shape = {"key": str, "status": str, "recipe": dict, "label": str, "epochs": list, "method": dict}
    wrong = [name for name, kind in shape.items() if not isinstance(record.get(name), kind)]
    return f"{wrong[0]} is missing or wrong" if wrong else ""


def read_records(paths: Iterable[str | Path] | str | Path) -> list[Record]:
    """All records in files and folders, sorted by file name."""
    paths = [paths] if isinstance(paths, (str, Path)) else paths
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path} does not exist")
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    found = (read_record(file) for file in dict.fromkeys(files))
    return [record for record in found if record is not None]


def to_frame(records: Iterable[Record]) -> Any:
    """Records as a pandas table with one row per run: recipe, final numbers, curvature."""
    import pandas

    rows = []
    for r in records:
        row: dict[str, Any] = {k: r.get(k) for k in ("key", "label", "role", "status", "verdict")}
        row |= {k: json.dumps(v) if isinstance(v, dict) else v for k, v in r["recipe"].items()}
        row |= {"cost": r["method"].get("cost"), "parameters": r.get("parameters")}
        row |= r.get("final") or {}
        row |= {k: v["value"] for k, v in (r.get("curvature") or {}).items() if isinstance(v, dict) and "value" in v}
        rows.append(row)
    return pandas.DataFrame(rows)


def epochs_frame(records: Iterable[Record]) -> Any:
    """Records as a pandas table with one row per epoch."""
    import pandas

    rows = [
        {"key": r["key"], "label": r["label"], "role": r["role"], "seed": r["recipe"].get("seed"), **epoch}
        for r in records
        for epoch in r["epochs"]
    ]
    return pandas.DataFrame(rows)
