"""Loggers that get a run's numbers besides its record: TensorBoard, Weights & Biases, MLflow, or the user's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...support.errors import UserError, describe, require, user_function


def logger_maker(name: str) -> Callable[[str], Any] | None:
    """The function that makes a logger for a folder, by name or as "package.module:function"; None without a name."""
    if not name:
        return None
    if ":" in name:
        return user_function("logger", name)
    if name == "tensorboard":
        return require("torch.utils.tensorboard", "tensorboard", "--log tensorboard").SummaryWriter
    if name == "wandb":
        require("wandb", "wandb", "--log wandb")
        return WeightsAndBiases
    if name == "mlflow":
        require("mlflow", "mlflow", "--log mlflow")
        return MLflow
    raise UserError(f"no logger {name!r}: use tensorboard, wandb, mlflow or your own, package.module:function")


class WeightsAndBiases:
    """A run of Weights & Biases, named like the record. `WANDB_PROJECT` and `WANDB_MODE=offline` work as usual."""

    def __init__(self, folder: str):
        wandb = require("wandb", "wandb", "--log wandb")
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", "steppe")
        try:
            self._run = wandb.init(project=project, name=place.name, dir=str(place), reinit="create_new")
        except Exception as error:
            raise UserError(f"--log wandb: {describe(error)}; set WANDB_MODE=offline to log without a server") from None

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Log one number of an epoch."""
        self._run.log({name: value}, step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class MLflow:
    """A run of MLflow, named like the record: on the server of `MLFLOW_TRACKING_URI`, else in files beside the logs."""

    def __init__(self, folder: str):
        tracking = require("mlflow.tracking", "mlflow", "--log mlflow")
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions refuse files without it
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (place.parent / "mlflow").resolve().as_uri()
        try:
            self._client = tracking.MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name("steppe")
            experiment = found.experiment_id if found else self._client.create_experiment("steppe")
            self._run = self._client.create_run(experiment, run_name=place.name).info.run_id
        except Exception as error:
            raise UserError(f"--log mlflow: {describe(error)}") from None

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Log one number of an epoch. MLflow allows no arrow in a name."""
        self._client.log_metric(self._run, name.strip("↑"), float(value), step=step)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)
