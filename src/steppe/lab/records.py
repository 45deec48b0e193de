"""Records: one JSON file a run, beside it a checkpoint until the run is done.

Files appear whole or not at all (written beside, then renamed), so that a process may be killed at any moment. What is
not a record (a foreign file, one cut short by a full disk) is skipped with a warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import platform
import subprocess
import warnings
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

from .. import __version__
from ..support.errors import UserError, one_line
from ..support.files import whole_file
from .recipe.method_text import label_of, settings_of
from .recipe.recipe import Recipe, filled, is_users

Record: TypeAlias = "dict[str, Any]"
FORMAT = "steppe-run/1"


class RecordWarning(UserWarning):
    """A file that is not what it should be, and is left alone."""


_BASE_NAMES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "adabelief": "AdaBelief"}


def new_record(recipe: Recipe, role: str = "method", label: str | None = None, device: str = "cpu") -> Record:
    """The record of a run that is about to start."""
    method = recipe.build_method()
    own_code = code_of(recipe)
    return {
        "format": FORMAT,
        "key": recipe.key,
        "status": "running",
        "recipe": recipe.as_dict(),
        "label": label or label_for(recipe),
        "role": role,
        "method": {"name": method.name, "settings": settings_of(method), "cost": float(method.cost)},
        "environment": environment(device),
        **({"own_code": own_code} if own_code else {}),
        "epochs": [],
        "final": None,
        "curvature": None,
        "verdict": "",
        "started": now(),
        "finished": None,
    }


def label_for(recipe: Recipe) -> str:
    """A run's name in tables: the method's, or the base's for plain training."""
    return _BASE_NAMES[recipe.base] if recipe.method == "plain" else label_of(recipe.method)


def code_of(recipe: Recipe) -> dict[str, str]:
    """A hash of each file that a user's own functions are in, by the name of its module."""
    names = [recipe.model] if ":" in recipe.model else []
    names += [recipe.data] if is_users(recipe.data) else []
    modules = {name.partition(":")[0] for name in names}
    # The library's own are told apart by its version, like all its code.
    files = {module: _file_of(module) for module in sorted(modules) if module.partition(".")[0] != "steppe"}
    return {module: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for module, file in files.items() if file}


def _file_of(module: str) -> Path | None:
    try:
        found = importlib.util.find_spec(module)
    except Exception:  # of a package that cannot be imported: said where it is needed
        return None
    file = Path(found.origin) if found is not None and found.origin else None
    return file if file is not None and file.is_file() else None


def same_code(record: Record, recipe: Recipe) -> bool:
    """Whether the user's own functions are as they were then; a record that does not say so counts as the same."""
    return record.get("own_code") in (None, code_of(recipe))


def environment(device: str) -> dict[str, Any]:
    """What a result may depend on beside its recipe."""
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
    """The commit of the source tree that runs, if it is one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def now() -> str:
    """The time, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


# Files


def write_record(record: Record, folder: Path) -> Path:
    """Write a run's record; the file of the same run is replaced."""
    path = folder / f"{record['key']}.json"
    with whole_file(path) as beside:
        beside.write_text(json.dumps(finite(record), indent=1, allow_nan=False, ensure_ascii=False), "utf-8")
    return path


def finite(value: Any) -> Any:
    """The same without what JSON cannot write: NaN and infinities become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def read_record(path: Path) -> Record | None:
    """The record in a file, or None with a warning."""
    try:
        record = json.loads(path.read_text("utf-8"))
        problem = _problem(record)
    except (OSError, ValueError) as error:
        problem = one_line(error)
    if problem:
        warnings.warn(f"{path} is not a record and is skipped: {problem}", RecordWarning, stacklevel=2)
        return None
    return {**record, "recipe": filled(record["recipe"])}


def _problem(record: Any) -> str:
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return f"its format is not {FORMAT}"
    shape = {"key": str, "status": str, "recipe": dict, "label": str, "epochs": list, "method": dict}
    wrong = [name for name, kind in shape.items() if not isinstance(record.get(name), kind)]
    return f"{wrong[0]} is missing or wrong" if wrong else ""


def read_records(paths: Iterable[str | Path] | str | Path) -> list[Record]:
    """All records in files and folders, in the order of their names."""
    paths = [paths] if isinstance(paths, (str, Path)) else paths
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"there is no {path}")
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    found = (read_record(file) for file in dict.fromkeys(files))
    return [record for record in found if record is not None]


def to_frame(records: Iterable[Record]) -> Any:
    """Records as a pandas table, one row a run: recipe, final numbers, curvature."""
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
    """Records as a pandas table, one row an epoch."""
    import pandas

    names = {k: lambda r, k=k: r[k] for k in ("key", "label", "role")}
    rows = [
        {**{k: get(r) for k, get in names.items()}, "seed": r["recipe"].get("seed"), **epoch}
        for r in records
        for epoch in r["epochs"]
    ]
    return pandas.DataFrame(rows)


# Checkpoints and weights


def read_checkpoint(path: Path, record: Record, device: torch.device) -> dict[str, Any] | None:
    """A run's checkpoint, if there is one and it is of this very run: the same recipe, the same settings."""
    if not path.exists():
        return None
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        then = saved["record"]
        same = (filled(then["recipe"]), then["method"]) == (record["recipe"], record["method"])
        code = saved["record"].get("own_code")
    except Exception as error:
        warnings.warn(f"{path} cannot be read, starting anew: {one_line(error)}", RecordWarning, stacklevel=2)
        return None
    if same and code not in (None, record.get("own_code")):
        changed = f"{', '.join(code)} has changed since {path} was written"
        warnings.warn(f"{changed}: starting anew", RecordWarning, stacklevel=2)
        return None
    return saved if same else None


def write_weights(weights: Mapping[str, Any], folder: Path, key: str) -> Path:
    """Write a model's weights: as safetensors, or where that is missing or weights share memory, with torch.save."""
    try:
        from safetensors.torch import save_file

        path = folder / f"{key}.safetensors"
        with whole_file(path) as beside:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, beside)
    except (ImportError, RuntimeError):
        path = folder / f"{key}.pt"
        with whole_file(path) as beside:
            torch.save(dict(weights), beside)
    return path


def finished(recipe: Recipe, folder: Path) -> Record | None:
    """The record of this run if it has ended and its method's settings and the user's code still mean the same."""
    record = ended(recipe, folder)
    return record if record is not None and same_code(record, recipe) else None


def ended(recipe: Recipe, folder: Path) -> Record | None:
    """The record of this run if it has ended, whatever the user's own code was then."""
    path = folder / f"{recipe.key}.json"
    record = read_record(path) if path.exists() else None
    if record is None or record["status"] not in ("done", "diverged") or record["recipe"] != recipe.as_dict():
        return None
    if record["method"].get("settings") != finite(settings_of(recipe.build_method())):
        return None
    if not _has_results(record):
        warnings.warn(f"{path} is without results: the run is trained again", RecordWarning, stacklevel=2)
        return None
    return {"role": "", "verdict": "", "curvature": None, **record}


def _has_results(record: Record) -> bool:
    last, final = record["epochs"][-1] if record["epochs"] else None, record.get("final")
    if not isinstance(last, dict) or not isinstance(final, dict):
        return False
    return "test_accuracy" in last and {"test_accuracy", "test_loss", "seconds", "gradients"} <= set(final)


@contextlib.contextmanager
def only_one(folder: Path, key: str) -> Iterator[None]:
    """Wait until no other process trains this run. The lock is the system's: it ends with its process, however."""
    try:
        import fcntl
    except ImportError:  # Windows: nothing waits there
        yield
        return
    place = folder / ".locks"
    place.mkdir(parents=True, exist_ok=True)
    with (place / key).open("w") as file:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        for part in folder.glob(f".{key}.*.part"):  # of a process that was killed
            part.unlink()
        yield
        (place / key).unlink(missing_ok=True)  # it is done: whoever waits will see that, with this lock or a new one
