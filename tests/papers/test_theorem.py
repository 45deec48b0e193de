"""S0's Table 1 with GAM as its theorem says: its cells, the chosen radius, lost trainings, and how they are shown."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.pages import making
from helpers.paper_records import CURVATURE, fill, kept, record
from steppe.lab.records import write_record
from steppe.papers import store
from steppe.papers.choosing import CHOOSING
from steppe.papers.claims import Contest, contests
from steppe.papers.definitions import s0_theorem as definition
from steppe.papers.definitions.s0_theorem import HERE, NAME, RADII, STABILITY, TRENDS, chosen_by, losses, table
from steppe.papers.experiment import Experiment
from steppe.papers.registry import experiments, find
from steppe.papers.run import plan
from steppe.papers.show import lines, matrix, print_experiment
from steppe.papers.store import Results, collect, kept_lines

COLUMN = "cifar10/cnn-5"
WHOLE = table(dict.fromkeys(HERE, 0.5))
THEOREM = "gam:discrepancy=cosine,period=10,reference=weights,directions=unit"


@pytest.fixture
def chosen(monkeypatch):
    """As if held-out data had chosen 0.5 in every column."""
    known = {**experiments(), NAME: WHOLE}
    monkeypatch.setattr("helpers.paper_records.find", known.__getitem__)
    return known


def trend(name: str, results: Results, known: dict[str, Experiment]):
    return next(one for one in TRENDS if one.name == name).judge(known, results)


# Cells


def test_the_columns_are_those_with_data_at_hand():
    assert HERE == (
        "mnist/mlp-3", "mnist/cnn-3", "cifar10/mlp-3", "cifar10/cnn-5", "cifar10/cnn-14", "fashion/mlp-3",
        "fashion/cnn-5", "fashion/cnn-14",
    )  # fmt: skip


def test_cells_of_a_column_and_their_recipes():
    mine = {cell.name.removeprefix(f"{COLUMN}/"): cell for cell in WHOLE.cells if cell.name.startswith(f"{COLUMN}/")}
    found = {name: (cell.recipe.method, cell.recipe.auxiliary) for name, cell in mine.items() if cell.recipe}
    choose = {f"choose/{rho}": (f"sam:rho={rho}", "previous") for rho in RADII} | {"choose/0.05": ("sam", "previous")}
    assert found == {
        "sgd": ("plain", "previous"), "sam-0.1": ("sam:rho=0.1,normalize=false", "previous"),
        "crsam": ("crsam", "previous"), "gam": ("gam", "previous"),
        "gam-theorem": (THEOREM.replace("gam:", "gam:T=1,"), "held-out"), "gam-theorem-2": (THEOREM, "held-out"),
        "gapsam": ("gapsam", "held-out"), **choose, "sam": ("sam:rho=0.5", "previous"),
    }  # fmt: skip
    assert {cell.recipe.precision for name, cell in mine.items() if name not in _KEPT and cell.recipe} == {"tf32"}
    assert [(cell.recipe.base, cell.recipe.lr, cell.recipe.batch) for cell in mine.values() if cell.recipe] == [
        ("adam", 1e-3, 100)
    ] * len(mine)
    assert (RADII[0], RADII[-1], len(RADII), WHOLE.seeds) == (0.01, 2.0, 8, 5)


_KEPT = ("sgd", "sam-0.1", "crsam", "gam")


def test_the_form_is_the_maps():
    for T, cell in ((1, "gam-theorem"), (2, "gam-theorem-2")):
        method: Any = find(NAME).cell(f"{COLUMN}/{cell}").recipe.build_method()  # type: ignore[union-attr]
        assert (method.T, method.reference, method.discrepancy, method.directions, method.period) == (
            T, "weights", "cosine", "unit", 10,
        )  # fmt: skip
    ours, of_map = (
        find(NAME).cell(f"{COLUMN}/gam-theorem").recipe,
        find("extra/frontier").cell("vit/gam-theorem").recipe,
    )
    assert ours and of_map and (ours.method, ours.auxiliary) == (of_map.method, of_map.auxiliary)


def test_only_methods_without_hessian_products_have_float16_and_only_with_cnn_14():
    for column in HERE:
        own = {name: WHOLE.cell(f"{column}/{name}").recipe for name in ("gam-theorem", "gapsam", "sam", "choose/2.0")}
        found = {name: (recipe.precision, recipe.compile) for name, recipe in own.items() if recipe}
        large = column.endswith("cnn-14")
        half = ("fp16-fixed", True) if large else ("tf32", False)
        assert found == {"gam-theorem": ("tf32", large), "gapsam": half, "sam": half, "choose/2.0": half}


def test_the_papers_rows_are_the_runs_of_table_1():
    paper = find("s0/table1")
    for experiment, rows in ((WHOLE, _KEPT), (find(STABILITY), ("sgd", "gam"))):
        for column in HERE:
            for row in rows:
                assert experiment.cell(f"{column}/{row}").recipe == paper.cell(f"{column}/{row}").recipe


def test_only_the_cells_that_choose_hold_out_data():
    for cell in WHOLE.cells:
        assert cell.recipe is not None
        chooses = "/choose/" in cell.name
        assert (cell.recipe.hold_out, cell.seeds, cell.role == CHOOSING) == (
            (0.1, 2, True) if chooses else (0, 0, False)
        )


def test_at_least_100_trainings_are_counted():
    jobs = plan(find(STABILITY), "full", None, ["T-1,T-2,T-3,T-5"]).jobs
    assert len(jobs) == len({job.recipe.key for job in jobs}) == 4 * 8 * 4
    shared = plan(WHOLE, "full", 4, ["gam-theorem,gam-theorem-2"]).jobs  # T = 1 and 2 are trained once
    assert {job.recipe.key for job in shared} < {job.recipe.key for job in jobs} and len(shared) == 64


def test_the_papers_rows_are_not_trained_again():
    whole, rest = (plan(find(NAME), "full", missing=missing).jobs for missing in (False, True))
    ours = {job.recipe.key for job in plan(find("s0/table1"), "full").jobs}
    assert len(whole) - len({job.recipe.key for job in whole} - ours) == 8 * 4 * 5
    assert [job.name for job in rest if job.recipe.key in ours] == []
    assert len(plan(find(NAME), "full", None, ["choose"]).jobs) == 8 * 8 * 2


def test_a_run_of_another_table_is_missing_if_it_lacks_what_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "results_folder", lambda: tmp_path / "results")
    plain, measured = find("s2/table7"), find("s2/fig5")
    key = plain.recipe(plain.cell("cifar10/sgd"), "full").key
    kept(tmp_path, "s2/table7", {"cifar10/sgd": [0.95]})
    counts = [len(plan(one, "full", 1, ["cifar10/sgd"], missing=True).jobs) for one in (plain, measured)]
    assert counts == [0, 1] and plan(measured, "full", 1, ["cifar10/sgd"]).jobs[0].recipe.key == key
    entries = {"top_values": [3.0, 2.0], "trace": {"value": 9.0, "error": 0.1}}
    kept(tmp_path / "measured", "s2/fig5", {"cifar10/sgd": [0.95]}, curvature=CURVATURE, entries=entries)
    monkeypatch.setattr(store, "results_folder", lambda: tmp_path / "measured" / "results")
    assert plan(measured, "full", 1, ["cifar10/sgd"], missing=True).jobs == []


# The choice


def chose(rho: float, seed: int, accuracy: float, column: str = COLUMN) -> dict[str, Any]:
    final = {"test_accuracy": accuracy, "test_loss": 1.0}
    cell = f"{column}/choose/{rho}"
    return {"role": CHOOSING, "scale": "full", "seed": seed, "cell": cell, "status": "done", "final": final}


def test_the_radius_with_the_best_mean_of_two_seeds_is_chosen():
    means = dict(zip(RADII, (0.5, 0.6, 0.65, 0.7, 0.75, 0.75, 0.8, 0.4), strict=True))
    runs = [chose(rho, seed, mean + 0.02 * (seed - 0.5)) for rho, mean in means.items() for seed in range(2)]
    assert chosen_by(runs) == {COLUMN: 1.0}
    gone = (f"{COLUMN}/choose/1.0", 1)  # it diverged: what it had reached until then does not count
    lost = [{**run, "status": "diverged"} if (run["cell"], run["seed"]) == gone else run for run in runs]
    assert chosen_by(lost) == {COLUMN: 0.2}  # as good as 0.5, and smaller
    assert chosen_by(runs[:-1]) == {}  # a seed of the last radius is missing
    assert chosen_by([{**run, "scale": "small"} for run in runs]) == {}
    assert chosen_by([*runs, chose(0.01, 2, 1.0)]) == {COLUMN: 1.0}  # a third seed does not choose
    other = [chose(rho, seed, 1 - rho / 4, "mnist/mlp-3") for rho in RADII for seed in range(2)]
    assert chosen_by([*runs, *other]) == {COLUMN: 1.0, "mnist/mlp-3": 0.01}


def test_sam_is_there_once_its_radius_is_chosen():
    names = [{cell.name for cell in table(radii).cells} for radii in ({}, {COLUMN: 0.2})]
    assert names[1] - names[0] == {f"{COLUMN}/sam"}
    cell = table({COLUMN: 0.2}).cell(f"{COLUMN}/sam")
    assert cell.recipe and (cell.recipe.method, cell.recipe.hold_out, cell.note) == ("sam:rho=0.2", 0.0, "ρ = 0.2")


def test_the_definition_follows_the_kept_runs():
    runs = list(kept_lines("s0-table1-theorem", f'"role": "{CHOOSING}"'))
    assert chosen_by(runs) == definition.CHOSEN
    assert find(NAME).cells == table(definition.CHOSEN).cells


def test_sam_is_collected_together_with_the_runs_that_choose(tmp_path, chosen):
    runs = {f"{COLUMN}/choose/{rho}": [0.9 if rho == 0.5 else 0.8] * 2 for rho in RADII}
    fill(tmp_path, NAME, {**runs, f"{COLUMN}/sam": [0.7], "mnist/mlp-3/sam": [0.7]})
    assert collect(tmp_path, table({}), "full", tmp_path / "results") == (17, 17)  # none was chosen for mnist/mlp-3


# Lost trainings


def test_diverged_trainings_and_those_below_half_of_adam_are_lost(tmp_path):
    """Adam has 0.8 in both columns, so that 0.4 is kept and 0.399 lost."""
    adam = {"mnist/mlp-3/sgd": [0.7, 0.9], f"{COLUMN}/sgd": [0.8]}
    runs = {"mnist/mlp-3/T-3": [0.4, 0.399, 0.8, 0.1], f"{COLUMN}/T-3": [0.9, 0.9, 0.9]}
    fill(tmp_path / "runs", STABILITY, {"cifar10/mlp-3/T-3": [0.1]})  # without Adam it cannot be judged
    results = kept(tmp_path, STABILITY, {**adam, **runs})
    found = losses(find(STABILITY), results, "T-3")
    assert (found.lost, found.total, found.cells, found.fewest) == (2, 7, 1, 3)
    assert str(found) == "2 of 7 lost (mnist/mlp-3: 2 of 4)"
    write_record(record(STABILITY, f"{COLUMN}/T-3", 3, 0.9, status="diverged"), tmp_path / "runs")
    collect(tmp_path / "runs", find(STABILITY), "full", tmp_path / "results")
    found = losses(find(STABILITY), Results.read(tmp_path / "results"), "T-3")
    assert str(found) == f"3 of 8 lost (mnist/mlp-3: 2 of 4, {COLUMN}: 1 of 4)"
    assert str(losses(find(STABILITY), results, "T-5")) == "0 of 0 lost"


def everywhere(row: str, *accuracies: float) -> dict[str, list[float]]:
    return {f"{column}/{row}": list(accuracies) for column in HERE}


def test_the_statement_counts_all_trainings(tmp_path):
    runs = everywhere("sgd", 0.8)
    for T in (1, 2, 3, 5):
        runs |= everywhere(f"T-{T}", 0.8, 0.8, 0.8, 0.8)
    verdict, found = trend("none-lost", kept(tmp_path / "all", STABILITY, runs), experiments())
    assert (verdict, found.holds, found.n) == ("reproduced", True, 4)
    assert found.short(verdict) == "0 of 128 trainings lost; at full scale"
    assert found.details == "; ".join(f"T = {T}: 0 of 32 lost" for T in (1, 2, 3, 5))
    runs["fashion/cnn-14/T-5"] = [0.8, 0.8, 0.8, 0.3]
    runs |= {f"{COLUMN}/gam": [0.1, 0.8]}
    verdict, found = trend("none-lost", kept(tmp_path / "one", STABILITY, runs), experiments())
    assert (verdict, found.short(verdict)) == ("not reproduced", "1 of 128 trainings lost; at full scale")
    assert found.details.endswith(
        f"T = 5: 1 of 32 lost (fashion/cnn-14: 1 of 4); as printed: 1 of 2 lost ({COLUMN}: 1 of 2)"
    )
    part = {name: values for name, values in runs.items() if not name.endswith(("T-5", "gam"))}
    part["mnist/cnn-3/T-1"] = [0.8, 0.8, 0.8]
    verdict, found = trend("none-lost", kept(tmp_path / "part", STABILITY, part), experiments())
    said = "0 of 95 trainings lost; 9 cells not run in full; at full scale"
    assert (verdict, found.short(verdict)) == ("run at smaller scale", said)
    assert trend("none-lost", kept(tmp_path / "adam", STABILITY, everywhere("sgd", 0.8)), experiments())[0] == "not run"


# Comparisons


def test_the_forms_are_compared_with_kept_runs_of_table_1(tmp_path, chosen):
    kept(tmp_path, "s0/table1", everywhere("gam", 0.70, 0.71, 0.72) | everywhere("sgd", 0.75, 0.755, 0.77))
    runs = everywhere("gam-theorem", 0.73, 0.741, 0.752) | {f"{COLUMN}/sam": [0.72, 0.731, 0.74]}
    results = kept(tmp_path, NAME, runs)
    verdict, found = trend("theorem-printed", results, chosen)
    assert (verdict, found.holds, found.missing) == ("reproduced", True, 0)
    assert found.short(verdict) == "above in 8 of 8 comparisons; beyond doubt in 8 (n = 3); at full scale"
    assert found.details.startswith("mnist/mlp-3: +3.1 points (")
    verdict, found = trend("theorem-adam", results, chosen)
    assert found.short(verdict) == "above in 0 of 8 comparisons; beyond doubt in none (n = 3); at full scale"
    verdict, found = trend("theorem-sam", results, chosen)
    assert found.short(verdict) == "above in 1 of 1 comparisons; beyond doubt in 1 (n = 3); 7 not run; at full scale"
    assert trend("theorem-second", results, chosen)[0] == "not run"


def test_a_cell_that_is_not_chosen_yet_is_not_run(tmp_path, chosen):
    results = kept(tmp_path, NAME, everywhere("gam-theorem", 0.73, 0.741) | everywhere("sam", 0.72, 0.731))
    known = {**chosen, NAME: table({COLUMN: 0.5})}
    _, found = trend("theorem-sam", results, known)
    assert (found.missing, found.details.count("points (")) == (7, 1)
    assert trend("theorem-sam", results, {**chosen, NAME: table({})})[0] == "not run"
    with pytest.raises(Exception, match="no cell of s0/table1 'cifar10/cnn-5/sma'"):  # elsewhere it is a mistake
        contests([Contest(f"{COLUMN}/gam", f"{COLUMN}/sma")])(find("s0/table1"), results)


def test_diverged_runs_of_the_worse_cell_are_named(tmp_path, chosen):
    kept(tmp_path, "s0/table1", {f"{COLUMN}/gam": [0.70, 0.71, 0.72]})
    write_record(record("s0/table1", f"{COLUMN}/gam", 3, 0.1, status="diverged"), tmp_path / "runs")
    collect(tmp_path / "runs", find("s0/table1"), "full", tmp_path / "results")
    results = kept(tmp_path, NAME, {f"{COLUMN}/gam-theorem": [0.73, 0.741, 0.752, 0.74]})
    _, found = trend("theorem-printed", results, chosen)
    assert found.details.startswith(f"{COLUMN}: +3.1 points (") and found.details.endswith(
        "n = 3), 1 of the other diverged"
    )


# The table


def test_without_results_nothing_is_shown_as_run(capsys):
    assert matrix(lines(WHOLE, Results()), WHOLE.rows) == []
    print_experiment(WHOLE, Results())
    shown = capsys.readouterr().out
    assert f"{NAME} · {WHOLE.title}: not run" in shown and "Adam" in shown and "standard error" not in shown


def test_the_table_has_the_papers_rows_and_ours(tmp_path, chosen, capsys, monkeypatch):
    kept(tmp_path, "s0/table1", {"mnist/mlp-3/sgd": [0.97, 0.98], f"{COLUMN}/sgd": [0.68], f"{COLUMN}/gam": [0.70]})
    write_record(record("s0/table1", f"{COLUMN}/gam", 1, 0.1, status="diverged"), tmp_path / "runs")
    collect(tmp_path / "runs", find("s0/table1"), "full", tmp_path / "results")
    runs = {f"{COLUMN}/sam": [0.72, 0.74], f"{COLUMN}/gam-theorem-2": [0.75], f"{COLUMN}/choose/0.5": [0.99]}
    results = kept(tmp_path, NAME, runs)
    only = table({COLUMN: 0.5})
    grid = matrix(lines(only, results), only.rows)
    assert grid == [
        ("", "mnist/mlp-3", COLUMN),
        ("Adam", "97.50 ± 0.50 (2)", "68.00 (1)"),
        ("SAM 0.1 of the paper", "not run", "not run"),
        ("CR-SAM", "not run", "not run"),
        ("GAM, as printed", "not run", "70.00 (1), 1 diverged"),
        ("GAM, as its theorem says, T = 1", "not run", "not run"),
        ("GAM, as its theorem says, T = 2", "not run", "75.00 (1)"),
        ("GapSAM", "not run", "not run"),
        ("SAM, ρ chosen on held-out data", "not run", "73.00 ± 1.00 (2), ρ = 0.5"),
    ]
    monkeypatch.setenv("COLUMNS", "200")
    print_experiment(only, results)
    shown = capsys.readouterr().out
    assert any("SAM, ρ chosen" in line and "73.00 ± 1.00 (2), ρ = 0.5" in line for line in shown.splitlines())
    both = matrix(lines(WHOLE, results), WHOLE.rows)  # chosen, but not run, in mnist/mlp-3
    assert both[-1][1:] == ("not run, ρ = 0.5", "73.00 ± 1.00 (2), ρ = 0.5")


def test_other_tables_keep_their_rows(tmp_path):
    results = kept(tmp_path, "s0/table1", {"mnist/mlp-3/sgd": [0.97], f"{COLUMN}/sgd": [0.68]})
    rows = [row[0] for row in matrix(lines(find("s0/table1"), results))]
    assert rows == ["", "sgd", "sam-0.001", "sam-0.01", "sam-0.1", "crsam", "gam"]


# GAM's page


def test_the_section_of_gams_page_is_from_the_records(tmp_path):
    section = making("theorem").section
    nothing = section((), Results())
    assert nothing[0] == "## What the paper says, what is printed, what follows" and "**" in nothing[2]
    assert "- Trainings with GAM as printed: not run." in nothing
    assert any(line.startswith(f"| {COLUMN} | not run | not run | not run | not run") for line in nothing)
    runs = tmp_path / "runs"
    for seed, end in enumerate((0.2, 0.05)):
        made = record("s0/table1", f"{COLUMN}/gam", seed, 0.7)
        made["epochs"] = [{**made["epochs"][0], "metrics": {"gamma": [g, 0.0]}} for g in (0.0, 0.0, 0.1, end)]
        write_record(made, runs)
    fill(runs, "s0/table1", {f"{COLUMN}/sgd": [0.68]})
    collect(runs, find("s0/table1"), "full", tmp_path / "results")
    results = kept(tmp_path, STABILITY, {f"{COLUMN}/T-1": [0.72, 0.73], "mnist/mlp-3/T-1": [0.9]})
    found = section(("why",), results)
    assert found[4:7] == ["why", "", "Our runs:"]
    grew = "γ₁ still grew in the last quarter of 1 of 2 finished ones"
    assert f"- Trainings with GAM as printed: 0 of 2 lost; {grew}." in found
    assert "- Trainings with GAM as its theorem says, T = 1: 0 of 2 lost; " in "\n".join(found)
    row = f"| {COLUMN} | 68.0 (1) | 70.0 ± 0.0 (2) | 72.5 ± 0.5 (2) | not run"  # with SAM's radius once it is chosen
    assert any(line.startswith(row) for line in found)


def test_the_section_is_on_gams_page_alone_and_has_the_reasons_of_its_docstring():
    pages, title = making("methods").pages(), making("theorem").TITLE
    assert [address for address, text in pages.items() if title in text.splitlines()] == ["methods/gam.md"]
    before, _, after = pages["methods/gam.md"].partition(title)
    for beginning in making("theorem").WHY:
        assert (before.count(beginning), after.count(beginning)) == (0, 1)
    assert after.index("**What follows") < after.index("Our runs:") < after.index("## When to use it")
