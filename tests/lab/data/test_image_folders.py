"""Folders of images: what is read, in which order, and how it is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.file_formats import told
from helpers.image_excerpt import images, inputs_of
from steppe.lab.data import load
from steppe.lab.data.image_folders import read_folder
from steppe.support.errors import UserError

CLASSES = ("n01", "n02", "n03")


def write_folders(root, split, count, ending="png", inner=""):
    """`count` images a class, without loss."""
    for i in range(3 * count):
        path = root / split / CLASSES[i % 3] / inner / f"{i:03}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images("cifar10")[i].permute(1, 2, 0).numpy()).save(path)


def test_folders_by_class(tmp_path):
    write_folders(tmp_path, "train", 4)
    write_folders(tmp_path, "val", 2)
    train, test = read_folder(tmp_path, size=32)
    assert (len(train), len(test)) == (12, 6)
    x, y = train.take(torch.arange(12))
    assert y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    by_class = [i for c in range(3) for i in range(c, 12, 3)]
    assert torch.equal(x, images("cifar10")[by_class])  # already 32x32: not resampled
    reversed_rows = torch.arange(11, -1, -1)
    assert torch.equal(train.take(reversed_rows)[0], x.flip(0))


def test_streaming_gives_the_same_as_taking(tmp_path):
    write_folders(tmp_path, "train", 10)
    write_folders(tmp_path, "val", 1)
    data = load(f"folder:{tmp_path}")
    assert data.classes == 3 and data.input_shape == (3, 224, 224) and data.name == f"folder:{tmp_path.name}"
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    batches = list(data.batches("train", 4, order, seed=5))
    assert [len(y) for _, y in batches] == [4] * 7 + [2]
    whole = data.train.take(order, seed=5)
    assert torch.equal(torch.cat([x for x, _ in batches]), whole[0])
    assert torch.equal(torch.cat([y for _, y in batches]), whole[1])
    assert torch.equal(whole[1], data.train.targets[order])


def test_training_crops_follow_the_seed_and_the_file_alone(tmp_path):
    write_folders(tmp_path, "train", 4)
    write_folders(tmp_path, "val", 1)
    train, _ = read_folder(tmp_path, size=24)
    rows = torch.arange(12)
    first, again, other, middle = (train.take(rows, seed)[0] for seed in (1, 1, 2, None))
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, middle)
    assert torch.equal(train.take(rows.flip(0), 1)[0].flip(0), first)
    assert first.shape == (12, 3, 24, 24)


def test_two_files_of_one_image_get_different_crops(tmp_path):
    for path in ("train/a/1.png", "train/a/2.png", "val/a/1.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images("cifar10")[0].permute(1, 2, 0).numpy()).save(tmp_path / path)
    x, _ = read_folder(tmp_path, size=24)[0].take(torch.arange(2), seed=1)
    assert not torch.equal(x[0], x[1])


def test_a_reader_may_stop_early(tmp_path):
    write_folders(tmp_path, "train", 20)
    write_folders(tmp_path, "val", 1)
    train: Any = read_folder(tmp_path, size=32)[0]
    stream = train.stream(torch.arange(60).split(2))
    assert next(stream)[0].shape == (2, 3, 32, 32)
    stream.close()


def test_the_middle_of_a_large_image(tmp_path):
    wide = Image.new("RGB", (80, 40), (255, 0, 0))
    wide.paste((0, 255, 0), (20, 0, 60, 40))  # the middle square is green
    for split in ("train", "val"):
        (tmp_path / split / "only").mkdir(parents=True)
        wide.save(tmp_path / split / "only" / "wide.png")
    x, _ = read_folder(tmp_path, size=10)[1].take(torch.tensor([0]))
    assert torch.equal(x, torch.tensor([0, 255, 0], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 10, 10))


def test_tiny_imagenets_layout(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    write_folders(root, "train", 2, "JPEG", inner="images")
    val = root / "val" / "images"
    val.mkdir(parents=True)
    lines = []
    for i in range(6):
        Image.fromarray(images("cifar10")[i].permute(1, 2, 0).numpy()).resize((64, 64)).save(val / f"val_{i}.JPEG")
        lines.append(f"val_{i}.JPEG\t{CLASSES[2 - i % 3]}\t0\t0\t62\t62")
    (val.parent / "val_annotations.txt").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"^tiny-imagenet in .* has 3 classes, not 200: is it another data set\?$"):
        load("tiny-imagenet", tmp_path)
    data = load("tiny-imagenet", tmp_path, verify=False)
    assert data.input_shape == (3, 64, 64) and data.test.targets.tolist() == [2, 1, 0, 2, 1, 0]
    assert data.train.targets.tolist() == [0, 0, 1, 1, 2, 2]
    with Image.open(val / "val_4.JPEG") as image:
        assert torch.equal(inputs_of(data.test)[4], torch.from_numpy(np.array(image)).permute(2, 0, 1))


@pytest.mark.parametrize(
    ("name", "folder", "size"), [("imagenette", "imagenette2-160", 160), ("imagenet", "imagenet", 224)]
)
def test_imagenets_folders(tmp_path, name, folder, size):
    write_folders(tmp_path / folder, "train", 1, "JPEG")
    write_folders(tmp_path / folder, "val", 1, "JPEG")
    data = load(name, tmp_path, verify=False)
    x, y = next(data.batches("test", 3))
    assert x.shape == (3, 3, size, size) and x.dtype == torch.uint8 and y.tolist() == [0, 1, 2]


def test_bad_folders(tmp_path):
    assert (
        told(read_folder, tmp_path, 32) == f"{tmp_path} needs the folders train and val, each with one folder per class"
    )
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    assert told(read_folder, tmp_path, 32) == f"{tmp_path / 'train'} has no folders: one per class is needed"
    write_folders(tmp_path, "train", 1)
    assert told(read_folder, tmp_path, 32).startswith(f"{tmp_path / 'val'} has no images in folders by class")
    write_folders(tmp_path, "val", 1)
    (tmp_path / "val" / "other").mkdir()
    assert told(read_folder, tmp_path, 32) == f"{tmp_path / 'val' / 'other'} is a class that train does not have"
    (tmp_path / "val" / "other").rmdir()
    bad = tmp_path / "val" / "n02" / "001.png"
    bad.write_bytes(bad.read_bytes()[:100])
    _, test = read_folder(tmp_path, 32)
    assert told(test.take, torch.arange(3)).startswith(f"{bad} is not an image that can be read: ")
    (tmp_path / "val" / "val_annotations.txt").write_text("001.png\tn02\t0\t0\t1\t1\n")
    assert told(read_folder, tmp_path, 32).endswith(f"names {tmp_path / 'val/images/001.png'}, which is not there")
    (tmp_path / "val" / "val_annotations.txt").write_text("001.png\tn99\t0\t0\t1\t1\n")
    assert told(read_folder, tmp_path, 32).endswith("'001.png' has class 'n99', which train does not have")
