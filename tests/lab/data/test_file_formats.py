"""Readers: tiny files in each standard format, written from real images and read back byte for byte."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from helpers.file_formats import (
    half,
    idx_bytes,
    old_pickle,
    python2_pickle,
    same,
    told,
    write_cifar10_binary,
    write_cifar10_pickle,
    write_cifar100,
    write_idx,
    write_svhn,
)
from helpers.image_excerpt import images, labels
from steppe.lab.data import catalogue_entry, corrupt, load
from steppe.lab.data.catalogue import ENTRIES
from steppe.lab.data.file_formats import read_cifar_binary, read_cifar_pickle, read_idx, read_idx_pair, read_svhn
from steppe.support.errors import UserError


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("name", "source", "folder"),
    [("mnist", "mnist", "MNIST/raw"), ("mnist", "mnist", "mnist"), ("fashion-mnist", "fashion", "FashionMNIST/raw")],
)
def test_idx(tmp_path, name, source, folder, zipped):
    write_idx(tmp_path / folder, source, zipped)
    data = load(name, tmp_path, verify=False)
    assert same(data.train, *half(source, 0)) and same(data.test, *half(source, 1))
    assert data.input_shape == (1, 28, 28) and data.classes == 10 and len(data.mean) == 1


@pytest.mark.parametrize("kind", [">i1", ">i2", ">i4", ">f4", ">f8"])
def test_idx_of_other_types(tmp_path, kind):
    code = {">i1": 0x09, ">i2": 0x0B, ">i4": 0x0C, ">f4": 0x0D, ">f8": 0x0E}[kind]
    array = (images("mnist", 2)[:, 0].numpy().astype(int) - 100).astype(kind)
    (tmp_path / "numbers").write_bytes(idx_bytes(array, code))
    assert np.array_equal(read_idx(tmp_path / "numbers").numpy(), array)


@pytest.mark.parametrize(
    ("write", "folder"),
    [(write_cifar10_binary, "cifar-10-batches-bin"), (write_cifar10_pickle, "cifar-10-batches-py")],
)
def test_cifar10(tmp_path, write, folder):
    write(tmp_path / folder)
    data = load("cifar-10", tmp_path, verify=False)
    assert same(data.train, *half("cifar10", 0)) and same(data.test, *half("cifar10", 1))


def test_a_pickle_of_python_2(tmp_path):
    x, y = half("cifar10", 1)
    (tmp_path / "batch").write_bytes(python2_pickle(x, y))
    assert same(read_cifar_pickle([tmp_path / "batch"]), x, y)


@pytest.mark.parametrize("binary", [True, False])
def test_cifar100_takes_the_fine_labels(tmp_path, binary):
    write_cifar100(tmp_path / ("cifar-100-binary" if binary else "cifar-100-python"), binary)
    data = load("cifar-100", tmp_path, verify=False)
    assert same(data.train, *half("cifar10", 0)) and same(data.test, *half("cifar10", 1)) and data.classes == 100


def test_svhns_ten_is_zero(tmp_path):
    write_svhn(tmp_path / "SVHN")
    data = load("svhn", tmp_path, verify=False)
    assert (data.train.targets == 0).any()
    assert same(data.train, *half("cifar10", 0)) and same(data.test, *half("cifar10", 1))


# ---- CIFAR-10's variants


def test_cifar10_c_is_made_or_read(tmp_path):
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin")
    x, y = half("cifar10", 1)
    made = load("cifar-10-c:fog:3", tmp_path, verify=False)
    assert made.name == "cifar-10-c (regenerated): fog 3" and same(made.test, corrupt(x, "fog", 3), y)
    assert len(load("cifar-10-c:contrast", tmp_path, verify=False).test) == 5 * 80

    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    severities = torch.cat([corrupt(x, "jpeg", s) for s in range(1, 6)])
    np.save(folder / "jpeg_compression.npy", severities.permute(0, 2, 3, 1).numpy())
    np.save(folder / "labels.npy", y.repeat(5).byte().numpy())
    read = load("cifar-10-c:jpeg:4", tmp_path, verify=False)
    assert read.name == "cifar-10-c: jpeg 4" and same(read.test, corrupt(x, "jpeg", 4), y)
    assert same(load("cifar-10-c:jpeg", tmp_path, verify=False).test, severities, y.repeat(5))
    with pytest.raises(UserError, match=r"file .*fog\.npy does not exist"):
        load("cifar-10-c:fog:1", tmp_path, verify=False)


@pytest.mark.parametrize("ending", ["npz", "pt"])
def test_cifar10n(tmp_path, ending):
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin")
    clean = labels("cifar10")[:100].numpy()
    worse = (clean + 1) % 10
    found: dict[str, Any] = {"clean_label": clean, "worse_label": worse, "random_label2": clean}
    if ending == "npz":
        np.savez(tmp_path / "cifar10n_labels.npz", **found)
    else:
        (tmp_path / "CIFAR-10N").mkdir()
        torch.save(found, tmp_path / "CIFAR-10N" / "CIFAR-10_human.pt")
    data = load("cifar-10n:worse", tmp_path, verify=False)
    assert data.name == "cifar-10n:worse" and data.train.targets.tolist() == worse.tolist()
    assert torch.equal(data.test.targets, half("cifar10", 1)[1])
    assert load("cifar-10n:random2", tmp_path, verify=False).train.targets.tolist() == clean.tolist()
    with pytest.raises(UserError, match="has no aggre_label: it has clean_label, worse_label, random_label2"):
        load("cifar-10n:aggre", tmp_path, verify=False)


def test_cifar10ns_order_is_checked(tmp_path):
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin")
    shifted = np.roll(labels("cifar10")[:100].numpy(), 1)
    np.savez(tmp_path / "cifar10n_labels.npz", clean_label=shifted, worse_label=shifted)
    with pytest.raises(UserError, match="its clean labels are not those of these images"):
        load("cifar-10n:worse", tmp_path, verify=False)


# ---- bad files


def test_files_that_are_not_the_published_ones_are_reported_with_both_checksums(tmp_path):
    write_idx(tmp_path / "MNIST/raw", "mnist")
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    found = hashlib.md5(path.read_bytes()).hexdigest()
    assert told(load, "mnist", tmp_path) == (
        f"{path} is truncated, damaged or another file: md5 {found} ({16 + 60 * 784} bytes), "
        "expected 6bbc9ace898e44ae57da46a324031adb"
    )


def test_zipped_files_have_their_own_checksums(tmp_path):
    write_idx(tmp_path / "MNIST/raw", "mnist", zipped=True)
    assert told(load, "mnist", tmp_path).endswith("expected f68b3c2dcbeaaa9fbdd348bbdeb94873")


def test_the_published_checksums_let_the_right_files_pass(tmp_path, monkeypatch):
    write_idx(tmp_path / "MNIST/raw", "mnist")
    layout: Any = ENTRIES["mnist"].layouts[0]
    right = {**layout.train, **layout.test}
    monkeypatch.setattr(catalogue_entry, "md5", lambda path: right[path.name])
    assert same(load("mnist", tmp_path).test, *half("mnist", 1))


def test_bad_idx_files(tmp_path):
    path = tmp_path / "images"
    raw = idx_bytes(images("mnist", 3)[:, 0].numpy())
    for content, said in [
        (raw[:-1], f"{path} is truncated or damaged: {len(raw) - 1} bytes, its header promises {len(raw)}"),
        (raw[:7], f"{path} is truncated: 7 bytes, its header alone has 16"),
        (b"", f"{path} is not in idx format: it begins with nothing"),
        (b"GIF89a", f"{path} is not in idx format: it begins with 47 49 46 38"),
    ]:
        path.write_bytes(content)
        assert told(read_idx, path) == said
    assert told(read_idx, tmp_path / "none") == f"file {tmp_path / 'none'} does not exist"
    zipped = tmp_path / "images.gz"
    zipped.write_bytes(gzip.compress(raw)[:-20])
    assert told(read_idx, zipped).startswith(f"{zipped} cannot be read: ")
    path.write_bytes(raw)
    (tmp_path / "labels").write_bytes(idx_bytes(np.zeros(2, np.uint8)))
    assert told(read_idx_pair, path, tmp_path / "labels").endswith(
        "has 3 images but " + f"{tmp_path / 'labels'} has 2 labels"
    )


def test_bad_cifar_files(tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(bytes(3073 + 5))
    assert told(read_cifar_binary, [path]) == (
        f"{path} is truncated or not CIFAR's binary version: 3078 bytes, not a multiple of 3073"
    )
    path.write_bytes(old_pickle({"data": np.zeros((2, 3072), np.uint8)}))
    assert told(read_cifar_pickle, [path]) == f"{path} is not CIFAR's Python version: it has no 'labels'"
    path.write_bytes(old_pickle({"data": np.zeros((2, 30), np.uint8), "labels": [1, 2]}))
    assert told(read_cifar_pickle, [path]) == f"{path}: expected 2 x 3072 bytes, found uint8 of shape (2, 30)"
    path.write_bytes(old_pickle({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]})[:-100])
    assert told(read_cifar_pickle, [path]).startswith(f"{path} cannot be read as a pickle: ")


def test_a_pickle_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "done"),)

    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": Evil()}))
    assert "which no CIFAR file needs" in told(read_cifar_pickle, [path])
    assert not (tmp_path / "done").exists()


def test_bad_svhn_files(tmp_path):
    path = tmp_path / "train_32x32.mat"
    assert told(read_svhn, path) == f"file {path} does not exist"
    write_svhn(tmp_path / "SVHN")
    path.write_bytes((tmp_path / "SVHN/train_32x32.mat").read_bytes()[:5000])
    assert told(read_svhn, path).startswith(f"{path} is truncated or not a MATLAB file with X and y: ")
    savemat(path, {"X": np.zeros((32, 32, 3)), "y": np.zeros((1, 1))})
    assert told(read_svhn, path).endswith("expected X of bytes, H x W x 3 x N, found float64 of shape (32, 32, 3)")


def test_bad_variants(tmp_path):
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin")

    def ask(name):
        return load(name, tmp_path, verify=False)

    assert told(ask, "cifar-10-c:frog:2") == "no corruption 'frog': did you mean fog?"
    assert told(ask, "cifar-10-c:fog:9") == "severity goes from 1 to 5, not '9'"
    assert (
        told(ask, "cifar-10n:wors")
        == "no set of labels 'cifar-10n:wors': did you mean cifar-10n:worse or cifar-10n:aggre?"
    )
    assert told(ask, "cifar-10n:worse").startswith(
        f"the labels of CIFAR-10N are not in {tmp_path}: put CIFAR-10_human.pt"
    )
    (tmp_path / "cifar10n_labels.npz").write_bytes(b"nonsense")
    assert told(ask, "cifar-10n:worse").startswith(f"{tmp_path / 'cifar10n_labels.npz'} cannot be read as labels")
