"""ImageNet's other test sets, from a run through what is kept to the table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.paper_records import fill, kept, record
from helpers.photographs import World
from steppe.cli.app import app
from steppe.lab.data.imagenet_sets import OF_ALL, OTHER_SETS
from steppe.lab.records import write_record
from steppe.lab.runner.jobs import Place
from steppe.lab.training.batches import cached_data
from steppe.papers import sets
from steppe.papers.imagenet_evaluation import OtherSets
from steppe.papers.registry import experiments, find
from steppe.papers.run import plan, run
from steppe.papers.show import lines, matrix
from steppe.papers.store import Results, collect

REAL, V2, R, C = (other.metric for other in OTHER_SETS)


@pytest.fixture
def smoke_world(tmp_path, monkeypatch):
    """Smoke runs of ImageNet on photographs with all four sets beside them."""
    world = World(tmp_path / "data", 4)
    world.real({0: []})
    world.v2({0: 1})
    world.r({1: [1], 2: [2, 0]})
    monkeypatch.setattr(sets, "_written", lambda: world.imagenet)
    monkeypatch.chdir(tmp_path)
    cached_data.cache_clear()
    yield world
    cached_data.cache_clear()


def command(*args: str):
    result = CliRunner().invoke(app, ["paper", *args], env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.slow
def test_run_collect_and_show(smoke_world, tmp_path):
    smoke_world.c()
    args = ("--scale", "smoke", "--cells", "resnet-50/sam", "--seeds", "1", "--jobs", "1")
    ran = command("run", "s1/table1", *args)
    assert "not tested on" not in ran.stderr and "resnet-50/sam, seed 0: ImageNet-v2:" in ran.stderr
    files = sorted((tmp_path / "runs" / "s1-table1-smoke").glob("*.json"))
    records = [json.loads(file.read_text("utf-8")) for file in files]
    assert [{m: r["curvature"][m]["images"] for m in (REAL, V2, R, C)} for r in records] == [
        {REAL: 3, V2: 4, R: 3, C: 300}
    ]
    Path("kept").mkdir()
    command("collect", "runs/s1-table1-smoke", "s1/table1", "--scale", "smoke", "--results", "kept")
    shown = command("show", "s1/table1", "--results", "kept", "--scale", "smoke").stdout
    for name, metric in zip(("Real", "v2", "R", "C"), (REAL, V2, R, C), strict=True):
        line = next(line for line in shown.splitlines() if f"resnet-50/sam (ImageNet-{name})" in line)
        mean = records[0]["curvature"][metric]["value"]
        assert line.split(f"(ImageNet-{name})")[1].split()[0] == f"{100 * mean:.2f}"
    again = command("run", "s1/table1", *args)
    assert "1 of 1 runs were already done" in again.stderr


def test_missing_and_damaged_sets_are_reported_before_training(smoke_world, tmp_path):
    shutil.rmtree(smoke_world.root / "imagenet-r")
    args = ("run", "s1/table1", "--scale", "smoke", "--cells", "resnet-50/sam", "--jobs", "1")
    ran = command(*args).stderr
    names = "ImageNet-R (imagenet-r), ImageNet-C (imagenet-c)"
    note = f"note: not tested on these sets, which are not in {smoke_world.root}: {names}"
    assert note in ran.splitlines() and ran.index(note) < ran.index("ImageNet-v2:")
    (smoke_world.root / "real.json").write_text("[", "utf-8")
    failed = CliRunner().invoke(app, ["paper", *args, "--out", "other"])
    assert failed.exit_code == 2 and "real.json is truncated or not JSON" in failed.stderr.splitlines()[-1]
    assert not list(Path("other").glob("*"))


FOUND = {REAL: {"value": 0.83, "images": 46837}, V2: {"value": 0.644, "images": 10000}, R: {"value": 0.35},
         OF_ALL: {"value": 0.238},
         C: {"value": 0.4, "images": 3750000}}  # fmt: skip


def test_each_number_is_shown_beside_the_papers(tmp_path):
    results = kept(tmp_path, "s1/table1", {"resnet-50/sam": [0.76, 0.77], "resnet-101/gsam": [0.78]}, curvature=FOUND)
    rows = {line.texts()[0]: line.texts()[2:5] for line in lines(find("s1/table1"), results) if line.has_run}
    assert rows["resnet-50/sam (ImageNet-Real)"] == ("83.30", "83.00 (no interval)", "2")
    assert rows["resnet-50/sam (ImageNet-v2)"] == ("64.40", "64.40 (no interval)", "2")
    assert rows["resnet-50/sam (ImageNet-R, of all classes)"] == ("23.80", "23.80 (no interval)", "2")
    assert rows["resnet-50/sam (ImageNet-C)"] == ("46.50", "40.00 (no interval)", "2")
    assert rows["resnet-50/sam"][0] == "76.90"
    assert rows["resnet-50/sam (ImageNet-R)"] == ("", "35.00 (no interval)", "2")
    head, *body = matrix(lines(find("s1/table1"), results))
    sam = dict(zip(head, next(row for row in body if row[0] == "sam"), strict=True))
    assert sam["resnet-50"] == "76.50 ± 0.50 (2) / 76.90"
    assert sam["resnet-50 (ImageNet-R, of all classes)"].endswith("/ 23.80")
    assert sam["resnet-101 (ImageNet-C)"] == "not run / 51.30"


def test_runs_of_other_tables_count_for_what_they_have(tmp_path):
    """Table 5 trains Table 1's ViT-B/32: its accuracy on ImageNet is a number of Table 1 too."""
    fill(tmp_path / "runs", "s1/table5", {"gsam-300": [0.76]})
    collect(tmp_path / "runs", find("s1/table5"), "full", tmp_path / "results")
    group = Results.read(tmp_path / "results").of(find("s1/table1"), "vit-b-32/gsam")
    assert group.finished("test_accuracy") == {0: 0.76} and group.finished(V2) == {}
    write_record(record("s1/table1", "vit-b-32/gsam", 0, 0.77, curvature=FOUND), tmp_path / "own")
    collect(tmp_path / "own", find("s1/table1"), "full", tmp_path / "results")
    group = Results.read(tmp_path / "results").of(find("s1/table1"), "vit-b-32/gsam")
    assert group.finished("test_accuracy") == {0: 0.77} and group.finished(V2) == {0: 0.644}  # its own come first


def test_a_run_without_the_other_sets_counts_as_done(tmp_path, monkeypatch):
    """Nobody has to train again because a set is missing."""
    world = World(tmp_path / "data", 4)
    monkeypatch.setattr(sets, "_written", lambda: world.imagenet)
    cached_data.cache_clear()
    table = find("s1/table1")
    planned, place = (
        plan(table, "smoke", 1, ["resnet-50/vanilla"]),
        Place(tmp_path, measuring=table.measuring_at("smoke")),
    )
    run(planned, place)
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text("utf-8"))["curvature"] is None
    before = file.stat().st_mtime_ns
    run(planned, place)
    assert file.stat().st_mtime_ns == before
    cached_data.cache_clear()


def test_only_table_1_is_tested_on_them():
    assert [name for name, one in experiments().items() if isinstance(one.measuring, OtherSets)] == ["s1/table1"]


def test_smoke_data_has_nothing_of_others_beside_it():
    """It is in a folder for temporary files: whatever lies there is not looked at."""
    assert [path.name for path in sets._written().parent.iterdir()] == ["imagenet"]
