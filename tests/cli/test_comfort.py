"""Help in a useful order, JSON, announcements, names of papers, and warnings of comparisons that say nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from steppe.cli.app import app
from steppe.cli.options import OBJECTIVE, PLACE
from steppe.cli.progress import Display, other_measures
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.runner import estimate
from steppe.lab.runner.jobs import Job, Place
from steppe.lab.runner.local import News, perform


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*args: str):
    return CliRunner().invoke(app, args, env={"COLUMNS": "160", "TERM": "dumb"})


def test_compare_comes_first_and_options_come_in_groups():
    top = list(get_command(app).commands)  # type: ignore[attr-defined]
    assert top[:2] == ["compare", "train"] and {"work", "doctor", "paper"} <= set(top)
    said = run("compare", "--help").stdout
    assert "What is trained" in said and "Where and how" in said
    assert "--install-completion" in run("--help").stdout
    assert PLACE["device"][1] == OBJECTIVE["device"][1] == "auto"


def test_one_list_of_methods():
    assert run("list", "methods").stdout == run("methods").stdout
    assert run("list", "methods", "sam").stdout == run("methods", "sam").stdout
    assert "takes no name" in run("list", "data", "digits").stderr


def test_papers_have_names():
    said = run("paper", "list").stdout
    assert "S1: Surrogate Gap Minimization" in said and "S4: Smoothness-Adaptive" in said


def test_json_in_place_of_the_table():
    options = "--seeds 1 --epochs 1 --share 0.2 --no-curvature --no-equal-cost --jobs 1 --rivals none --device cpu"
    result = run("compare", "sam:rho=0.1", *options.split(), "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert [row["method"] for row in said["methods"]] == ["SGD", "SAM rho=0.1"] and Path(said["page"]).exists()
    assert said["methods"][1]["cost"] == 2.0 and said["methods"][1]["verdict"] == "n too small to tell"
    assert said["conclusion"].startswith("Nothing can be said") and said["cautions"][0].startswith("One seed:")
    assert "2 runs, about " in result.stderr and " left" in result.stderr
    assert "4 batches per epoch, 4 steps in all: that is too short to compare methods" in result.stderr


def test_the_estimate_covers_unfinished_runs_only(tmp_path, monkeypatch):
    monkeypatch.setattr(estimate, "_seconds_per_example", lambda job, place: 0.01)
    jobs = [Job(Recipe(method=method, share=0.2, epochs=10)) for method in ("plain", "sam")]
    place = Place(tmp_path)
    # 287 examples, 10 epochs, one gradient and two: 8610 examples of 0.01 s, and a fifth more
    assert estimate.announcement(jobs, place, 1) == "2 runs, about 2 min"
    assert estimate.announcement(jobs, place, 2) == "2 runs, about 52 s"
    perform(jobs[1:], place)
    assert estimate.announcement(jobs, place, 2) == "1 run, about 34 s"
    perform(jobs, place)
    assert estimate.announcement(jobs, place, 2) == ""


def test_lines_show_the_remaining_time(monkeypatch, capsys):
    jobs = [Job(Recipe(seed=seed, epochs=10)) for seed in range(4)]
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Display(jobs) as show:
        show(News(jobs[0].recipe.key, 10, ended=True, result="97 %", before=True))
        now = 40.0  # processes have started
        show(News(jobs[1].recipe.key, 1))
        for job in jobs[1:]:
            now += 9.0 if job is jobs[1] else 10.0
            show(News(job.recipe.key, 10, ended=True, result="97 %"))
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("97 %, about 20 s left") and said[1].endswith("about 10 s left")
    assert said[2].endswith("seed 3: 97 %") and said[3] == "1 of 4 runs were already done"


def test_bars_show_the_remaining_time(monkeypatch):
    """Runs of an earlier command do not count for the estimate of the remaining time."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    now = 0.0
    jobs = [Job(Recipe(seed=seed, epochs=10)) for seed in range(4)]
    with Display(jobs) as show:
        monkeypatch.setattr("steppe.lab.runner.estimate.time.monotonic", lambda: now)
        assert show._bars is not None
        show(News(jobs[0].recipe.key, 10, ended=True, result="97 %", before=True))
        assert show._bars.tasks[0].fields["note"] == "1 of 4 done"
        show(News(jobs[1].recipe.key, 1))
        now = 9.0
        show(News(jobs[1].recipe.key, 10, ended=True, result="97 %"))
        assert show._bars.tasks[0].fields["note"] == "2 of 4 done, about 20 s left"


def test_the_second_table_names_its_problems(tmp_path):
    """The problems with clean and with wrong labels of `steppe compare` have headings in the second table too."""
    recipes = [Recipe(share=0.2, epochs=1, base="sgd", label_noise=noise) for noise in (0.0, 0.6)]
    records = perform([Job(recipe) for recipe in recipes], Place(tmp_path))
    console = Console(file=io.StringIO(), width=120)
    console.print(other_measures(records), other_measures(records[:1]))
    first, _, second = console.file.getvalue().partition("means over seeds")[2].partition("means over seeds")  # type: ignore[attr-defined]
    lines = [line.split()[0] for line in first.splitlines() if line.strip()]
    assert lines == ["method", "digits,", "SGD", "digits,", "SGD"] and "60 % label noise" in first
    assert len(second.splitlines()) == 3


def test_a_report_of_another_task_is_by_its_own_metric():
    """It used to ask for accuracies, which runs of other tasks do not have."""
    Path("mine.py").write_text(REGRESSION)
    options = "--seeds 1 --epochs 1 --batch 50 --no-curvature --no-equal-cost --jobs 1 --device cpu --task regression"
    done = run("compare", "sam", "--data", "mine:data", "--model", "mine:net", *options.split())
    assert done.exit_code == 0, done.output
    again = run("report", "runs")
    assert again.exit_code == 0 and again.stdout == done.stdout, again.output
    said = json.loads(run("report", "runs", "--json").stdout)
    assert [row["method"] for row in said["methods"]] == ["Adam", "SAM"] and said["methods"][0]["test_rmse"] > 0
    assert "without --against" in run("report", "runs", "--json", "--against", "runs").stderr


REGRESSION = """
from sklearn.datasets import load_diabetes
from torch import nn

def data():
    x, y = load_diabetes(return_X_y=True)
    return (x[:300], y[:300] / 100), (x[300:], y[300:] / 100)

def net():
    return nn.Linear(10, 1)
"""


def test_a_metric_that_is_not_finite_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    Path("mine_never.py").write_text("def never(outputs, targets):\n    return float('nan')\n")
    said = run("train", "--metric", "mine_never:never", "--epochs", "1", "--no-curvature")
    assert said.exit_code == 0 and "test never is not finite, loss" in said.stdout
