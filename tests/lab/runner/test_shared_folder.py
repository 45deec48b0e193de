"""Many processes that share a folder: each run is trained by one of them; runs of killed processes are taken over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steppe.cli.app import app
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.records import read_records
from steppe.lab.runner import local, shared_folder
from steppe.lab.runner.claims import Claim, TakenOver, owners
from steppe.lab.runner.comparison import plan
from steppe.lab.runner.jobs import Job, Place
from steppe.lab.runner.local import perform
from steppe.lab.runner.shared_folder import counts, queue_up, work
from steppe.lab.training.final_curvature import Measuring
from steppe.support.errors import UserError
from steppe.support.own_objects import keep

SMALL = Recipe(base="sgd", lr=0.1, batch=64, epochs=2, share=0.2)


def aged(claim: Claim, seconds: float) -> None:
    before = claim.path.stat().st_mtime - seconds
    os.utime(claim.path, (before, before))


# Claims


def test_one_of_many_gets_a_claim(tmp_path):
    got: list[Any] = []
    gate = threading.Barrier(8)

    def try_it():
        gate.wait()
        got.append(Claim.take(tmp_path, "a-run"))

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(one is not None for one in got) == 1 and len(got) == 8
    (mine,) = [one for one in got if one is not None]
    assert str(os.getpid()) in owners(tmp_path)["a-run"] and Claim.take(tmp_path, "another.run") is not None
    mine.release()
    assert Claim.take(tmp_path, "a-run") is not None


def test_a_stale_claim_is_taken_over_once(tmp_path):
    dead = Claim.take(tmp_path, "run")
    assert dead is not None and Claim.take(tmp_path, "run", stale=30) is None
    aged(dead, 31)
    assert owners(tmp_path, stale=30) == {}
    heir = Claim.take(tmp_path, "run", stale=30)
    assert heir is not None and heir.number == 2 and dead.lost() and not heir.lost()
    assert Claim.take(tmp_path, "run", stale=30) is None, "the heir is alive"
    with dead.held(stale=600):
        pass  # it was not dead after all: it must not take the heir's claim away
    assert not heir.lost() and Claim.take(tmp_path, "run", stale=30) is None
    with heir.held(stale=600):
        pass
    assert not list((tmp_path / ".claims").iterdir())
    assert dead.lost(), "the heir has ended the run: training on would overwrite its record"


def test_a_held_claim_is_kept_alive(tmp_path):
    claim = Claim.take(tmp_path, "run")
    assert claim is not None
    aged(claim, 1000)
    touched = threading.Event()
    utime = os.utime

    def watched(path, *more):
        utime(path, *more)
        touched.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steppe.lab.runner.claims.os.utime", watched)
        with claim.held(stale=0.06):
            assert touched.wait(30) and Claim.take(tmp_path, "run", stale=500) is None


# The queue


def test_a_queued_run_equals_a_local_run(tmp_path):
    measuring = Measuring(samples=16, probes=2, dimension=4, products=168, points=0)
    jobs, queue = (
        plan(SMALL, ["sam:rho=0.1"], [0], equal_cost=False),
        Place(tmp_path / "queue", measuring=measuring, keep_weights=True),
    )
    elsewhere = perform(jobs, Place(tmp_path / "here", measuring=measuring))
    assert queue_up(jobs, queue) == 2 == counts(queue.folder)["waiting"]
    assert {r["status"] for r in read_records(queue.folder)} == {"waiting"}
    trained = work(queue.folder)
    assert queue_up(jobs, queue) == 0 and counts(queue.folder) == {"done": 2} and len(trained) == 2
    assert len(list(queue.folder.glob("*.safetensors"))) == 2
    found = {record["key"]: record for record in read_records(queue.folder)}
    for record in elsewhere:
        same = found[record["key"]]
        for name in ("label", "role", "curvature", "recipe", "method"):
            assert same[name] == json.loads(json.dumps(record[name])), name
        assert same["final"]["test_loss"] == record["final"]["test_loss"]  # type: ignore[index]
    assert work(queue.folder) == []


def test_a_run_that_was_taken_over_is_abandoned(tmp_path, monkeypatch):
    queue_up([Job(SMALL)], Place(tmp_path))
    take = Claim.take

    def taken_at_once(folder, key, stale):
        claim = take(folder, key, stale)
        if claim is not None:
            (claim.path.parent / f"{key}.2").touch()
        return claim

    monkeypatch.setattr(shared_folder.Claim, "take", taken_at_once)
    assert work(tmp_path) == [] and counts(tmp_path) == {"waiting": 1}
    assert [path.name for path in (tmp_path / ".claims").iterdir() if path.name.endswith(".2")]


def test_being_taken_over_is_no_failure_of_the_users_code():
    jobs = [Job(replace(SMALL, model=f"{__name__}:make_model"))]
    with pytest.raises(TakenOver), local._explain_own_failures(jobs):
        raise TakenOver
    with pytest.raises(UserError, match="make_model failed"), local._explain_own_failures(jobs):
        raise ValueError


def test_objects_of_a_python_program_cannot_be_queued(tmp_path):
    recipe = Recipe(data="digits", model=keep("model", lambda: None))
    with pytest.raises(UserError, match="python:model exists only in this Python program"):
        queue_up([Job(recipe)], Place(tmp_path))


def run(*args: str):
    return CliRunner().invoke(app, args, env={"COLUMNS": "200"})


def test_commands_fill_a_queue_and_work_it_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "compare sam --seeds 1 --epochs 1 --share 0.2 --no-curvature --rivals none"
    command = text.split()
    filled = run(*command, "--on", "queue")
    assert filled.exit_code == 0, filled.output
    assert "3 of 3 runs are queued in runs" in filled.stdout and "steppe work runs" in filled.stdout
    worked = run("work", "runs", "--device", "cpu")
    assert worked.exit_code == 0 and "trained 3 runs here\nall are done: steppe report runs" in worked.stdout
    assert all(record["curvature"] is None for record in read_records("runs"))
    done = run(*command, "--on", "queue")
    assert done.exit_code == 0 and "wrote runs/report.html" in done.stdout, "nothing is left: the report"
    for wrong, message in {
        "work nowhere": "folder nowhere does not exist", "work .": "no queued runs in .",
        "work runs --stale 0": "--stale above 0",
        "sweep --range lr=0.1..1 --on queue": "--on queue is for a --grid",
    }.items():  # fmt: skip
        result = run(*wrong.split())
        assert result.exit_code == 2 and message in result.stderr, result.output


OWN = """
import os, signal
from torch import nn

def net():
    try:
        os.close(os.open("victim", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        with open("built", "a") as file:
            file.write(f"{os.getpid()}\\n")
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_processes_share_a_folder_and_one_is_killed(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "victim").touch()  # not while the queue is filled
    jobs = "compare sam --model mine:net --seeds 3 --epochs 2 --share 0.2 --no-curvature --no-equal-cost --rivals none"
    options: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "text": True}
    filled = [sys.executable, "-m", "steppe", *jobs.split(), "--on", "queue"]
    subprocess.run(filled, check=True, capture_output=True, **options)
    (tmp_path / "victim").unlink()
    (tmp_path / "built").unlink(missing_ok=True)
    work_ = [sys.executable, "-m", "steppe", "work", "runs", "--wait", "--stale", "5", "--device", "cpu"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(work_, **pipes, **options) for _ in range(3)]
    ended = [(process.communicate(timeout=400), process.returncode) for process in processes]
    assert Counter(code for _, code in ended) == {0: 2, -signal.SIGKILL: 1}, ended
    records = read_records(tmp_path / "runs")
    assert len(records) == 6 and {record["status"] for record in records} == {"done"}
    assert len((tmp_path / "built").read_text().split()) == 6, "no run was trained twice"
    trained = [int(out.partition("trained ")[2].split()[0]) for (out, _), code in ended if code == 0]
    assert sum(trained) == 6
    assert not [path for path in Path(tmp_path / "runs" / ".claims").iterdir() if not path.name.startswith(".")]


def test_code_that_was_edited_after_the_runs_were_queued(tmp_path, monkeypatch):
    """Otherwise runs of the old and of the new code would be in one table."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "queued", raising=False)
    net = "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    Path("queued.py").write_text(net)
    options = "--model queued:net --seeds 1 --epochs 1 --share 0.2 --no-curvature --no-equal-cost"
    command = ["compare", "sam", *options.split()]
    assert run(*command, "--on", "queue").exit_code == 0
    Path("queued.py").write_text(f"{net}# once more\n")
    worked = run("work", "runs", "--device", "cpu")
    assert worked.exit_code == 2 and counts(Path("runs")) == {"waiting": 2}, worked.output
    assert "queued has changed since the runs were queued: run the command with --on queue again" in worked.stderr
    assert run(*command, "--on", "queue").exit_code == 0 and run("work", "runs", "--device", "cpu").exit_code == 0
    assert counts(Path("runs")) == {"done": 2}
