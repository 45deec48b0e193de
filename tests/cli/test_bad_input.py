"""Own code that fails or is edited during training, a full disk: one line, nothing lost, the same command resumes."""

from __future__ import annotations

import os
import sys
from errno import ENOSPC
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steppe.cli.app import app
from steppe.lab.records import read_records
from steppe.lab.training.batches import cached_data

MODULE = """
import os
from dataclasses import dataclass, field
import steppe
import torch
from torch import nn
from sklearn.datasets import load_digits

def data():
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    return (x[:120].float(), y[:120]), (x[120:200].float(), y[120:200])

def few():
    (x, y), test = data()
    return (x[:1], y[:1]), test

class Net(nn.Linear):
    steps = 0
    def forward(self, x):
        Net.steps += 1
        if os.path.exists("fail") and Net.steps > 45:
            raise KeyError("a key of mine")
        return super().forward(x)

def net():
    return Net(64, 10)

class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:, : 10 if self.training else 5]

def halved():
    return Halved(64, 10)

def shapes():
    train, (x, y) = data()
    return train, (x[:, :9], y)

def raising():
    raise KeyError("a key of mine")

def words(outputs, targets):
    return "good"

@dataclass(frozen=True)
class NoDefault(steppe.SAM):
    far: float = field(kw_only=True)

@dataclass(frozen=True)
class Raising(steppe.Method):
    def looks(self, ctx):
        yield steppe.HERE
        raise KeyError("a key of mine")

@dataclass(frozen=True)
class WrongThing(steppe.Method):
    def looks(self, ctx):
        yield steppe.HERE
        return 3

def wrong_base(params):
    return (params,),

def edited():
    with open("mine.py", "a") as file:
        file.write("# once more\\\\n")
    return Net(64, 10)
"""
OPTIONS = "--data mine:data --batch 12 --epochs 4 --seeds 2 --no-curvature --no-equal-cost --rivals none"
OPTIONS += " --jobs 1 --device cpu"


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.py").write_text(MODULE)
    cached_data.cache_clear()
    yield
    sys.modules.pop("mine", None)
    cached_data.cache_clear()


def run(*args: str):
    return CliRunner().invoke(app, args, env={"COLUMNS": "200"})


def last_line(result) -> str:
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    return [line for line in result.stderr.splitlines() if line.startswith("steppe:")][-1]


def compare(*more: str, model: str = "mine:net"):
    return run("compare", "sam", "--model", model, *OPTIONS.split(), *more)


def test_own_code_that_fails_during_training(tmp_path):
    Path("fail").touch()
    line = last_line(compare())
    assert "training with mine:data, mine:net failed in mine.py, line 22: KeyError: 'a key of mine'" in line
    assert line.endswith("nothing is lost: correct it and run the same command again")
    assert list(Path("runs").glob("*.ckpt")), "the epochs before are kept"
    Path("fail").unlink()
    assert compare().exit_code == 0 and {record["status"] for record in read_records("runs")} == {"done"}


def test_code_that_is_edited_during_training():
    line = last_line(compare(model="mine:edited"))
    assert "mine was edited during training: run the same command again to train with the new code" in line


def test_a_full_disk(monkeypatch):
    replace, calls = os.replace, []

    def full_after_a_while(source, target):
        calls.append(target)
        if len(calls) == 5:
            raise OSError(ENOSPC, "No space left on device", str(target))
        return replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("steppe.support.files.os.replace", full_after_a_while)
        line = last_line(compare())
    assert "the disk is full" in line and "run the same command again" in line
    assert not list(Path("runs").glob("*.part")) and compare().exit_code == 0


def test_methods_that_fail_in_the_middle():
    """The base's runs are kept."""
    assert "training with mine:Raising, mine:data, mine:net failed in mine.py, line 53" in last_line(
        compare("--methods", "mine:Raising")
    )
    assert "WrongThing.looks must return a Vector, not 3; nothing is lost" in last_line(
        compare("--methods", "mine:WrongThing")
    )
    assert {record["status"] for record in read_records("runs") if "mine" not in record["recipe"]["method"]} == {"done"}


def test_wrong_data_models_metrics_and_bases():
    assert "(64,) in training and (9,) in the test data" in last_line(compare("--data", "mine:shapes"))
    assert "returns (2, 5) for 2 inputs in evaluation, not (2, 10)" in last_line(compare(model="mine:halved"))
    assert "failed with KeyError: 'a key of mine'" in last_line(compare("--data", "mine:raising"))
    assert "could not be built: KeyError" in last_line(compare(model="mine:raising"))
    assert "must return one number for a batch, not str" in last_line(compare("--metric", "mine:words"))
    assert "NoDefault needs far" in last_line(compare("--methods", "mine:NoDefault"))
    assert "batch 12 is larger than the 1 training examples" in last_line(compare("--data", "mine:few"))
    assert "returned a tuple, not a torch.nn.Module" in last_line(compare(model="mine:data"))
    assert "returned a tuple, not a torch.optim.Optimizer" in last_line(compare("--base", "mine:wrong_base"))
