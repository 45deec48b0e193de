"""Stopped at any moment, also with kill -9, and started again, a run ends with the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from helpers.small_task import environment
from steppe.cli.app import app
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.records import read_records
from steppe.lab.runner.jobs import Job, Place
from steppe.lab.runner.local import train_jobs
from steppe.lab.training.final_curvature import Measuring
from steppe.lab.training.run import Run

PATIENCE = 600  # seconds for a process to end, on a machine with any load
# Kills itself at a moment that is named by what the process does, not by a clock. One process forks for each moment.
KILLED = '''
import os, signal, sys
from functools import partial
from pathlib import Path
import torch
torch.set_num_threads(1)
from steppe.lab import records
from steppe.lab.training import run as train
train.PAUSE = 0.0  # a checkpoint after every epoch
from steppe.lab.training.final_curvature import Measuring
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.runner.jobs import Job, Place
from steppe.lab.runner.local import train_jobs

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def on_call(owner, name, number, do=die):
    """Do something in place of the n-th call of a function."""
    original, calls = getattr(owner, name), [0]
    def patched(*args, **kwargs):
        calls[0] += 1
        return do(*args, **kwargs) if calls[0] == number else original(*args, **kwargs)
    setattr(owner, name, patched)

def half_a_file(data, path):
    Path(path).write_bytes(b"PK half a checkpoint")
    die()

def write_and_die(record, folder):
    records.write_record(record, folder)
    die()

MOMENTS = {
    "in the first step": lambda: on_call(train.Run, "step", 1),
    "in the second epoch": lambda: on_call(train.Run, "step", 8),
    "while writing the third checkpoint": lambda: on_call(torch, "save", 2, half_a_file),
    "between the last checkpoint and its record": lambda: on_call(train, "write_record", 2),
    "while measuring": lambda: on_call(Measuring, "__call__", 1),
    "before the last record gets its name": lambda: on_call(os, "replace", 1),
    "before the checkpoint is removed": lambda: on_call(train, "write_record", 1, write_and_die),
    "never": lambda: None,
}
settings = {"base": "sgd", "lr": 0.05, "momentum": 0.9, "batch": 64, "epochs": 4, "schedule": "cosine"}
task = {"data": "helpers.small_task:data", "model": "cnn-3"}
job = Job(Recipe(**task, method="gam:period=2", auxiliary="previous", **settings))
measuring = Measuring(samples=16, probes=2, dimension=4, products=168, points=0)
place = Place(Path(sys.argv[1]), measuring=measuring)
train.Run(job.recipe)  # now what it imports and its data are in memory for all
for moment, arrange in MOMENTS.items():
    child = os.fork()
    if child == 0:
        arrange()
        train_jobs([job], place)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(moment, ":", os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), flush=True)
'''


def without_time(record):
    for epoch in record["epochs"]:
        del epoch["seconds"]
    del record["final"]["seconds"], record["started"], record["finished"], record["environment"]
    return record


def test_small_nets_do_not_write_a_checkpoint_each_epoch(tmp_path, monkeypatch):
    """The first epoch has one, then one every few seconds; what is stopped in between loses those seconds alone."""
    now, epochs, written = [0.0], 6, []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    save = torch.save
    monkeypatch.setattr(
        "torch.save", lambda data, path: (written.append(len(data["record"]["epochs"])), save(data, path))
    )
    recipe = Recipe(
        data="helpers.small_task:data", model="helpers.small_task:net", batch=32, epochs=epochs, method="sam"
    )
    run = Run(recipe, tmp_path)
    for _ in islice(run.train(), 4 * run.batches.steps + 1):  # and the first step of the fifth epoch
        now[0] += 6.0 / run.batches.steps
    assert written == [1, 4]
    (record,) = read_records(tmp_path)
    assert len(record["epochs"]) == 4  # the record is written every epoch
    stopped = Run(recipe, tmp_path)
    assert len(stopped.record["epochs"]) == 4
    whole = Run(recipe)
    for each in (stopped, whole):
        list(each.train())
    assert without_time(stopped.record) == without_time(whole.record)


@pytest.mark.slow
def test_killed_at_every_moment(tmp_path):
    """With the method's own memory, batch normalisation's buffers, momentum and a schedule."""
    folder = tmp_path / "killed"
    command = [sys.executable, "-W", "error", "-c", KILLED, str(folder)]
    killed = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    ends = [line.split(" : ")[1] for line in killed.stdout.splitlines()]
    assert ends == ["9"] * 7 + ["0"] and not killed.stderr, killed.stdout + killed.stderr
    (record,) = read_records(folder)
    recipe = Recipe.of(record["recipe"])
    assert [path.name for path in folder.iterdir() if path.is_file()] == [f"{recipe.key}.json"]
    measuring = Measuring(samples=16, probes=2, dimension=4, products=168, points=0)
    place = Place(tmp_path / "whole", measuring=measuring)
    (whole,) = train_jobs([Job(recipe)], place)
    assert without_time(record) == without_time(json.loads(json.dumps(whole)))


@pytest.mark.slow
def test_a_comparison_is_stopped_killed_and_finished(tmp_path, monkeypatch):
    """Ctrl-C, then kill -9, each while two workers train, then to the end; against runs that were never stopped."""
    task = ["--data", "helpers.small_task:data", "--model", "helpers.small_task:net", "--batch", "32", "--epochs", "5"]
    command = ["compare", "sam", *task, "--seeds", "2", "--no-curvature", "--no-equal-cost"]

    def two_workers_that_train(name: str):
        gate = tmp_path / name
        gate.mkdir()
        # Tests that run in the background of a shell ignore Ctrl-C, and so would what they start.
        hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(
            [sys.executable, "-m", "steppe", *command, "--jobs", "2"], cwd=tmp_path, start_new_session=True,
            env=environment(STEPPE_TEST_GATE=str(gate)), preexec_fn=hears, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        while process.poll() is None and len(list(gate.iterdir())) < 2:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()[1]
        return process

    first = two_workers_that_train("first")
    assert list((tmp_path / "runs").glob("*.ckpt"))
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, said = first.communicate(timeout=PATIENCE)
    assert first.returncode == 130 and "Traceback" not in said, said
    assert said.endswith("steppe: stopped; nothing is lost. Run the same command again to resume.\n")
    second = two_workers_that_train("second")
    second.kill()
    second.communicate(timeout=PATIENCE)  # ends when the workers, which hold the pipes, have ended too
    assert second.returncode == -signal.SIGKILL
    monkeypatch.chdir(tmp_path)
    for out in ("runs", "whole"):
        finished = CliRunner().invoke(app, [*command, "--jobs", "1", "--out", out], env={"COLUMNS": "80"})
        assert finished.exit_code == 0, finished.output
    runs, others = ([without_time(r) for r in read_records(tmp_path / folder)] for folder in ("runs", "whole"))
    assert len(runs) == 4 and runs == others
    assert not list(Path(tmp_path / "runs").glob("*.ckpt"))
