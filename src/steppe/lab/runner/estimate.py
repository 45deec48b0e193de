"""Estimates of how long runs will take: before training from the time of a few steps, later from the progress."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ...methods.plain import Plain
from ...optimizer import SharpnessAware
from ..models import build
from ..report.formatting import plural
from ..training.base_optimizers import make_base
from ..training.batches import Batches, data_for
from ..training.stack import worth_stacking
from ..training.tasks import task_of
from .finished import finished_record
from .jobs import Job, Place
from .local import News

_EXAMPLES = 64  # size of the timed batch; the time of a larger one is taken to be proportional


def duration(seconds: float) -> str:
    """A rough duration.

    >>> [duration(s) for s in (0.4, 40, 200, 9000)]
    ['1 s', '40 s', '3 min', '2.5 h']
    """
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Remaining:
    """The estimated remaining time, from the work done since the first report: starting processes does not count."""

    def __init__(self, jobs: Sequence[Job]):
        self._jobs = {job.recipe.key: job for job in jobs}
        self._done: dict[str, float] = {}
        self._before = 0.0  # work of runs that an earlier command had finished
        self._start = time.monotonic(), 0.0
        self._first: tuple[float, float] | None = None  # time of the first report, and the work until then
        self._rate = Rate()

    def hear(self, news: News) -> None:
        """Count the work of a run."""
        job = self._jobs[news.key]
        epochs = news.epoch + (news.step / news.steps if news.steps else 0.0)
        self._done[news.key] = job.work * (1.0 if news.ended else epochs / job.recipe.epochs)
        self._rate.hear(news, job.recipe.batch)
        if news.before:
            self._before += job.work
        elif self._first is None:
            self._first = time.monotonic(), self.done - self._before

    @property
    def done(self) -> float:
        """The work of all runs so far."""
        return sum(self._done.values())

    @property
    def whole(self) -> float:
        """The work of all runs."""
        return sum(job.work for job in self._jobs.values())

    def __str__(self) -> str:
        """A text such as ", 41,000 examples per second, about 3 min left"; parts that are not known are left out."""
        left = self.whole - self.done
        if self._first is None or left <= 0:
            return str(self._rate)
        worked = self.done - self._before
        when, work = self._first if worked > self._first[1] else self._start
        if worked <= work:
            return str(self._rate)
        return f"{self._rate}, about {duration((time.monotonic() - when) * left / (worked - work))} left"


class Rate:
    """Training examples per second, of all runs together, in about the last half minute."""

    WINDOW = 30.0
    LEAST = 0.5  # seconds: over less time the rate is chance

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # examples of each run, including those of earlier commands
        self._marks: deque[tuple[float, int]] = deque()  # (time, examples that this command has trained on)

    def hear(self, news: News, batch: int) -> None:
        """Count the examples of a run. Those before its first report do not count: it may have been resumed."""
        if not news.steps:
            return
        seen, now = (news.epoch * news.steps + news.step) * batch, time.monotonic()
        total = (self._marks[-1][1] if self._marks else 0) + seen - self._seen.get(news.key, seen)
        self._seen[news.key] = seen
        self._marks.append((now, total))
        while len(self._marks) > 2 and self._marks[1][0] <= now - self.WINDOW:
            self._marks.popleft()

    def __str__(self) -> str:
        """A text with two significant digits, such as ", 41,000 examples per second"; empty if not known yet."""
        if len(self._marks) < 2 or self._marks[-1][0] - self._marks[0][0] < self.LEAST:
            return ""
        (began, before), (now, total) = self._marks[0], self._marks[-1]
        rate = float(f"{(total - before) / (now - began):.2g}")
        return f", {rate:,.0f} examples per second" if rate >= 10 else f", {rate:g} examples per second"


def announcement(jobs: Sequence[Job], place: Place, workers: int) -> str:
    """The number of runs to train and the estimated time: "33 runs, about 1 min"; empty if there are none."""
    waiting = [job for job in jobs if finished_record(job.recipe, place.folder) is None]
    if not waiting:
        return ""
    per_example = _seconds_per_example(waiting[0], place)
    examples = sum(job.work * _examples_per_epoch(job, place) for job in waiting)
    extra = 1.2  # for evaluation, records, and everything else besides steps
    if place.measuring is not None:
        products = place.measuring.products + place.measuring.dimension
        examples += len(waiting) * 2 * products * min(place.measuring.samples, _examples_per_epoch(waiting[0], place))
    at_once = min(workers, len(waiting))
    return f"{plural(len(waiting), 'run')}, about {duration(extra * per_example * examples / at_once)}"


def _examples_per_epoch(job: Job, place: Place) -> int:
    return len(data_for(job.recipe, place.data_root, place.device).train)


def _seconds_per_example(job: Job, place: Place) -> float:
    """The time per example of a step of the base; for seeds that are trained as one, of its gradient only."""
    recipe, device = job.recipe, torch.device(place.device)
    data, task = data_for(recipe, place.data_root, place.device), task_of(recipe)
    if device.type == "cpu":
        torch.set_num_threads(place.threads)
    model = build(recipe.model, data.input_shape, data.classes, **dict(recipe.model_settings)).to(device)
    batches = Batches(recipe, data, frozenset(), device, 0, 1)
    inputs, targets, _ = next(batches.of_epoch(1))
    inputs, targets = inputs[:_EXAMPLES], targets[:_EXAMPLES]
    model.train().to(batches.dtype)
    optimizer = SharpnessAware(make_base(recipe, model.parameters(), model), Plain(), model=model)
    best, shared = float("inf"), worth_stacking(recipe, place.device)
    for _ in range(3):
        began = time.perf_counter()
        if shared:
            task.loss(model(inputs), targets).backward()
        else:
            optimizer.step(lambda: task.loss(model(inputs), targets))
        _wait(device)
        best = min(best, time.perf_counter() - began)
        if best > 1:  # a large model: one is enough
            break
    return best / len(inputs)


def _wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
