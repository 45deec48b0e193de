"""What is kept, how it is looked up, and which verdicts follow from it."""

from __future__ import annotations

import json
import math
import sys

import pytest
from typer.testing import CliRunner

from helpers.paper_records import CURVATURE, fill, kept, record
from steppe.cli.app import app
from steppe.lab.records import write_record
from steppe.lab.runner.local import Place
from steppe.papers.claims import Claim, Finding, falls_along, judge
from steppe.papers.registry import claims, experiments, find, trends
from steppe.papers.run import plan, run
from steppe.papers.store import Results, collect
from steppe.support.errors import UserError

TABLE = "s0/table1"
CELL = "cifar10/cnn-5/gam"


def judged(results: Results, cell: str = CELL, experiment: str = TABLE):
    claim = next(c for c in claims() if (c.experiment, c.cell) == (experiment, cell))
    return judge(claim, experiments(), results)


def trend(name: str, results: Results):
    found = next(t for t in trends() if t.name == name)
    return found.judge(experiments(), results)


# Keeping


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


def test_a_run_again_without_its_measurements_does_not_take_their_place(tmp_path):
    runs, into = tmp_path / "runs", tmp_path / "results"
    for accuracy, curvature in ((0.7, CURVATURE), (0.71, None), (0.72, CURVATURE)):
        write_record(record(TABLE, CELL, 0, accuracy, curvature=curvature), runs)
        assert collect(runs, find(TABLE), "full", into)[0] == 1
        line = json.loads((into / "s0-table1.jsonl").read_text("utf-8"))
        assert line["final"]["test_accuracy"] == {0.7: 0.7, 0.71: 0.7, 0.72: 0.72}[accuracy]
        assert line["curvature"]


def test_what_is_kept(tmp_path):
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


def test_unfinished_and_foreign_runs_are_left(tmp_path):
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


# Numbers


def test_within_two_combined_errors_is_reproduced(tmp_path):
    """Ours .690, .692, .694: mean .692, standard error .002/√3; the paper's .69396 ± .00154."""
    found = judged(kept(tmp_path, TABLE, {CELL: [0.690, 0.692, 0.694]}))
    error = 0.002 / math.sqrt(3)
    assert found.n == 3 and found.ours is not None and found.ours.error == pytest.approx(error)
    assert found.apart == pytest.approx((0.692 - 0.69396) / math.hypot(error, 0.00154))
    assert found.verdict == "reproduced"


def test_further_apart_is_not(tmp_path):
    found = judged(kept(tmp_path, TABLE, {CELL: [0.700, 0.702, 0.704]}))
    assert found.verdict == "not reproduced" and found.apart is not None and found.apart > 4


def test_verdicts_that_claim_less(tmp_path):
    few = judged(kept(tmp_path / "few", TABLE, {CELL: [0.690, 0.692]}))
    assert (few.verdict, few.apart, few.said) == ("run at smaller scale", None, "n = 2, too few to tell")
    small = judged(kept(tmp_path / "small", TABLE, {CELL: [0.690, 0.692, 0.694]}, scale="small"))
    assert (small.verdict, small.scale) == ("run at smaller scale", "small")
    assert judged(Results()).verdict == "not run"
    lost = judged(kept(tmp_path / "lost", TABLE, {CELL: [0.7, 0.7, 0.7]}, status="diverged"))
    assert (lost.verdict, lost.said) == ("not reproduced", "3 of 3 runs diverged")


def test_without_any_spread_only_the_same_number_is_the_same(tmp_path):
    cell = "imagenet/resnet-50/gam"  # the paper gives no spread
    assert judged(kept(tmp_path / "same", TABLE, {cell: [0.65924] * 3}), cell).apart == 0
    below = judged(kept(tmp_path / "below", TABLE, {cell: [0.659] * 3}), cell)
    assert (below.apart, below.verdict) == (-math.inf, "not reproduced")


def test_a_paper_without_spread_counts_ours_alone(tmp_path):
    results = kept(tmp_path, "s3/table2", {"cifar10/sgd": [0.937, 0.938, 0.939]})
    found = judged(results, "cifar10/sgd", "s3/table2")
    assert found.apart == pytest.approx(0, abs=1e-9) and found.said == "the paper gives no spread"
    assert found.verdict == "reproduced"


def test_claims_of_other_test_sets_are_not_run_when_only_imagenet_was():
    claim = Claim("s1/table1", "resnet-50/sam", 0.644, metric="imagenet_v2_accuracy")
    assert judge(claim, experiments(), Results()).verdict == "not run"


# Words

COLUMNS = ("mnist/mlp-3", "mnist/cnn-3", "cifar10/mlp-3", "cifar10/cnn-5", "cifar10/cnn-14")


def columns(row: str, *accuracies: float, only: tuple[str, ...] = COLUMNS) -> dict[str, list[float]]:
    return {f"{column}/{row}": list(accuracies) for column in only}


def test_words_in_short_and_in_full():
    found = Finding(False, "λ falls in 1 of 2; a; b", 3, part="λ falls in 1 of 2")
    assert found.short("not reproduced") == "not reproduced (n = 3): λ falls in 1 of 2"
    assert found.words("not reproduced") == "not reproduced (n = 3). λ falls in 1 of 2; a; b"  # λ is not made Λ
    assert Finding(True, "falls", 3).words("reproduced") == "reproduced (n = 3). Falls"


def test_order_by_column(tmp_path):
    cells = columns("gam", 0.73, 0.741, 0.752) | columns("sgd", 0.70, 0.71, 0.72) | columns("sam-0.1", 0.70, 0.72, 0.71)
    results = kept(tmp_path, TABLE, cells)
    verdict, found = trend("gam-above-sgd", results)
    assert (verdict, found.holds, found.n, found.missing) == (
        "run at smaller scale",
        True,
        3,
        3,
    )  # five columns of eight
    assert found.said.startswith(
        "significant in 5 of 5, in this direction in 5, 3 not run; mnist/mlp-3: +3.1 points (+2.85 to +3.35, n = 3);"
    )
    verdict, found = trend("sam-above-sgd", results)  # the same mean
    assert verdict == "not reproduced" and found.said.startswith(
        "significant in 0 of 5, in this direction in 0, 3 not run"
    )
    assert trend("crsam-wins-cnns", results)[0] == "not run"


def test_what_survived_of_a_cell_does_not_win_for_it(tmp_path):
    only = ("cifar10/cnn-5", "cifar10/cnn-14")
    better, worse = (0.76, 0.771, 0.782), (0.73, 0.74, 0.75)
    cells = columns("crsam", *better, only=only) | columns("gam", *worse, only=only)
    kept(tmp_path, TABLE, cells)
    write_record(record(TABLE, "cifar10/cnn-5/crsam", 3, 0.1, status="diverged"), tmp_path / "runs")
    collect(tmp_path / "runs", find(TABLE), "full", tmp_path / "results")
    _, found = trend("crsam-wins-cnns", Results.read(tmp_path / "results"))
    assert not found.holds and found.said.startswith("significant in 1 of 2, in this direction in 2")
    assert "cifar10/cnn-5: +3.1 points (+2.85 to +3.35, n = 3), 1 diverged" in found.said


def test_two_seeds_are_too_few_for_a_slope(tmp_path):
    look = falls_along(["cifar10/cnn-5/sgd", "cifar10/cnn-5/gam"], "test_accuracy")
    experiment = find(TABLE)
    for count in (2, 3):
        cells = {"cifar10/cnn-5/sgd": [0.9, 0.901, 0.902][:count], "cifar10/cnn-5/gam": [0.8, 0.802, 0.801][:count]}
        found = look(experiment, kept(tmp_path / str(count), TABLE, cells))
        assert (found.holds, found.n) == (count == 3, count)


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_with_fewer_than_three_seeds_words_are_not_judged(seeds, tmp_path):
    cells = columns("gam", *(0.70, 0.71, 0.72)[:seeds]) | columns("sgd", *(0.75, 0.755, 0.77)[:seeds])
    verdict, found = trend("gam-above-sgd", kept(tmp_path, TABLE, cells))
    assert (found.n, found.holds) == (seeds, False)
    assert verdict == ("run at smaller scale" if seeds < 3 else "not reproduced")


def test_one_pair_of_several_does_not_speak_for_all(tmp_path):
    only = ("cifar10/cnn-5",)
    cells = columns("crsam", 0.76, 0.771, 0.782, only=only) | columns("gam", 0.73, 0.74, 0.75, only=only)
    verdict, found = trend("crsam-wins-cnns", kept(tmp_path, TABLE, cells))
    assert found.short(verdict).endswith("significant in 1 of 1, in this direction in 1, 3 not run")


def test_crsam_on_cnns(tmp_path):
    only = ("cifar10/cnn-5", "cifar10/cnn-14")
    cells = columns("crsam", 0.76, 0.771, 0.782, only=only) | columns("gam", 0.73, 0.74, 0.75, only=only)
    verdict, found = trend("crsam-wins-cnns", kept(tmp_path, TABLE, cells))
    assert verdict == "run at smaller scale" and found.holds and found.missing == 2
    assert found.short(verdict).endswith("significant in 2 of 2, in this direction in 2, 2 not run")
    rest = tuple(column.replace("cifar10", "svhn") for column in only)
    cells |= columns("crsam", 0.86, 0.871, 0.882, only=rest) | columns("gam", 0.83, 0.84, 0.85, only=rest)
    assert trend("crsam-wins-cnns", kept(tmp_path, TABLE, cells))[0] == "reproduced"
    stand_in = ("fashion/cnn-5",)
    cells |= columns("crsam", 0.8, 0.81, 0.82, only=stand_in) | columns("gam", 0.9, 0.92, 0.93, only=stand_in)
    verdict, found = trend("crsam-wins-cnns", kept(tmp_path, TABLE, cells))  # a stand-in is not missed, but counts
    assert verdict == "not reproduced" and "fashion/cnn-5 (in place of svhn/cnn-5): -10.7 points" in found.said


def test_words_at_small_scale_say_so(tmp_path):
    cells = columns("gam", 0.73, 0.741, 0.752) | columns("sgd", 0.70, 0.71, 0.72)
    assert trend("gam-above-sgd", kept(tmp_path, TABLE, cells, scale="small"))[0] == "run at smaller scale"


def test_learned_transformation_by_hand(tmp_path):
    """γ = (.2, .04): P(10)/10 = 1 + 2 + 4 = 7, P(1) = 1.24; contrast 5.645 against SAM's 2/1.1."""
    runs = tmp_path / "runs"
    for seed, extra in enumerate((0.0, 0.001, 0.002)):
        gamma = {"gamma": [0.2 + extra, 0.04]}
        write_record(record(TABLE, CELL, seed, 0.7, metrics=gamma), runs)
    collect(runs, find(TABLE), "full", tmp_path / "results")
    results = Results.read(tmp_path / "results")
    verdict, found = trend("sharpens", results)
    assert verdict == "reproduced" and "cifar10/cnn-5: P(10)/10 = 7.01" in found.said and "P(1)/1 = 1.24" in found.said
    verdict, found = trend("contrast", results)
    assert verdict == "reproduced" and "above SAM's 1.82; cifar10/cnn-5: 5.65" in found.said


def test_periodic_updates(tmp_path):
    fill(tmp_path / "runs", "s0/fig3", {"period-1": [0.72, 0.731, 0.742]}, seconds=40.0)
    fill(tmp_path / "runs", "s0/fig3", {"period-10": [0.71, 0.721, 0.732]}, seconds=30.0)
    fill(tmp_path / "runs", "s0/fig3", {"sgd": [0.67, 0.68, 0.69], "sam-0.01": [0.68, 0.69, 0.70]})
    collect(tmp_path / "runs", find("s0/fig3"), "full", tmp_path / "results")
    verdict, found = trend("periodic", Results.read(tmp_path / "results"))
    assert verdict == "reproduced"
    assert found.said.startswith(
        "80 % of the gain over SGD kept, at 3.00x SGD's time against 4.00x; significant in 2 of 2"
    )


def test_a_tenth_of_the_steps(tmp_path):
    """The share of the gain that is kept; where there is none, a smaller loss is not a share of it."""
    cells = {"cifar10/sgd": [0.94] * 3, "cifar10/gnam-1.0": [0.95] * 3, "cifar10/gnam-0.1": [0.949] * 3}
    verdict, found = trend("a-tenth", kept(tmp_path / "gain", "s2/table7", cells))
    assert verdict == "reproduced" and found.said == "cifar10: 90 % of the gain, for 0 % more time"
    cells["cifar10/gnam-1.0"] = [0.93] * 3
    verdict, found = trend("a-tenth", kept(tmp_path / "loss", "s2/table7", cells))
    assert verdict == "not reproduced" and "no gain to keep (-1.00 points on all steps, +0.90 on a tenth)" in found.said


def test_instability_is_runs_that_are_lost(tmp_path):
    calm = {"T/2": [0.70, 0.702, 0.704], "T/5": [0.70, 0.702, 0.705]}
    assert trend("unstable", kept(tmp_path / "calm", "s0/fig6", calm))[0] == "not reproduced"
    fill(tmp_path / "wild" / "runs", "s0/fig6", {"T/5": [0.1]}, status="diverged")
    wild = kept(tmp_path / "wild", "s0/fig6", {"T/2": calm["T/2"]})
    verdict, found = trend("unstable", wild)
    assert verdict == "reproduced" and "T = 5: none finished, 1 of 1 lost" in found.said
    fallen = kept(tmp_path / "fallen", "s0/fig6", {"T/2": calm["T/2"], "T/3": [0.1, 0.1, 0.36]})
    verdict, found = trend("unstable", fallen)
    assert verdict == "reproduced" and "T = 3: 18.67 ± 8.67, 2 of 3 lost" in found.said


def test_a_figure_is_of_one_scale(tmp_path):
    """Three of Figure 6's cells are Table 1's GAM, run at full scale: they must not stand beside small runs."""
    small = {"T/1": [0.50, 0.51], "T/2": [0.49, 0.48], "T/3": [0.1, 0.1], "eps/0.01": [0.47, 0.48], "batch/50": [0.4]}
    kept(tmp_path, "s0/fig6", small, "small")
    fill(tmp_path / "full", "s0/table1", {"cifar10/cnn-5/gam": [0.70, 0.71]})
    collect(tmp_path / "full", find("s0/table1"), "full", tmp_path / "results")
    results, figure = Results.read(tmp_path / "results"), find("s0/fig6")
    assert results.scale_of(figure) == "small" and results.scale_of(find("s0/table1")) == "full"
    scale, group = results.best(figure, "T/2")
    mean = group.mean("test_accuracy")
    assert scale == "small" and mean is not None and mean.value == pytest.approx(0.485)
    assert results.best(find("s0/table1"), "cifar10/cnn-5/gam")[0] == "full"
    assert results.largest(figure, "T/2")[0] == "full" and results.largest(figure, "T/1")[0] == "small"
    assert trend("unstable", results)[1].holds


def test_insensitivity_to_epsilon(tmp_path):
    near = {"eps/0.0001": [0.70, 0.71, 0.72], "eps/0.001": [0.701, 0.711, 0.721], "eps/0.01": [0.70, 0.71, 0.722]}
    verdict, found = trend("insensitive", kept(tmp_path / "near", "s0/fig6", near))
    assert verdict == "reproduced" and found.said.endswith("at most 0.1 combined standard errors apart")
    far = near | {"eps/0.01": [0.60, 0.61, 0.62]}
    assert trend("insensitive", kept(tmp_path / "far", "s0/fig6", far))[0] == "not reproduced"


def test_curvature_falls_with_alpha(tmp_path):
    for i, alpha in enumerate((0.0, 0.05, 0.1, 0.15, 0.2, 0.4)):
        for seed in range(3):
            top = {"value": 10.0 - i + 0.1 * seed * i, "error": 0.0}
            one = record("s1/fig4-cifar", f"rho-0.1/alpha-{alpha}", seed, 0.7, curvature={**CURVATURE, "top": top})
            write_record(one, tmp_path / "runs")
    collect(tmp_path / "runs", find("s1/fig4-cifar"), "full", tmp_path / "results")
    results = Results.read(tmp_path / "results")
    verdict, found = trend("top-falls", results)
    assert verdict == "run at smaller scale" and found.holds  # a stand-in, whatever it shows
    assert found.said == "10 → 9.1 → 8.2 → 7.3 → 6.4 → 5.5: falls, significant"
    assert trend("gap-falls", results)[1].holds is False  # the same everywhere


def test_words_about_two_estimates_and_the_angle_are_found_at_small_scale_too(tmp_path):
    cells = ["rho-0.05/alpha-0.2", "rho-0.1/alpha-0.0", "rho-0.1/alpha-0.2", "rho-0.2/alpha-0.4"]
    for i, cell in enumerate(cells):
        curvature = {**CURVATURE, "top": {"value": 9.0 - i, "error": 0.0}, "from_gap": {"value": 90.0 - i, "rho": 0.1}}
        metrics = {"cos": 0.99 - 0.01 * i}
        write_record(
            record("s1/fig4-cifar", cell, 0, 0.7, "small", curvature=curvature, metrics=metrics), tmp_path / "runs"
        )
    collect(tmp_path / "runs", find("s1/fig4-cifar"), "small", tmp_path / "results")
    results = Results.read(tmp_path / "results")
    _, alike = trend("gap-as-proxy", results)
    assert (alike.holds, alike.scale, alike.said) == (True, "small", "rank correlation 1.00 over 4 cells")
    _, angle = trend("small-angle", results)
    assert (angle.holds, angle.scale, angle.said[:28]) == (True, "small", "lowest mean of an epoch 0.96")


# The command


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
    "collect missing s0/table1": "there is no folder missing",
    "collect . s0/table1 --scale smoke": "smoke runs are not worth keeping",
    "show s0/table1 --results missing": "there is no folder missing",
    "figures out --name s0/table1": "no figure 's0/table1'",
}


@pytest.mark.parametrize(("typed", "said"), WRONG.items(), ids=str)
def test_mistakes_get_one_line(typed, said, tmp_path, monkeypatch):
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
    assert again.exit_code == 0 and "4 of 4 runs were done before" in again.stderr
    assert [path.stat().st_mtime_ns for path in records] == before
    (tmp_path / "kept").mkdir()
    put = command("collect", "runs/s0-smoke", "s0/table1", "--scale", "smoke", "--results", "kept")
    assert "4 runs, 4 of them new" in put.stdout
    shown = command("show", "s0/table1", "--results", "kept", "--scale", "smoke")
    assert shown.exit_code == 0 and "not in the paper, smaller scale (smoke scale)" in shown.stdout
    assert "not run: 66 more cells" in shown.stdout  # at this scale fashion/mlp-3/sgd is mnist's


@pytest.mark.parametrize("damaged", ["", '{"format": "steppe-paper/1", "cell"', "[]", '{"format": "steppe-paper/1"}'])
def test_a_damaged_computed_result_is_computed_again(damaged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smoke, into = ("--scale", "smoke", "--out", "runs"), ("--scale", "smoke", "--results", "kept")
    assert command("run", "s1/fig3", *smoke).exit_code == 0
    path = tmp_path / "runs" / "s1-fig3-gsam-smoke-seed0.json"
    values = json.loads(path.read_text("utf-8"))["values"]
    path.write_text(damaged, "utf-8")
    said = "s1-fig3-gsam-smoke-seed0.json is not a result of the format steppe-paper/1 and does not count"
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


def test_list_and_show_say_not_run(tmp_path):
    listed = command("list", "--results", str(tmp_path))
    assert listed.exit_code == 0 and listed.stdout.count("not run") == len(experiments())
    cells = command("list", "s0/fig3", "--results", str(tmp_path))
    assert "gam:period=10,lr_times_period=true" in cells.stdout
    shown = command("show", "s0/table1", "--results", str(tmp_path)).stdout
    assert "69.40 ± 0.15" in shown and "GAM is above SGD in every column: not run" in shown


def test_one_scale_alone_is_shown(tmp_path):
    """Neither numbers nor words of another scale stand below a table."""
    cells = {"adam": [0.5, 0.52, 0.51], "adam-40": [0.53, 0.54, 0.52], "sam": [0.6, 0.61, 0.64]}
    kept(tmp_path, "extra/equal-cost", cells, "small", curvature=CURVATURE)
    kept(tmp_path, "s0/fig6", {"T/2": [0.7, 0.71], "T/4": [0.1, 0.1]}, "small")

    def shown(name: str, scale: str) -> str:
        return command("show", name, "--results", str(tmp_path / "results"), "--scale", scale).stdout

    table, unstable = "at equal cost (Holm's correction", "GAM can become unstable for large T: run at smaller scale"
    assert table in shown("extra/equal-cost", "small") and table not in shown("extra/equal-cost", "full")
    assert "All methods at equal cost: CNN-5 on CIFAR-10: not run at full scale" in shown("extra/equal-cost", "full")
    assert unstable in shown("s0/fig6", "small") and unstable not in shown("s0/fig6", "full")
    assert "s0/fig6 · Figure 6: T, batch size and ε: not run at full scale" in shown("s0/fig6", "full")


def test_cells_without_data_are_left_out_and_named(tmp_path, monkeypatch):
    """Where some data is there, the rest of a table runs."""
    from steppe.cli.commands.paper import run as commands
    from steppe.papers.experiment import SETS

    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    planned = plan(find("s0/table1"), "smoke", 1, ["mnist/mlp-3/sgd"])
    mixed = plan(find("s0/table1"), "full", 1, ["mnist/mlp-3/sgd"])
    assert commands._with_data(planned, None).cells == planned.cells
    with pytest.raises(UserError, match="mnist is not in"):
        commands._with_data(mixed, None)
    assert mixed.jobs[0].recipe.data == f"{SETS}:mnist"
