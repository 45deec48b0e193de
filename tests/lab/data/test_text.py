"""Text as a data set: which documents are tested on, rows of bytes and their targets, errors in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steppe.lab.data import load, prepare
from steppe.lab.data.text import LENGTH, text_in
from steppe.lab.preparing import recipe_for
from steppe.support.errors import UserError

WORDS = "Grüße von der Steppe. "  # 22 letters, two of them of two bytes


def write(folder, count, rows=2):
    for number in range(count):
        text = (f"{number:03d} " + WORDS * 40).encode()[: rows * LENGTH + 1]
        place = folder / ("early" if number % 2 else "late")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:03d}.txt").write_bytes(text)


def test_every_tenth_document_is_test_data(tmp_path):
    write(tmp_path, 20)
    (tmp_path / "notes.md").write_text("no document")
    data: Any = text_in(tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.tokens) == (36, 4, 256, True)
    first = [bytes(row[:3].tolist()).decode() for row in data.test.inputs[::2]]
    assert first == ["019", "018"]  # early/001 … early/019, late/000 … late/018: the tenth of each


def test_a_target_is_the_next_byte_and_rows_stay_in_their_document(tmp_path):
    write(tmp_path, 10, rows=3)
    data: Any = text_in(tmp_path)
    assert data.train.inputs.shape == data.train.targets.shape == (27, LENGTH)
    assert torch.equal(data.train.inputs[:, 1:], data.train.targets[:, :-1])
    assert bytes(data.train.inputs[0].tolist()) == ("001 " + WORDS * 40).encode()[:LENGTH]
    x, y = data.train.take(torch.tensor([0, 1]))
    assert y[0, -1] == x[1, 0] and prepare(x, data) is x  # tokens stay whole numbers


def test_of_one_file_the_last_tenth_is_test_data(tmp_path):
    whole = bytes(range(256)) * 50  # 12800 bytes
    (tmp_path / "book").write_bytes(whole)
    data: Any = load(f"text:{tmp_path / 'book'}", task="language")
    assert (len(data.train), len(data.test)) == (11519 // LENGTH, 1279 // LENGTH)
    assert bytes(data.test.inputs[0].tolist()) == whole[11520 : 11520 + LENGTH]


def test_text_of_the_data_folder(tmp_path):
    write(tmp_path / "text", 10)
    assert len(load("text", tmp_path, task="language").train) == 18


def test_errors_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"text does not exist: name a text file, or a folder of files NAME\.txt"):
        load("text", tmp_path, task="language")
    with pytest.raises(UserError, match="is for language models: --task language"):
        load("text", tmp_path)
    write(tmp_path / "few", 3)
    with pytest.raises(UserError, match=r"has 3 files NAME\.txt: at least 10 are needed, or name one file"):
        text_in(tmp_path / "few")
    write(tmp_path / "short", 10, rows=0)
    with pytest.raises(UserError, match="a document needs more than 128 bytes"):
        text_in(tmp_path / "short")


def test_a_language_model_is_the_default_for_text(tmp_path):
    recipe = recipe_for({"data": f"text:{tmp_path}"})
    assert (recipe.task, recipe.model, recipe.base, recipe.augmentation) == ("language", "gpt-tiny", "adamw", "none")
    with pytest.raises(UserError, match="is for language: --task regression needs your own --data"):
        recipe_for({"data": "text", "task": "regression"})
