"""Tiny files in the standard formats, written from real images."""

from __future__ import annotations

import gzip
import pickle
import struct

import pytest
import torch
from scipy.io import savemat

from helpers.image_excerpt import images, labels
from steppe.support.errors import UserError

HALF = {
    "mnist": (slice(0, 60), slice(60, 100)),
    "fashion": (slice(0, 60), slice(60, 100)),
    "cifar10": (slice(0, 100), slice(100, 180)),
}


def half(name, test):
    part = HALF[name][test]
    return images(name)[part], labels(name)[part]


def same(split, x, y):
    return torch.equal(split.inputs, x) and torch.equal(split.targets, y) and split.inputs.dtype == torch.uint8


def idx_bytes(array, code=0x08):
    return bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder, name, zipped=False):
    folder.mkdir(parents=True)
    for test, split in ((0, "train"), (1, "t10k")):
        x, y = half(name, test)
        for kind, array in (("images-idx3", x[:, 0]), ("labels-idx1", y.byte())):
            raw = idx_bytes(array.numpy())
            path = folder / f"{split}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(raw) if zipped else raw)


def cifar_rows(x, y, coarse=False):
    columns = [y.byte().unsqueeze(1), x.flatten(1)]
    return torch.cat([torch.zeros(len(y), 1, dtype=torch.uint8), *columns] if coarse else columns, 1).numpy()


def write_cifar10_binary(folder):
    folder.mkdir()
    x, y = half("cifar10", 0)
    for i in range(5):
        part = slice(20 * i, 20 * i + 20)
        (folder / f"data_batch_{i + 1}.bin").write_bytes(cifar_rows(x[part], y[part]).tobytes())
    (folder / "test_batch.bin").write_bytes(cifar_rows(*half("cifar10", 1)).tobytes())


def old_pickle(content):
    """As Python 2 and numpy 1 wrote the originals: protocol 2, numpy's old module names."""
    raw = pickle.dumps(content, protocol=2)
    return raw.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def python2_pickle(x, y):
    """The very bytes Python 2 writes: every string, the array's content too, is a byte string (U, T)."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    raw = x.flatten(1).numpy().tobytes()
    empty = (
        b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    )
    kind = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    kind += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    shape = number(x.shape[0]) + number(3072) + b"\x86"
    array = empty + b"(" + number(1) + shape + kind + b"I00\n" + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    classes = b"](" + b"".join(number(label) for label in y.tolist()) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + classes + b"u."


def write_cifar10_pickle(folder):
    folder.mkdir()
    x, y = half("cifar10", 0)
    for i in range(5):
        part = slice(20 * i, 20 * i + 20)
        content = {"data": x[part].flatten(1).numpy(), "labels": y[part].tolist(), "batch_label": f"batch {i + 1} of 5"}
        (folder / f"data_batch_{i + 1}").write_bytes(old_pickle(content))
    x, y = half("cifar10", 1)
    (folder / "test_batch").write_bytes(old_pickle({"data": x.flatten(1).numpy(), "labels": y.tolist()}))


def write_cifar100(folder, binary):
    folder.mkdir()
    for test, name in ((0, "train"), (1, "test")):
        x, y = half("cifar10", test)
        if binary:
            (folder / f"{name}.bin").write_bytes(cifar_rows(x, y, coarse=True).tobytes())
        else:
            content = {"data": x.flatten(1).numpy(), "fine_labels": y.tolist(), "coarse_labels": [0] * len(y)}
            (folder / name).write_bytes(old_pickle(content))


def write_svhn(folder):
    folder.mkdir()
    for test, name in ((0, "train"), (1, "test")):
        x, y = half("cifar10", test)
        content = {"X": x.permute(2, 3, 1, 0).numpy(), "y": torch.where(y == 0, 10, y).view(-1, 1).numpy()}
        savemat(folder / f"{name}_32x32.mat", content)


def told(function, *arguments):
    with pytest.raises(UserError) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)
