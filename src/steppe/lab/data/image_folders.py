"""Images in one folder per class: ImageNet, Imagenette, Tiny-ImageNet, or your own.

Large data sets are streamed: threads decode files a few batches ahead. Training crops are those usual for ImageNet
(8 % to 100 % of the area, aspect ratio 3:4 to 4:3, flipped with probability 1/2). They depend only on the seed and the
file's number, so that an epoch is the same for every method. Without a seed the crop is the centre.
"""

from __future__ import annotations

import math
import os
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...support.errors import UserError, one_line, require
from .dataset import Batch, Device, Readable, Split

_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_AHEAD = 4  # number of batches that are decoded while one is used


@dataclass(frozen=True)
class FolderSplit:
    """Image files and their classes, decoded on demand."""

    paths: tuple[str, ...] = field(repr=False)  # not Path objects: ImageNet has a million files
    targets: Tensor = field(repr=False)
    size: int
    device: Device = "cpu"

    def __len__(self) -> int:
        return len(self.paths)

    def to(self, device: Device) -> FolderSplit:
        """The same files, with batches on this device."""
        return replace(self, device=device)

    def subset(self, rows: Tensor) -> FolderSplit:
        """Only these files."""
        return replace(self, paths=tuple(self.paths[i] for i in rows.tolist()), targets=self.targets[rows])

    def take(self, rows: Tensor, seed: int | None = None) -> Batch:
        """These files' images, decoded now."""
        return next(self.stream([rows], seed))

    def stream(self, batches: Sequence[Tensor], seed: int | None = None) -> Iterator[Batch]:
        """The images of each batch of rows; a few batches are decoded ahead."""
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            waiting: deque[tuple[list[Future[Tensor]], Tensor]] = deque()
            try:
                for rows in batches:
                    jobs = [pool.submit(_decode, self.paths[i], self.size, _seed(seed, i)) for i in rows.tolist()]
                    waiting.append((jobs, self.targets[rows.cpu()]))
                    if len(waiting) > _AHEAD:
                        yield self._ready(*waiting.popleft())
                while waiting:
                    yield self._ready(*waiting.popleft())
            finally:  # if the reader stops early, do not decode what it does not need
                for jobs, _ in waiting:
                    for job in jobs:
                        job.cancel()

    def _ready(self, jobs: Iterable[Future[Tensor]], targets: Tensor) -> Batch:
        images = torch.stack([job.result() for job in jobs])
        if torch.device(self.device).type == "cuda":
            images, targets = images.pin_memory(), targets.pin_memory()
        return images.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


def _seed(seed: int | None, row: int) -> int | None:
    return None if seed is None else seed * 1_000_003 + row


def _decode(path: str, size: int, seed: int | None) -> Tensor:
    Image = require("PIL.Image", "pillow", "reading images")
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{path} is not an image that can be read: {one_line(error)}") from error
    width, height = image.size
    box, flip = _middle(width, height, size) if seed is None else _random_crop(width, height, random.Random(seed))
    if image.size != (size, size) or box != (0, 0, size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return (pixels.flip(-1) if flip else pixels).contiguous()


Crop = tuple[tuple[float, float, float, float], bool]


def _middle(width: int, height: int, size: int) -> Crop:
    """The central square: 7/8 of the short side, as in "resize to 256, crop 224"; all of it if it has that size."""
    side = float(min(width, height)) if min(width, height) == size else min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return (left, top, left + side, top + side), False


def _random_crop(width: int, height: int, chance: random.Random) -> Crop:
    flip = chance.random() < 0.5
    for _ in range(10):
        area = width * height * chance.uniform(0.08, 1)
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = chance.randint(0, width - w), chance.randint(0, height - h)
            return (left, top, left + w, top + h), flip
    side = min(width, height)  # a very long image: its centre
    left, top = (width - side) / 2, (height - side) / 2
    return (left, top, left + side, top + side), flip


@dataclass(frozen=True)
class Folders:
    """A folder with one of these names that has train/CLASS/..., and val/CLASS/... or Tiny-ImageNet's val."""

    names: tuple[str, ...]
    size: int
    in_memory: bool = False

    def there(self, root: Path) -> bool:
        """Whether such a folder with train and val exists."""
        return self._folder(root) is not None

    def lacking(self, root: Path) -> Path | None:
        """The missing one of train and val, if the other is there."""
        for folder in (root / name for name in self.names):
            train, val = folder / "train", held_out_folder(folder)
            if train.is_dir() != (val is not None):
                return folder / "val" if train.is_dir() else train
        return None

    def _folder(self, root: Path) -> Path | None:
        folders = (root / name for name in self.names)
        return next((f for f in folders if (f / "train").is_dir() and held_out_folder(f) is not None), None)

    def read(self, root: Path, checksums: Mapping[str, str] | None) -> tuple[Readable, Readable]:
        """Both splits; there are no checksums for folders."""
        folder = self._folder(root)
        assert folder is not None
        return read_folder(folder, self.size, self.in_memory)


def read_folder(folder: Path, size: int, in_memory: bool = False) -> tuple[Readable, Readable]:
    """Training and test split of a folder with train/ and val/ (or test/)."""
    held_out = held_out_folder(folder)
    if not (folder / "train").is_dir() or held_out is None:
        raise UserError(f"{folder} needs the folders train and val, each with one folder per class")
    classes = sorted(entry.name for entry in os.scandir(folder / "train") if entry.is_dir())
    if not classes:
        raise UserError(f"{folder / 'train'} has no folders: one per class is needed")
    number = {name: i for i, name in enumerate(classes)}
    annotations = held_out / "val_annotations.txt"
    pairs = _annotated(held_out, annotations, number) if annotations.exists() else images_by_class(held_out, number)
    splits = [_split(images_by_class(folder / "train", number), size), _split(pairs, size)]
    if in_memory:
        return tuple(Split(*split.take(torch.arange(len(split)))) for split in splits)  # type: ignore[return-value]
    return splits[0], splits[1]


def held_out_folder(folder: Path) -> Path | None:
    """The folder of the test images: val or test."""
    return next((folder / name for name in ("val", "test") if (folder / name).is_dir()), None)


def _split(pairs: list[tuple[str, int]], size: int) -> FolderSplit:
    return FolderSplit(tuple(path for path, _ in pairs), torch.tensor([label for _, label in pairs]), size)


def images_by_class(folder: Path, number: dict[str, int]) -> list[tuple[str, int]]:
    """Path and class number of every image in a folder with one subfolder per class."""
    pairs = []
    for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()):
        if name not in number:
            raise UserError(f"{folder / name} is a class that train does not have")
        inside = os.walk(folder / name)
        found = [os.path.join(place, file) for place, _, files in inside for file in files if _is_image(file)]
        pairs += [(path, number[name]) for path in sorted(found)]
    if not pairs:
        raise UserError(f"{folder} has no images in folders by class ({', '.join(_IMAGES)})")
    return pairs


def _is_image(name: str) -> bool:
    return name.lower().endswith(_IMAGES)


def _annotated(folder: Path, annotations: Path, number: dict[str, int]) -> list[tuple[str, int]]:
    """Tiny-ImageNet: val/images/*.JPEG and a table of file, class, box."""
    pairs = []
    for line in annotations.read_text().splitlines():
        name, _, rest = line.partition("\t")
        label = rest.partition("\t")[0]
        if label not in number:
            raise UserError(f"{annotations}: {name!r} has class {label!r}, which train does not have")
        path = folder / "images" / name
        if not path.exists():
            raise UserError(f"{annotations} names {path}, which is not there")
        pairs.append((str(path), number[label]))
    if not pairs:
        raise UserError(f"{annotations} is empty")
    return pairs
