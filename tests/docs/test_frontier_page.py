"""The page of the map agrees with the kept results."""

from __future__ import annotations

import json
import re
from statistics import mean, stdev

import pytest

from helpers.pages import ROOT, making
from steppe.papers.definitions.frontier import REGIMES

page = making("frontier")
LINES = [json.loads(text) for text in (ROOT / "results" / "extra-frontier.jsonl").read_text("utf-8").splitlines()]


def values(cell: str, *path: str) -> list[float]:
    """Numbers of a cell's runs, read without the library."""
    found = []
    for line in LINES:
        if line["cell"] == cell and line["scale"] == "full":
            for name in path:
                line = line[name]
            found.append(100 * line)
    return found


def says(text: str, numbers: list[float]) -> bool:
    """Whether a cell of the page has their mean and standard error, rounded."""
    middle, _, error = text.strip().partition(" ± ")
    expected = mean(numbers), stdev(numbers) / len(numbers) ** 0.5
    return all(abs(float(a) - b) < 0.0501 for a, b in zip((middle, error), expected, strict=True))


def test_the_table_has_a_row_for_each_regime_that_was_run():
    body = page.overview().splitlines()[2:]
    run = [r for r in REGIMES if any(x["cell"].startswith(f"{r.name}/") and "/choose/" not in x["cell"] for x in LINES)]
    assert len(body) == len(run) >= 2
    for regime, row in zip(run, body, strict=True):
        assert row.startswith(f"| {regime.title}; n = ") and row.count("|") == 7
    rest = page._missing()
    assert [r.name for r in REGIMES if f"`{r.name}`" in rest] == [r.name for r in REGIMES if r not in run]


def test_numbers_are_those_of_the_records():
    cell, title = "digits-60/base-1", page.table_of("digits-60").regime.title
    base = values(cell, "final", "test_accuracy")
    (row,) = (line for line in page.overview().splitlines() if title in line)
    assert len(base) == 10 and says(row.split("|")[2], base)
    (row,) = (line for line in page.afterwards().splitlines() if title in line and "| SGD |" in line)
    bits, images, error = (
        values(cell, "curvature", name, "value") for name in ("rounded", "corrupted", "calibration_error")
    )
    lost = [a - b for a, b in zip(base, bits, strict=True)]
    found = zip(row.split("|")[3:8], (base, bits, lost, images, error), strict=True)
    assert all(says(text, numbers) for text, numbers in found)


def on_corrupted_images(cell: str) -> dict[int, float]:
    """Accuracies by seed."""
    found = [line for line in LINES if line["cell"] == cell and line["scale"] == "full"]
    return {line["seed"]: line["curvature"]["corrupted"]["value"] for line in found}


def test_the_words_on_robustness_count_paired_differences():
    """On corrupted images, counted again from the lines."""
    from scipy.stats import t

    more = less = 0
    for table in page.tables():
        if table.regime.metric == "test_accuracy" and table.row("sam") and table.row("base-1"):
            theirs = on_corrupted_images(f"{table.regime.name}/base-1")
            mine = on_corrupted_images(f"{table.regime.name}/sam")
            mine = mine or on_corrupted_images(f"{table.regime.name}/sam-default")  # where it is the chosen radius
            gains = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
            half = t.ppf(0.975, len(gains) - 1) * stdev(gains) / len(gains) ** 0.5
            more, less = more + (mean(gains) > half), less + (mean(gains) < -half)
    assert f"is more accurate on corrupted images in {more} (less in {less})" in page.robustness() and more + less > 0


def test_a_gain_is_the_difference_to_the_base_that_is_named():
    """ASAM with 60 % wrong labels: against an average of the base, the best tenth of each length within its cost."""
    asam = page.table_of("digits-60").row("asam")
    stops = re.fullmatch(r"SGD(, (\d)x longer)?, EMA 0.99, stopped early", asam.gain.against)
    assert stops is not None
    length = int(stops[2] or 1)
    runs = [line for line in LINES if line["cell"] == f"digits-60/base-{length}"]
    within = [k for k in range(9) if runs[0]["epochs"]["gradients"][k] <= 2 * 880 * 1.05]
    best = max(mean(run["epochs"]["averaged"][k]["test_accuracy"] for run in runs) for k in within)
    gain = mean(values("digits-60/asam", "final", "test_accuracy")) / 100 - best
    assert abs(gain - asam.gain.mean.value) < 1e-6


def test_the_text_names_the_significant_gains():
    said = page.sentences()
    for table in page.tables():
        for row in table.methods if table.row("base-1") else ():  # without the base nothing is compared
            sure = row.gain is not None and row.gain.verdict in ("better", "worse") and not row.group.diverged
            (line,) = (line for line in said.splitlines() if table.regime.title in line)
            assert (f": {row.label} (" in line or f"), {row.label} (" in line) is bool(sure), row.label
        if table.methods and not any(row.gain and row.gain.mean.low is not None for row in table.methods):
            assert f"- **{table.regime.title}**: too few seeds to judge yet." in said.splitlines()


def test_what_is_said_about_resnet_at_equal_cost():
    """With augmentation: SAM against SGD of as many epochs, and of as many gradients."""
    said = " ".join((ROOT / "docs" / "choose.md").read_text("utf-8").split())
    found = {
        name: values(f"resnet-augmented/{name}", "final", "test_accuracy") for name in ("sam-2", "base-2", "base-4")
    }
    sam, same, longer = (f"{mean(found[name]):.1f} %" for name in found)
    assert f"ResNet-18 reaches {sam} on CIFAR-10 after 60 epochs of SAM, and {same} after 60 epochs of SGD; " in said
    assert f"but after 120 epochs of SGD, which cost the same, {longer} (n = {len(found['sam-2'])})" in said
    (row,) = (
        line for line in making("regimes").markdown().splitlines() if "ResNet-18, SGD, 60 epochs, ρ = 0.05" in line
    )
    gain = mean(found["sam-2"]) - mean(found["base-4"])
    assert f"| {gain:+.1f} [".replace("-", "−") in row and row.endswith("| not run | SGD, 120 epochs |")
    (row,) = (line for line in making("where_it_helps").markdown().splitlines() if "crops and flips, 60 epochs" in line)
    assert row.startswith(
        f"| the same, crops and flips, 60 epochs | {same} | {longer} | {gain:+.1f} [".replace("-", "−")
    )


def test_each_regime_has_its_chart():
    table = page.table_of("digits-60")
    drawn = page._drawn(table)
    assert drawn.startswith("<figure") and "GapSAM" in drawn and "stopped early" in drawn


def test_a_difference_in_perplexity_is_not_shown_as_points():
    """The language model's regime is judged by perplexity, where lower is better."""
    table = page.table_of("language")
    for row in (table.row("sam-default"), table.row("gapsam")):
        bare = page._gain(table, row).strip("*")
        assert bare.startswith(f"+{row.gain.mean.value:.2f} [") and "in perplexity, lower is better" in bare
        assert f"{row.label} ({bare})" in page.sentences() and f"**{bare}**" in page.overview()
        assert row.gain.verdict == "worse"
    regimes = making("regimes")
    assert not regimes.rows()["language"].points and regimes.rows()["cifar-40"].points
    assert "in perplexity, lower is better" in regimes.markdown()


def test_the_first_picture_has_the_gains_of_the_table():
    pytest.importorskip("matplotlib")
    (axis,) = page.draw_gains().axes
    judged = [table for table in page.tables() if f"{table.regime.title}**: {page.TOO_FEW}" not in page.sentences()]
    in_points = [table for table in judged if page.in_points(table)]
    assert [label.get_text() for label in axis.get_yticklabels()] == [table.regime.title for table in in_points]
    one = page.table_of("cifar-40").row("gapsam").gain.mean
    ends = [list(line.get_xdata()) for line in axis.lines if len(line.get_xdata()) == 2]
    assert any(end == pytest.approx([100 * one.low, 100 * one.high]) for end in ends)


def test_a_point_beyond_the_limits_is_a_number_at_the_edge():
    pytest.importorskip("matplotlib")
    forest = making("forest")
    points = {"a": [forest.Point(-15.2, -16, -14), None], "b": [forest.Point(1, 0.5, 9), forest.Point(7, 6, 8)]}
    (axis,) = forest.draw(["one", "two"], points, "points", (-5.0, 5.0)).axes
    assert [text.get_text() for text in axis.texts] == ["◂ −15", "+7 ▸"]
    assert [0.5, 5.0] in [list(line.get_xdata()) for line in axis.lines]  # an interval ends at the limit
