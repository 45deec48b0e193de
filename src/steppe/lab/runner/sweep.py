"""A search for settings: over a grid, or with a sampler. Its results are ordinary records.

Candidates are judged on held-out training data (`Recipe.hold_out`), so that the test data stays unseen. The held-out
labels are clean, even with `Recipe.label_noise`. Candidates that cannot be told apart from the best are tied with it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import socket
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from ...support.errors import UserError, describe, require, unknown
from ..recipe.method_text import make_method, pieces_of, plain_value, with_settings
from ..recipe.own_code import code_of
from ..recipe.recipe import Recipe
from ..records import Record, RecordWarning, label_for, metric_of, value_of
from ..report.formatting import difference
from ..statistics import Difference, group_records, larger_is_better
from ..statistics import against_best as differences_to_best
from .finished import finished_record
from .jobs import Job

RunJobs: TypeAlias = Callable[[Sequence[Job]], "list[Record]"]
_WORST = 1e30  # counts as the value of a diverged run where smaller is better, and its negative where larger is better
_FIXED = ("data", "method", "seed", "hold_out", "model_settings")


@dataclass(frozen=True)
class Span:
    """Numbers from low to high; on a logarithmic scale if they span a factor of 10 or more."""

    low: float
    high: float
    whole: bool = False

    @property
    def log(self) -> bool:
        """Whether the scale is logarithmic."""
        return self.low > 0 and self.high / self.low >= 10


Space: TypeAlias = "dict[str, list[Any] | Span]"


def read_space(grids: Sequence[str], ranges: Sequence[str], template: Recipe) -> Space:
    """The search space from texts such as ``lr=1e-3,1e-2`` and ``sam.rho=0.01..0.5``.

    A name is a field of the recipe, or a setting of the method as method.setting.
    """
    space: Space = {}
    for text in [*grids, *ranges]:
        name, equals, values = (part.strip() for part in text.partition("="))
        listed = pieces_of(values, ",")
        if not equals or not listed:
            raise UserError(f"{text!r} is not of the form name=values, such as lr=1e-3,1e-2 or sam.rho=0.01..0.5")
        name = _checked(name, template)
        if name in space:
            raise UserError(f"{name} is given twice")
        space[name] = _span(text, values) if text in ranges else [plain_value(value) for value in listed]
    if not space:
        raise UserError("nothing to search: give --grid lr=1e-3,1e-2 or --range lr=1e-4..1e-1")
    for name, values in space.items():  # raise for a mistake in any value before the first run
        for value in [values.low, values.high] if isinstance(values, Span) else values:
            candidate(template, {name: value})
    return space


def _checked(name: str, template: Recipe) -> str:
    """The name, if it is a recipe field or a setting of the method as method.setting; else it raises."""
    method = make_method(template.method)
    owner, dot, setting = name.partition(".")
    if dot:
        if owner.lower() not in ("method", method.name.lower()):
            raise UserError(f"{name}: the method is {template.method}, so write {method.name.lower()}.{setting}")
        known = [f.name for f in fields(method)]
        if setting not in known:
            raise unknown(f"setting of {method.name}", setting, known)
        return f"{method.name.lower()}.{setting}"
    known = [f.name for f in fields(Recipe) if f.name not in _FIXED]
    if name in _FIXED:
        raise UserError(f"{name} cannot be searched; run a sweep for each")
    if name not in known:
        if name in [f.name for f in fields(method)]:
            raise UserError(f"{name} is a setting of the method: write {method.name.lower()}.{name}")
        raise unknown("recipe field", name, known)
    return name


def _span(text: str, values: str) -> Span:
    found = re.fullmatch(r"(.+?)\.\.(.+)", values)
    ends = [plain_value(end) for end in found.groups()] if found else []
    if len(ends) != 2 or not all(isinstance(end, (int, float)) for end in ends) or not ends[0] < ends[1]:
        raise UserError(f"{text!r} is not a range, such as lr=1e-4..1e-1")
    return Span(*ends, whole=all(isinstance(end, int) for end in ends))


def candidate(template: Recipe, values: dict[str, Any]) -> Recipe:
    """The recipe with these values."""
    own = {name: value for name, value in values.items() if "." not in name}
    settings = {name.partition(".")[2]: value for name, value in values.items() if "." in name}
    method = with_settings(template.method, settings) if settings else template.method
    return replace(template, **own, method=method)


def jobs_for(template: Recipe, values: dict[str, Any], seeds: Sequence[int]) -> list[Job]:
    """One run per seed."""
    recipe = candidate(template, values)
    texts = [f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()]
    own = [text for text, name in zip(texts, values, strict=True) if "." not in name]
    return [Job(replace(recipe, seed=seed), "method", " ".join([label_for(recipe), *own])) for seed in seeds]


def over_grid(template: Recipe, space: Space, seeds: Sequence[int], run: RunJobs) -> list[Record]:
    """Train every combination of the values."""
    axes = [values for values in space.values() if not isinstance(values, Span)]
    points = itertools.product(*axes)
    combinations = [dict(zip(space, point, strict=True)) for point in points]
    return run(_once(job for values in combinations for job in jobs_for(template, values, seeds)))


def _once(jobs: Iterable[Job]) -> list[Job]:
    """The jobs without repetitions: 0.1 and 1e-1 are one candidate."""
    return list({job.recipe.key: job for job in jobs}.values())


def sample(
    template: Recipe, space: Space, seeds: Sequence[int], trials: int, sampler: str, url: str, study_name: str,
    at_once: int, run: RunJobs, folder: Path,
) -> list[Record]:  # fmt: skip
    """Train candidates that Optuna chooses. Several machines that share the database work on one study."""
    search = _search_hash(template, space, seeds)
    study = _study(url, study_name or f"{make_method(template.method).name.lower()}-{search}", sampler)
    if study.trials and study.user_attrs.get("question") != search:
        raise UserError(f"the study {study.study_name} in {url} belongs to another search: choose another --study")
    study.set_user_attr("question", search)
    _requeue_dead_trials(study)
    if earlier := _jobs_here(study, template, space, seeds, folder)[0]:
        run(earlier)  # runs whose records were deleted are trained again
    while (left := trials - sum(trial.state.name == "COMPLETE" for trial in study.trials)) > 0:
        asked = [study.ask() for _ in range(min(at_once, left))]
        for trial in asked:
            trial.set_user_attr("process", [socket.gethostname(), os.getpid()])
        chosen = [{name: suggest(trial, name, values) for name, values in space.items()} for trial in asked]
        wanted = [jobs_for(template, values, seeds) for values in chosen]
        found = {record["key"]: record for record in run(_once(job for jobs in wanted for job in jobs))}
        for trial, jobs in zip(asked, wanted, strict=True):
            study.tell(trial, score([found[job.recipe.key] for job in jobs]))
    jobs, missing = _jobs_here(study, template, space, seeds, folder)
    if not jobs:
        raise UserError(f"{missing}: copy them here, or choose another --study")
    if missing:
        warnings.warn(f"{missing}: they are not shown", RecordWarning, stacklevel=2)
    found = [finished_record(job.recipe, folder) for job in jobs]
    return run(jobs) if None in found else [record for record in found if record is not None]


def _jobs_here(study: Any, template: Recipe, space: Space, seeds: Sequence[int], folder: Path) -> tuple[list[Job], str]:
    """The runs of finished trials of this machine or with records in the folder, and a note on the other trials."""
    here: list[Job] = []
    away = 0
    done = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    for trial in done:
        jobs = jobs_for(template, {name: trial.params[name] for name in space}, seeds)
        ours = trial.user_attrs.get("process", [""])[0] == socket.gethostname()
        if ours or all(finished_record(job.recipe, folder) for job in jobs):
            here += jobs
        else:
            away += 1
    missing = f"{away} of {len(done)} trials were done on other machines and have no records in {folder}"
    return _once(here), missing if away else ""


def score(records: Sequence[Record]) -> float:
    """The score of a candidate, larger is better: the mean over seeds, where a diverged run counts as the worst."""
    return statistics.mean(_score(record) for record in records)


def _score(record: Record) -> float:
    metric = metric_of([record])
    value = value_of(record, metric) if record["status"] == "done" else None
    if value is None:
        return 0.0 if metric.endswith("accuracy") else -_WORST
    return value if larger_is_better(metric) else -value


def _search_hash(template: Recipe, space: Space, seeds: Sequence[int]) -> str:
    """A hash of what is searched: another search has another study."""
    spaces = {name: str(values) for name, values in space.items()}
    text = json.dumps([template.as_dict(), code_of(template), spaces, list(seeds)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def sqlite_url(path: Path) -> str:
    """The address of a database file, quoted where its path needs it."""
    try:
        from sqlalchemy.engine import URL, make_url
    except ImportError:  # it comes with optuna, whose absence is reported later
        return f"sqlite:///{path}"
    url = URL.create("sqlite", database=str(path)).render_as_string()
    if make_url(url).database != str(path):  # older versions do not quote
        raise UserError(
            f"the path {path.parent} cannot be used for a database: choose another --out, or give --storage"
        )
    return url


def _study(url: str, name: str, sampler: str) -> Any:
    if sampler not in ("tpe", "random"):
        raise unknown("sampler", sampler, ("tpe", "random"))
    optuna = require("optuna", "optuna", "a search with --range")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(study_name=name, storage=url, direction="maximize", load_if_exists=True)
    except Exception as error:
        raise UserError(f"the database {url} cannot be used: {describe(error)}") from None
    seed = len(study.trials)  # a continued study must not draw the same numbers again
    makers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study.sampler = makers[sampler](seed=seed)
    return study


def _requeue_dead_trials(study: Any) -> None:
    """Queue again the trials whose process on this machine has ended; they resume from their checkpoints."""
    for trial in study.trials:
        host, pid = trial.user_attrs.get("process", (None, None))
        if trial.state.name == "RUNNING" and host == socket.gethostname() and not _alive(pid):
            study.tell(trial.number, state=type(trial.state).FAIL)
            study.enqueue_trial(trial.params)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def suggest(trial: Any, name: str, values: list[Any] | Span) -> Any:
    """The value that Optuna proposes."""
    if not isinstance(values, Span):
        return trial.suggest_categorical(name, values)
    if values.whole:
        return trial.suggest_int(name, int(values.low), int(values.high), log=values.log)
    return trial.suggest_float(name, values.low, values.high, log=values.log)


def ranked(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """The candidates and their runs, best first."""
    groups = [(group.label, group.records) for group in group_records(records)]
    return sorted(groups, key=lambda item: -score(item[1]))


def best(records: Sequence[Record]) -> Recipe:
    """The recipe of the best candidate, without held-out data: for training on all training data."""
    return replace(Recipe.of(ranked(records)[0][1][0]["recipe"]), hold_out=0.0)


def against_best(records: Sequence[Record]) -> dict[str, Difference]:
    """Every other candidate minus the best, paired by seed, with simultaneous intervals, by label."""
    best, *others = sorted(group_records(records), key=lambda group: -score(group.records))
    found = zip(others, differences_to_best(best, others, metric_of(records)), strict=True)
    return {group.label: one for group, one in found if one is not None}


def tied(records: Sequence[Record]) -> list[str]:
    """The candidates that cannot be told apart from the best, and did not diverge."""
    out = {label for label, group in ranked(records) if any(record["status"] != "done" for record in group)}
    return [label for label, one in against_best(records).items() if one.verdict != "worse" and label not in out]


def table_of(records: Sequence[Record]) -> Any:
    """The candidates, best first, as a rich table."""
    from rich.table import Table

    held = any(record["recipe"]["hold_out"] for record in records)
    metric = metric_of(records)
    name = metric.removeprefix("test_").replace("_", " ")
    share = metric.endswith("accuracy")
    head = (
        "settings",
        f"held-out {name}" if held else f"test {name}",
        "difference to the best",
        "",
        "runs",
        "diverged",
    )
    table = Table(*head)
    differences, same = against_best(records), tied(records)
    for place, (label, group) in enumerate(ranked(records)):
        diverged = sum(record["status"] == "diverged" for record in group)
        mean = score(group) if larger_is_better(metric) else -score(group)
        value = f"{100 * mean:.2f} %" if share else f"{mean:.4g}"
        apart = difference(differences[label], metric) if label in differences else ""
        word = "the best" if place == 0 else "tied" if label in same else ""
        table.add_row(label, value, apart, word, str(len(group)), str(diverged or ""))
    return table
