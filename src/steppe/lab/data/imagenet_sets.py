"""Further test sets for models trained on ImageNet: ImageNet-Real, -v2, -R and -C.

They are expected beside the folder of ImageNet, under the names that their archives have:

    real.json                                         the correct classes of every validation image
    imagenetv2-matched-frequency-format-val/0/*.jpeg  folders 0 to 999
    imagenet-r/n01443537/*.jpg                        200 of the classes
    imagenet-c/fog/3/n01440764/*.JPEG                 15 corruptions, 5 severities

Images are read like ImageNet's validation images. Those of ImageNet-C are 224x224 already, so they are neither resized
nor cropped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...support.errors import UserError, one_line
from .dataset import DataSet, Device
from .image_folders import FolderSplit, held_out_folder, images_by_class

# The other four (gaussian_blur, saturate, spatter, speckle_noise) are for tuning and not part of the published mean.
MAIN_CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
SEVERITIES = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class ImageNet:
    """The folder that a data set was read from, and its class names in the order of a model's outputs."""

    folder: Path
    classes: tuple[str, ...] = field(repr=False)
    size: int = 224
    device: Device = "cpu"

    @classmethod
    def of(cls, data: DataSet) -> ImageNet | None:
        """The folder of a data set; None if it is not images in folders."""
        if not isinstance(data.train, FolderSplit):
            return None
        train = next((above for above in Path(data.train.paths[0]).parents if above.name == "train"), None)
        if train is None:
            return None
        names = sorted(entry.name for entry in os.scandir(train) if entry.is_dir())
        return cls(train.parent, tuple(names), data.train.size, data.train.device)

    @property
    def beside(self) -> Path:
        """The folder that contains ImageNet's folder."""
        deep = self.folder.parts[-3:] == ("ILSVRC", "Data", "CLS-LOC")
        return self.folder.parents[2] if deep else self.folder.parent

    @property
    def number(self) -> dict[str, int]:
        """The class of a name."""
        return {name: i for i, name in enumerate(self.classes)}


@dataclass(frozen=True)
class TestPart:
    """A test set or a part of one: images, and their correct classes."""

    images: FolderSplit
    admissible: tuple[tuple[int, ...], ...] = ()  # the correct classes of every image; empty: only its own class
    among: tuple[int, ...] = ()  # the classes to choose from; empty: all
    part: str = ""  # the name of the part, if the set has several

    def right(self, answers: Sequence[int], begin: int = 0) -> int:
        """The number of correct answers, for the images from number `begin` on."""
        rows = range(begin, begin + len(answers))
        if self.admissible:
            return sum(answer in self.admissible[row] for answer, row in zip(answers, rows, strict=True))
        targets = self.images.targets[begin : begin + len(answers)].tolist()
        return sum(answer == target for answer, target in zip(answers, targets, strict=True))


@dataclass(frozen=True)
class OtherSet:
    """One of the four test sets."""

    name: str
    metric: str
    places: tuple[str, ...]  # beside ImageNet's folder, or in it
    reader: Callable[[Path, ImageNet], Iterator[TestPart]]
    images: int = 0  # in each part, with all 1000 classes; 0: the reader checks it

    def found(self, imagenet: ImageNet) -> Path | None:
        """Its path, or None if it is missing."""
        homes = (imagenet.beside, imagenet.folder)
        return next((path for home in homes for place in self.places if (path := home / place).exists()), None)

    def parts(self, imagenet: ImageNet) -> Iterator[TestPart]:
        """Its parts in turn: one, or 75 for ImageNet-C. Nothing if the set is missing."""
        path = self.found(imagenet)
        if path is None:
            return
        for part in self.reader(path, imagenet):
            count = len(part.images)
            if self.images and count != self.images and len(imagenet.classes) == 1000:
                where = path / part.part
                raise UserError(f"{where} has {count} images, not {self.images}: incomplete, or another set")
            yield part


# Reading


def _split(pairs: Iterable[tuple[str, int]], imagenet: ImageNet) -> FolderSplit:
    paths, targets = zip(*pairs, strict=True)
    return FolderSplit(paths, torch.tensor(targets), imagenet.size, imagenet.device)


def _need_all(folder: Path, pairs: Iterable[tuple[str, int]], imagenet: ImageNet) -> None:
    missing = set(range(len(imagenet.classes))) - {target for _, target in pairs}
    if missing:
        first = min(missing)
        raise UserError(f"{folder} is incomplete: it has no images of class {first}, {imagenet.classes[first]}")


def _real(path: Path, imagenet: ImageNet) -> Iterator[TestPart]:
    """The validation images of ImageNet that have at least one correct class."""
    lists = _lists(path, len(imagenet.classes))
    held_out = held_out_folder(imagenet.folder)
    if held_out is None:
        raise UserError(f"{imagenet.folder} has no folder val, whose images {path.name} is about")
    pairs = images_by_class(held_out, imagenet.number)
    if len(lists) != len(pairs):
        raise UserError(f"{path} is about {len(lists)} images, but {held_out} has {len(pairs)}")
    rows = [_row(file, len(lists)) for file, _ in pairs]
    kept = [(pair, lists[row]) for pair, row in zip(pairs, rows, strict=True) if lists[row]]
    if not kept:
        raise UserError(f"{path} names no class for any image")
    yield TestPart(_split([pair for pair, _ in kept], imagenet), tuple(tuple(right) for _, right in kept))


def _lists(path: Path, classes: int) -> list[list[int]]:
    try:
        lists = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is truncated or not JSON: {one_line(error)}") from error
    wanted = f"a list, for each image, of its correct classes, from 0 to {classes - 1}"
    if not isinstance(lists, list):
        raise UserError(f"{path} must be {wanted}, in one list; it is a {type(lists).__name__}")
    for number, right in enumerate(lists, 1):
        if not isinstance(right, list) or not all(type(c) is int and 0 <= c < classes for c in right):
            raise UserError(f"{path} must have {wanted}; its entry {number} is {one_line(right)[:60]}")
    return lists


def _row(file: str, count: int) -> int:
    """The row of a file by its name: ILSVRC2012_val_00000001.JPEG is the first, in any folder."""
    found = re.search(r"_val_(\d{8})", os.path.basename(file))
    if found is None or not 1 <= int(found[1]) <= count:
        raise UserError(f"{file} should be named as in ImageNet, ILSVRC2012_val_00000001.JPEG to {count:08}")
    return int(found[1]) - 1


def _v2(path: Path, imagenet: ImageNet) -> Iterator[TestPart]:
    """Folder names are class numbers ("10" is class 10, though it sorts before "2"), or in an older edition names."""
    names = [entry.name for entry in os.scandir(path) if entry.is_dir()]
    number = {name: int(name) for name in names if name.isdecimal() and int(name) < len(imagenet.classes)}
    pairs = images_by_class(path, {**imagenet.number, **number})
    _need_all(path, pairs, imagenet)
    yield TestPart(_split(pairs, imagenet))


def _r(path: Path, imagenet: ImageNet) -> Iterator[TestPart]:
    """Folders have ImageNet's class names; a model chooses among the classes that are there."""
    pairs = images_by_class(path, imagenet.number)
    yield TestPart(_split(pairs, imagenet), among=tuple(sorted({target for _, target in pairs})))


def _c(path: Path, imagenet: ImageNet) -> Iterator[TestPart]:
    """One part for each corruption and severity, after a check that all are there."""
    parts = [f"{kind}/{severity}" for kind in MAIN_CORRUPTIONS for severity in SEVERITIES]
    for part in parts:
        if not (path / part).is_dir():
            raise UserError(f"{path} is incomplete: {path / part} is missing")
    for part in parts:
        pairs = images_by_class(path / part, imagenet.number)
        _need_all(path / part, pairs, imagenet)
        yield TestPart(_split(pairs, imagenet), part=part)


OTHER_SETS = (
    OtherSet("ImageNet-Real", "imagenet_real_accuracy", ("real.json", "imagenet-real/real.json"), _real),
    OtherSet(
        "ImageNet-v2",
        "imagenet_v2_accuracy",
        (
            "imagenetv2-matched-frequency-format-val",
            "imagenet-matched-frequency-format-val",
            "imagenetv2-matched-frequency",
            "imagenet-v2",
        ),
        _v2,
        10000,
    ),
    OtherSet("ImageNet-R", "imagenet_r_accuracy", ("imagenet-r", "ImageNet-R"), _r, 30000),
    OtherSet("ImageNet-C", "imagenet_c_accuracy", ("imagenet-c", "ImageNet-C"), _c, 50000),
)
OF_ALL = "imagenet_r_of_all_accuracy"  # on ImageNet-R, choosing among all classes
METRICS = {**{other.metric: other.name for other in OTHER_SETS}, OF_ALL: "ImageNet-R, of all classes"}
