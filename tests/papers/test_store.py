"""Which results are kept, where they are, and how they are found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.paper_records import CURVATURE, fill, kept, record
from steppe.lab.records import write_record
from steppe.lab.runner.jobs import Place
from steppe.papers import store
from steppe.papers.registry import find
from steppe.papers.run import plan, run
from steppe.papers.store import Results, collect, results_folder
from steppe.support.errors import UserError

TABLE = "s0/table1"
CELL = "cifar10/cnn-5/gam"


def test_results_are_in_the_checkout_or_in_the_current_folder(tmp_path, monkeypatch):
    root = Path(__file__).parents[2]
    assert results_folder() == root / "results"
    monkeypatch.setattr(store, "_PACKAGE", tmp_path / "site-packages" / "steppe")
    assert results_folder() == Path("results")


def test_nothing_is_written_into_the_package(tmp_path):
    fill(tmp_path, TABLE, {CELL: [0.7]})
    inside = Path(store.__file__).parent / "results"
    with pytest.raises(UserError, match="is inside the package: choose another folder for results"):
        collect(tmp_path, find(TABLE), "full", inside)
    assert not inside.exists()


def test_runs_that_are_not_collected_are_found_and_marked(tmp_path):
    results = kept(tmp_path, TABLE, {CELL: [0.70, 0.71]})
    fill(tmp_path / "runs" / "s0", TABLE, {CELL: [0.1, 0.1, 0.72], "cifar10/cnn-5/sgd": [0.66]})
    (tmp_path / "runs" / "s0" / "other.json").write_text("{}")
    both = results.with_uncollected(tmp_path / "runs")
    group = both.of(find(TABLE), CELL)
    assert group.finished("test_accuracy") == {0: 0.70, 1: 0.71, 2: 0.72}  # a kept run comes first
    assert [r.get("uncollected") for r in group.records] == [None, None, str(tmp_path / "runs" / "s0")]
    assert both.of(find("s0/fig3"), "sgd").finished("test_accuracy") == {0: 0.66}
    assert results.of(find(TABLE), CELL).finished("test_accuracy") == {0: 0.70, 1: 0.71}
    assert results.with_uncollected(tmp_path / "nowhere").by_file == results.by_file


def test_computed_results_that_are_not_collected_are_found(tmp_path):
    run(plan(find("s1/fig3"), "smoke"), Place(tmp_path / "runs" / "s1-fig3-smoke"))
    found = Results().with_uncollected(tmp_path / "runs")
    ends = {cell.name: found.of(find("s1/fig3"), cell, "smoke").records for cell in find("s1/fig3").cells}
    assert [len(records) for records in ends.values()] == [1, 1, 1]
    assert ends["gsam"][0]["values"]["end"] and ends["gsam"][0]["uncollected"].endswith("s1-fig3-smoke")


def test_collect_merges_folders_and_keeps_each_run_once(tmp_path):
    one, two, into = tmp_path / "one", tmp_path / "two", tmp_path / "results"
    fill(one, TABLE, {CELL: [0.69, 0.70]})
    fill(two, TABLE, {CELL: [0.69, 0.70, 0.71], "cifar10/cnn-5/sgd": [0.66]})
    table = find(TABLE)
    assert collect(one, table, "full", into) == (2, 2)
    assert collect(two, table, "full", into) == (4, 2)
    text = (into / "s0-table1.jsonl").read_text("utf-8")
    assert collect(one, table, "full", into) == (4, 0)
    assert (into / "s0-table1.jsonl").read_text("utf-8") == text  # nothing changes, not even the order
    assert [p.name for p in into.iterdir()] == ["s0-table1.jsonl"]  # and nothing is left beside it
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["cell"].split("/")[-1], line["seed"]) for line in lines] == [
        ("sgd", 0),
        *(("gam", i) for i in range(3)),
    ]
    assert all(len(line) < 2000 for line in text.splitlines())


def test_a_later_run_without_measurements_does_not_replace_them(tmp_path):
    runs, into = tmp_path / "runs", tmp_path / "results"
    for accuracy, curvature in ((0.7, CURVATURE), (0.71, None), (0.72, CURVATURE)):
        write_record(record(TABLE, CELL, 0, accuracy, curvature=curvature), runs)
        assert collect(runs, find(TABLE), "full", into)[0] == 1
        line = json.loads((into / "s0-table1.jsonl").read_text("utf-8"))
        assert line["final"]["test_accuracy"] == {0.7: 0.7, 0.71: 0.7, 0.72: 0.72}[accuracy]
        assert line["curvature"]


def test_the_kept_part_of_a_record(tmp_path):
    runs = tmp_path / "runs"
    one = record(TABLE, CELL, 4, 0.7, seconds=8.0, metrics={"gamma": [0.2, 1 / 3], "slope": [1.0, 2.0]})
    write_record(one, runs)
    collect(runs, find(TABLE), "full", tmp_path)
    line = json.loads((tmp_path / "s0-table1.jsonl").read_text("utf-8"))
    assert (line["key"], line["seed"], line["scale"], line["status"]) == (one["key"], 4, "full", "done")
    assert line["epochs"]["test_accuracy"] == [0.35, 0.7]
    assert line["metrics"] == {"gamma": [[0.2, 0.33333], [0.2, 0.33333]]}
    assert line["final"]["seconds"] == 8.0
    assert line["final"]["images_per_second"] == 2 * 1000 / 8.0
    assert line["recipe"]["method"] == "gam" and "momentum" not in line["recipe"]
    assert line["environment"] == one["environment"]


def test_unfinished_and_foreign_runs_are_not_collected(tmp_path):
    runs = tmp_path / "runs"
    write_record(record(TABLE, CELL, 0, 0.7) | {"status": "running"}, runs)
    write_record(record("s0/fig6", "batch/50", 0, 0.7), runs)
    write_record(record(TABLE, CELL, 1, 0.7, scale="small"), runs)
    assert collect(runs, find(TABLE), "full", tmp_path / "r") == (0, 0)
    assert not list((tmp_path / "r").iterdir())
    assert collect(runs, find(TABLE), "small", tmp_path / "r") == (1, 1)


def test_a_damaged_results_file_is_named(tmp_path):
    (tmp_path / "s0-table1.jsonl").write_text('{"format": "other"}\n', "utf-8")
    with pytest.raises(UserError, match=r"s0-table1\.jsonl, line 1, is not a result"):
        Results.read(tmp_path)


def test_figures_find_the_runs_of_tables(tmp_path):
    """γ every step on CIFAR-10 with CNN-5 is Table 1's cell: nobody has to run it twice."""
    results = kept(tmp_path, TABLE, {CELL: [0.7, 0.71]})
    assert results.of(find("s0/fig3"), "period-1").finished("test_accuracy") == {0: 0.7, 1: 0.71}
    assert results.of(find("s0/fig6"), "T/2").finished("test_accuracy") == {0: 0.7, 1: 0.71}
    assert results.of(find("s0/fig3"), "period-2").records == []
    assert results.best(find("s0/fig3"), "period-2")[0] == ""


def test_runs_without_the_measurements_do_not_count(tmp_path):
    results = kept(tmp_path, "s2/table7", {"cifar10/sgd": [0.95]})
    assert len(results.of(find("s2/table1"), "cifar10/resnet-18/basic/sgd").records) == 1
    assert results.of(find("s2/fig3"), "cifar10/sgd").records == []
    assert results.of(find("s2/fig5"), "cifar10/sgd").records == []


def test_a_folder_of_another_table_is_refused_where_measurements_are_wanted(tmp_path):
    experiment = find("s2/fig5")
    recipe = experiment.recipe(experiment.cell("cifar10/sgd"), "smoke")
    plain = find("s2/table7")
    assert plain.recipe(plain.cell("cifar10/sgd"), "smoke") == recipe
    run(plan(plain, "smoke", 1, ["cifar10/sgd"]), Place(tmp_path))
    place = Place(tmp_path, measuring=experiment.measuring_at("smoke"))
    with pytest.raises(UserError, match="lacks measurements: choose another --out"):
        run(plan(experiment, "smoke", 1, ["cifar10/sgd"]), place)
