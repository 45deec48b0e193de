"""Kept results: one JSON-lines file per table or figure, one line per run. Tables, figures and verdicts come from them.

They are in the folder `results` of the source checkout; without a checkout, in `results` of the current folder. The
package itself contains none, and nothing is ever written into it.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..lab.recipe.recipe import filled
from ..lab.records import RecordWarning, finite, read_record, read_records
from ..lab.statistics import Group
from ..support.errors import UserError
from ..support.files import whole_file
from .experiment import Cell, Experiment, differing, without_seed

FORMAT = "steppe-paper/1"
KEPT_SCALES = ("full", "small")
Line = dict[str, Any]  # a kept run
_PACKAGE = Path(__file__).resolve().parents[1]


def results_folder() -> Path:
    """The folder of kept results: in the source checkout that this package is part of, else in the current folder."""
    root = _PACKAGE.parents[1]
    checkout = _PACKAGE.parent.name == "src" and (root / "pyproject.toml").is_file()
    return root / "results" if checkout else Path("results")


# Looking results up


@dataclass
class Results:
    """Kept runs, found by recipe: a figure also finds the runs of a table if their recipes are the same."""

    by_file: dict[str, dict[str, dict[int, Line]]] = field(default_factory=dict)
    _scales: dict[str, str] = field(default_factory=dict)  # by experiment, see `scale_of`

    @classmethod
    def read(cls, folder: Path | None = None) -> Results:
        """The kept results in a folder, by default `results_folder()`."""
        found = cls()
        for path in sorted((folder or results_folder()).glob("*.jsonl")):
            found.by_file[path.stem] = _by_run(_lines(path))
        return found

    def with_uncollected(self, folder: Path) -> Results:
        """These results together with the finished runs in a folder and its subfolders that are not collected yet.

        Such a run has its folder as `uncollected`. It counts only for a seed that has no kept run.
        """
        own: dict[str, list[Line]] = {}  # computed results belong to their experiment
        for line in _uncollected(folder):
            own.setdefault(line.get("experiment", f"{folder}/"), []).append(line)
        by_file = {name: dict(runs) for name, runs in self.by_file.items()}
        for name, some in own.items():
            file = by_file.setdefault(name, {})
            for what, runs in _by_run(some).items():
                file[what] = {**runs, **file.get(what, {})}
        return Results(by_file)

    def of(self, experiment: Experiment, cell: Cell | str, scale: str = "full") -> Group:
        """The runs of a cell. Those of its own experiment come first; runs without its measurements are left out."""
        cell = experiment.cell(cell) if isinstance(cell, str) else cell
        own = self.by_file.get(experiment.slug, {})
        if cell.recipe is None:
            runs = own.get(f"{cell.name} {scale}", {})
            return Group(cell.label, cell.role, {}, [runs[seed] for seed in sorted(runs)])
        what, runs = experiment.identity(cell, scale), {}
        for file in [own, *(runs for name, runs in self.by_file.items() if name != experiment.slug)]:
            for seed, line in file.get(what, {}).items():
                if line["status"] != "done" or experiment.measured_in(line):
                    runs.setdefault(seed, line)
        recipe = experiment.recipe(cell, scale).as_dict()
        return Group(cell.label, cell.role, recipe, [runs[seed] for seed in sorted(runs)])

    def distinct(self, experiment: Experiment, scale: str) -> list[Group]:
        """The groups of all cells with runs, each group once: at small scale two cells may have the same recipe."""
        groups = [self.of(experiment, cell, scale) for cell in experiment.cells]
        first = {group.records[0]["key"]: group for group in reversed(groups) if group.records}
        return list(reversed(first.values()))

    def best(self, experiment: Experiment, cell: Cell | str) -> tuple[str, Group]:
        """The scale and the runs of a cell: at the experiment's scale, else at another; "" and no runs without any."""
        own = self.scale_of(experiment)
        group = self.of(experiment, cell, own or "full")
        return (own, group) if group.records else self.largest(experiment, cell)

    def largest(self, experiment: Experiment, cell: Cell | str) -> tuple[str, Group]:
        """The scale and the runs of a cell at its largest scale, for the comparison with the paper's number."""
        for scale in KEPT_SCALES:
            group = self.of(experiment, cell, scale)
            if group.records:
                return scale, group
        return "", self.of(experiment, cell)

    def scale_of(self, experiment: Experiment) -> str:
        """The scale that most of an experiment's cells were run at; "" if none was run.

        It is not the largest scale: one cell of a figure may also belong to a table that was run at full scale, and
        must not be compared with the others.
        """
        if experiment.name not in self._scales:
            counts = {
                scale: sum(bool(self.of(experiment, cell, scale).records) for cell in experiment.cells)
                for scale in KEPT_SCALES
            }
            most = max(KEPT_SCALES, key=lambda scale: counts[scale])
            self._scales[experiment.name] = most if counts[most] else ""
        return self._scales[experiment.name]


def _by_run(lines: Iterable[Line]) -> dict[str, dict[int, Line]]:
    """Lines by what was run, then by seed."""
    runs: dict[str, dict[int, Line]] = {}
    for line in lines:
        what = without_seed(line["recipe"]) if "recipe" in line else f"{line['cell']} {line['scale']}"
        runs.setdefault(what, {})[line["seed"]] = line
    return runs


def kept_lines(slug: str, containing: str = "") -> Iterator[Line]:
    """The kept runs of an experiment whose text contains `containing`. Other lines are not parsed, which is fast."""
    return _lines(results_folder() / f"{slug}.jsonl", containing)


def kept_keys(experiment: Experiment) -> frozenset[str]:
    """The keys of all kept runs, of whatever table, that have what this experiment measures."""
    lines = (line for path in sorted(results_folder().glob("*.jsonl")) for line in _lines(path) if "recipe" in line)
    return frozenset(line["key"] for line in lines if line["status"] != "done" or experiment.measured_in(line))


def _lines(path: Path, containing: str = "") -> Iterator[Line]:
    if not path.exists():
        return
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        if containing not in text:
            continue
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or line.get("format") != FORMAT:
            raise UserError(f"{path}, line {number}, is not a result of the format {FORMAT}")
        yield line


def _uncollected(folder: Path) -> Iterator[Line]:
    """The finished runs in a folder and its subfolders. Other files are ignored without a warning."""
    for path in sorted((*folder.glob("*.json"), *folder.glob("*/*.json"))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecordWarning)
            computed = read_computed(path)
            record = read_record(path) if computed is None else None
        if computed is not None:
            slug = computed["key"].removesuffix(f"-{computed['scale']}-seed{computed['seed']}")
            slug = slug.removesuffix(f"-{computed['cell'].replace('/', '-')}")
            yield {**computed, "experiment": slug, "uncollected": str(path.parent)}
        elif record is not None and record["status"] in ("done", "diverged") and record["epochs"]:
            yield {**compact(record, "", ""), "uncollected": str(path.parent)}


# Collecting


def collect(folder: Path, experiment: Experiment, scale: str = "full", into: Path | None = None) -> tuple[int, int]:
    """Add the finished runs in a folder to the experiment's results; return the numbers of all and of new results."""
    into = into or results_folder()
    if into.resolve().is_relative_to(_PACKAGE):
        raise UserError(f"{into} is inside the package: choose another folder for results")
    if not folder.is_dir():
        raise UserError(f"folder {folder} does not exist")
    into.mkdir(parents=True, exist_ok=True)
    path = into / f"{experiment.slug}.jsonl"
    kept = {line["key"]: line for line in _lines(path)}
    before = set(kept)
    computed = [
        file for cell in experiment.cells if cell.recipe is None for file in _computed_files(folder, experiment, cell)
    ]
    _take(kept, _finished(folder, experiment, scale, {file.name for file in computed}))
    if experiment.follows is not None:  # the runs just added may decide which other cells there are
        experiment = experiment.follows(kept.values())
        _take(kept, _finished(folder, experiment, scale, set()))
    for file in computed:
        line = read_computed(file)
        if line is not None and line["scale"] == scale:
            kept[line["key"]] = finite(line)
    if kept:
        order = {cell.name: number for number, cell in enumerate(experiment.cells)}
        lines = sorted(kept.values(), key=lambda r: (r["scale"], order.get(r["cell"], len(order)), r["seed"]))
        with whole_file(path) as beside:
            text = "".join(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n" for line in lines)
            beside.write_text(text, "utf-8")
    return len(kept), len(set(kept) - before)


def _take(kept: dict[str, Line], lines: Iterable[Line]) -> None:
    """Add runs to the kept ones, unless a kept run has more measurements."""
    for line in lines:
        if _measured(kept.get(line["key"])) <= _measured(line):
            kept[line["key"]] = line


def _finished(folder: Path, experiment: Experiment, scale: str, apart_from: set[str]) -> Iterator[Line]:
    """The finished runs of an experiment in a folder. A run is named after the first cell that has its recipe."""
    records = read_records([path for path in sorted(folder.glob("*.json")) if path.name not in apart_from])
    ended: dict[str, list[Any]] = {}
    for record in records:
        if record["status"] in ("done", "diverged"):
            ended.setdefault(without_seed(record["recipe"]), []).append(record)
    for cell in experiment.cells:
        if cell.recipe is not None:
            for record in ended.pop(experiment.identity(cell, scale), ()):
                yield compact(record, cell.name, scale, experiment.stops)


def _measured(line: Line | None) -> set[str]:
    """The names of what was measured in a run; a later run without these measurements does not replace it."""
    return set() if line is None else {*line["metrics"], *line["curvature"]}


_COLUMNS = ("test_accuracy", "test_loss", "train_loss", "train_accuracy", "seconds", "gradients")


def compact(record: Mapping[str, Any], cell: str, scale: str, stops: int = 0) -> Line:
    """The part of a lab record that is kept: the numbers of all epochs in columns, to five digits.

    With `stops`, only the epochs at the ends of that many equal parts of training are kept.
    """
    epochs = record["epochs"]
    if stops:
        ends = sorted({round(k * len(epochs) / stops) for k in range(1, stops + 1)} - {0})
        epochs = [epochs[place - 1] for place in ends]
    names = dict.fromkeys([*_COLUMNS, record.get("metric") or "test_accuracy"])
    digits = 7 if stops else 5  # early-stopped results are compared with final ones, so they have as many digits
    columns = {name: [_short(entry.get(name), digits) for entry in epochs] for name in names if name in epochs[-1]}
    if stops:
        columns["epoch"] = [entry["epoch"] for entry in epochs]
        if "averaged" in epochs[-1]:
            columns["averaged"] = [_short(entry.get("averaged"), digits) for entry in epochs]
    metrics = {
        name: [_short(e["metrics"].get(name)) for e in epochs]
        for name in epochs[-1].get("metrics", {})
        if name != "slope"
    }
    for name in ("frobenius", "top_values", "trace"):
        if any(name in entry for entry in epochs):
            metrics[name] = [_short(entry.get(name)) for entry in epochs]
    # The density is long, and not used in any figure.
    curvature = {k: v for k, v in (record.get("curvature") or {}).items() if k != "density"}
    line = {
        "format": FORMAT, "key": record["key"], "cell": cell, "scale": scale, "seed": record["recipe"]["seed"],
        "status": record["status"], "recipe": differing(record["recipe"]), "role": record["role"],
        "method": record["method"], "parameters": record["parameters"], "train_examples": record["train_examples"],
        "test_examples": record["test_examples"], "environment": record["environment"], "final": _final(record),
        "epochs": columns, "metrics": metrics, "curvature": _short(curvature),
        "verdict": record["verdict"], "started": record["started"], "finished": record["finished"],
    }  # fmt: skip
    line |= {name: _short(record[name], 7) for name in ("averaged", "metric") if record.get(name)}
    return finite(line)


def as_record(line: Line, **fields: Any) -> dict[str, Any]:
    """A kept run in the form of a lab record, as far as statistics need it: with its epochs as a list."""
    columns = line["epochs"] if "epoch" in line["epochs"] else {"epoch": []}
    rows = zip(*columns.values(), strict=True)
    epochs = [dict(zip(columns, row, strict=True)) for row in rows]
    return {**line, "recipe": filled(line["recipe"]), "epochs": epochs, **fields}


def _final(record: Mapping[str, Any]) -> dict[str, Any]:
    """The final numbers to seven digits, with the best epoch's accuracy and the speed."""
    epochs, recipe = record["epochs"], record["recipe"]
    final = {name: _short(value, 7) for name, value in record["final"].items()}
    best = [e["test_accuracy"] for e in epochs if isinstance(e.get("test_accuracy"), float)]
    final["best_test_accuracy"] = _short(max(best), 7) if best else None
    seconds, images = final.get("seconds"), record["train_examples"] // recipe["batch"] * recipe["batch"]
    final["images_per_second"] = _short(images * len(epochs) / seconds) if seconds else None
    return final


def _short(value: Any, digits: int = 5) -> Any:
    """The value with its numbers rounded to this many significant digits."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: _short(item, digits) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item, digits) for item in value]
    return value


# Results that an experiment computes itself, without training


def computed_key(experiment: Experiment, cell: Cell, scale: str, seed: int) -> str:
    """The name of a computed result, for its file."""
    return f"{experiment.slug}-{cell.name.replace('/', '-')}-{scale}-seed{seed}"


def _computed_files(folder: Path, experiment: Experiment, cell: Cell) -> list[Path]:
    return sorted(folder.glob(f"{experiment.slug}-{cell.name.replace('/', '-')}-*-seed*.json"))


def write_computed(line: Line, folder: Path) -> None:
    """Write a computed result under its key."""
    with whole_file(folder / f"{line['key']}.json") as beside:
        beside.write_text(json.dumps(finite(line), allow_nan=False), "utf-8")


def read_computed(path: Path) -> Line | None:
    """The computed result in a file; None if the file does not exist or, with a warning, has another content."""
    if not path.exists():
        return None
    try:
        line = json.loads(path.read_text("utf-8"))
    except ValueError:
        line = None
    needed = {"key", "cell", "scale", "seed", "values"}
    if isinstance(line, dict) and line.get("format") == FORMAT and needed <= set(line):
        return line
    warnings.warn(f"{path} is not a result of the format {FORMAT} and is skipped", RecordWarning, stacklevel=2)
    return None
