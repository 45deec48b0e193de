"""The loss around each checkpoint: model, data and loss by name, weights from a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..curvature.objective import Objective
from ..lab.data import DataSet, prepare
from ..lab.data.own_data import as_data_set
from ..support.devices import require_device
from ..support.errors import UserError, describe, user_function
from .errors import say


def objectives(checkpoints: list[Path], given: dict[str, Any]) -> Iterator[tuple[str, Objective]]:
    """A name and an objective for each checkpoint. `given` has the options of the table OBJECTIVE."""
    build, load = user_function("--model", given["model"]), user_function("--data", given["data"])
    loss_fn = _loss(given["loss"])
    device = require_device(given["device"])
    names = [path.stem for path in checkpoints]
    if len(set(names)) < len(names):
        names = [str(path) for path in checkpoints]
    made = _call(load, "--data")
    batches = _of_split(made, given["split"])
    for name, path in zip(names, checkpoints, strict=True):
        net = _call(build, "--model", *_shape_and_classes(build, made))
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


def _of_split(made: Any, split: str) -> Any:
    """The batches to measure on. Of a function that `steppe compare` takes too: those of one split."""
    if split not in ("", "train", "test"):
        raise UserError(f"--split is train or test, not {split!r}")
    data = _two_splits(made)
    if data is None:
        if split:
            raise UserError("--split is for data with two splits: ((inputs, targets), (inputs, targets)) or a DataSet")
        return made
    one: Literal["train", "test"] = "test" if split == "test" else "train"
    if not split:
        count = f"{len(data.train)} training examples"
        say(f"--data has training and test data: measuring on the {count}; --split test for the others")
    if not isinstance(made, DataSet):  # a pair of arrays, with the precision that it has
        inputs, targets = (torch.as_tensor(part) for part in made[one == "test"])
        return [(prepare(inputs, data) if inputs.dtype == torch.uint8 else inputs, targets)]
    return [(prepare(inputs, data), targets) for inputs, targets in data.batches(one, 1000)]


def _two_splits(made: Any) -> DataSet | None:
    """The data set, if the function has returned one as `steppe compare` expects it; None for batches."""
    pairs = (
        isinstance(made, (tuple, list))
        and len(made) == 2
        and all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in made)
        and not any(isinstance(part, (tuple, list, dict)) for pair in made for part in pair)
    )
    if isinstance(made, DataSet):
        return made
    if not pairs:
        return None
    numbers = torch.as_tensor(made[0][1]).is_floating_point()
    return as_data_set(made, "--data", task="regression" if numbers else "classification")


def _shape_and_classes(build: Callable[..., Any], made: Any) -> tuple[Any, ...]:
    """The arguments of the model's function, as in `steppe compare`: none, or the input's shape and the classes."""
    try:
        inspect.signature(build).bind()
    except TypeError:
        data = _two_splits(made)
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
