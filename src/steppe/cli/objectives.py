"""The loss around each checkpoint: model, data and loss by name, weights from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..curvature.objective import Objective
from ..support.devices import require_device
from ..support.errors import UserError, describe, user_function
from .prepare import import_from_current_folder


def objectives(checkpoints: list[Path], given: dict[str, Any]) -> Iterator[tuple[str, Objective]]:
    """A name and an objective for each checkpoint. `given` has the options of the table OBJECTIVE."""
    import_from_current_folder()
    build, load = user_function("--model", given["model"]), user_function("--data", given["data"])
    loss_fn = _loss(given["loss"])
    device = require_device(given["device"])
    names = [path.stem for path in checkpoints]
    if len(set(names)) < len(names):
        names = [str(path) for path in checkpoints]
    batches = _call(load, "--data")
    for name, path in zip(names, checkpoints, strict=True):
        net = _call(build, "--model")
        if not isinstance(net, nn.Module):
            raise UserError(f"--model {given['model']} returned a {type(net).__name__}, not a torch.nn.Module")
        load_weights(net, path)
        net = net.to(device, torch.float64 if given["double"] else None)
        params, samples = given["params"] or None, given["samples"] or None
        objective = Objective(
            net, loss_fn, batches, params=params, mode=given["mode"], samples=samples, seed=given["seed"]
        )
        _try_loss(objective)
        yield name, objective


def _loss(name: str) -> Callable[..., Any]:
    known = {"cross_entropy": nn.functional.cross_entropy, "mse": nn.functional.mse_loss}
    return known.get(name) or user_function("--loss", name)


def _call(function: Callable[[], Any], option: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise UserError(f"{option}: {function.__name__}() failed: {describe(error)}") from None


def _try_loss(objective: Objective) -> None:
    try:
        objective.loss()
    except (RuntimeError, LookupError, AttributeError, AssertionError) as error:
        said = (str(error).splitlines() or [""])[0]
        said = said if isinstance(error, (RuntimeError, IndexError)) else f"{type(error).__name__}: {said}"
        raise UserError(f"--model, --data and --loss do not fit together: {said}") from None


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict from a file of tensors; one inside a larger checkpoint, or of a wrapped model, is found."""
    if not path.exists():
        raise UserError(f"there is no checkpoint {path}")
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        raise UserError(f"{path} cannot be read as a checkpoint of tensors: save model.state_dict()") from None
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise UserError(f"{path} has no state dict")
    for prefix in ("module.", "_orig_mod.", "module."):  # DDP around torch.compile, or the other way round
        if not any(key.startswith(prefix) for key in model.state_dict()):  # as AveragedModel's keys do
            state = {str(key).removeprefix(prefix): value for key, value in state.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}") from None
