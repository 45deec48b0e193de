"""Records on disk: written completely or not at all, in plain JSON; a bad file is never fatal."""

from __future__ import annotations

import errno
import json
import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from steppe.lab.recipe.own_code import code_of
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.records import (
    RecordWarning,
    epochs_frame,
    new_record,
    read_record,
    read_records,
    to_frame,
    write_record,
)  # fmt: skip
from steppe.lab.runner.finished import finished_record, run_lock
from steppe.lab.statistics import group_records
from steppe.lab.training.checkpoints import read_checkpoint, write_weights
from steppe.support.errors import UserError
from steppe.support.files import whole_file

RECIPE = Recipe(method="gam:gamma=(0.1,0.01)", model_settings={"hidden": 3})


def record(status="done", **changes) -> Any:
    epoch = {"epoch": 1, "train_loss": 0.5, "test_loss": math.nan, "test_accuracy": 0.75, "seconds": 1.0}
    final = {"test_accuracy": 0.75, "test_loss": math.inf, "seconds": 1.0, "gradients": 10}
    curvature = {"top": {"value": 2.0, "error": 0.1}, "density": {"grid": [0.0], "density": [1.0]}}
    return {
        **new_record(RECIPE),
        "status": status,
        "epochs": [epoch],
        "final": final,
        "curvature": curvature,
        **changes,
    }


def test_a_written_record_is_read_back(tmp_path):
    path = write_record(record(), tmp_path)
    assert path.name == f"{RECIPE.key}.json" and [p.name for p in tmp_path.iterdir()] == [path.name]
    found: Any
    (found,) = read_records(tmp_path)
    assert found == read_records([path])[0] == json.loads(path.read_text(), parse_constant=pytest.fail)
    assert found["epochs"][0]["test_loss"] == "nan" and found["final"]["test_loss"] == "inf"
    assert found["method"] == {
        "name": "GAM", "cost": 3.0, "settings": found["method"]["settings"],
    }  # fmt: skip
    assert found["method"]["settings"]["gamma"] == [0.1, 0.01] and found["method"]["settings"]["T"] == 2
    assert Recipe.of(found["recipe"]) == RECIPE
    assert found["label"] == "GAM gamma=(0.1,0.01)" and found["environment"]["torch"] == torch.__version__


def test_a_file_that_is_not_a_record_is_skipped_with_a_warning(tmp_path):
    path = write_record(record(), tmp_path)
    text = path.read_text()
    for name, content in {
        "half": text[: len(text) // 2], "empty": "", "foreign": '{"a": 1}', "list": "[1]", "binary": "\x00\x01",
        "later": text.replace("steppe-run/1", "steppe-run/9"), "damaged": text.replace('"epochs"', '"epoch"'),
    }.items():  # fmt: skip
        other = tmp_path / f"{name}.json"
        other.write_text(content)
        with pytest.warns(RecordWarning, match=f"{name}.json is not a record and is skipped"):
            assert len(read_records(tmp_path)) == 1
        other.unlink()
    path.write_bytes(b"\xff\xfe{")
    with pytest.warns(RecordWarning):
        assert read_record(path) is None
    with pytest.raises(UserError, match="does not exist"):
        read_records(tmp_path / "nothing")


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(FileNotFoundError), whole_file(path) as beside:
        _ = beside.write_text("half") and (tmp_path / "absent").read_text()
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    with whole_file(path) as beside:
        beside.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after" and list(tmp_path.iterdir()) == [path]


def test_frames(tmp_path):
    path = write_record(record(), tmp_path)
    frame = to_frame(read_records(path))
    row = frame.iloc[0]
    assert (row["test_accuracy"], row["top"], row["cost"], row["lr"]) == (0.75, 2.0, 3.0, 1e-3)
    assert row["model_settings"] == '{"hidden": 3}'
    epochs = epochs_frame(read_records(path))
    assert list(epochs["train_loss"]) == [0.5] and list(epochs["label"]) == ["GAM gamma=(0.1,0.01)"]


def test_a_run_counts_as_finished_only_if_it_is_the_same_run(tmp_path):
    assert finished_record(RECIPE, tmp_path) is None
    write_record(record(status="running"), tmp_path)
    assert finished_record(RECIPE, tmp_path) is None
    for status in ("done", "diverged"):
        write_record(record(status=status), tmp_path)
        found = finished_record(RECIPE, tmp_path)
        assert found is not None and found["status"] == status
    other = record()
    other["method"]["settings"]["T"] = 5  # what a default was when the library was older
    write_record(other, tmp_path)
    assert finished_record(RECIPE, tmp_path) is None


def test_records_from_before_a_field_was_added(tmp_path):
    """Its default is what they were trained with: they count, and belong to the same group."""
    old = record()
    old["recipe"] = {name: value for name, value in old["recipe"].items() if name != "clip"}
    path = write_record(old, tmp_path)
    found = finished_record(RECIPE, tmp_path)
    assert found is not None and found["recipe"] == RECIPE.as_dict() == read_records(path)[0]["recipe"]
    assert finished_record(replace(RECIPE, clip=1.0), tmp_path) is None
    later: Any = {**new_record(replace(RECIPE, seed=1)), "status": "done", "final": record()["final"]}
    write_record(later, tmp_path)
    (group,) = group_records(read_records(tmp_path))
    assert len(group.records) == 2
    torch.save({"record": old}, tmp_path / "run.ckpt")
    device = torch.device("cpu")
    assert read_checkpoint(tmp_path / "run.ckpt", record(), device) is not None
    assert read_checkpoint(tmp_path / "run.ckpt", new_record(replace(RECIPE, clip=1.0)), device) is None


def test_a_full_disk_is_reported_in_one_line(tmp_path):
    resource = pytest.importorskip("resource")
    weights = {"weight": torch.zeros(10_000)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))  # no file may grow beyond that
    try:
        said = r"run\.\w+ cannot be written; is the disk full\?"
        with pytest.raises(UserError, match=said), whole_file(tmp_path / "run.ckpt") as beside:
            torch.save(weights, beside)
        with pytest.raises(UserError, match=said):
            write_weights(weights, tmp_path, "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_leaves_the_old_file(tmp_path):
    path = write_record(record(), tmp_path)
    before = path.read_bytes()
    said = r"cannot be written: the disk is full\. .* run the same command again"
    with pytest.raises(UserError, match=said), whole_file(path) as beside:
        raise OSError(errno.ENOSPC, "No space left on device", beside.write_text("half"))
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == [path.name]


def test_own_functions_are_identified_by_the_hash_of_their_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_mine.py").write_text("def net(): ...")
    recipe = Recipe(data="of_mine:load", model="of_mine:net")
    before = code_of(recipe)
    assert list(before) == ["of_mine"] and new_record(recipe).get("own_code") == before
    (tmp_path / "of_mine.py").write_text("def net(): pass")
    assert list(code_of(recipe)) == ["of_mine"] and code_of(recipe) != before
    for others in (Recipe(), Recipe(data="steppe.papers.sets:cifar10"), Recipe(data="cifar-10n:worse")):
        assert code_of(others) == {} and "own_code" not in new_record(others)
    assert code_of(Recipe(model="absent.module:net")) == {}


def test_two_processes_do_not_train_one_run(tmp_path):
    """The second waits: here threads, each with its own handle, as the system's locks see them."""
    order = []
    waiting = threading.Event()

    def second():
        waiting.set()
        with run_lock(tmp_path, "key"):
            order.append("second")

    with run_lock(tmp_path, "key"):
        thread = threading.Thread(target=second)
        thread.start()
        waiting.wait()
        with run_lock(tmp_path, "another"):
            order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_weights_are_kept_as_safetensors_unless_they_share_memory(tmp_path):
    from safetensors.torch import load_file

    weights = {"a": torch.arange(4.0), "b": torch.ones(2, 2).T}
    path = write_weights(weights, tmp_path, "key")
    assert path.suffix == ".safetensors"
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load_file(path).items())
    tied = torch.ones(3)
    path = write_weights({"a": tied, "b": tied}, tmp_path, "tied")
    assert path.suffix == ".pt" and torch.equal(torch.load(path)["b"], tied)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["key.safetensors", "tied.pt"]
