"""Sweeps: every candidate once, the same records, on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helpers.report_records import diverged, printed_table, record
from helpers.small_task import environment
from steppe.cli.app import app
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.records import read_records, value_of
from steppe.lab.runner.jobs import Job, Place
from steppe.lab.runner.local import train_jobs
from steppe.lab.runner.sweep import Span, _study, against_best, candidate, read_space, score, table_of, tied
from steppe.lab.training.batches import cached_data, data_for

QUICK = ["--epochs", "1", "--share", "0.25", "--no-curvature", "--jobs", "1", "--seeds", "1"]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*args: str):
    result = CliRunner().invoke(app, args, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def test_search_spaces_are_read_from_text():
    template = Recipe(method="gsam:alpha=0.3", hold_out=0.2)
    space = read_space(["lr=1e-3,1e-2", "gsam.rho=0.1..0.02,0.05"], ["batch=16..64", "method.alpha=0.01..1"], template)
    assert space == {
        "lr": [1e-3, 1e-2], "gsam.rho": ["0.1..0.02", 0.05], "batch": Span(16, 64, whole=True),
        "gsam.alpha": Span(0.01, 1),
    }  # fmt: skip
    assert not Span(16, 64, whole=True).log and Span(0.01, 1).log
    chosen = candidate(template, {"lr": 0.01, "gsam.rho": 0.2})
    assert (chosen.lr, chosen.method) == (0.01, "gsam:rho=0.2,alpha=0.3")


def test_values_in_brackets_are_one_value():
    space = read_space(["gam.gamma=(0.1,0.2),(0.3,0.4)"], [], Recipe(method="gam"))
    assert space == {"gam.gamma": ["(0.1,0.2)", "(0.3,0.4)"]}
    assert candidate(Recipe(method="gam"), {"gam.gamma": "(0.3,0.4)"}).method == "gam:gamma=(0.3,0.4)"
    template = Recipe(method="every:k=2,method=(sam)")
    methods: Any
    (methods,) = read_space(["every.method=(sam),(gsam:rho=0.1,alpha=0.2)"], [], template).values()
    chosen = [candidate(template, {"every.method": method}).method for method in methods]
    assert chosen == ["every:k=2,method=(sam)", "every:k=2,method=(gsam:rho=0.1,alpha=0.2)"]


def test_a_grid_on_held_out_data():
    result = run("sweep", "--grid", "lr=0.001,0.1", "--grid", "sam.rho=0.05,0.2", *QUICK, "--seeds", "2")
    records: list[Any] = read_records("runs")
    assert len(records) == 8
    seen = {(r["recipe"]["lr"], r["recipe"]["method"], r["recipe"]["seed"]) for r in records}
    assert seen == {(lr, method, seed) for lr in (1e-3, 0.1) for method in ("sam", "sam:rho=0.2") for seed in (0, 1)}
    assert all((r["train_examples"], r["test_examples"]) == (287, 72) for r in records)
    best = max({r["label"] for r in records}, key=lambda name: score([r for r in records if r["label"] == name]))
    body = [line for line in result.stdout.splitlines() if "lr=" in line and "│" in line]
    assert len(body) == 4 and best in body[0]
    (said,) = [line for line in result.stdout.splitlines() if line.startswith("to train with the best setting")]
    chosen = next(r for r in records if r["label"] == best)["recipe"]
    command = said.partition(": steppe ")[2].split(" ")
    run(*command, "--no-curvature", "--out", "chosen")
    assert read_records("chosen")[0]["recipe"] == {**chosen, "hold_out": 0.0}
    (compare,) = [line for line in result.stdout.splitlines() if line.startswith("to see whether it helps: ")]
    assert compare.startswith("to see whether it helps: steppe compare --data digits --model digits-mlp --methods sam")
    assert compare.endswith(" --seeds 10") and "--hold-out" not in compare
    # A candidate is the run that `train` would do.
    again: Any
    (again,) = train_jobs([Job(Recipe.of(records[0]["recipe"]))], Place(Path("alone")))
    assert again["final"]["test_loss"] == records[0]["final"]["test_loss"]


def test_candidates_not_shown_to_be_worse_are_tied_with_the_best():
    best = [0.90, 0.91, 0.92, 0.90]
    near = [0.91, 0.90, 0.91, 0.90]
    far = [value - 0.2 for value in best]
    records: Any = [record("SAM rho=0.1", a, s) for s, a in enumerate(best)]
    records += [record("SAM rho=0.2", a, s) for s, a in enumerate(near)]
    records += [record("SAM rho=5", a + s / 1000, s) for s, a in enumerate(far)]
    records += [record("SAM rho=4", 0.9, s) for s in range(3)] + [diverged("SAM rho=4", 3)]
    assert tied(records) == ["SAM rho=0.2"]
    apart = against_best(records)["SAM rho=5"]
    assert apart.verdict == "worse" and apart.mean.value == pytest.approx(-0.2 + 1.5 / 1000)


def test_label_noise_is_not_in_the_held_out_data():
    recipe = Recipe(label_noise=0.5, hold_out=0.2)
    noisy, clean = (cached_data("digits", 1.0, share, 0.2, None, "cpu") for share in (0.5, 0.0))
    assert torch.equal(noisy.test.targets, clean.test.targets)
    changed = (noisy.train.targets != clean.train.targets).float().mean().item()
    assert 0.45 < changed < 0.55 and torch.equal(data_for(recipe).train.targets, noisy.train.targets)


def test_a_diverged_candidate_is_not_the_best():
    assert "every run diverged, so there is no best setting" in run("sweep", "--grid", "lr=1e30,1e35", *QUICK).stdout
    said = run("sweep", "--grid", "lr=1e30,0.1", *QUICK).stdout
    assert "to train with the best setting on all training data: " in said and "1e+30 --" not in said


def test_with_a_metric_that_may_be_negative_a_diverged_candidate_is_not_the_best_either():
    """R² of a poor model is below zero; a diverged run counted as zero, and signs were not shown."""
    records: Any = [record("SAM", 0.1), {**diverged("GSAM"), "final": None}]
    records[0]["final"]["r2↑"] = -0.5
    records = [{**one, "metric": "r2↑"} for one in records]
    assert score(records[:1]) == -0.5 > score(records[1:])
    assert "-0.5" in printed_table(table_of(records))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optuna and what it brings
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.slow
def test_a_stopped_search_resumes():
    pytest.importorskip("optuna")
    search = ["sweep", "--range", "lr=1e-3..1", "--range", "sam.rho=0.01..0.5", "--sampler", "random", *QUICK]
    run(*search, "--trials", "2")
    first = {r["key"] for r in read_records("runs")}
    assert len(first) == 2
    import optuna

    (name,) = optuna.get_all_study_names("sqlite:///runs/sweep.db")
    study = _study("sqlite:///runs/sweep.db", name, "random")
    assert sorted(t.value for t in study.trials) == sorted(score([r]) for r in read_records("runs"))
    # A trial whose process was killed is done again, by whoever comes next.
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    trial = study.ask()
    trial.set_user_attr("process", [os.uname().nodename, dead.pid])
    lr, rho = trial.suggest_float("lr", 1e-3, 1, log=True), trial.suggest_float("sam.rho", 0.01, 0.5, log=True)
    run(*search, "--trials", "3")
    new = [r for r in read_records("runs") if r["key"] not in first]
    assert len(new) == 1
    assert (new[0]["recipe"]["lr"], new[0]["recipe"]["method"]) == (lr, f"sam:rho={rho}")
    states = [t.state.name for t in _study("sqlite:///runs/sweep.db", name, "random").trials]
    assert states == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]
    result = run(*search, "--trials", "3")
    assert len(read_records("runs")) == 3 and result.stdout.count("lr=") >= 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_tree_sampler_runs():
    pytest.importorskip("optuna")
    run("sweep", "--range", "lr=1e-3..1", "--sampler", "tpe", "--trials", "2", *QUICK)
    assert len(read_records("runs")) == 2


CAN_RAY_START = "import ray; ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False); ray.shutdown()"


@pytest.mark.slow
def test_a_ray_cluster_gives_the_same_records():
    pytest.importorskip("ray")
    task = ["--data", "helpers.small_task:data", "--model", "helpers.small_task:net", "--batch", "16"]
    command = ["sweep", "--grid", "lr=0.01,0.1", *task, *QUICK]
    env = environment(RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": env, "check": False, "timeout": 900}
    on_ray = subprocess.run([sys.executable, "-m", "steppe", *command, "--on", "ray", "--out", "ray"], **options)
    if on_ray.returncode != 0:
        probe = subprocess.run([sys.executable, "-c", CAN_RAY_START], **options)
        if probe.returncode != 0:
            pytest.skip(f"ray cannot start here: {probe.stderr.strip().splitlines()[-1]}")
        pytest.fail(on_ray.stderr)
    run(*command, "--out", "here")
    there, here = (
        [(r["key"], value_of(r, "test_loss"), value_of(r, "test_accuracy")) for r in read_records(folder)]
        for folder in ("ray", "here")
    )
    assert len(here) == 2 and there == here


def test_finished_runs_are_not_sent_to_a_cluster(monkeypatch):
    ray = pytest.importorskip("ray")
    command = ["sweep", "--grid", "lr=0.01,0.1", *QUICK]
    run(*command)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("nothing is left to do"))
    assert "2 of 2 runs were already done" in run(*command, "--on", "ray").stderr


def sampled(*args: str) -> list[str]:
    """The candidates that a search shows."""
    result = run("sweep", "--sampler", "random", "--trials", "2", *QUICK, *args)
    return [line for line in result.stdout.splitlines() if line.startswith("│")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.slow
def test_another_search_has_another_study():
    optuna = pytest.importorskip("optuna")
    questions = [
        ["--range", "lr=0.01..0.2"],
        ["--range", "sam.rho=0.01..0.2"],
        ["--range", "lr=1e-5..0.5"],
        ["--range", "lr=0.01..0.2", "--method", "gsam"],
        ["--range", "lr=0.01..0.2", "--batch", "16"],
        ["--range", "lr=0.01..0.2", "--seeds", "2"],
    ]
    for count, question in enumerate(questions, 1):
        before = {r["key"] for r in read_records("runs")} if Path("runs").exists() else set()
        shown = sampled(*question)
        assert len(shown) == 2
        assert len(optuna.get_all_study_names("sqlite:///runs/sweep.db")) == count
        assert {r["key"] for r in read_records("runs")} != before, "something was trained"
    everything = {r["key"] for r in read_records("runs")}
    assert len(sampled(*questions[0])) == 2
    assert {r["key"] for r in read_records("runs")} == everything, "the first question is answered already"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_study_of_another_search_is_refused():
    pytest.importorskip("optuna")
    sampled("--range", "lr=0.01..0.2", "--study", "mine")
    result = CliRunner().invoke(app, ["sweep", "--range", "lr=0.01..0.3", "--study", "mine", *QUICK])
    assert result.exit_code == 2 and len([x for x in result.stderr.splitlines() if "too short" not in x]) == 1
    assert (
        "the study mine in sqlite:///runs/sweep.db belongs to another search: choose another --study" in result.stderr
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_trials_whose_records_were_deleted(monkeypatch):
    """Trials of this machine are trained again; those of another machine are reported as missing."""
    pytest.importorskip("optuna")
    search = ["--range", "lr=0.01..0.2"]
    shown = sampled(*search)
    paths = sorted(Path("runs").glob("*.json"))
    for path in paths:
        path.unlink()
    assert sampled(*search) == shown and sorted(Path("runs").glob("*.json")) == paths
    monkeypatch.setattr("steppe.lab.runner.sweep.socket.gethostname", lambda: "another")
    paths[0].unlink()
    command = ["sweep", *search, "--sampler", "random", "--trials", "2", *QUICK]
    missing = "1 of 2 trials were done on other machines and have no records in runs"
    assert missing in run(*command).stderr and not paths[0].exists()
    paths[1].unlink()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and len([x for x in result.stderr.splitlines() if "too short" not in x]) == 1
    assert missing.replace("1 of", "2 of") in result.stderr and "choose another --study" in result.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_database_is_in_the_folder_whatever_its_name():
    pytest.importorskip("optuna")
    folder = Path("q?mode=ro %41")
    result = CliRunner().invoke(
        app, ["sweep", "--range", "lr=0.01..0.2", "--trials", "1", "--out", str(folder), *QUICK]
    )
    assert list(Path().iterdir()) == [folder]
    assert (folder / "sweep.db").is_file() or "choose another --out" in result.stderr  # with an SQLAlchemy before 2.1


def test_candidates_with_the_same_label_are_told_apart_by_recipe():
    result = run("sweep", "--grid", "lr=0.30001,0.30002,0.300010", *QUICK)
    assert len(read_records("runs")) == 2
    lines = [line for line in result.stdout.splitlines() if "lr=0.3 " in line and "│" in line]
    assert len(lines) == 2 and sum("lr=0.30001" in line for line in lines) == 1
    assert all("│ 1 " in line for line in lines), "one run each"
