"""CIFAR-10 with corrupted test images (CIFAR-10-C) or with people's training labels (CIFAR-10N)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...support.errors import UserError, one_line, unknown
from .catalogue import ENTRIES
from .corruptions import CORRUPTIONS, SEVERITIES, all_corrupted
from .dataset import DataSet, Split, with_targets

_CIFAR10 = ENTRIES["cifar-10"]
# Published file names that differ from our names:
_OTHER_FILES = {"jpeg": "jpeg_compression", "elastic": "elastic_transform"}
LABELS = ("aggre", "worse", "random1", "random2", "random3")
_HUMAN = ("CIFAR-10N/CIFAR-10_human", "CIFAR-10_human", "CIFAR-10N/cifar10n_labels", "cifar10n_labels")


def cifar10_c(clean: DataSet, root: Path, which: str = "") -> DataSet:
    """CIFAR-10, tested on corrupted images; `which` is "", "fog" or "fog:3".

    The images are the published ones if the folder CIFAR-10-C exists; otherwise they are generated, and the data set's
    name says so.
    """
    name, _, level = which.partition(":")
    if name and name not in CORRUPTIONS:
        raise unknown("corruption", name, CORRUPTIONS)
    if level and level not in map(str, SEVERITIES):
        raise UserError(f"severity goes from 1 to 5, not {level!r}")
    names = (name,) if name else tuple(CORRUPTIONS)
    severities = (int(level),) if level else SEVERITIES
    folder = root / "CIFAR-10-C"
    if not folder.is_dir():
        return all_corrupted(clean, (name,) if name else (), severities)
    parts = [_published(folder, name, severities) for name in names]
    test = Split(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))
    return replace(clean, name=f"cifar-10-c{': ' if name else ''}{which.replace(':', ' ')}", test=test)


def _published(folder: Path, name: str, severities: tuple[int, ...]) -> Split:
    """One file has the images of all five severities in sequence, N x H x W x C."""
    path = folder / f"{_OTHER_FILES.get(name, name.replace('-', '_'))}.npy"
    images, labels = _array(path), _array(folder / "labels.npy")
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(labels) or len(images) % 5:
        raise UserError(f"{path}: expected 5 times N x H x W x 3 bytes, found {images.dtype} of shape {images.shape}")
    count = len(images) // 5
    rows = np.concatenate([np.arange((s - 1) * count, s * count) for s in severities])
    inputs = torch.from_numpy(images[rows]).permute(0, 3, 1, 2).contiguous()
    return Split(inputs, torch.from_numpy(labels[rows].astype(np.int64)))


def _array(path: Path) -> Any:
    if not path.exists():
        raise UserError(f"file {path} does not exist")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} is truncated or not a numpy file: {one_line(error)}") from error


def cifar10n(clean: DataSet, root: Path, which: str) -> DataSet:
    """CIFAR-10 with one of the sets of labels that people gave its training images (Wei et al. 2022)."""
    if which not in LABELS:
        raise unknown("set of labels", f"cifar-10n:{which}", [f"cifar-10n:{label}" for label in LABELS])
    path = _human(root)
    if path is None:
        raise UserError(f"the labels of CIFAR-10N are not in {root}: {_GET_LABELS.format(root)}")
    found = _labels(path)
    key = f"random_label{which[-1]}" if which.startswith("random") else f"{which}_label"
    if key not in found or "clean_label" not in found:
        raise UserError(f"{path} has no {key}: it has {', '.join(found) or 'nothing'}")
    if not np.array_equal(found["clean_label"], clean.train.targets.cpu().numpy()):
        raise UserError(f"{path}: its clean labels are not those of these images, so their order differs")
    targets = torch.from_numpy(np.asarray(found[key]).astype(np.int64))
    return replace(clean, name=f"cifar-10n:{which}", train=with_targets(clean.train, targets))


_GET_LABELS = "put CIFAR-10_human.pt of github.com/UCSC-REAL/cifar-10-100n there, in {}/CIFAR-10N"


def _human(root: Path) -> Path | None:
    found = (root / f"{stem}{end}" for stem in _HUMAN for end in (".pt", ".npz"))
    return next((path for path in found if path.exists()), None)


def _labels(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {key: file[key] for key in file}
        safe: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.int64))]
        rebuild = np.empty(0).__reduce__()[0]
        safe += [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
        with torch.serialization.safe_globals(safe):
            found = torch.load(path, weights_only=True)
        return {key: np.asarray(value) for key, value in found.items()}
    except Exception as error:  # numpy, torch and zip files each have their own kinds
        raise UserError(f"{path} cannot be read as labels of CIFAR-10N: {one_line(error)}") from error


@dataclass(frozen=True)
class Variant:
    """What `data_names` lists for a variant: a `Listing` that depends on the data folder."""

    name: str
    about: str
    train: int
    test: int
    classes: int
    found: Callable[[Path], bool]
    how: Callable[[Path], str]

    def line(self, root: Path) -> tuple[str, str, int, int, int, bool, str]:
        """The fields of its `Listing`."""
        return self.name, self.about, self.train, self.test, self.classes, self.found(root), self.how(root)


VARIANTS = (
    Variant(
        "cifar-10-c",
        f"cifar-10 tested under {len(CORRUPTIONS)} corruptions (cifar-10-c:fog, cifar-10-c:fog:3: one)",
        _CIFAR10.train,
        _CIFAR10.test * len(CORRUPTIONS) * len(SEVERITIES),
        10,
        lambda root: _CIFAR10.found(root) is not None,
        lambda root: f"made from cifar-10: {_CIFAR10.how(root)}",
    ),
    Variant(
        "cifar-10n",
        f"cifar-10 with people's labels: cifar-10n:{', '.join(LABELS)}",
        _CIFAR10.train,
        _CIFAR10.test,
        10,
        lambda root: _CIFAR10.found(root) is not None and _human(root) is not None,
        lambda root: f"cifar-10, and {_GET_LABELS.format(root)}",
    ),
)
