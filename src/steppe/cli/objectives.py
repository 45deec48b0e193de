"""Objectives for checkpoints: model, data and loss by name, weights from a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..curvature.objective import Objective
from ..lab.data import DataSet, prepare
from ..lab.data.dataset import Examples
from ..lab.data.own_data import as_data_set, two_splits
from ..support.devices import require_device
from ..support.errors import UserError, describe, require, user_function
from .errors import say


def objectives(checkpoints: list[Path], given: dict[str, Any]) -> Iterator[tuple[str, Objective]]:
    """The name and the objective of each checkpoint. `given` has the options of the table OBJECTIVE."""
    build, load = user_function("--model", given["model"]), user_function("--data", given["data"])
    loss_fn = _loss(given["loss"])
    device = require_device(given["device"])
    names = [path.stem for path in checkpoints]
    if len(set(names)) < len(names):
        names = [str(path) for path in checkpoints]
    made = _call(load, "--data")
    data = _data_set(made)
    batches = _of_split(made, data, given["split"])
    for name, path in zip(names, checkpoints, strict=True):
        net = _call(build, "--model", *_shape_and_classes(build, data))
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


def _of_split(made: Any, data: DataSet | None, split: str) -> Any:
    """The batches to measure on. Of a function that `steppe compare` takes too: those of one split."""
    if split not in ("", "train", "test"):
        raise UserError(f"--split must be train or test, not {split!r}")
    if data is None:
        if split:
            raise UserError("--split needs data with two parts: ((inputs, targets), (inputs, targets)) or two Datasets")
        return made
    one: Literal["train", "test"] = "test" if split == "test" else "train"
    if not split:
        count = f"{len(data.train)} training examples"
        say(f"--data has training and test data: measuring on the {count}; use --split test for the test data")
    exact = [(x, x.dtype if x.is_floating_point() else torch.float32, y) for x, y in data.batches(one, 1000)]
    return [(prepare(inputs, data, dtype), targets) for inputs, dtype, targets in exact]


def _data_set(made: Any) -> DataSet | None:
    """The data set, if the function has returned one as `steppe compare` expects it; None for batches."""
    if isinstance(made, DataSet):
        return made
    try:
        found = two_splits(made)
    except Exception as error:  # of any kind, from the user's Dataset
        raise UserError(f"--data: {describe(error)}") from None
    if found is None:
        return None
    targets = found[0][1]
    task = "regression" if targets.is_floating_point() else "language" if targets.dim() > 1 else "classification"
    train, test = (Examples(x, y if y.is_floating_point() else y.long()) for x, y in found)
    return replace(as_data_set(found, "--data", task=task), train=train, test=test)  # with the precision that they have


def _shape_and_classes(build: Callable[..., Any], data: DataSet | None) -> tuple[Any, ...]:
    """The arguments of the model's function, as in `steppe compare`: none, or the input's shape and the classes."""
    try:
        inspect.signature(build).bind()
    except TypeError:
        return () if data is None else (data.input_shape, data.classes)
    except ValueError:  # a function of C has no signature
        pass
    return ()


def _call(function: Callable[..., Any], option: str, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise UserError(f"{option}: {function.__name__}() failed: {describe(error)}") from None


def _try_loss(objective: Objective) -> None:
    try:
        objective.loss()
    except (RuntimeError, LookupError, AttributeError, AssertionError) as error:
        reason = (str(error).splitlines() or [""])[0]
        reason = reason if isinstance(error, (RuntimeError, IndexError)) else f"{type(error).__name__}: {reason}"
        raise UserError(f"--model, --data and --loss do not fit together: {reason}") from None


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict from a file of tensors; one inside a larger checkpoint, or of a wrapped model, is found."""
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist")
    try:
        state: Any = _read_weights(path)
    except UserError:
        raise
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


def _read_weights(path: Path) -> Any:
    if path.suffix == ".safetensors":  # as `steppe compare --keep-weights` writes them
        return require("safetensors.torch", "safetensors", str(path)).load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)
