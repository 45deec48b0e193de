"""The page of benchmarks shows the records; the equal-cost table agrees with the kept results."""

from __future__ import annotations

import json
import re

import pytest

from helpers.pages import DOCS, ROOT, making

charts = making("benchmarks").script("charts")
benchmarks, figures = making("benchmarks"), making("figures")
BARS = {"net one": {"steppe": 1.25, "two-step loop": 2.5}, "net two": {"steppe": 0.875}}


def test_every_record_has_a_script_and_every_script_is_found():
    records = sorted(benchmarks.RESULTS.glob("*.json"))
    known = benchmarks.pages()
    written = {benchmarks.script_of(path) for path in records}
    assert written <= set(known) and len(written) >= 9  # a script without a record has no section yet
    text = benchmarks.markdown(records)
    assert [path.name for path in records if f"Record: `{path.name}`" not in text] == []
    headings = [text.index(f"\n## {page.title}\n") for name, page in known.items() if name in written]
    assert headings == sorted(headings)  # in the order of their places
    assert [page.title for name, page in known.items() if name not in written and f"## {page.title}" in text] == []


def test_the_page_begins_with_one_chart():
    text = benchmarks.markdown()
    assert text.startswith("## A SAM step, ") and text.index("<svg") < text.index("\n## Time of a step\n")


def test_every_number_of_a_record_is_on_the_page():
    """One benchmark, typed again."""
    path = benchmarks.RESULTS / "method_cost-cnn5-cpu.json"
    text = benchmarks.markdown([path])
    for r in json.loads(path.read_text("utf-8"))["records"]:
        assert f"    | {r['method']}, {r['looks']:.3g} looks | {charts.three_digits(r['over_bare'])} |" in text


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_chart_says_its_numbers(logarithmic):
    chart = charts.Chart("name", "title", "time of a step", BARS, "two bare passes", logarithmic)
    svg = charts.svg(chart)
    for said in ("net one", "net two", "1.25", "2.50", "0.875", "two-step loop", "(1: two bare passes)"):
        assert said in svg, said
    assert "\n" not in svg and "fill='currentColor'" in svg and "var(--bar-1," in svg
    assert charts.numbers(chart)[2:] == ["| net one | 1.25 | 2.50 |", "| net two | 0.875 |  |"]


def test_bars_are_as_long_as_their_values():
    svg = charts.svg(charts.Chart("name", "title", "axis", BARS))
    widths = [float(width) for width in re.findall(r"<rect x='0.0' y='[^']*' width='([^']*)' height='15'", svg)]
    assert widths == pytest.approx([510 / 2, 510, 510 * 0.35])


def test_a_record_of_another_kind_is_named(tmp_path):
    path = tmp_path / "something_new-cpu.json"
    path.write_text('{"environment": {}}')
    assert "- `something_new-cpu.json`" in benchmarks.markdown([path])


@pytest.mark.parametrize(
    ("value", "said"), [(1.0, "1.00"), (1.6, "1.60"), (17.25, "17.2"), (117, "117"), (1278.4, "1278"), (0.01, "0.0100")]
)
def test_three_digits(value, said):
    assert charts.three_digits(value) == said


# Figures of matplotlib


def test_a_figure_takes_the_colours_of_the_page():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure()
    figure.add_subplot().plot([0, 1], color="0.5", label="grey")
    svg = figures.themed(figure, "name")
    assert svg.startswith("<svg class=") and "#000000" not in svg and "<metadata" not in svg
    assert "stroke: color-mix(in srgb, currentColor 50%, transparent)" in svg and "\n\n" not in svg


def test_a_figure_is_made_once(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    monkeypatch.setattr(figures, "KEPT", tmp_path)
    made = []

    def make():
        made.append(1)
        return Figure()

    for record in ("one", "one", "two"):
        assert "<svg" in figures.kept("name", [record], make)
    assert len(made) == 2 and len(list(tmp_path.iterdir())) == 1  # the drawing of the old record is gone


def test_drawings_are_not_committed():
    """Records and what README shows are; the build draws the rest."""
    shown = set(re.findall(r"docs/assets/([^)\"]+)", (ROOT / "README.md").read_text("utf-8")))
    drawn = {str(p.relative_to(DOCS / "assets")) for p in (DOCS / "assets").rglob("*") if p.suffix in (".png", ".svg")}
    assert drawn - shown == {"favicon.svg", "step.svg"}  # made by hand
