"""Which verdicts follow from results."""

from __future__ import annotations

import math

import pytest

from helpers.paper_records import CURVATURE, fill, kept, record
from steppe.lab.records import write_record
from steppe.papers.claims import Claim, Finding, falls_along, judge
from steppe.papers.registry import claims, experiments, find, trends
from steppe.papers.store import Results, collect

TABLE = "s0/table1"
CELL = "cifar10/cnn-5/gam"


def judged(results: Results, cell: str = CELL, experiment: str = TABLE):
    claim = next(c for c in claims() if (c.experiment, c.cell) == (experiment, cell))
    return judge(claim, experiments(), results)


def trend(name: str, results: Results):
    found = next(t for t in trends() if t.name == name)
    return found.judge(experiments(), results)


# Numbers


def test_within_two_combined_errors_is_reproduced(tmp_path):
    """Ours .690, .692, .694: mean .692, standard error .002/√3; the paper's .69396 ± .00154."""
    found = judged(kept(tmp_path, TABLE, {CELL: [0.690, 0.692, 0.694]}))
    error = 0.002 / math.sqrt(3)
    assert found.n == 3 and found.ours is not None and found.ours.error == pytest.approx(error)
    assert found.apart == pytest.approx((0.692 - 0.69396) / math.hypot(error, 0.00154))
    assert found.verdict == "reproduced"


def test_further_apart_is_not_reproduced(tmp_path):
    found = judged(kept(tmp_path, TABLE, {CELL: [0.700, 0.702, 0.704]}))
    assert found.verdict == "not reproduced" and found.apart is not None and found.apart > 4


def test_verdicts_that_claim_less(tmp_path):
    few = judged(kept(tmp_path / "few", TABLE, {CELL: [0.690, 0.692]}))
    assert (few.verdict, few.apart, few.note) == ("run at smaller scale", None, "n = 2, too few to tell")
    small = judged(kept(tmp_path / "small", TABLE, {CELL: [0.690, 0.692, 0.694]}, scale="small"))
    assert (small.verdict, small.scale) == ("run at smaller scale", "small")
    assert judged(Results()).verdict == "not run"
    lost = judged(kept(tmp_path / "lost", TABLE, {CELL: [0.7, 0.7, 0.7]}, status="diverged"))
    assert (lost.verdict, lost.note) == ("not reproduced", "3 of 3 runs diverged")


def test_without_any_spread_only_the_same_number_is_the_same(tmp_path):
    cell = "imagenet/resnet-50/gam"  # the paper gives no spread
    assert judged(kept(tmp_path / "same", TABLE, {cell: [0.65924] * 3}), cell).apart == 0
    below = judged(kept(tmp_path / "below", TABLE, {cell: [0.659] * 3}), cell)
    assert (below.apart, below.verdict) == (-math.inf, "not reproduced")


def test_a_paper_without_spread_counts_ours_alone(tmp_path):
    results = kept(tmp_path, "s3/table2", {"cifar10/sgd": [0.937, 0.938, 0.939]})
    found = judged(results, "cifar10/sgd", "s3/table2")
    assert found.apart == pytest.approx(0, abs=1e-9) and found.note == "the paper gives no spread"
    assert found.verdict == "reproduced"


def test_claims_of_other_test_sets_are_not_run_when_only_imagenet_was():
    claim = Claim("s1/table1", "resnet-50/sam", 0.644, metric="imagenet_v2_accuracy")
    assert judge(claim, experiments(), Results()).verdict == "not run"


# Words

COLUMNS = ("mnist/mlp-3", "mnist/cnn-3", "cifar10/mlp-3", "cifar10/cnn-5", "cifar10/cnn-14")


def columns(row: str, *accuracies: float, only: tuple[str, ...] = COLUMNS) -> dict[str, list[float]]:
    return {f"{column}/{row}": list(accuracies) for column in only}


def test_findings_in_short_and_in_full():
    """Direction, evidence and scale are separate parts, each named once."""
    found = Finding(False, "λ falls; a; b", 3, part="in the paper's direction in 1 of 2", at="at full scale")
    assert found.short("not reproduced") == "in the paper's direction in 1 of 2; at full scale"
    assert found.words("not reproduced").endswith("at full scale. λ falls; a; b")  # λ is not made Λ
    assert Finding(True, "falls", 3, at="at full scale").words("reproduced") == "it holds (n = 3); at full scale. Falls"
    assert Finding(None).words("not run") == "not run"


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
    assert found.short(verdict) == (
        "in the paper's direction in 5 of 5 comparisons; beyond doubt in 5 (n = 3); 3 not run; at full scale"
    )
    assert found.details.startswith("mnist/mlp-3: +3.1 points (+2.9 to +3.3, n = 3);")
    verdict, found = trend("sam-above-sgd", results)  # the same mean
    assert verdict == "not reproduced" and found.part.startswith(
        "in the paper's direction in 0 of 5 comparisons; beyond doubt in none (n = 3); 3 not run"
    )
    assert trend("crsam-wins-cnns", results)[0] == "not run"


def test_a_cell_with_diverged_runs_does_not_count_as_better(tmp_path):
    only = ("cifar10/cnn-5", "cifar10/cnn-14")
    better, worse = (0.76, 0.771, 0.782), (0.73, 0.74, 0.75)
    cells = columns("crsam", *better, only=only) | columns("gam", *worse, only=only)
    kept(tmp_path, TABLE, cells)
    write_record(record(TABLE, "cifar10/cnn-5/crsam", 3, 0.1, status="diverged"), tmp_path / "runs")
    collect(tmp_path / "runs", find(TABLE), "full", tmp_path / "results")
    _, found = trend("crsam-wins-cnns", Results.read(tmp_path / "results"))
    assert not found.holds and found.part.startswith(
        "in the paper's direction in 2 of 2 comparisons; beyond doubt in 1"
    )
    assert "cifar10/cnn-5: +3.1 points (+2.85 to +3.35, n = 3), 1 diverged" in found.details


def test_two_seeds_are_too_few_for_a_slope(tmp_path):
    look = falls_along(["cifar10/cnn-5/sgd", "cifar10/cnn-5/gam"], "test_accuracy")
    experiment = find(TABLE)
    for count in (2, 3):
        cells = {"cifar10/cnn-5/sgd": [0.9, 0.901, 0.902][:count], "cifar10/cnn-5/gam": [0.8, 0.802, 0.801][:count]}
        found = look(experiment, kept(tmp_path / str(count), TABLE, cells))
        assert (found.holds, found.n) == (count == 3, count)


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_statements_need_three_seeds(seeds, tmp_path):
    cells = columns("gam", *(0.70, 0.71, 0.72)[:seeds]) | columns("sgd", *(0.75, 0.755, 0.77)[:seeds])
    verdict, found = trend("gam-above-sgd", kept(tmp_path, TABLE, cells))
    assert (found.n, found.holds) == (seeds, False)
    assert verdict == ("run at smaller scale" if seeds < 3 else "not reproduced")


def test_one_pair_of_several_is_not_enough_for_a_statement(tmp_path):
    only = ("cifar10/cnn-5",)
    cells = columns("crsam", 0.76, 0.771, 0.782, only=only) | columns("gam", 0.73, 0.74, 0.75, only=only)
    verdict, found = trend("crsam-wins-cnns", kept(tmp_path, TABLE, cells))
    assert found.short(verdict).startswith(
        "in the paper's direction in 1 of 1 comparisons; beyond doubt in 1 (n = 3); 3 not"
    )


def test_crsam_on_cnns(tmp_path):
    only = ("cifar10/cnn-5", "cifar10/cnn-14")
    cells = columns("crsam", 0.76, 0.771, 0.782, only=only) | columns("gam", 0.73, 0.74, 0.75, only=only)
    verdict, found = trend("crsam-wins-cnns", kept(tmp_path, TABLE, cells))
    assert verdict == "run at smaller scale" and found.holds and found.missing == 2
    assert found.short(verdict).startswith(
        "in the paper's direction in 2 of 2 comparisons; beyond doubt in 2 (n = 3); 2 not"
    )
    rest = tuple(column.replace("cifar10", "svhn") for column in only)
    cells |= columns("crsam", 0.86, 0.871, 0.882, only=rest) | columns("gam", 0.83, 0.84, 0.85, only=rest)
    assert trend("crsam-wins-cnns", kept(tmp_path, TABLE, cells))[0] == "reproduced"
    stand_in = ("fashion/cnn-5",)
    cells |= columns("crsam", 0.8, 0.81, 0.82, only=stand_in) | columns("gam", 0.9, 0.92, 0.93, only=stand_in)
    verdict, found = trend("crsam-wins-cnns", kept(tmp_path, TABLE, cells))  # a stand-in is not missed, but counts
    assert verdict == "not reproduced" and "fashion/cnn-5 (in place of svhn/cnn-5): -10.7 points" in found.details


def test_statements_at_small_scale_name_the_scale(tmp_path):
    cells = columns("gam", 0.73, 0.741, 0.752) | columns("sgd", 0.70, 0.71, 0.72)
    verdict, found = trend("gam-above-sgd", kept(tmp_path, TABLE, cells, scale="small"))
    assert verdict == "run at smaller scale" and found.short(verdict).endswith(
        "at 1/5 of the paper's length on 20 % of the data"
    )


def test_right_direction_without_significance_is_not_called_a_failure(tmp_path):
    cells = columns("gam", 0.71, 0.76, 0.75) | columns("sgd", 0.70, 0.71, 0.77)
    verdict, found = trend("gam-above-sgd", kept(tmp_path, TABLE, cells))
    assert verdict == "in the paper's direction, not beyond doubt" and not found.holds
    assert found.part.startswith("in the paper's direction in 5 of 5 comparisons; beyond doubt in none (n = 3)")


def test_learned_transformation_by_hand(tmp_path):
    """γ = (.2, .04): P(10)/10 = 1 + 2 + 4 = 7, P(1) = 1.24; contrast 5.645 against SAM's 2/1.1."""
    runs = tmp_path / "runs"
    for seed, extra in enumerate((0.0, 0.001, 0.002)):
        gamma = {"gamma": [0.2 + extra, 0.04]}
        write_record(record(TABLE, CELL, seed, 0.7, metrics=gamma), runs)
    collect(runs, find(TABLE), "full", tmp_path / "results")
    results = Results.read(tmp_path / "results")
    verdict, found = trend("sharpens", results)
    assert (
        verdict == "reproduced"
        and "cifar10/cnn-5: P(10)/10 = 7.01" in found.details
        and "P(1)/1 = 1.24" in found.details
    )
    verdict, found = trend("contrast", results)
    assert verdict == "reproduced" and "above SAM's 1.82; cifar10/cnn-5: 5.65" in found.details


def test_periodic_updates(tmp_path):
    fill(tmp_path / "runs", "s0/fig3", {"period-1": [0.72, 0.731, 0.742]}, seconds=40.0)
    fill(tmp_path / "runs", "s0/fig3", {"period-10": [0.71, 0.721, 0.732]}, seconds=30.0)
    fill(tmp_path / "runs", "s0/fig3", {"sgd": [0.67, 0.68, 0.69], "sam-0.01": [0.68, 0.69, 0.70]})
    collect(tmp_path / "runs", find("s0/fig3"), "full", tmp_path / "results")
    verdict, found = trend("periodic", Results.read(tmp_path / "results"))
    assert verdict == "reproduced"
    assert found.details.startswith(
        "80 % of the gain over SGD kept, at 3.00x SGD's time against 4.00x; above SAM 0.01: +3.1"
    )


def test_a_tenth_of_the_steps(tmp_path):
    """The share of the gain that is kept; where there is none, a smaller loss is not a share of it."""
    cells = {"cifar10/sgd": [0.94] * 3, "cifar10/gnam-1.0": [0.95] * 3, "cifar10/gnam-0.1": [0.949] * 3}
    verdict, found = trend("a-tenth", kept(tmp_path / "gain", "s2/table7", cells))
    assert verdict == "reproduced" and found.details == "cifar10: 90 % of the gain, for 0 % more time"
    cells["cifar10/gnam-1.0"] = [0.93] * 3
    verdict, found = trend("a-tenth", kept(tmp_path / "loss", "s2/table7", cells))
    assert (
        verdict == "not reproduced" and "no gain to keep (-1.00 points on all steps, +0.90 on a tenth)" in found.details
    )


def test_instability_means_collapsed_runs(tmp_path):
    calm = {"T/2": [0.70, 0.702, 0.704], "T/5": [0.70, 0.702, 0.705]}
    assert trend("unstable", kept(tmp_path / "calm", "s0/fig6", calm))[0] == "not reproduced"
    fill(tmp_path / "wild" / "runs", "s0/fig6", {"T/5": [0.1]}, status="diverged")
    wild = kept(tmp_path / "wild", "s0/fig6", {"T/2": calm["T/2"]})
    verdict, found = trend("unstable", wild)
    assert verdict == "reproduced" and "T = 5: none finished, 1 of 1 collapsed" in found.details
    fallen = kept(tmp_path / "fallen", "s0/fig6", {"T/2": calm["T/2"], "T/3": [0.1, 0.1, 0.36]})
    verdict, found = trend("unstable", fallen)
    assert verdict == "reproduced" and "T = 3: 18.67 ± 8.67, 2 of 3 collapsed" in found.details


def test_a_figure_is_of_one_scale(tmp_path):
    """Three of Figure 6's cells are Table 1's GAM, run at full scale: they must not be shown beside small runs."""
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
    assert verdict == "reproduced" and found.details.endswith("at most 0.1 combined standard errors apart")
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
    assert found.details == "10 → 9.1 → 8.2 → 7.3 → 6.4 → 5.5: falls, significant"
    assert trend("gap-falls", results)[1].holds is False  # the same everywhere


def test_statements_on_estimates_and_angle_are_judged_at_small_scale_too(tmp_path):
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
    assert (alike.holds, alike.scale, alike.details) == (True, "small", "rank correlation 1.00 over 4 cells")
    _, angle = trend("small-angle", results)
    assert (angle.holds, angle.scale, angle.details[:28]) == (True, "small", "lowest mean of an epoch 0.96")
