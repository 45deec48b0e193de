"""The training commands: a mistake is reported in one helpful line, a correct command does what its help says."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from typer.testing import CliRunner

from steppe.cli.app import app


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path / "nothing-here"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's module of that name


def run(*args: str):
    return CliRunner().invoke(app, args, env={"COLUMNS": "200"})


WRONG = {
    "compare --epochs ten": "Invalid value for '--epochs'",
    "compare --epochs 0": "epochs must be a whole number, at least 1, not 0",
    "compare --seeds 0": "--seeds must be at least 1, not 0",
    "compare --together 0": "--together must be at least 1, not 0",
    "compare --lr -1": "lr must be a finite number, at least 0, not -1.0",
    "compare --lr nan": "lr must be a finite number, at least 0, not nan",
    "compare --sheeds 3": "No such option: --sheeds",
    "compare --methods": "requires an argument",
    "compare --methods gsma": "no method 'gsma': did you mean",
    "compare --methods sam:rhoo=0.1": "SAM: no setting 'rhoo': did you mean rho?",
    "compare --methods sam:rho=big": "SAM: rho must be a number, not 'big'",
    "compare --methods sam:rho=-1": "SAM: rho must not be negative, got -1",
    "compare --methods sam:rho=0.1,0.2": "'0.2' is not a method; to compare several values write each",
    "compare --methods rho=0.1,sam": "'rho=0.1' comes before any method: write for example sam:rho=0.1",
    "compare --methods sam:rho=0.1,rho=0.2": "SAM: rho is given twice",
    "compare --methods sam:0.1": "SAM: '0.1' is not a setting; write name=value",
    "compare --methods gam:T=2.5": "GAM: T must be a whole number, not '2.5'",
    "compare --methods gam:optimizer=adam": "GAM: optimizer is a function and cannot be set by text",
    "compare --methods every:k=3": "Every needs method",
    "compare --methods gam:gamma=(0.1": "brackets",
    "compare --data cats": "no data set 'cats'",
    "compare --data mnist": "mnist",
    "compare --data mnist --data-dir missing": "folder missing does not exist",
    "compare --data mine:load": "name a model for your own data",
    "compare --data mine:load --model mlp-3": "cannot import mine",
    "compare --model mlp-33": "no model 'mlp-33': did you mean mlp-3",
    "compare --model cnn-5 --model-settings width=3": "width",
    "compare --model-settings hidden": "'hidden' is not of the form name=value",
    "compare --base sdg": "no base 'sdg': did you mean sgd",
    "compare --base adam --momentum 0.9": "base adam takes no momentum",
    "compare --schedule cosin": "no schedule 'cosin'",
    "compare --schedule step:0.1": "no schedule 'step:0.1'",
    "compare --schedule multistep:0.2/60,120": "no schedule 'multistep:0.2/60,120'",
    "compare --schedule multistep:0.2/0.3,": "no schedule 'multistep:0.2/0.3,'",
    "compare --precision fp8": "no precision 'fp8'",
    "compare --augment flips": "no augmentation 'flips'",
    "compare --auxiliary new": "no auxiliary 'new'",
    "compare --batch 5000": "batch 5000 is larger than the 1437 training examples",
    "compare --batch 1 --model mlp-3": "Expected more than 1 value per channel when training",
    "compare --share 2": "share must be above 0 and at most 1",
    "compare --device tpu:9": "--device tpu:9 cannot be used",
    "compare --jobs 0": "--jobs must be at least 1",
    "compare --threads 0": "--threads must be at least 1",
    "compare --log paper": "no logger 'paper'",
    "compare --out file": "--out file is a file",
    "train --method sam,gsam": "no method 'sam,gsam'",
    "train --seed -1": "seed must be a whole number, at least 0",
    "train --distributed ddp": "needs torchrun",
    "train --distributed dpp": "--distributed must be ddp or fsdp2",
    "sweep": "nothing to search",
    "sweep --grid lr": "is not of the form name=values",
    "sweep --grid lr=,": "is not of the form name=values",
    "sweep --grid sam.rho=0.1 --trials 4": "--trials is for a --range",
    "sweep --grid rho=0.1": "rho is a setting of the method: write sam.rho",
    "sweep --grid gsam.rho=0.1": "the method is sam, so write sam.rho",
    "sweep --grid sam.rho=0.1,-2": "SAM: rho must not be negative",
    "sweep --range lr=0.1": "is not a range, such as lr=1e-4..1e-1",
    "sweep --grid lr=0.1 --on mars": "--on must be local, ray or queue",
    "sweep --range lr=0.1..1 --sampler best": "no sampler 'best'",
    "sweep --range lr=0.1..1 --storage nonsense": "the database nonsense cannot be used",
    "report nowhere": "nowhere does not exist",
    "report .": "there are no records in .",
    "list optimizers": "no list of 'optimizers'",
    "list": "Missing argument",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_is_reported_in_one_helpful_line(line):
    if "--storage" in line:
        pytest.importorskip("optuna")
    Path("file").write_text("")
    result = run(*line.split())
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("steppe: ") and result.stderr.count("\n") == 1, result.stderr
    assert WRONG[line] in result.stderr, result.stderr
    assert result.stdout == ""


USERS = {
    "mine.py": """
import torch
from sklearn.datasets import load_digits
from torch import nn

def load():
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16).float(), torch.tensor(y)
    return (x[:500], y[:500]), (x[500:700], y[500:700])

def net(): return nn.Linear(64, 10)
def wrong(): return nn.Linear(64, 9)
def misfit(): return nn.Linear(63, 10)
def broken(): raise RuntimeError("two\\nlines")
"""
}


def test_a_users_own_data_and_model():
    Path("mine.py").write_text(USERS["mine.py"])
    sys.modules.pop("mine", None)
    own = ["--data", "mine:load", "--epochs", "1", "--no-curvature"]
    for model, said in {
        "wrong": "returns (2, 9) for 2 inputs in training, not (2, 10)",
        "misfit": "mine:misfit does not fit data mine:load",
        "broken": "RuntimeError: two lines",
        "absent": "mine has no function 'absent'",
    }.items():
        result = run("train", "--model", f"mine:{model}", *own)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1 and said in result.stderr, result.stderr
    result = run("train", "--model", "mine:net", *own)
    assert result.exit_code == 0, result.stderr
    (path,) = Path("runs").glob("*.json")
    record = json.loads(path.read_text())
    assert (record["status"], record["parameters"], record["train_examples"]) == ("done", 650, 500)
    assert (record["role"], record["label"], record["final"]["gradients"]) == ("base", "Adam", 5)


def test_own_code_that_has_changed_is_trained_again():
    own = ["--data", "mine:load", "--model", "mine:net", "--no-curvature"]

    def trained(code: str, *more: str):
        Path("mine.py").write_text(code)
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()
        result = run("train", *own, *(more or ("--epochs", "1")))
        assert result.exit_code == 0, result.output
        return result

    code = USERS["mine.py"]
    wider = code.replace("nn.Linear(64, 10)", "nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))", 1)
    first = trained(code)
    (path,) = Path("runs").glob("*.json")
    assert first.stdout.splitlines()[-1] == f"wrote {path}"
    before = path.read_bytes()
    assert trained(code).stdout.splitlines()[-1] == f"already done: {path}"
    assert path.read_bytes() == before
    again = trained(wider)
    assert "steppe: mine has changed since 1 run in runs ended: trained again\n" in again.stderr
    assert json.loads(path.read_text())["parameters"] == 64 * 32 + 32 + 32 * 10 + 10
    assert again.stdout.splitlines()[-1] == f"wrote {path}"
    # A record that says nothing of the code counts as the same.
    record = json.loads(path.read_text())
    assert list(record.pop("own_code")) == ["mine"]
    path.write_text(json.dumps(record))
    assert trained(code).stdout.splitlines()[-1] == f"already done: {path}"


def test_a_checkpoint_of_other_code(monkeypatch):
    """It is not resumed; one without a hash of its code that does not fit is reported in one line."""
    from steppe.lab.training import run as train

    def stop(*_):
        raise KeyboardInterrupt

    own = ["train", "--data", "mine:load", "--model", "mine:net", "--no-curvature", "--epochs", "2"]
    code = USERS["mine.py"]
    Path("mine.py").write_text(code)
    sys.modules.pop("mine", None)
    with monkeypatch.context() as patch:
        patch.setattr(train, "write_record", stop)  # right after the first checkpoint
        assert run(*own).exit_code == 130
    (path,) = Path("runs").glob("*.ckpt")
    whole = path.read_bytes()
    Path("mine.py").write_text(code.replace("nn.Linear(64, 10)", "nn.Linear(64, 10, bias=False)", 1))
    sys.modules.pop("mine", None)
    importlib.invalidate_caches()
    result = run(*own)
    assert result.exit_code == 0, result.output
    assert f"steppe: mine has changed since {path} was written: starting from scratch\n" in result.stderr
    next(Path("runs").glob("*.json")).unlink()
    path.write_bytes(whole)
    saved = torch.load(path)
    del saved["record"]["own_code"]
    torch.save(saved, path)
    result = run(*own)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert f"{path.name} in runs does not fit the model any more: delete it to start from scratch (" in result.stderr
    assert path.exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_finished_runs_lack_is_reported():
    options = ["compare", "sam", "--epochs", "1", "--share", "0.25", "--no-equal-cost", "--jobs", "1"]
    plain = [*options, "--seeds", "2", "--no-curvature"]
    assert run(*plain).exit_code == 0
    stamps = {path: path.stat().st_mtime_ns for path in Path("runs").glob("*.json")}
    asked = {
        "--curvature": "curvature", "--keep-weights --no-curvature": "weights",
        "--log tensorboard --no-curvature": "log",
    }  # fmt: skip
    advice = "; to get it, choose another --out or delete their .json files\n"
    for option, what in asked.items():
        result = run(*options, "--seeds", "2", *option.split())
        assert result.exit_code == 0, result.output
        assert f"steppe: already done in runs: 4 runs without {what}{advice}" in result.stderr
    result = run("train", "--epochs", "1", "--share", "0.25", "--keep-weights")
    assert f"steppe: already done in runs: 1 run without curvature, 1 run without weights{advice}" in result.stderr
    assert stamps == {path: path.stat().st_mtime_ns for path in Path("runs").glob("*.json")}, "nothing is lost"
    # As it says: what is deleted is trained again, with what is asked for; then nothing is to be said.
    for path in stamps:
        path.unlink()
    everything = [*options, "--seeds", "1", "--keep-weights", "--log", "tensorboard"]
    for _ in range(2):
        result = run(*everything)
        assert result.exit_code == 0 and "already done in" not in result.stderr, result.output
    assert "1 run without" not in run(*plain).stderr


def own_logger(folder: str):
    """A logger that leaves no files."""
    return SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None)


def test_an_own_logger_is_remembered():
    sys.modules["loggers_of_mine"] = SimpleNamespace(make=own_logger)  # pyright: ignore[reportArgumentType]
    options = ["train", "--epochs", "1", "--share", "0.25", "--no-curvature", "--log", "loggers_of_mine:make"]
    assert [run(*options).stderr.count("steppe: ") for _ in range(2)] == [0, 0]
    del sys.modules["loggers_of_mine"]


def test_records_edited_by_hand():
    """What can be filled in is; without its results a run is trained again."""
    options = ["compare", "sam", "--epochs", "1", "--share", "0.25", "--no-equal-cost", "--jobs", "1", "--seeds", "1"]
    assert run(*options, "--no-curvature").exit_code == 0
    first, second = sorted(Path("runs").glob("*.json"))
    results = [json.loads(path.read_text()) for path in (first, second)]
    first.write_text(json.dumps({k: v for k, v in results[0].items() if k not in ("role", "verdict", "curvature")}))
    for damage in ({"epochs": []}, {"final": None}, {"epochs": [{}]}, {"final": {}}):
        second.write_text(json.dumps({**results[1], **damage}))
        result = run(*options, "--no-curvature")
        assert result.exit_code == 0, result.output + repr(result.exception)
        assert f"steppe: {second} has no results: the run is trained again\n" in result.stderr
        assert "1 of 2 runs were already done" in result.stderr
        for path, before in zip((first, second), results, strict=True):
            now = json.loads(path.read_text())
            assert now["role"] == before["role"] and now["final"]["test_loss"] == before["final"]["test_loss"]


def test_compare_then_report_then_list():
    options = ["--epochs", "1", "--seeds", "2", "--jobs", "1", "--no-curvature", "--no-equal-cost"]
    result = run("compare", "sam:rho=0.1", "--methods", "gsam", *options)
    assert result.exit_code == 0, result.stderr
    assert {path.name.split("-seed")[0] for path in Path("runs").glob("*.json")} == {
        "digits-digits-mlp-plain", "digits-digits-mlp-sam-rho-0.1", "digits-digits-mlp-gsam",
    }  # fmt: skip
    assert "SAM rho=0.1" in result.stdout and "wrote runs/report.html" in result.stdout
    assert sum("/6  " in line for line in result.stderr.splitlines()) == 6
    Path("runs/report.html").unlink()
    (Path("runs") / "foreign.json").write_text("{}")
    again = run("report", "runs")
    assert again.exit_code == 0 and Path("runs/report.html").exists()
    assert "foreign.json is not a record and is skipped" in again.stderr
    first, second = (text.split("wrote")[0] for text in (result.stdout, again.stdout))
    assert first == second
    assert "fashion-mnist" in run("list", "data").stdout and "mlp-3" in run("list", "models").stdout
    assert "GNAMFast" in run("list", "methods").stdout


def test_an_unknown_metric_does_not_change_the_page():
    options = ["--epochs", "1", "--share", "0.25", "--no-curvature"]
    assert run("train", *options).exit_code == 0
    assert run("report", "runs", "--metric", "test_loss").exit_code == 0
    page = Path("runs/report.html").read_bytes()
    (path,) = Path("runs").glob("*.json")
    record = json.loads(path.read_text())

    def refused(metric: str) -> str:
        result = run("report", "runs", "--metric", metric)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1 and result.stdout == "", result.output
        assert Path("runs/report.html").read_bytes() == page
        return result.stderr

    assert refused("test_los").startswith("steppe: no metric 'test_los': did you mean test_loss")
    assert "no metric 'top': there are gradients, seconds" in refused("top")
    path.write_text(
        json.dumps({**record, "curvature": {"top": {"value": 2.0}, "density": {"grid": [], "density": []}}})
    )
    assert refused("tp") == "steppe: no metric 'tp': did you mean top?\n"
    assert "no metric 'density'" in refused("density")
    path.write_text(json.dumps({**record, "status": "running", "final": None}))
    assert refused("tp") == "steppe: no metric 'tp': did you mean top?\n"
    assert run("report", "runs").exit_code == 0


@pytest.mark.filterwarnings("ignore:.*with momentum it overshoots")
def test_a_method_that_sets_the_learning_rate_gets_no_schedule():
    result = run(
        "compare",
        "sasgd",
        *["--epochs", "1", "--seeds", "1", "--jobs", "1", "--no-curvature", "--no-equal-cost", "--lr", "0.01"],
    )
    assert result.exit_code == 0, result.stderr
    assert "SASGD sets the learning rate itself: trained without the cosine schedule" in result.stderr
    (path,) = Path("runs").glob("*sasgd*.json")
    assert json.loads(path.read_text())["recipe"]["schedule"] == "constant"
    quick = ["--method", "sasgd", "--epochs", "1", "--share", "0.1", "--no-curvature"]
    said = "steppe: SASGD sets the learning rate itself: trained without"
    assert f"{said} the linear schedule\n" in run("train", *quick, "--schedule", "linear").stderr
    assert f"{said} warm-up\n" in run("train", *quick, "--schedule", "constant", "--warmup", "2").stderr
    assert said not in run("train", *quick, "--schedule", "constant").stderr
    searched = run("sweep", *quick, "--grid", "batch=50", "--warmup", "2", "--jobs", "1")
    assert f"{said} the cosine schedule and warm-up\n" in searched.stderr


def test_batches_of_one():
    result = run("train", "--batch", "1", "--share", "0.01", "--epochs", "1", "--no-curvature")
    assert result.exit_code == 0, result.stderr
    (path,) = Path("runs").glob("*.json")
    assert json.loads(path.read_text())["final"]["gradients"] == 14  # a hundredth of 1437, one by one


def test_a_recipe_becomes_the_command_that_trains_it():
    from steppe.cli.options import RECIPE
    from steppe.cli.prepare import command_for, make_recipe
    from steppe.lab.recipe.recipe import Recipe, suggested

    for recipe in (
        Recipe(**suggested("digits", "digits-mlp"), seed=2),
        Recipe(data="cifar-10", model="resnet-18", method="gsam:rho=0.1..0.02", base="adamw", lr=3e-4, warmup=5),
        Recipe(data="mnist", model="mlp-3", method="gam:gamma=(0.1,0.01)", model_settings={"hidden": 7}, compile=True),
    ):
        words = shlex.split(command_for(recipe))
        named = dict(zip(words[2::2], words[3::2], strict=False))
        given = {name: named.get(f"--{name.replace('_', '-')}") for name in RECIPE}
        for name, (kind, _, _) in RECIPE.items():
            given[name] = None if given[name] is None else get_args(kind)[0](given[name])
        words = [word for word in words if word != "--compile"]
        named = dict(zip(words[2::2], words[3::2], strict=True))
        found = replace(make_recipe(given, recipe.compile), method=named["--method"], seed=int(named["--seed"]))
        assert found == recipe


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard, in what it brings
def test_logs_and_weights():
    options = [
        "--epochs",
        "2",
        "--share",
        "0.25",
        "--no-curvature",
        "--method",
        "sam",
        "--log",
        "tensorboard",
        "--keep-weights",
    ]
    result = run("train", *options)
    assert result.exit_code == 0, result.output + repr(result.exception)
    (path,) = Path("runs").glob("*.json")
    record = json.loads(path.read_text())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path("runs/logs") / record["key"])).Reload()
    logged = [(event.step, event.value) for event in events.Scalars("test_loss")]
    assert logged == [(e["epoch"], pytest.approx(e["test_loss"], rel=1e-6)) for e in record["epochs"]]
    from safetensors.torch import load_file

    from steppe.lab.recipe.recipe import Recipe
    from steppe.lab.training.run import Run

    again = Run(Recipe.of(record["recipe"]))
    again.net.load_state_dict(load_file(path.with_suffix(".safetensors")))
    assert again.evaluate()["test_loss"] == pytest.approx(record["final"]["test_loss"], rel=1e-6)
