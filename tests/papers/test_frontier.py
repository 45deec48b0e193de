"""The map: which cells there are, how the radius is chosen, what a method is compared with."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("scipy")

from steppe.lab.records import new_record, write_record
from steppe.papers.choosing import CHOOSING
from steppe.papers.definitions import frontier as definition
from steppe.papers.definitions.frontier import RADII, REGIMES, chosen_by, frontier
from steppe.papers.frontier_table import length_for, table_of
from steppe.papers.registry import find
from steppe.papers.run import plan
from steppe.papers.store import Results, as_record, collect, compact, kept_lines

WHOLE = frontier({regime.name: 0.1 for regime in REGIMES})
DIGITS = next(regime for regime in REGIMES if regime.name == "digits-60")


def line(rho: float, seed: int, accuracy: float | None, regime: str = "digits-60", **more: Any) -> dict[str, Any]:
    final = {"test_accuracy": accuracy, "test_loss": 1.0}
    status = "diverged" if accuracy is None else "done"
    cell = f"{regime}/choose/{rho}"
    return {"role": CHOOSING, "scale": "full", "seed": seed, "cell": cell, "status": status, "final": final, **more}


def test_the_radius_is_the_best_on_held_out_data():
    means = dict(zip(RADII, (0.5, 0.6, 0.7, 0.8, 0.8, 0.9, 0.3), strict=True))
    lines = [line(rho, seed, mean + 0.01 * (seed - 1)) for rho, mean in means.items() for seed in range(3)]
    assert chosen_by(lines) == {"digits-60": 1.0}
    lost = [one if (one["cell"], one["seed"]) != ("digits-60/choose/1.0", 2) else line(1.0, 2, None) for one in lines]
    assert chosen_by(lost) == {"digits-60": 0.2}  # as good as 0.5, and smaller
    assert chosen_by(lines[1:]) == {}  # a run is missing
    assert chosen_by([{**one, "scale": "small"} for one in lines]) == {}
    more = [line(0.02, 3, 1.0)]  # a seed beyond those that choose
    assert chosen_by(lines + more) == {"digits-60": 1.0}


def test_a_language_model_is_chosen_by_its_loss():
    lines = [
        {**line(rho, seed, 0.5, "language"), "final": {"test_perplexity": 9.0, "test_loss": abs(rho - 0.2) + 1}}
        for rho in RADII
        for seed in range(3)
    ]
    assert chosen_by(lines) == {"language": 0.2}


def test_cells_at_the_chosen_radius_are_there_once_it_is_chosen():
    without, with_it = frontier({}), frontier({"digits-60": 0.1})
    more = {cell.name for cell in with_it.cells} - {cell.name for cell in without.cells}
    names = "sam sam-2 sam-4 sam-averaged asam gsam late-sam fsam crsam looksam"
    digits = "every-5 gnp wsam gnam-fast tracesam"
    assert more == {f"digits-60/{name}" for name in f"{names} {digits}".split()}
    cifar = {cell.name for cell in frontier({"cifar-40": 0.1}).cells} - {cell.name for cell in without.cells}
    assert cifar == {f"cifar-40/{name}" for name in names.split()}
    methods = {name: with_it.cell(f"digits-60/{name}").recipe for name in ("sam", "sam-4", "asam", "late-sam")}
    found = {name: (recipe.method, recipe.epochs) for name, recipe in methods.items() if recipe}
    assert found == {
        "sam": ("sam:rho=0.1", 40), "sam-4": ("sam:rho=0.1", 160), "asam": ("asam:rho=1", 40),
        "late-sam": ("late:method=(sam:rho=0.1),start=0.875", 40),
    }  # fmt: skip
    bases = [cell for cell in without.cells if cell.name.startswith("digits-60/base")]
    assert [(cell.recipe.epochs, cell.role) for cell in bases if cell.recipe] == [
        (40, "base"), (80, "equal-cost"), (160, "equal-cost"), (320, "equal-cost"),
    ]  # fmt: skip


def test_only_the_choosing_cells_hold_out_data():
    for cell in WHOLE.cells:
        assert cell.recipe is not None
        assert bool(cell.recipe.hold_out) is (cell.role == CHOOSING) is ("/choose/" in cell.name)


def test_the_definition_follows_the_kept_runs():
    lines = list(kept_lines("extra-frontier", f'"role": "{CHOOSING}"'))
    assert all(one["role"] == CHOOSING for one in lines)
    assert chosen_by(lines) == definition.CHOSEN
    assert find("extra/frontier").cells == frontier(definition.CHOSEN).cells


def test_each_regime_has_its_number_of_seeds():
    jobs = plan(
        find("extra/frontier"),
        "full",
        cells=["digits-60/base-1", "digits-60/choose/0.1", "vit/base-1", "vit/choose/0.1"],
    ).jobs
    seeds = {name: [job.recipe.seed for job in jobs if job.name == name] for name in {job.name for job in jobs}}
    assert seeds == {
        "digits-60/base-1": list(range(10)), "digits-60/choose/0.1": [0, 1, 2], "vit/base-1": [0, 1, 2],
        "vit/choose/0.1": [0],
    }  # fmt: skip
    asked = plan(find("extra/frontier"), "full", 4, ["vit/base-1"]).jobs
    assert [job.recipe.seed for job in asked] == [0, 1, 2, 3]


def test_a_new_machine_runs_only_what_is_not_kept():
    experiment, cells = find("extra/frontier"), ["digits-60/base-1", "digits-60/choose"]
    whole, rest = (plan(experiment, "full", None, cells, missing).jobs for missing in (False, True))
    kept = {one["key"] for one in kept_lines("extra-frontier")}
    assert len(whole) == 10 + 7 * 3
    assert [job.recipe.key for job in rest] == [job.recipe.key for job in whole if job.recipe.key not in kept]
    assert len(rest) < len(whole)
    smoke = plan(experiment, "smoke", None, cells, missing=True).jobs  # another scale is another run
    assert len(smoke) == len(plan(experiment, "smoke", None, cells).jobs)


# The table


def record(cell: str, seed: int, accuracies: list[float], gradients: int, averaged: list[float] = ()) -> Any:  # type: ignore[assignment]
    """A run of a cell with these accuracies, epoch by epoch."""
    found = WHOLE.cell(f"digits-60/{cell}")
    made: Any = new_record(WHOLE.recipe(found, "full", seed), found.role, found.name)
    count = len(accuracies)
    made["epochs"] = [
        {"epoch": e + 1, "train_loss": 1.0, "test_loss": 1.0, "test_accuracy": accuracy, "seconds": 1.0 * e,
         "gradients": gradients * (e + 1) // count, "metrics": {},
         **({"averaged": {"test_accuracy": averaged[e], "test_loss": 1.0}} if averaged else {})}
        for e, accuracy in enumerate(accuracies)
    ]  # fmt: skip
    made |= {"parameters": 1, "train_examples": 100, "test_examples": 100, "status": "done", "finished": "now"}
    made["final"] = {name: made["epochs"][-1][name] for name in ("test_accuracy", "test_loss", "seconds", "gradients")}
    made["curvature"] = {"rounded": {"value": 0.5, "bits": 4}}
    if averaged:
        made["averaged"] = made["epochs"][-1]["averaged"]
    return made


def results(tmp_path: Any, rows: dict[str, tuple[list[float], int, list[float]]]) -> Results:
    for cell, (accuracies, gradients, averaged) in rows.items():
        for seed, bump in enumerate((0.0, 0.002, 0.001, 0.003)):
            mine = [a + bump * (0.9 if cell == "sam" else 1) for a in accuracies]
            write_record(record(cell, seed, mine, gradients, [a + bump for a in averaged]), tmp_path)
    collect(tmp_path, WHOLE, "full", tmp_path / "kept")
    return Results.read(tmp_path / "kept")


TEN = [0.70, 0.75, 0.80, 0.85, 0.88, 0.86, 0.84, 0.82, 0.80, 0.78]  # best when half trained


def test_a_method_is_compared_with_the_hardest_of_all_forms_of_the_base(tmp_path):
    rows = {
        "base-1": (TEN, 100, [a + 0.01 for a in TEN]),
        "base-2": ([a - 0.05 for a in TEN], 200, []),
        "base-4": ([0.99] * 10, 400, []),
        "sam": ([0.90] * 10, 200, []),
        "crsam": ([0.90] * 10, 300, []),
        "looksam": ([0.90] * 10, 110, []),
    }
    table = table_of(DIGITS, results(tmp_path, rows), WHOLE)
    assert [row.cell for row in table.rows] == [
        "base-1", "base-1-ema", "base-2", "base-4", "sam", "crsam", "looksam",
    ]  # fmt: skip
    gains = {row.cell: row.gain for row in table.methods}
    # Up to twice the cost the longest base counts when it is stopped in time: 0.99 at half of its 400 gradients.
    assert gains["sam"] is not None and gains["sam"].against == "SGD, 4x longer, stopped early"
    assert gains["sam"].mean.value == pytest.approx(-0.09 - 0.1 * 0.0015, abs=1e-9)
    assert gains["crsam"] is not None and gains["crsam"].against.startswith("SGD, 4x longer")
    assert {one.family for one in gains.values() if one} == {3}
    assert (table.best_bases[0].length, table.best_bases[0].label) == (1, "SGD, 4x longer, stopped early")


def test_the_average_of_the_base_stopped_early_is_its_best_form(tmp_path):
    rows = {
        "base-1": (TEN, 100, [a + 0.01 for a in TEN]), "base-2": ([0.5] * 10, 200, []), "sam": ([0.90] * 10, 200, []),
    }  # fmt: skip
    table = table_of(DIGITS, results(tmp_path, rows), WHOLE)
    sam = table.row("sam")
    assert sam is not None and sam.gain is not None and sam.cost == 2.0
    assert sam.gain.against == "SGD, EMA 0.99, stopped early"
    assert sam.gain.mean.value == pytest.approx(0.90 - 0.89 - 0.1 * 0.0015, abs=1e-9)
    assert table.best_base is not None and table.best_base.mean.value == pytest.approx(0.89 + 0.0015)


def test_runs_at_the_radius_are_collected_together_with_those_that_choose_it(tmp_path):
    """Once they needed a second `steppe paper collect`: the cells were not yet there in the first."""
    for rho in RADII:
        for seed in range(3):
            write_record(record(f"choose/{rho}", seed, [0.9 if rho == 0.1 else 0.8] * 10, 200), tmp_path)
    write_record(record("sam", 0, [0.9] * 10, 200), tmp_path)
    assert collect(tmp_path, frontier({}), "full", tmp_path / "kept") == (22, 22)


def test_without_a_base_of_its_cost_there_is_no_gain(tmp_path):
    table = table_of(DIGITS, results(tmp_path, {"base-1": (TEN, 100, []), "sam": (TEN, 200, [])}), WHOLE)
    (sam,) = table.methods
    assert sam.gain is None and sam.length == 2


def test_lengths_that_methods_are_compared_with():
    assert [length_for(cost) for cost in (1.0, 1.1, 1.125, 1.2, 2.1, 2.2, 3, 6, 20)] == [1, 1, 1, 2, 2, 2, 4, 8, 8]


def test_ten_epochs_of_a_run_are_kept_and_come_back(tmp_path):
    made = record("base-1", 0, [k / 40 for k in range(1, 41)], 880)
    kept = compact(made, "digits-60/base-1", "full", stops=10)
    assert kept["epochs"]["epoch"] == [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    back = as_record(kept, label="SGD")
    assert [epoch["test_accuracy"] for epoch in back["epochs"]] == pytest.approx([k / 10 for k in range(1, 11)])
    assert back["recipe"]["epochs"] == 40 and back["recipe"]["clip"] == 0.0  # defaults are filled in
    assert as_record(compact(made, "", ""))["epochs"] == []  # all epochs, without their numbers: for figures only
