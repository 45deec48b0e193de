"""Running cells, and keeping what came out: one JSON line a run, which tables, figures and verdicts are made from."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..lab.records import RecordWarning, environment, finite, now, read_records
from ..lab.runner.finished import run_lock
from ..lab.runner.local import Job, News, Place, Tell, done_already, perform
from ..lab.statistics import Group
from ..support.errors import UserError
from ..support.files import whole_file
from .experiment import Cell, Experiment, differing, select, without_seed

RESULTS = Path(__file__).parent / "results"
FORMAT = "steppe-paper/1"
KEPT_SCALES = ("full", "small")
Kept = dict[str, Any]


@dataclass(frozen=True)
class Planned:
    """The runs that an experiment asks for."""

    experiment: Experiment
    scale: str
    seeds: Sequence[int]
    cells: tuple[Cell, ...]

    @property
    def jobs(self) -> list[Job]:
        """What the lab trains; cells with the same recipe once."""
        found: dict[str, Job] = {}
        for seed in self.seeds:
            for cell in self.cells:
                if cell.recipe is not None:
                    job = Job(self.experiment.recipe(cell, self.scale, seed), cell.role, cell.name)
                    found.setdefault(job.recipe.key, job)
        return list(found.values())

    @property
    def computed(self) -> list[tuple[Cell, int]]:
        """What the experiment computes itself."""
        return [(cell, seed) for seed in self.seeds for cell in self.cells if cell.recipe is None]


def plan(experiment: Experiment, scale: str, seeds: int | None = None, cells: Iterable[str] = ()) -> Planned:
    """The runs of an experiment, or of some of its cells."""
    if seeds is not None and seeds < 1:
        raise UserError(f"--seeds must be at least 1, not {seeds}")
    return Planned(experiment, scale, range(seeds or experiment.seeds), select(experiment, cells))


def run(planned: Planned, place: Place, workers: int = 1, tell: Tell = lambda news: None) -> None:
    """Do what is planned and not done yet; records go to the place's folder."""
    experiment, jobs = planned.experiment, planned.jobs
    watch = experiment.watch_at(planned.scale)
    for job in jobs:
        record = done_already(job, place.folder)
        if record is not None and record["status"] == "done" and not experiment.measured_in(record):
            what = f"{record['key']} in {place.folder} was trained for another table and lacks measurements"
            raise UserError(f"{what}: choose another --out")
    if watch is None:
        perform(jobs, place, workers, tell)
    else:
        _perform_watched(jobs, place, watch, tell)
    for cell, seed in planned.computed:
        path = place.folder / f"{_computed_key(experiment, cell, planned.scale, seed)}.json"
        if _read_computed(path) is None:
            assert experiment.compute is not None
            _write_json(path, _computed(experiment, cell, planned.scale, seed))


def _perform_watched(jobs: list[Job], place: Place, watch: Any, tell: Tell) -> None:
    """In this process, since the lab's workers know nothing of what is watched."""
    import torch

    from ..lab.training.round_robin import train_round_robin
    from .measurements import Watched

    if place.device == "cpu":
        torch.set_num_threads(place.threads)
    by_cell: dict[str, list[Job]] = {}
    for job in jobs:
        by_cell.setdefault(job.name, []).append(job)
    groups = [alike[i : i + place.together] for alike in by_cell.values() for i in range(0, len(alike), place.together)]
    for group in groups:
        with ExitStack() as locks:
            runs: list[Any] = []
            for job in group:
                locks.enter_context(run_lock(place.folder, job.recipe.key))
                if (record := done_already(job, place.folder)) is not None:
                    tell(_news(record, before=True))
                    continue
                one = Watched(
                    job.recipe, place.folder, device=place.device, data_root=place.data_root, role=job.role,
                    label=job.name, measure=place.measuring,
                )  # fmt: skip
                one.watch = watch
                runs.append(one)
            train_round_robin(runs, _reporter(tell))


def _reporter(tell: Tell) -> Callable[[Any], None]:
    seen: dict[str, tuple[int, str]] = {}

    def report(run: Any) -> None:
        state = (len(run.record["epochs"]), run.record["status"])
        if seen.get(run.recipe.key) != state:
            seen[run.recipe.key] = state
            tell(_news(run.record))

    return report


def _news(record: Kept, before: bool = False) -> News:
    ended = record["status"] != "running"
    said = record["verdict"] or f"{100 * record['epochs'][-1]['test_accuracy']:.2f} %" if ended else ""
    return News(record["key"], len(record["epochs"]), ended, said, before)


def _computed(experiment: Experiment, cell: Cell, scale: str, seed: int) -> Kept:
    assert experiment.compute is not None
    began = now()
    values = experiment.compute(cell.name, scale, seed)
    return {
        "format": FORMAT, "key": _computed_key(experiment, cell, scale, seed), "cell": cell.name, "scale": scale,
        "seed": seed, "status": "done", "values": values, "environment": environment("cpu"),
        "started": began, "finished": now(),
    }  # fmt: skip


def _computed_key(experiment: Experiment, cell: Cell, scale: str, seed: int) -> str:
    return f"{experiment.slug}-{cell.name.replace('/', '-')}-{scale}-seed{seed}"


def _read_computed(path: Path) -> Kept | None:
    """A computed record; None if there is none, with a warning if what is there is none."""
    if not path.exists():
        return None
    try:
        line = json.loads(path.read_text("utf-8"))
    except ValueError:
        line = None
    needed = {"key", "cell", "scale", "seed", "values"}
    if isinstance(line, dict) and line.get("format") == FORMAT and needed <= set(line):
        return line
    warnings.warn(f"{path} is not a result of the format {FORMAT} and does not count", RecordWarning, stacklevel=2)
    return None


# Keeping results


def collect(folder: Path, experiment: Experiment, scale: str = "full", into: Path = RESULTS) -> tuple[int, int]:
    """Add the finished runs in a folder to the experiment's results; how many there are now, and how many are new."""
    into.mkdir(parents=True, exist_ok=True)
    path = into / f"{experiment.slug}.jsonl"
    kept = {line["key"]: line for line in _lines(path)}
    before, taken = set(kept), set()
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    computed = [
        p for cell in experiment.cells if cell.recipe is None for p in _computed_files(folder, experiment, cell)
    ]
    own = {p.name for p in computed}
    records = read_records([path for path in sorted(folder.glob("*.json")) if path.name not in own])
    ended = [record for record in records if record["status"] in ("done", "diverged")]
    for cell in experiment.cells:
        wanted = "" if cell.recipe is None else without_seed(experiment.recipe(cell, scale).as_dict())
        for record in ended:  # of cells with the same recipe the first one names it
            if without_seed(record["recipe"]) == wanted and record["key"] not in taken:
                taken.add(record["key"])
                line = compact(record, cell.name, scale)
                if _measured(kept.get(record["key"])) <= _measured(line):
                    kept[record["key"]] = line
    for file in computed:
        line = _read_computed(file)
        if line is not None and line["scale"] == scale:
            kept[line["key"]] = finite(line)
    if kept:
        order = {cell.name: number for number, cell in enumerate(experiment.cells)}
        lines = sorted(kept.values(), key=lambda r: (r["scale"], order.get(r["cell"], len(order)), r["seed"]))
        with whole_file(path) as beside:
            text = "".join(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n" for line in lines)
            beside.write_text(text, "utf-8")
    return len(kept), len(set(kept) - before)


def _measured(line: Kept | None) -> set[str]:
    """What was watched in a run: a training run again without it does not take its place."""
    return set() if line is None else {*line["metrics"], *line["curvature"]}


def _computed_files(folder: Path, experiment: Experiment, cell: Cell) -> list[Path]:
    return sorted(folder.glob(f"{experiment.slug}-{cell.name.replace('/', '-')}-*-seed*.json"))


_COLUMNS = ("test_accuracy", "test_loss", "train_loss", "train_accuracy", "seconds", "gradients")


def compact(record: Kept, cell: str, scale: str) -> Kept:
    """What of a lab record is worth keeping: numbers by epoch in columns, to five digits."""
    epochs = record["epochs"]
    columns = {name: [_short(entry.get(name)) for entry in epochs] for name in _COLUMNS}
    metrics = {
        name: [_short(e["metrics"].get(name)) for e in epochs]
        for name in epochs[-1].get("metrics", {})
        if name != "slope"
    }
    for name in ("frobenius", "top_values", "trace"):
        if any(name in entry for entry in epochs):
            metrics[name] = [_short(entry.get(name)) for entry in epochs]
    final = {name: _short(value, 7) for name, value in record["final"].items()}
    best = [e["test_accuracy"] for e in epochs if isinstance(e["test_accuracy"], float)]
    final["best_test_accuracy"] = _short(max(best), 7) if best else None
    seconds = final.get("seconds")
    steps = record["train_examples"] // record["recipe"]["batch"] * record["recipe"]["batch"]
    final["images_per_second"] = _short(steps * len(epochs) / seconds) if seconds else None
    curvature = {
        k: v for k, v in (record.get("curvature") or {}).items() if k != "density"
    }  # long, and nobody's figure
    line = {
        "format": FORMAT, "key": record["key"], "cell": cell, "scale": scale, "seed": record["recipe"]["seed"],
        "status": record["status"], "recipe": differing(record["recipe"]), "role": record["role"],
        "method": record["method"], "parameters": record["parameters"], "train_examples": record["train_examples"],
        "test_examples": record["test_examples"], "environment": record["environment"], "final": final,
        "epochs": columns, "metrics": metrics, "curvature": _short(curvature),
        "verdict": record["verdict"], "started": record["started"], "finished": record["finished"],
    }  # fmt: skip
    return finite(line)


def _short(value: Any, digits: int = 5) -> Any:
    """The same with fewer digits."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: _short(item, digits) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item, digits) for item in value]
    return value


def _write_json(path: Path, value: Kept) -> None:
    with whole_file(path) as beside:
        beside.write_text(json.dumps(finite(value), allow_nan=False), "utf-8")


def _lines(path: Path) -> Iterator[Kept]:
    if not path.exists():
        return
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            good = isinstance(line, dict) and line.get("format") == FORMAT
        except ValueError:
            good = False
        if not good:
            raise UserError(f"{path}, line {number}, is not a result of the format {FORMAT}")
        yield line


# Looking results up


@dataclass
class Results:
    """Kept results by what was run: a figure finds the runs of a table if their recipes are the same."""

    by_file: dict[str, dict[str, dict[int, Kept]]] = field(default_factory=dict)
    _scales: dict[str, str] = field(default_factory=dict)  # found already

    @classmethod
    def read(cls, folder: Path | None = None) -> Results:
        """All results in a folder."""
        found = cls()
        for path in sorted((folder or RESULTS).glob("*.jsonl")):
            runs: dict[str, dict[int, Kept]] = {}
            for line in _lines(path):
                runs.setdefault(_what(line), {})[line["seed"]] = line
            found.by_file[path.stem] = runs
        return found

    def of(self, experiment: Experiment, cell: Cell | str, scale: str = "full") -> Group:
        """The runs of a cell, its own experiment's first; those that lack what it measures are left out."""
        cell = experiment.cell(cell) if isinstance(cell, str) else cell
        if cell.recipe is None:
            what = f"{cell.name} {scale}"
            runs = self.by_file.get(experiment.slug, {}).get(what, {})
            return Group(cell.label, cell.role, {}, [runs[seed] for seed in sorted(runs)])
        recipe = experiment.recipe(cell, scale).as_dict()
        what = without_seed(recipe)
        runs = {}
        own = self.by_file.get(experiment.slug, {})
        for file in [own, *(runs for name, runs in self.by_file.items() if name != experiment.slug)]:
            for seed, line in file.get(what, {}).items():
                if line["status"] != "done" or experiment.measured_in(line):
                    runs.setdefault(seed, line)
        return Group(cell.label, cell.role, recipe, [runs[seed] for seed in sorted(runs)])

    def distinct(self, experiment: Experiment, scale: str) -> list[Group]:
        """The runs of every cell that has any, each once: at a short scale two cells may have the same recipe."""
        groups = [self.of(experiment, cell, scale) for cell in experiment.cells]
        first = {group.records[0]["key"]: group for group in reversed(groups) if group.records}
        return list(reversed(first.values()))

    def best(self, experiment: Experiment, cell: Cell | str) -> tuple[str, Group]:
        """A cell's runs at the experiment's scale, else at another, and the scale; no scale, no runs if never run."""
        own = self.scale_of(experiment)
        group = self.of(experiment, cell, own or "full")
        return (own, group) if group.records else self.largest(experiment, cell)

    def largest(self, experiment: Experiment, cell: Cell | str) -> tuple[str, Group]:
        """The same at the largest scale that the cell was run at: for a number that is the paper's."""
        for scale in KEPT_SCALES:
            group = self.of(experiment, cell, scale)
            if group.records:
                return scale, group
        return "", self.of(experiment, cell)

    def scale_of(self, experiment: Experiment) -> str:
        """The scale that most of an experiment's cells were run at; "" if there are none.

        Not the largest: a figure's cell may be a table's too, run at full scale, and must not stand alone there.
        """
        if experiment.name not in self._scales:
            counts = {
                scale: sum(bool(self.of(experiment, cell, scale).records) for cell in experiment.cells)
                for scale in KEPT_SCALES
            }
            most = max(KEPT_SCALES, key=lambda scale: counts[scale])
            self._scales[experiment.name] = most if counts[most] else ""
        return self._scales[experiment.name]


def _what(line: Kept) -> str:
    return without_seed(line["recipe"]) if "recipe" in line else f"{line['cell']} {line['scale']}"


def set_data_folder(folder: Path | None) -> None:
    """Let data functions that take no argument, here and in worker processes, find the folder."""
    if folder is not None:
        os.environ["STEPPE_DATA"] = str(folder)
