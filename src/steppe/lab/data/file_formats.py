"""Readers of the standard file formats. Each returns images as uint8, N x C x H x W; an error names the bad file."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...support.errors import UserError, one_line, require
from .dataset import Split

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def contents(path: Path) -> bytes:
    """The bytes of a file, unzipped if its name ends in .gz."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except FileNotFoundError:
        raise UserError(f"file {path} does not exist") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def md5(path: Path) -> str:
    """Checksum of a file."""
    digest = hashlib.md5()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_idx(path: Path) -> Tensor:
    """MNIST's format: two zero bytes, the type, the number of dimensions, the dimensions, the numbers."""
    raw = contents(path)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_TYPES:
        raise UserError(f"{path} is not in idx format: it begins with {raw[:4].hex(' ') or 'nothing'}")
    kind, dimensions = np.dtype(_IDX_TYPES[raw[2]]), raw[3]
    start = 4 + 4 * dimensions
    if len(raw) < start:
        raise UserError(f"{path} is truncated: {len(raw)} bytes, its header alone has {start}")
    shape = struct.unpack(f">{dimensions}I", raw[4:start])
    _expect(path, len(raw), start + int(np.prod(shape, dtype=np.int64)) * kind.itemsize)
    array = np.frombuffer(raw, kind, offset=start).reshape(shape)
    return torch.from_numpy(array.astype(kind.newbyteorder("=")))


def read_idx_pair(images: Path, labels: Path) -> Split:
    """A split from a file of grey images and a file of labels."""
    x, y = read_idx(images), read_idx(labels)
    if len(x) != len(y):
        raise UserError(f"{images} has {len(x)} images but {labels} has {len(y)} labels")
    return Split(x.unsqueeze(1), y.long())


def read_cifar_binary(paths: Sequence[Path], label_bytes: int = 1) -> Split:
    """CIFAR's binary version: for each image its label bytes (the last is the class) and 3 x 32 x 32 colour bytes."""
    size = label_bytes + 3072
    parts = []
    for path in paths:
        raw = np.frombuffer(contents(path), np.uint8)
        if len(raw) == 0 or len(raw) % size:
            raise UserError(
                f"{path} is truncated or not CIFAR's binary version: {len(raw)} bytes, not a multiple of {size}"
            )
        parts.append(torch.from_numpy(raw.reshape(-1, size).copy()))
    rows = torch.cat(parts)
    return Split(rows[:, label_bytes:].reshape(-1, 3, 32, 32).contiguous(), rows[:, label_bytes - 1].long())


class _ArraysOnly(pickle.Unpickler):
    """Reads only plain values and numpy arrays: a pickle could run any code when it is read."""

    allowed = {  # noqa: RUF012
        "_reconstruct": np.empty(0).__reduce__()[0],  # its module differs between versions of numpy
        "ndarray": np.ndarray,
        "dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in self.allowed:
            return self.allowed[name]
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode(encoding)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")


def read_cifar_pickle(paths: Sequence[Path], label: str = "labels") -> Split:
    """CIFAR's Python version: a pickled dictionary with `data` (N x 3072) and a list of labels."""
    inputs, targets = [], []
    for path in paths:
        contents_of = _unpickle(path)
        try:
            data, labels = np.asarray(contents_of["data"]), np.asarray(contents_of[label], np.int64)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is not CIFAR's Python version: it has no {one_line(error)}") from error
        if data.dtype != np.uint8 or data.shape != (len(labels), 3072):
            raise UserError(f"{path}: expected {len(labels)} x 3072 bytes, found {data.dtype} of shape {data.shape}")
        inputs.append(torch.from_numpy(data.copy()).reshape(-1, 3, 32, 32))
        targets.append(torch.from_numpy(labels))
    return Split(torch.cat(inputs), torch.cat(targets))


def _unpickle(path: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the originals were written by numpy 1.x: "align should be passed as boolean"
        try:
            return _ArraysOnly(io.BytesIO(contents(path)), encoding="latin1").load()
        except UserError:
            raise
        except Exception as error:  # a damaged pickle can raise anything
            raise UserError(f"{path} cannot be read as a pickle: {one_line(error)}") from error


def read_svhn(path: Path) -> Split:
    """SVHN's cropped digits, a MATLAB file: X is 32 x 32 x 3 x N, y is 1..10 where 10 means the digit 0."""
    reader = require("scipy.io", "scipy", "reading SVHN's files")
    if not path.exists():
        raise UserError(f"file {path} does not exist")
    try:
        found = reader.loadmat(path, variable_names=["X", "y"])
        images, labels = found["X"], found["y"].reshape(-1).astype(np.int64)
    except Exception as error:  # scipy raises many kinds for a damaged file
        raise UserError(f"{path} is truncated or not a MATLAB file with X and y: {one_line(error)}") from error
    if images.ndim != 4 or images.shape[2] != 3 or images.dtype != np.uint8:
        raise UserError(f"{path}: expected X of bytes, H x W x 3 x N, found {images.dtype} of shape {images.shape}")
    return Split(torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1))), torch.from_numpy(labels % 10))


def _expect(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise UserError(f"{path} is truncated or damaged: {found} bytes, its header promises {expected}")
