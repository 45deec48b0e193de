"""`steppe.compare`: the comparison of `steppe compare`, from Python, with functions and objects in place of names."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..support.devices import best_device, require_device
from ..support.errors import UserError
from .comparison_result import Comparison
from .handing_over import data_name_of, method_texts, own_name
from .preparing import how_many_jobs, recipe_for, try_out, warnings_for, with_runs_at_once
from .recipe.own_code import unreadable
from .recipe.recipe import Recipe, is_users
from .records import Record, RecordWarning
from .runner.comparison import DEFAULT_METHODS, FIRST_SEEDS, notes, plan_all
from .runner.estimate import Remaining, announcement
from .runner.jobs import Job, Place
from .runner.local import News, perform
from .runner.local import notes as notes_on_earlier_runs
from .runner.ray import perform_on_ray
from .training.batches import cached_data, data_for
from .training.final_curvature import Measuring


def compare(
    data: Any = None, model: Any = None, methods: Any = DEFAULT_METHODS, base: Any = None, *,
    seeds: int | Sequence[int] | None = None, equal_cost: bool = True, rivals: Sequence[dict[str, Any]] | None = None,
    task: str | None = None, loss: Any = None, metric: Any = None, lower_is_better: bool = False,
    out: str | Path = "runs", device: str = "auto", jobs: int | None = None, on: str = "local", address: str = "",
    threads: int = 1, curvature: bool = True, keep_weights: bool = False, data_dir: str | Path | None = None,
    progress: bool = True, **settings: Any,
) -> Comparison:  # fmt: skip
    """Train a model with several methods and seeds, and test which differences are more than chance.

    Finished runs in `out` are not repeated; a stopped comparison resumes when it is called again.

    Args:
        data: a name such as "digits", or your own: ((inputs, targets), (inputs, targets)) for training and test, as
            tensors or arrays; two Datasets or DataLoaders; a Hugging Face DatasetDict; a function that returns one.
        model: a name such as "mlp-3", or a function or class that makes a module: `make()` or `make(shape, outputs)`.
            A module is copied, so that every seed starts from its weights.
        methods: names with settings ("sam:rho=0.1"), methods (`steppe.ASAM(rho=1.0)`), or classes.
        base: the base optimizer's name ("sgd", "adamw", "muon+adamw"), or a function of parameters and lr.
        seeds: the number of seeds, or a list of seeds; by default 3.
        rivals: variants of the base that methods have to beat, such as [{"weight_decay": 5e-4}]. By default an average
            of its weights and, with SGD, Nesterov momentum and weight decay.
        equal_cost: also train the base longer, until it has cost as much as each method.
        task: "classification", "regression", "multi-label" or "language".
        loss: your own, a function of (outputs, targets).
        metric: your own, a function of all (outputs, targets) of the test data.
        lower_is_better: whether a lower value of your metric is better.
        out: the folder of the records.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        jobs: number of worker processes; by default one per core on a CPU. With 1 everything runs in this process.
        on: where to train: "local" or "ray".
        address: the address of a Ray cluster; by default a local one is started.
        threads: CPU threads per process.
        curvature: measure the curvature at the end of every run.
        keep_weights: save the trained weights beside the records.
        data_dir: the folder of named data sets.
        progress: print the progress to stderr.
        settings: any other field of a recipe: epochs, batch, lr, momentum, weight_decay, schedule, precision,
            base_settings, ... The default is what is suggested for data and model.
    """
    asked = Asked(data, model, base, task, loss, metric, lower_is_better, settings)
    recipe = asked.recipe()
    wanted = method_texts(methods)
    first = asked.nothing and methods is DEFAULT_METHODS  # nothing is asked for: as `steppe compare` alone
    count = seeds if seeds is not None else FIRST_SEEDS if first else 3
    chosen = range(count) if isinstance(count, int) else list(count)
    if not wanted or not len(chosen):
        raise UserError("a comparison needs at least one method and one seed")
    planned = plan_all(recipe, wanted, chosen, equal_cost, rivals, first)
    where = place_for(out, device, threads, curvature, keep_weights, data_dir)
    where = with_runs_at_once(where, None, [recipe])
    for note in [*check(recipe, where), *notes(recipe, planned)]:
        tell_user(note)
    trainer = Trainer(where, how_many_jobs(jobs, where.device), on, address, progress)
    return Comparison(trainer(planned), where.folder)


@dataclass(frozen=True)
class Asked:
    """The arguments of `compare` and `tune` that define what is trained."""

    data: Any
    model: Any
    base: Any
    task: str | None
    loss: Any
    metric: Any
    lower_is_better: bool
    settings: dict[str, Any]

    @property
    def nothing(self) -> bool:
        """Whether everything is left to what is suggested."""
        given = (self.data, self.model, self.base, self.task, self.loss, self.metric)
        return not self.settings and all(one is None for one in given)

    def recipe(self) -> Recipe:
        """The recipe, in which functions and data have names."""
        data = None if self.data is None else data_name_of(self.data)
        if data is not None and is_users(data) and self.model is None:
            raise UserError("name a model for your own data: model=make_model")
        if self.lower_is_better and self.metric is None:
            raise UserError("lower_is_better is for a metric of your own: give metric")
        cached_data.cache_clear()  # a function of the same name may have been given before
        own = {name: getattr(self, name) for name in ("model", "base", "loss", "metric")}
        names = {name: None if thing is None else own_name(name, thing) for name, thing in own.items()}
        if names["metric"] and self.lower_is_better:
            names["metric"] += ":lower"
        return recipe_for({"data": data, "task": self.task, **names, **self.settings})


def place_for(
    out: str | Path, device: str, threads: int, curvature: bool, keep_weights: bool, data_dir: str | Path | None
) -> Place:
    """The place to train in."""
    device = best_device() if device == "auto" else device
    require_device(device)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    root = None if data_dir is None else Path(data_dir)
    return Place(folder, device, root, threads, 1, Measuring() if curvature else None, keep_weights=keep_weights)


def check(recipe: Recipe, place: Place) -> list[str]:
    """Check that data, model and loss fit together; return warnings."""
    data = data_for(recipe, place.data_root)
    try_out(recipe, data)
    found = warnings_for(recipe, data)
    if unknown := unreadable(recipe):
        named = ", ".join(name.partition(":")[2] for name in unknown)
        found.append(f"the source of {named} cannot be read, so finished runs cannot be recognised: all are trained")
    return found


def tell_user(note: str) -> None:
    """Issue a warning that points to the line of the user's code that called steppe."""
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("steppe."):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(note, RecordWarning, stacklevel=depth)


@dataclass(frozen=True)
class Trainer:
    """Trains jobs, on this machine or on Ray."""

    place: Place
    workers: int
    on: str = "local"
    address: str = ""
    progress: bool = True

    def __call__(self, jobs: Sequence[Job]) -> list[Record]:
        """The records of all jobs."""
        if self.on not in ("local", "ray"):
            raise UserError(f"on must be 'local' or 'ray', not {self.on!r}")
        for note in notes_on_earlier_runs(jobs, self.place):
            tell_user(note)
        tell = Lines(jobs) if self.progress else _silent
        if self.progress and self.on == "local" and (text := announcement(jobs, self.place, self.workers)):
            print(text, file=sys.stderr, flush=True)
        if self.on == "ray":
            return perform_on_ray(jobs, self.place, self.address, self.workers, tell)
        return perform(jobs, self.place, self.workers, tell)


def _silent(news: News) -> None:
    pass


class Lines:
    """Prints a line for each run that ends, with the estimated remaining time."""

    def __init__(self, jobs: Sequence[Job], write: Callable[[str], Any] | None = None):
        self._jobs = {job.recipe.key: job for job in jobs}
        self._remaining, self._ended = Remaining(jobs), set[str]()
        self._write = write or (lambda text: print(text, file=sys.stderr, flush=True))

    def __call__(self, news: News) -> None:
        """Print a line if the run has ended."""
        if news.key not in self._jobs or news.key in self._ended:
            return
        self._remaining.hear(news)
        if not news.ended:
            return
        self._ended.add(news.key)
        if not news.before:
            recipe, name = self._jobs[news.key].recipe, self._jobs[news.key].name
            count = f"{len(self._ended)}/{len(self._jobs)}"
            self._write(f"{count}  {name}, seed {recipe.seed}: {news.result}{self._remaining}")
