"""Loading data sets by name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from ...support.errors import UserError, describe, require, unknown, user_function
from .catalogue import ENTRIES
from .cifar_variants import LABELS, VARIANTS, cifar10_c, cifar10n
from .dataset import DataSet, Split
from .image_folders import read_folder
from .own_data import as_data_set, same_random_numbers
from .text import text_in


@dataclass(frozen=True)
class Listing:
    """A line of `steppe list data`."""

    name: str
    about: str
    train: int
    test: int
    classes: int
    found: bool
    how: str  # instructions to get it


def data_root(root: Path | str | None = None) -> Path:
    """The data folder: the one given, else $STEPPE_DATA, else ~/.cache/steppe."""
    return Path(root or os.environ.get("STEPPE_DATA") or "~/.cache/steppe").expanduser()


def data_names(root: Path | str | None = None) -> list[Listing]:
    """All built-in data sets, and whether they are on this machine."""
    where = data_root(root)
    how = "pip install scikit-learn"
    digits = Listing("digits", "handwritten digits, 8x8 grey", 1437, 360, 10, find_spec("sklearn") is not None, how)
    files = [
        Listing(e.name, e.about, e.train, e.test, e.classes, e.found(where) is not None, e.how(where))
        for e in ENTRIES.values()
    ]
    own = "put files NAME.txt into the subfolder text, or name any file or folder: text:PATH"
    text = Listing("text", "your text, as bytes, for --task language", 0, 0, 256, (where / "text").exists(), own)
    return [digits, *files, *(Listing(*variant.line(where)) for variant in VARIANTS), text]


def load(
    name: str,
    root: Path | str | None = None,
    *,
    download: bool = False,
    verify: bool = True,
    task: str = "classification",
) -> DataSet:
    """A data set by name, from `root` (default $STEPPE_DATA, else ~/.cache/steppe).

    With `download`, a built-in set that is missing is downloaded first. `verify=False` also reads files in a standard
    format that are not the published ones.

    Besides the names in `data_names`: "cifar-10-c:fog:3" (one corruption, one severity; both are optional),
    "cifar-10n:worse" (CIFAR-10 with labels by people), "folder:PATH" (your images in train/CLASS and val/CLASS, cropped
    to 224x224), "text:PATH" (a text file or a folder of them, as bytes; "text" is the folder text in `root`), and
    "package.module:function", your own function, which returns a `DataSet` or
    ((inputs, targets), (inputs, targets)); a Dataset or a DataLoader may take the place of a pair. `task` says what the
    targets of your own data are.
    """
    where = data_root(root)
    family, _, rest = name.partition(":")
    if family == "folder":
        return _folder(Path(rest).expanduser())
    if family == "text":
        if task != "language":
            raise UserError(f"{name} is for language models: --task language")
        return text_in(Path(rest).expanduser() if rest else where / "text")
    if rest and family.lower() not in ("cifar-10-c", "cifar-10n"):
        return _users(name, task)
    if name == "digits":
        return _digits()
    if root is not None and not where.is_dir() and not download:
        raise UserError(f"folder {where} does not exist")

    def built_in(name: str) -> DataSet:
        if name not in ENTRIES:
            variants = ["cifar-10-c", *(f"cifar-10n:{label}" for label in LABELS)]
            raise unknown("data set", name, ["digits", *ENTRIES, *variants])
        return ENTRIES[name].load(where, download, verify)

    if family.lower() == "cifar-10-c":
        return cifar10_c(built_in("cifar-10"), where, rest)
    if family.lower() == "cifar-10n":
        return cifar10n(built_in("cifar-10"), where, rest)
    return built_in(name.lower())


def _digits() -> DataSet:
    images, labels = require("sklearn.datasets", "scikit-learn", "digits").load_digits(return_X_y=True)
    select = require("sklearn.model_selection", "scikit-learn", "digits")
    parts = select.train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in parts)
    train, test = (Split(a.to(torch.uint8).view(-1, 1, 8, 8), b.long()) for a, b in ((x, y), (x_test, y_test)))
    return DataSet("digits", train, test, classes=10, peak=16.0)


def _folder(path: Path, size: int = 224) -> DataSet:
    if not path.is_dir():
        raise UserError(f"folder {path} does not exist")
    train, test = read_folder(path, size)
    imagenet = ENTRIES["imagenet"]
    return DataSet(f"folder:{path.name}", train, test, int(train.targets.max()) + 1, imagenet.mean, imagenet.std)


def _users(name: str, task: str) -> DataSet:
    function = user_function("data set", name)
    try:
        with same_random_numbers():
            made = function() if callable(function) else function  # a Python program may pass the data itself
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"data set {name!r} failed with {describe(error)}") from error
    return as_data_set(made, f"data set {name!r}", name, task)
