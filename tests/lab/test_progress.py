"""Long runs say how they go: examples per second and the time that is left, by a clock that the tests set."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from steppe.cli.progress import Display
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.runner.estimate import Rate, Remaining
from steppe.lab.runner.jobs import Job, Place
from steppe.lab.runner.local import News, Reporter, perform


@dataclass
class Clock:
    now: float = 0.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    return clock


@dataclass
class Training:
    """What a reporter reads of a run."""

    recipe: Any = field(default_factory=lambda: Recipe(epochs=3, batch=50))
    batches: Any = field(default_factory=lambda: SimpleNamespace(steps=4))
    record: Any = field(default_factory=lambda: {"epochs": [], "status": "running", "verdict": "lost", "key": "key"})


def test_a_run_reports_each_epoch_and_once_per_second(clock):
    heard: list[News] = []
    run, reporter = Training(), Reporter(heard.append)
    for step in range(12):  # two seconds for three steps
        if step and step % 4 == 0:
            run.record["epochs"].append({})
        reporter.after_step(run)
        clock.now += 2 / 3
    assert [(n.epoch, n.step) for n in heard] == [(0, 1), (0, 3), (1, 1), (1, 3), (2, 1), (2, 3)]
    run.record["epochs"].append({})
    run.record["status"] = "done"
    reporter.after_step(run)
    assert (heard[-1].epoch, heard[-1].step, heard[-1].steps, heard[-1].ended) == (3, 0, 4, True)


def test_a_rate_of_no_time_is_not_told(clock):
    rate = Rate()
    for clock.now, step in ((0.0, 1), (0.001, 50)):
        rate.hear(News("a", 0, step=step, steps=100), batch=50)
    assert str(rate) == ""


def test_the_rate_is_that_of_all_runs_in_the_last_half_minute(clock):
    rate = Rate()
    for seconds in range(100):  # two runs, 10 steps of 50 examples per second each, then only half as many
        clock.now = seconds
        for key in ("a", "b"):
            done = 10 * min(seconds, 50) + 5 * max(seconds - 50, 0)
            rate.hear(News(key, done // 100, step=done % 100, steps=100), batch=50)
        if seconds in (2, 40):
            assert str(rate) == ", 1,000 examples per second"
    assert str(rate) == ", 500 examples per second"


def test_examples_before_a_resume_do_not_count_for_the_rate(clock):
    rate = Rate()
    rate.hear(News("a", 9, step=1, steps=10), 1)
    assert str(rate) == ""  # after one moment
    clock.now = 2.0
    rate.hear(News("a", 9, step=3, steps=10), 1)
    assert str(rate) == ", 1 examples per second"
    clock.now = 3.0
    rate.hear(News("old", 10, ended=True, before=True), 1)  # of an earlier command
    assert str(rate) == ", 1 examples per second"


def test_steps_of_an_epoch_count_for_the_time_that_is_left(clock):
    job = Job(Recipe(epochs=2))
    remaining = Remaining([job])
    remaining.hear(News(job.recipe.key, 0, step=1, steps=10))
    clock.now = 8.0
    remaining.hear(News(job.recipe.key, 0, step=9, steps=10))  # a step a second, 11 are left
    assert str(remaining) == ", 100 examples per second, about 11 s left"


def test_without_a_terminal_a_long_run_prints_a_line_per_minute(clock, capsys):
    job = Job(Recipe(epochs=20))
    with Display([job]) as show:
        for second in range(200):  # 10 steps of 100 examples per second
            clock.now = float(second)
            show(News(job.recipe.key, second // 10, step=10 * (second % 10), steps=100))
        clock.now = 201.0
        show(News(job.recipe.key, 20, ended=True, result="97 %", steps=100))
    said = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[1] for line in said] == ["60 s", "120 s", "180 s", "201 s"]
    assert said[0] == "0/1  60 s  Adam, seed 0: epoch 6 of 20, 1,000 examples per second, about 2 min left"
    assert "97 %" in said[3] and "left" not in said[3]


def test_a_real_run_reports_its_steps(tmp_path):
    heard: list[News] = []
    job = Job(Recipe(epochs=2, share=0.2, batch=50))
    perform([job], Place(tmp_path), tell=heard.append)
    assert {n.steps for n in heard} == {5} and heard[0].step == 1
    assert (heard[-1].epoch, heard[-1].step, heard[-1].ended) == (2, 0, True)
