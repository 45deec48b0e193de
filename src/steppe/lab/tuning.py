"""`steppe.tune`: a method's radius and the learning rate, chosen on held-out training data by successive halving.

Optuna proposes candidates. All are trained for a short time with one seed, the better ones for longer, and the best few
for the whole time with all seeds. Only those few are compared in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..support.errors import UserError, require
from .comparing import Asked, Trainer, check, place_for, tell_user
from .comparison_result import Choice, Comparison, choice_among
from .handing_over import method_texts
from .preparing import how_many_jobs, with_runs_at_once
from .recipe.method_text import make_method, with_settings
from .recipe.recipe import Recipe
from .records import Record
from .runner.comparison import notes, with_method
from .runner.jobs import Job
from .runner.sweep import jobs_for, read_space, score, suggest
from .statistics import summarise

RANDOM = 10  # number of random candidates before Optuna proposes candidates from their results


@dataclass(frozen=True, repr=False)
class Tuned:
    """What `steppe.tune` returns: the best setting with its interval, and the settings that it is tied with."""

    choice: Choice
    recipe: Recipe  # the best, without held-out data
    finalists: Comparison
    trials: list[dict[str, Any]]  # every candidate: its values, score and number of epochs

    @property
    def method(self) -> str:
        """The method with the chosen settings, as `steppe.compare` and `steppe train` take it."""
        return self.recipe.method

    @property
    def lr(self) -> float:
        """The chosen learning rate."""
        return self.recipe.lr

    @property
    def tied(self) -> tuple[str, ...]:
        """The settings that cannot be told apart from the best."""
        return self.choice.tied

    def __str__(self) -> str:
        return f"{self.choice} (on held-out training data, {len(self.trials)} candidates)"

    __repr__ = __str__  # a notebook shows the sentence


def tune(
    data: Any = None, model: Any = None, method: Any = "sam", base: Any = None, *,
    radius: float | tuple[float, float] | None = None, lr: float | tuple[float, float] | None = None,
    ranges: dict[str, tuple[float, float]] | None = None,
    trials: int = 12, seeds: int = 3, keep: int = 3, hold_out: float = 0.2,
    task: str | None = None, loss: Any = None, metric: Any = None, lower_is_better: bool = False,
    out: str | Path = "runs/tune", device: str = "auto", jobs: int | None = None, on: str = "local", address: str = "",
    threads: int = 1, data_dir: str | Path | None = None, progress: bool = True, **settings: Any,
) -> Tuned:  # fmt: skip
    """Choose a method's radius, and the learning rate, on held-out training data. The test data is not used.

    All arguments that are not described here are those of `steppe.compare`.

    Args:
        method: one method; its other settings stay as given.
        radius: the range in which to search the method's radius, such as (0.01, 0.5); by default from a fifth to five
            times its default. A number is a fixed radius.
        lr: the range in which to search the learning rate, or a fixed learning rate.
        ranges: ranges of other fields of the recipe ("weight_decay") or settings of the method ("gsam.alpha").
        trials: the number of candidates.
        seeds: the number of seeds of each finalist.
        keep: the number of finalists.
        hold_out: the share of the training data that candidates are judged on.
    """
    if trials < 1 or seeds < 1 or keep < 1:
        raise UserError("trials, seeds and keep must be at least 1")
    fixed = {"lr": lr} if isinstance(lr, (int, float)) else {}
    asked = Asked(data, model, base, task, loss, metric, lower_is_better, {**settings, **fixed, "hold_out": hold_out})
    whole = asked.recipe()
    texts = method_texts(method)
    if len(texts) != 1:
        raise UserError(f"tune takes one method, not {len(texts)}: tune each, then compare them")
    template = with_method(whole, texts[0])
    if isinstance(radius, (int, float)):
        template = replace(template, method=_with_radius(template.method, radius))
    space = _space(template, radius, None if fixed else lr, ranges or {})
    where = place_for(out, device, threads, False, False, data_dir)
    workers = how_many_jobs(jobs, where.device)
    where = with_runs_at_once(where, None, [template])
    for note in [*check(template, where), *notes(whole, [Job(template)])]:
        tell_user(note)
    train = Trainer(where, workers, on, address, progress)
    search = Halving(template, space, trials, seeds, keep, max(workers * where.together, 1))
    records, tried = search.run(train)
    finalists = Comparison(records, where.folder)
    choice = choice_among(summarise(records, finalists.metric), finalists.metric)
    recipe = replace(Recipe.of({**choice.recipe, "seed": 0}), hold_out=0.0)
    return Tuned(choice, recipe, finalists, tried)


def _ends(name: str, given: Any) -> tuple[Any, Any]:
    """The two ends of a range."""
    ends = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(ends) != 2 or not all(isinstance(end, (int, float)) for end in ends):
        raise UserError(f"{name} must be a range, such as (0.01, 0.5), not {given!r}")
    return ends[0], ends[1]


def _with_radius(method: str, radius: float) -> str:
    made = make_method(method)
    if not made.radius:
        raise UserError(f"{made.name} has no radius")
    return with_settings(method, {made.radius: float(radius)})


def _space(template: Recipe, radius: Any, lr: Any, ranges: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The search space, as for `steppe sweep --range`."""
    made = make_method(template.method)
    wanted = {} if lr is None else {"lr": tuple(map(float, _ends("lr", lr)))}
    wanted |= {name: _ends(f"ranges[{name!r}]", ends) for name, ends in ranges.items()}
    name = f"{made.name.lower()}.{made.radius}"
    if radius is not None and not made.radius:
        raise UserError(f"{made.name} has no radius to search")
    if made.radius and radius is None and not {name, f"method.{made.radius}"} & set(wanted):
        now = getattr(made, made.radius)
        radius = (now / 5, now * 5) if isinstance(now, (int, float)) and now > 0 else None
    if radius is not None and not isinstance(radius, (int, float)):
        wanted = {name: tuple(map(float, _ends("radius", radius))), **wanted}
    if not wanted:
        raise UserError(f"nothing to search: give radius=(0.01, 0.5) or lr=(1e-4, 1e-1) for {template.method}")
    return read_space([], [f"{key}={low!r}..{high!r}" for key, (low, high) in wanted.items()], template)


@dataclass(frozen=True)
class Halving:
    """Successive halving: many candidates are trained for a short time, few for the whole time."""

    template: Recipe
    space: dict[str, Any]
    trials: int
    seeds: int
    keep: int
    at_once: int

    def rungs(self) -> list[int]:
        """The epochs of each round but the last: a quarter and a half of all, if that is less than all."""
        whole = self.template.epochs
        return sorted({math.ceil(whole * share) for share in (0.25, 0.5)} - {whole, 0})

    def run(self, train: Callable[[Sequence[Job]], list[Record]]) -> tuple[list[Record], list[dict[str, Any]]]:
        """The records of the finalists with all seeds, and a description of every candidate."""
        tried = self._first_round(train)
        for epochs in [*self.rungs()[1:], self.template.epochs]:
            going = [one for one in tried if one["going"]]
            left = max(self.keep, math.ceil(len(going) / 2))
            for one in sorted(going, key=lambda one: -one["score"])[left:]:
                one["going"] = False
            self._train([one for one in tried if one["going"]], epochs, train)
        going = sorted((one for one in tried if one["going"]), key=lambda one: -one["score"])
        for one in going[self.keep :]:
            one["going"] = False
        jobs = [job for one in going[: self.keep] for job in jobs_for(self.template, one["values"], range(self.seeds))]
        return train(list({job.recipe.key: job for job in jobs}.values())), tried

    def _first_round(self, train: Callable[[Sequence[Job]], list[Record]]) -> list[dict[str, Any]]:
        """Train the candidates that Optuna proposes, several at a time, and report their scores to it."""
        optuna = require("optuna", "optuna", "steppe.tune")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            direction="maximize", sampler=optuna.samplers.TPESampler(n_startup_trials=RANDOM, seed=0)
        )
        first = (self.rungs() or [self.template.epochs])[0]
        tried: list[dict[str, Any]] = []
        while len(tried) < self.trials:
            count = max(self.at_once, RANDOM - len(tried))  # the random candidates do not depend on each other
            asked = [study.ask() for _ in range(min(count, self.trials - len(tried)))]
            values = [{name: _rounded(suggest(t, name, one)) for name, one in self.space.items()} for t in asked]
            some = [{"values": one, "score": 0.0, "epochs": 0, "going": True} for one in values]
            self._train(some, first, train)
            for trial, one in zip(asked, some, strict=True):
                study.tell(trial, one["score"])
            tried += some
        return tried

    def _train(self, candidates: list[dict[str, Any]], epochs: int, train: Callable[..., list[Record]]) -> None:
        """Train each candidate once, with the first seed, and update its score."""
        short = replace(self.template, epochs=epochs)
        jobs = {k: jobs_for(short, one["values"], [0])[0] for k, one in enumerate(candidates)}
        records = {r["key"]: r for r in train(list({job.recipe.key: job for job in jobs.values()}.values()))}
        for k, one in enumerate(candidates):
            one["score"], one["epochs"] = score([records[jobs[k].recipe.key]]), epochs


def _rounded(value: Any) -> Any:
    """The value with three significant digits: enough for a radius, and readable."""
    return float(f"{value:.3g}") if isinstance(value, float) else value
