"""Loggers: Weights & Biases offline and MLflow in files, with the real packages where they are installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steppe.lab.recipe.recipe import Recipe
from steppe.lab.runner.jobs import Job, Place
from steppe.lab.runner.local import train_jobs
from steppe.lab.runner.loggers import logger_maker
from steppe.support.errors import UserError

SMALL = Recipe(base="sgd", lr=0.1, batch=64, epochs=2, share=0.2)
NAMES = {"train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged: list[dict[str, Any]] = []
    log = wandb.Run.log if hasattr(wandb, "Run") else wandb.sdk.wandb_run.Run.log
    owner = wandb.Run if hasattr(wandb, "Run") else wandb.sdk.wandb_run.Run
    monkeypatch.setattr(
        owner, "log", lambda self, data, **more: (logged.append({**data, **more}), log(self, data, **more))
    )
    (record,) = train_jobs([Job(SMALL)], Place(tmp_path, log="wandb"))
    assert record.get("log") == "wandb" and {name for one in logged for name in one} == {*NAMES, "step"}
    losses = {one["step"]: one["test_loss"] for one in logged if "test_loss" in one}
    assert losses == {epoch["epoch"]: epoch["test_loss"] for epoch in record["epochs"]}
    assert list((tmp_path / "logs" / record["key"]).rglob("*.wandb")), "an offline run is on disk"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_in_files(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (record,) = train_jobs([Job(SMALL)], Place(tmp_path, log="mlflow"))
    written = {path.name: path.read_text() for path in (tmp_path / "logs" / "mlflow").glob("*/*/metrics/*")}
    assert set(written) == NAMES
    values = [float(line.split()[1]) for line in written["test_loss"].splitlines()]
    assert values == pytest.approx([epoch["test_loss"] for epoch in record["epochs"]])


def test_an_own_logger_and_unknown_ones(tmp_path, monkeypatch):
    assert logger_maker("") is None
    with pytest.raises(UserError, match="use tensorboard, wandb, mlflow or your own"):
        logger_maker("paper")
    (tmp_path / "mine_logger.py").write_text(
        "import json\n"
        "from pathlib import Path\n"
        "class Lines:\n"
        "    def __init__(self, folder): self.lines = []; self.folder = folder\n"
        "    def add_scalar(self, *what): self.lines.append(what)\n"
        "    def close(self): Path('lines.json').write_text(json.dumps(self.lines))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (record,) = train_jobs([Job(SMALL)], Place(tmp_path, log="mine_logger:Lines"))
    lines = json.loads(Path("lines.json").read_text())
    assert {name for name, *_ in lines} == NAMES and lines[2][1] == record["epochs"][0]["test_loss"]
