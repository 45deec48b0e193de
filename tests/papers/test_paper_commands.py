"""The commands of `steppe paper`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.paper_records import CURVATURE, fill, kept
from steppe.cli.app import app
from steppe.papers.experiment import SETS
from steppe.papers.registry import experiments, find
from steppe.papers.run import plan
from steppe.support.errors import UserError


def command(*args: str):
    return CliRunner().invoke(app, ["paper", *args], env={"COLUMNS": "250"})


WRONG = {
    "shwo s0/table1": "no command 'shwo': did you mean show?",
    "show s0/tabel1": "no table or figure 's0/tabel1': did you mean s0/table1",
    "run s0/table1 --cells cnn-6": "no cell of s0/table1 'cnn-6': did you mean cnn-",
    "run s0/table1 --scale tiny": "no scale 'tiny'",
    "run s0/table1 --seeds 0": "--seeds must be at least 1, not 0",
    "run s0/table1 --seeds many": "Invalid value for '--seeds'",
    "run s0/table1 --cells gam --device tpu:9": "--device tpu:9 cannot be used",
    "run s0/table1 --cells cifar10/cnn-5": "cifar-10 is not in",
    "collect missing s0/table1": "folder missing does not exist",
    "collect . s0/table1 --scale smoke": "smoke runs are not worth keeping",
    "show s0/table1 --results missing": "folder missing does not exist",
    "figures out --name s0/table1": "no figure 's0/table1'",
}


@pytest.mark.parametrize(("typed", "said"), WRONG.items(), ids=str)
def test_mistakes_are_reported_in_one_line(typed, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    result = command(*typed.split())
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("steppe: ") and "left out" not in line]
    assert len(errors) == 1 and said in errors[0]


def test_run_resumes_collects_and_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ("run", "s0/table1", "--cells", "mnist/mlp-3/sgd,mnist/mlp-3/gam", "--scale", "smoke", "--seeds", "2")
    first = command(*args, "--together", "2", "--jobs", "1")
    assert first.exit_code == 0, first.output
    records = sorted((tmp_path / "runs" / "s0-smoke").glob("*.json"))
    assert len(records) == 4
    before = [path.stat().st_mtime_ns for path in records]
    again = command(*args)
    assert again.exit_code == 0 and "4 of 4 runs were already done" in again.stderr
    assert [path.stat().st_mtime_ns for path in records] == before
    (tmp_path / "kept").mkdir()
    put = command("collect", "runs/s0-smoke", "s0/table1", "--scale", "smoke", "--results", "kept")
    assert "4 runs, 4 of them new" in put.stdout
    shown = command("show", "s0/table1", "--results", "kept", "--scale", "smoke")
    assert shown.exit_code == 0 and "ours only, smaller scale (smoke scale)" in shown.stdout
    assert "not run: 66 more cells" in shown.stdout  # at this scale fashion/mlp-3/sgd is mnist's


@pytest.mark.parametrize("damaged", ["", '{"format": "steppe-paper/1", "cell"', "[]", '{"format": "steppe-paper/1"}'])
def test_a_damaged_computed_result_is_computed_again(damaged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smoke, into = ("--scale", "smoke", "--out", "runs"), ("--scale", "smoke", "--results", "kept")
    assert command("run", "s1/fig3", *smoke).exit_code == 0
    path = tmp_path / "runs" / "s1-fig3-gsam-smoke-seed0.json"
    values = json.loads(path.read_text("utf-8"))["values"]
    path.write_text(damaged, "utf-8")
    said = "s1-fig3-gsam-smoke-seed0.json is not a result of the format steppe-paper/1 and is skipped"
    put = command("collect", "runs", "s1/fig3", *into)
    assert put.exit_code == 0 and said in put.stderr and "2 runs, 2 of them new" in put.stdout
    again = command("run", "s1/fig3", *smoke)
    assert again.exit_code == 0 and said in again.stderr
    assert json.loads(path.read_text("utf-8"))["values"] == values
    assert "3 runs, 1 of them new" in command("collect", "runs", "s1/fig3", *into).stdout


def test_figures_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    result = command("figures", str(tmp_path / "figures"), "--name", "s1/fig3")
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("steppe: drawing figures needs matplotlib: pip install matplotlib")
    assert result.stderr.count("\n") == 1


def test_list_and_show_print_not_run(tmp_path):
    listed = command("list", "--results", str(tmp_path))
    assert listed.exit_code == 0 and listed.stdout.count("not run") == len(experiments())
    cells = command("list", "s0/fig3", "--results", str(tmp_path))
    assert "gam:period=10,lr_times_period=true" in cells.stdout
    shown = command("show", "s0/table1", "--results", str(tmp_path)).stdout
    assert "69.40 ± 0.15" in shown and "GAM is above SGD in every column: not run" in shown


@pytest.mark.slow
def test_one_scale_alone_is_shown(tmp_path):
    """Neither numbers nor statements of another scale are printed."""
    cells = {"adam": [0.5, 0.52, 0.51], "adam-40": [0.53, 0.54, 0.52], "sam": [0.6, 0.61, 0.64]}
    kept(tmp_path, "extra/equal-cost", cells, "small", curvature=CURVATURE)
    kept(tmp_path, "s0/fig6", {"T/2": [0.7, 0.71], "T/4": [0.1, 0.1]}, "small")

    def shown(name: str, scale: str) -> str:
        return command("show", name, "--results", str(tmp_path / "results"), "--scale", scale).stdout

    table, unstable = "(simultaneous", "GAM can become unstable for large T: it holds (n = 2); at 1/5"
    assert table in shown("extra/equal-cost", "small") and table not in shown("extra/equal-cost", "full")
    assert "All methods at equal cost: CNN-5 on CIFAR-10: not run at full scale" in shown("extra/equal-cost", "full")
    assert unstable in shown("s0/fig6", "small") and unstable not in shown("s0/fig6", "full")
    assert "s0/fig6 · Figure 6: T, batch size and ε: not run at full scale" in shown("s0/fig6", "full")


def test_cells_without_data_are_left_out_and_named(tmp_path, monkeypatch):
    """Where some data is there, the rest of a table runs."""
    from steppe.cli.commands.paper import run as commands

    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    planned = plan(find("s0/table1"), "smoke", 1, ["mnist/mlp-3/sgd"])
    mixed = plan(find("s0/table1"), "full", 1, ["mnist/mlp-3/sgd"])
    assert commands._with_data(planned, None).cells == planned.cells
    with pytest.raises(UserError, match="mnist is not in"):
        commands._with_data(mixed, None)
    assert mixed.jobs[0].recipe.data == f"{SETS}:mnist"


def test_runs_that_are_not_collected_are_shown_and_marked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept(tmp_path / "old", "s0/table1", {"cifar10/cnn-5/gam": [0.690, 0.692]})
    fill(tmp_path / "runs" / "s0", "s0/table1", {"cifar10/cnn-5/gam": [0.5, 0.5, 0.694]})
    args = ("show", "s0/table1", "--results", "old/results")
    shown = command(*args).stdout
    row = next(line for line in shown.splitlines() if "cifar10/cnn-5/gam" in line)
    assert "69.20 (68.70 to 69.70)" in row and "reproduced (1 not collected)" in row
    advice = "1 run is not collected yet: steppe paper collect runs/s0 s0/table1"
    assert advice in shown.splitlines()
    alone = command(*args, "--runs", "nowhere").stdout
    assert "not collected" not in alone and "69.10 (67.83 to 70.37)" in alone
    assert command("collect", "runs/s0", "s0/table1", "--results", "old/results").exit_code == 0
    assert "not collected" not in command(*args).stdout


def test_a_folder_without_kept_results_says_where_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("steppe.papers.store.results_folder", lambda: Path("results"))
    shown = command("show", "s0/table1")
    assert shown.exit_code == 0 and "not run" in shown.stdout
    assert shown.stderr.startswith("no kept results found: ours are in results/ of the source checkout")
    assert shown.stderr.count("\n") == 1
    Path("results").mkdir()
    assert command("show", "s0/table1", "--results", "results").stderr == ""
