"""The user's own data as a data set: tensors, arrays, a Dataset, a DataLoader, or a Hugging Face dataset.

All examples are read into memory once. Random transforms of a Dataset are therefore drawn once; the lab has its own
augmentations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from ...engine.host_random import HostRandomState
from ...support.errors import UserError, describe
from .dataset import DataSet, Examples, Readable, Split

WANTED = "a DataSet or ((inputs, targets), (inputs, targets))"
_TARGETS = ("label", "labels", "target", "targets", "y")
_TESTS = ("test", "validation", "valid", "val")
_BLOCK = 128  # tokens per row that is cut from one long text


def as_data_set(made: Any, what: str, name: str = "data", task: str = "classification") -> DataSet:
    """The user's data in any of the accepted forms as a data set; `what` names it in error messages."""
    if isinstance(made, DataSet):
        if not isinstance(made.train, Readable) or not isinstance(made.test, Readable):
            raise UserError(f"{what}: train and test must be Splits, or have len, targets, take and to")
        return made
    try:
        train, test = (_split(part, task) for part in _train_and_test(made))
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    except Exception as error:  # of any kind, from numpy or torch
        raise UserError(f"{what} must return {WANTED}; reading it: {describe(error)}") from error
    _check(train, test, what)
    return DataSet(name, train, test, _outputs(train, test, task, what), tokens=task == "language")


def _train_and_test(made: Any) -> tuple[Any, Any]:
    if isinstance(made, Mapping):  # as Hugging Face has them
        tests = [key for key in _TESTS if key in made]
        if "train" not in made or not tests:
            raise UserError(f"there must be train and test, not {', '.join(map(str, made))}")
        return made["train"], made[tests[0]]
    if isinstance(made, (Dataset, DataLoader)) or _is_hugging_face(made):
        raise UserError(f"this is one {type(made).__name__}: give two, (training, test)")
    if isinstance(made, (tuple, list)) and len(made) == 4:
        raise UserError("these are four: give two pairs, ((inputs, targets), (inputs, targets)), training first")
    train, test = made
    return train, test


def two_splits(made: Any) -> tuple[Any, Any] | None:
    """Training and test data, each a pair of tensors as they were given; None for one batch, or an iterable of them."""
    if isinstance(made, Mapping):
        found = "train" in made and any(key in made for key in _TESTS)
    else:
        found = isinstance(made, (tuple, list)) and len(made) == 2 and all(_is_split(part) for part in made)
    if not found:
        return None
    train, test = (tuple(map(_as_tensor, _arrays(part, ""))) for part in _train_and_test(made))
    return train, test


def _is_split(part: Any) -> bool:
    if isinstance(part, (Dataset, DataLoader)) or _is_hugging_face(part):
        return True
    pair = isinstance(part, (tuple, list)) and len(part) == 2
    return pair and not any(isinstance(one, (tuple, list, Mapping)) for one in part)


def _split(part: Any, task: str) -> Split:
    named = isinstance(part, (Mapping, Dataset, DataLoader)) or _is_hugging_face(part)
    if task == "language" and not named and not isinstance(part, (tuple, list)):
        return Examples(*_next_tokens(part))  # tokens alone: each is the target of those before it
    inputs, targets = _arrays(part, task)
    if task == "classification":
        return Split(_tensor(inputs), _classes(_tensor(targets)))
    inputs, targets = _tensor(inputs), _tensor(targets)
    return Examples(inputs, targets.long() if task == "language" else targets.float())


def _classes(targets: Tensor) -> Tensor:
    if targets.dim() > 1 and targets.shape[1] > 1:
        raise UserError(f"there are {targets.shape[1]} targets for each example: name the task, such as multi-label")
    if targets.is_floating_point() and not bool((targets == targets.round()).all()):
        raise UserError("targets are not whole numbers, so they are not classes: name the task, such as regression")
    return targets.long()


def _arrays(part: Any, task: str) -> tuple[Any, Any]:
    """Inputs and targets of one split, all examples in one array each."""
    if isinstance(part, TensorDataset):
        return _arrays_of_batch(part.tensors, task)
    if isinstance(part, DataLoader):
        return _of_loader(part)
    if _is_hugging_face(part):
        return _columns(part.with_format("torch")[:], task)
    if isinstance(part, IterableDataset):
        return _arrays_of_batch(default_collate(list(part)), task)
    if isinstance(part, Dataset):
        count = len(part)  # pyright: ignore[reportArgumentType]
        return _arrays_of_batch(default_collate([part[i] for i in range(count)]), task)
    if isinstance(part, Mapping):
        return _columns(part, task)
    if hasattr(part, "shape"):
        raise UserError("this is one pair of inputs and targets: give two, for training and for test")
    inputs, targets = part
    return inputs, targets


def _of_loader(loader: DataLoader[Any]) -> tuple[Any, Any]:
    """All examples of a loader: in the order of its dataset, if it can be read so."""
    if loader.collate_fn is default_collate and _reads_all(loader):
        return _arrays(loader.dataset, "")
    with same_random_numbers():
        batches = [_arrays_of_batch(batch, "") for batch in loader]
    if not batches:
        raise UserError("the loader has no batches")
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def _reads_all(loader: DataLoader[Any]) -> bool:
    """Whether an epoch of the loader is its dataset, in any order: a sampler may choose a part of it."""
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or not isinstance(sampler, (SequentialSampler, RandomSampler)):
        return False
    return len(sampler) == len(loader.dataset) and not getattr(sampler, "replacement", False)  # type: ignore[arg-type]


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Shuffle and split alike in every process: the user's code in this context draws with a fixed seed."""
    import numpy

    before = HostRandomState()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        try:
            yield
        finally:
            before.restore()


def _arrays_of_batch(batch: Any, task: str) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        return _columns(batch, task)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        found = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise UserError(f"an example must be (input, target), not {found}")
    return batch[0], batch[1]


def _columns(table: Mapping[str, Any], task: str) -> tuple[Any, Any]:
    """Inputs and targets among named columns: the targets' by its usual names, the inputs' the first other one."""
    names = [name for name in table if name in _TARGETS]
    others = [name for name in table if name not in _TARGETS and _is_numeric(table[name])]
    if task == "language" and "input_ids" in table:
        return _next_tokens(_stacked(table["input_ids"]))
    if not names or not others:
        raise UserError(f"among the columns {', '.join(table)} there are no inputs, or no targets called label")
    return _stacked(table[others[0]]), _stacked(table[names[0]])


def _is_numeric(column: Any) -> bool:
    first = column[0] if len(column) else None
    return not isinstance(first, (str, bytes, dict, type(None)))


def _stacked(column: Any) -> Any:
    return torch.stack([torch.as_tensor(one) for one in column]) if isinstance(column, list) else column


def _next_tokens(tokens: Any) -> tuple[Tensor, Tensor]:
    """Inputs and targets from tokens: rows as they are; one long text is cut into rows."""
    rows = torch.as_tensor(tokens).long()
    if rows.dim() == 1:
        count = (len(rows) - 1) // _BLOCK
        if count == 0:
            raise UserError(f"{len(rows)} tokens are too few: at least {_BLOCK + 1}")
        return rows[: count * _BLOCK].view(count, _BLOCK), rows[1 : count * _BLOCK + 1].view(count, _BLOCK)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _is_hugging_face(thing: Any) -> bool:
    return hasattr(thing, "with_format") and hasattr(thing, "column_names")


def _as_tensor(array: Any) -> Tensor:
    if getattr(getattr(array, "dtype", None), "kind", "") in ("U", "S", "O"):
        raise UserError("there is text, or something else that is not numbers; classes count from 0")
    return torch.as_tensor(array.to_numpy(copy=True) if hasattr(array, "to_numpy") else array)  # pandas has tables


def _tensor(array: Any) -> Tensor:
    tensor = _as_tensor(array)
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _check(train: Split, test: Split, what: str) -> None:
    if not len(train) or not len(test):
        raise UserError(f"{what} has no {'test' if len(train) else 'training'} examples")
    for kind in ("inputs", "targets"):
        mine, theirs = (tuple(getattr(split, kind).shape[1:]) for split in (train, test))
        if mine != theirs:
            raise UserError(f"{what}: {kind} have the shape {mine} in training and {theirs} in the test data")
    for split, kind in ((train, "training"), (test, "test")):
        if split.inputs.is_floating_point() and not bool(split.inputs.isfinite().all()):
            raise UserError(f"{what}: the {kind} inputs have values that are not finite")
        if split.targets.is_floating_point() and not bool(split.targets.isfinite().all()):
            raise UserError(f"{what}: the {kind} targets have values that are not finite")


def _outputs(train: Split, test: Split, task: str, what: str) -> int:
    """How many numbers a model must give for an example: classes, targets, labels or the size of the vocabulary."""
    if task in ("regression", "multi-label"):
        return train.targets.shape[1] if train.targets.dim() > 1 else 1
    both = torch.cat([train.targets.flatten(), test.targets.flatten()])
    if task == "language":
        both = torch.cat([both[both >= 0], train.inputs.flatten(), test.inputs.flatten()])
    low, high = int(both.min()), int(both.max())
    if low < 0:
        raise UserError(f"{what}: classes count from 0, but there is a target {low}")
    return high + 1
