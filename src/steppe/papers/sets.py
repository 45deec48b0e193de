"""Data as the papers use it, and a few real images for smoke runs. Records name this module, so it must not move.

S0's inputs are in [0, 1] and not normalised, unlike the lab's: these are the lab's sets without normalisation.
They are read from $STEPPE_DATA, which `steppe paper run --data-dir` sets.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..lab.data import DataSet, Split, data_root, load, subset
from ..lab.data.text import text_in
from ..support.errors import UserError

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def mnist() -> DataSet:
    """MNIST in [0, 1]."""
    return _unit("mnist")


def fashion() -> DataSet:
    """Fashion-MNIST in [0, 1]."""
    return _unit("fashion-mnist")


def cifar10() -> DataSet:
    """CIFAR-10 in [0, 1]."""
    return _unit("cifar-10")


def svhn() -> DataSet:
    """SVHN in [0, 1]."""
    return _unit("svhn")


def _unit(name: str) -> DataSet:
    return replace(load(name), mean=(), std=())


# Folders of the transfer experiments: train/CLASS/* and val/CLASS/*


def flowers() -> DataSet:
    """Oxford Flowers, in a folder flowers."""
    return _folder("flowers")


def pets() -> DataSet:
    """Oxford-IIIT Pets, in a folder pets."""
    return _folder("pets")


def cars() -> DataSet:
    """Stanford Cars, in a folder cars."""
    return _folder("cars")


def food() -> DataSet:
    """Food-101, in a folder food."""
    return _folder("food")


def _folder(name: str) -> DataSet:
    path = data_root() / name
    if not path.is_dir():
        raise UserError(f"{name} is not in {data_root()}: put train/CLASS/* and val/CLASS/* in a folder {name} there")
    return load(f"folder:{path}")


# Smoke: scikit-learn's handwritten digits, enlarged to the size of the images they stand for


def smoke_grey() -> DataSet:
    """Digits in the format of MNIST: 28x28, grey."""
    return _small(28, 1)


def smoke_colour() -> DataSet:
    """Digits in the format of CIFAR-10 and SVHN: 32x32, three channels."""
    return _small(32, 3)


def smoke_colour_100() -> DataSet:
    """The same for a net with a hundred classes."""
    return replace(_small(32, 3), classes=100)


def smoke_folder() -> DataSet:
    """The same as image files in folders, read as ImageNet is."""
    return load(f"folder:{_written()}")


def smoke_text() -> DataSet:
    """Text for a language model: this source file."""
    data = text_in(Path(__file__))
    return replace(data, train=subset(data.train, torch.arange(8)))


def _digits(size: int, channels: int) -> tuple[Tensor, Tensor]:
    data = load("digits")
    inputs, targets = data.train.take(torch.arange(16))
    large = torch.nn.functional.interpolate(inputs.float() * (255 / data.peak), size=size, mode="bilinear")
    return large.round().to(torch.uint8).expand(-1, channels, -1, -1).contiguous(), targets


def _small(size: int, channels: int) -> DataSet:
    x, y = _digits(size, channels)
    return DataSet(f"digits {size}x{size}", Split(x[:8], y[:8]), Split(x[8:], y[8:]), 10)


@cache
def _written() -> Path:
    """A folder of image files, deleted when the process ends."""
    from PIL import Image

    alone = Path(tempfile.mkdtemp(prefix="steppe-smoke-"))
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    folder = alone / "imagenet"  # in a new folder, because other test sets are searched for beside it
    x, _ = _digits(48, 3)
    for row, (image, label) in enumerate(zip(x, [row % 4 for row in range(16)], strict=True)):
        place = folder / ("train" if row < 8 else "val") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(place / f"{row}.png")
    return folder
