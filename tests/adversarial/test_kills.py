"""kill -9 at random moments of a training that saves as it goes: started again, it ends as if nothing had happened."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import steppe
from helpers import problems
from helpers.adversarial import chance, trials

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]
STEPS = 30


def in_a_process(work, seconds=None):
    """Do work in a copy of this process, which is killed after some seconds; its exit code."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    assert process.pid is not None
    if seconds is not None:
        process.join(seconds)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode


def killed_until_done(work, draw, seconds, most):
    """Kill the work so many times, each time anew, then let it end."""
    for _ in range(most):
        assert in_a_process(work, draw.uniform(0, seconds)) in (0, -signal.SIGKILL)
    assert in_a_process(work) == 0


def own_loop(path, method, home):
    """Saves model, optimizer, step and random state after each step, in one file that replaces the last one."""
    model = problems.seeded(problems.batchnorm_dropout)
    opt = steppe.SharpnessAware(problems.adamw(model), method, model, home=home)
    start = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        torch.set_rng_state(saved["random"])
        start = saved["step"]
    for step, data in list(enumerate(problems.steps(STEPS)))[start:]:
        opt.step(**data.closures(model))
        state = {"model": model.state_dict(), "opt": opt.state_dict(), "random": torch.get_rng_state()}
        torch.save({**state, "step": step + 1}, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)


@pytest.mark.parametrize(("method", "home"), [(steppe.GSAM(), "cpu"), (steppe.FSAM(), "device")], ids=["GSAM", "FSAM"])
def test_a_training_of_one_s_own(method, home, tmp_path):
    start = time.perf_counter()
    assert in_a_process(lambda: own_loop(tmp_path / "straight.pt", method, home)) == 0
    seconds = time.perf_counter() - start
    work = lambda: own_loop(tmp_path / "killed.pt", method, home)  # noqa: E731
    killed_until_done(work, chance("kills", method.name), seconds / 3, most=len(trials(6)))
    straight, killed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("straight", "killed"))
    assert straight["step"] == killed["step"] == STEPS
    assert all(torch.equal(straight["model"][k], killed["model"][k]) for k in straight["model"])
    assert torch.equal(straight["random"], killed["random"])
    assert str(straight["opt"]) == str(killed["opt"])


def test_steppe_train(tmp_path, capfd):
    """The command: its record has the same numbers, apart from times."""
    from steppe.cli.app import app

    def train(folder):
        app(["train", "--method", "sam", "--epochs", "4", "--out", str(folder)])

    start = time.perf_counter()
    assert in_a_process(lambda: train(tmp_path / "straight")) == 0
    seconds = time.perf_counter() - start
    work = lambda: train(tmp_path / "killed")  # noqa: E731
    killed_until_done(work, chance("kills", "train"), seconds, most=len(trials(4)))
    records = [record_of(tmp_path / folder) for folder in ("straight", "killed")]
    assert records[0] == records[1]
    assert records[0]["status"] == "done"
    assert not list((tmp_path / "killed").glob(".*.part"))


def record_of(folder: Path):
    (path,) = folder.glob("*.json")
    record = json.loads(path.read_text("utf-8"))
    return without_times({key: record[key] for key in ("status", "final", "epochs", "recipe") if key in record})


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if "second" not in key}
    return [without_times(item) for item in value] if isinstance(value, list) else value
