"""A user's own data: tensors, arrays, Dataset, DataLoader, Hugging Face's; and what is wrong with it, in one line."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from sklearn.datasets import load_iris
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from steppe.lab.data import load, prepare
from steppe.lab.data.own_data import as_data_set
from steppe.support.errors import UserError
from steppe.support.own_objects import keep

X, Y = (torch.as_tensor(array) for array in load_iris(return_X_y=True))
X = X.float()
TRAIN, TEST = slice(0, None, 2), slice(1, None, 2)


class Pairs(Dataset):
    def __init__(self, rows, named=False):
        self.x, self.y, self.named = X[rows], Y[rows], named

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if i >= len(self):
            raise IndexError
        return {"features": self.x[i], "label": self.y[i]} if self.named else (self.x[i], int(self.y[i]))


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(zip(X[self.rows], Y[self.rows], strict=True))


class HuggingFace:
    """As much of `datasets.Dataset` as is used."""

    def __init__(self, rows, **columns):
        self.columns = {"text": ["an iris"] * len(X[rows]), "features": X[rows], "label": Y[rows], **columns}
        self.column_names = list(self.columns)

    def with_format(self, kind):
        assert kind == "torch"
        return self

    def __getitem__(self, rows):
        return {name: column[rows] for name, column in self.columns.items()}


def collated(batch):
    return torch.stack([x for x, _ in batch]), torch.tensor([y for _, y in batch])


FORMS: dict[str, Any] = {
    "tensors": lambda rows: (X[rows], Y[rows]),
    "numpy": lambda rows: (X[rows].double().numpy(), Y[rows].numpy()),
    "lists": lambda rows: [X[rows].tolist(), Y[rows].tolist()],
    "TensorDataset": lambda rows: TensorDataset(X[rows], Y[rows]),
    "Dataset": Pairs,
    "Dataset of dicts": lambda rows: Pairs(rows, named=True),
    "DataLoader": lambda rows: DataLoader(Pairs(rows), batch_size=7),
    "shuffled DataLoader": lambda rows: DataLoader(Pairs(rows), batch_size=7, shuffle=True),
    "DataLoader with its own collate": lambda rows: DataLoader(Pairs(rows), batch_size=7, collate_fn=collated),
    "DataLoader with a sampler": lambda rows: DataLoader(TensorDataset(X, Y), batch_size=7, sampler=range(150)[rows]),
    "IterableDataset": lambda rows: Stream(rows),
    "DataLoader of an IterableDataset": lambda rows: DataLoader(Stream(rows), batch_size=7),
    "pandas": lambda rows: (pandas.DataFrame(X[rows].numpy()), pandas.Series(Y[rows].numpy())),
    "Hugging Face": HuggingFace,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_examples(form):
    made = FORMS[form](TRAIN), FORMS[form](TEST)
    for given in (made, {"train": made[0], "test": made[1]}, {"train": made[0], "validation": made[1]}):
        data = as_data_set(given, "data")
        assert (data.classes, data.input_shape) == (3, (4,))
        for split, rows in ((data.train, TRAIN), (data.test, TEST)):
            inputs, targets = split.take(torch.arange(len(split)))
            assert torch.equal(inputs, X[rows]) and torch.equal(targets, Y[rows])
            assert inputs.dtype == torch.float32 and targets.dtype == torch.int64


@pytest.mark.filterwarnings("ignore")
def test_data_sets_of_hugging_face_itself():
    """Columns of numbers, pictures and text, as their package has them."""
    datasets = pytest.importorskip("datasets")
    kinds = {"text": datasets.Value("string"), "features": datasets.Sequence(datasets.Value("float32"))}
    kinds["label"] = datasets.ClassLabel(names=["setosa", "versicolor", "virginica"])
    parts = {name: (X[rows], Y[rows]) for name, rows in (("train", TRAIN), ("test", TEST))}
    made = {
        name: datasets.Dataset.from_dict(
            {"text": ["an iris"] * len(x), "features": x.tolist(), "label": y.tolist()},
            features=datasets.Features(kinds),
        )
        for name, (x, y) in parts.items()
    }
    data = as_data_set(datasets.DatasetDict(made), "data")
    inputs, targets = data.train.take(torch.arange(len(data.train)))
    assert torch.equal(inputs, X[TRAIN]) and torch.equal(targets, Y[TRAIN])
    with pytest.raises(UserError, match="this is one Dataset: give two"):
        as_data_set(made["train"], "data")
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    kinds = {"image": datasets.Image(), "label": datasets.Value("int64")}
    rows = datasets.Dataset.from_dict(
        {"image": [picture, picture[::-1].copy()], "label": [0, 1]}, features=datasets.Features(kinds)
    )
    data = as_data_set({"train": rows, "test": rows}, "data")
    assert data.input_shape == (3, 4, 4) and data.classes == 2
    inputs, _ = data.train.take(torch.tensor([1]))
    assert torch.equal(inputs[0], torch.as_tensor(picture[::-1].copy()).permute(2, 0, 1))


def test_regression_and_labels_have_targets_of_any_shape():
    pair = (X, X[:, :2]), (X[:9], X[:9, :2])
    for task in ("regression", "multi-label"):
        data = as_data_set(pair, "data", task=task)
        assert data.classes == 2 and torch.equal(data.train.targets, X[:, :2])
    assert as_data_set(((X, X[:, 0]), (X, X[:, 0])), "data", task="regression").classes == 1
    assert data.to("cpu").train.targets.shape == (150, 2)


def test_tokens_are_the_targets_of_those_before_them():
    rows = torch.arange(24).view(4, 6)
    data = as_data_set((rows, rows[:2]), "data", task="language")
    inputs, targets = data.train.take(torch.tensor([1]))
    assert inputs.tolist() == [[6, 7, 8, 9, 10]] and targets.tolist() == [[7, 8, 9, 10, 11]]
    assert data.classes == 24 and prepare(inputs, data).dtype == torch.int64
    long = as_data_set((np.arange(300), np.arange(200)), "data", task="language")
    assert len(long.train) == 2 and len(long.test) == 1 and long.input_shape == (128,)
    inputs, targets = long.train.take(torch.tensor([0, 1]))
    assert torch.equal(inputs.flatten(), torch.arange(256)) and torch.equal(targets.flatten(), torch.arange(1, 257))
    ids = {"input_ids": rows, "attention_mask": rows}
    named = as_data_set({"train": HuggingFace(TRAIN, **ids), "test": HuggingFace(TEST, **ids)}, "data", task="language")
    assert torch.equal(named.train.targets, rows[:, 1:])


def test_a_sampler_that_takes_a_part_or_draws_twice_is_followed():
    """Training and test data would be the same examples otherwise."""
    for sampler in (RandomSampler(range(150), num_samples=40), RandomSampler(range(150), replacement=True)):
        loader = DataLoader(TensorDataset(X, Y), batch_size=7, sampler=sampler)
        read = [as_data_set((loader, loader), "data").train.take(torch.arange(len(sampler)))[0] for _ in range(2)]
        assert torch.equal(*read) and len(read[0].unique(dim=0)) < len(X.unique(dim=0))


def test_random_splits_are_the_same_in_every_process(monkeypatch):
    """Each process calls the function again, and methods are compared on the same examples."""

    def data():
        rows = torch.randperm(150).tolist()
        random.shuffle(rows)
        rows = np.random.permutation(rows)
        return (X[rows[:100]], Y[rows[:100]]), (X[rows[100:]], Y[rows[100:]])

    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        found.append(load(keep("data", data)).train.targets)
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert torch.equal(*found)


WRONG = {
    "targets are not whole numbers, so they are not classes: name the task": ((X, X[:, 0]), (X, X[:, 0])),
    "these are four: give two pairs": (X, X, Y, Y),
    "there are 4 targets for each example: name the task, such as multi-label": ((X, X.long()), (X, X.long())),
    "this is one pair of inputs and targets: give two": (X, Y),
    "there is text, or something else that is not numbers": ((X, Y.numpy().astype(str)), (X, Y)),
    "no test examples": ((X, Y), (X[:0], Y[:0])),
    "no training examples": ((X[:0], Y[:0]), (X, Y)),
    r"inputs have the shape \(4,\) in training and \(3,\) in the test data": ((X, Y), (X[:, :3], Y)),
    "150 inputs but 149 targets": ((X, Y[:149]), (X, Y)),
    "classes count from 0, but there is a target -1": ((X, Y - 1), (X, Y)),
    "training inputs have values that are not finite": ((X / 0, Y), (X, Y)),
    "must return a DataSet or": 3,
    "this is one TensorDataset: give two": TensorDataset(X, Y),
    "this is one HuggingFace: give two": HuggingFace(TRAIN),
    "there must be train and test, not train": {"train": (X, Y)},
    r"an example must be \(input, target\), not 1 parts": (TensorDataset(X), TensorDataset(X)),
    "there are no inputs, or no targets called label": ({"a": X}, {"a": X}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_data_is_reported_in_one_line(message):
    with pytest.raises(UserError, match=message) as raised:
        as_data_set(WRONG[message], "data set 'mine:data'")
    assert "data set 'mine:data'" in str(raised.value) and "\n" not in str(raised.value)
