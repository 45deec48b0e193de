"""A small ImageNet of real photographs, its other test sets beside it, and a net whose answers are chosen by hand.

The photographs are pieces of the two that scikit-learn has, picked so that their mean colours differ as much as can be.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from steppe.lab.data.imagenet_sets import MAIN_CORRUPTIONS, SEVERITIES

PIECES = 12
EXTRA = ("gaussian_blur", "saturate", "spatter", "speckle_noise")


@cache
def pieces() -> tuple[np.ndarray, ...]:
    """Twelve pieces of 64x64, each as far in mean colour from those before it as there is one."""
    cut = [
        photo[top : top + 64, left : left + 64]
        for photo in load_sample_images().images
        for top in range(0, photo.shape[0] - 63, 64)
        for left in range(0, photo.shape[1] - 63, 64)
    ]
    colours = np.array([_colour(piece) for piece in cut])
    chosen = [0]
    while len(chosen) < PIECES:
        apart = np.linalg.norm(colours[:, None] - colours[chosen], axis=2).min(1)
        chosen.append(int(apart.argmax()))
    return tuple(cut[i] for i in chosen)


def _colour(piece: np.ndarray) -> np.ndarray:
    return piece[4:60, 4:60].reshape(-1, 3).mean(0)  # of what is left of it when its middle is cut out


class Known(nn.Module):
    """Sees which piece an image is, by its mean colour, and says of it what the table says: class by class."""

    def __init__(self, table: Tensor, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__()
        self.table, self.mean, self.std = table, torch.tensor(mean), torch.tensor(std)
        self.colours = torch.from_numpy(np.array([_colour(piece) for piece in pieces()])).float() / 255

    def forward(self, inputs: Tensor) -> Tensor:
        seen = inputs.float().mean((2, 3)) * self.std + self.mean  # as it was before it was normalised
        return self.table[torch.cdist(seen, self.colours).argmin(1)]


def write(path: Path, piece: int, size: int = 64) -> None:
    """A piece as a JPEG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    jpeg = _jpeg(piece, size)
    path.write_bytes(jpeg)


@cache
def _jpeg(piece: int, size: int) -> bytes:
    import io

    file = io.BytesIO()
    Image.fromarray(pieces()[piece]).resize((size, size)).save(file, "JPEG", quality=95)
    return file.getvalue()


class World:
    """A folder with ImageNet in it, of `classes` classes: in train and val, class k is piece k."""

    def __init__(self, root: Path, classes: int = PIECES):
        self.root, self.names = root, [f"n{k:08}" for k in range(classes)]
        self.imagenet = root / "imagenet"
        for k, name in enumerate(self.names):
            for copy in range(4):
                write(self.imagenet / "train" / name / f"{name}_{copy}.JPEG", k)
            write(self.imagenet / "val" / name / f"ILSVRC2012_val_{self.number(k):08}.JPEG", k)

    def number(self, k: int) -> int:
        """The number of class k's validation image: not in the order of classes."""
        return len(self.names) - k

    def real(self, right: Mapping[int, list[int]]) -> Path:
        """real.json with these classes for the validation image of class k, by default k alone."""
        lists: list[list[int]] = [[] for _ in self.names]
        for k in range(len(self.names)):
            lists[self.number(k) - 1] = right.get(k, [k])
        path = self.root / "real.json"
        path.write_text(json.dumps(lists), "utf-8")
        return path

    def v2(self, other: Mapping[int, int] = {}) -> Path:
        """A folder for every number with the piece of that number, or another."""
        folder = self.root / "imagenetv2-matched-frequency-format-val"
        for k in range(len(self.names)):
            write(folder / str(k) / f"{k:04x}.jpeg", other.get(k, k))
        return folder

    def r(self, shown: Mapping[int, list[int]]) -> Path:
        """The pieces in each class's folder, and the note that comes with the set."""
        folder = self.root / "imagenet-r"
        for k, some in shown.items():
            for piece in some:
                write(folder / self.names[k] / f"art_{piece}.jpg", piece)
        (folder / "README.txt").write_text("about the set", "utf-8")
        return folder

    def c(self, other: Mapping[str, Mapping[int, int]] = {}) -> Path:
        """All corruptions, the extra ones too, at all severities: class k is piece k, or another where one is given."""
        folder, kept = self.root / "imagenet-c", self.root / "kept"
        for piece in range(PIECES):
            write(kept / f"{piece}.JPEG", piece, 224)
        for kind in (*MAIN_CORRUPTIONS, *EXTRA):
            for severity in SEVERITIES:
                wrong = other.get(f"{kind}/{severity}", {})
                for k, name in enumerate(self.names):
                    place = folder / kind / str(severity) / name
                    place.mkdir(parents=True)
                    os.link(kept / f"{wrong.get(k, k)}.JPEG", place / f"ILSVRC2012_val_{self.number(k):08}.JPEG")
        return folder
