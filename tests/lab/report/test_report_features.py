"""Seeds, settings, the learning rate, downloads and small screens: the page in a real browser."""

from __future__ import annotations

import base64
import csv
import io
import json

import pytest

pytest.importorskip("scipy")
playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")

from helpers.report_pages import CHROMIUM, DRAWN, PATIENCE, until  # noqa: E402
from helpers.report_records import SCENES, comparison  # noqa: E402
from steppe.lab.report import write_report  # noqa: E402
from steppe.lab.report.values import line_of  # noqa: E402
from steppe.lab.statistics import summarise  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
expect = playwright.expect
expect.set_options(timeout=1000 * PATIENCE)

# Names that cover a line, a marker, a seed or an error bar of a chart.
COVERED = """() => [...document.querySelectorAll('[data-chart] > svg')].flatMap(svg => {
  const inside = (b, x, y) => x > b.left + 1 && x < b.right - 1 && y > b.top + 2 && y < b.bottom - 3;
  const frame = svg.getBoundingClientRect();
  const lines = [...svg.querySelectorAll('.series .line, .longer, .series .interval')].flatMap(line => {
    const length = line.getTotalLength(), count = Math.ceil(length / 3);
    return Array.from({length: count + 1}, (_, k) => line.getPointAtLength(length * k / Math.max(1, count)));
  }).map(p => [p.x + frame.left, p.y + frame.top]);
  const spots = [...svg.querySelectorAll('.marker, .seed')].map(m => m.getBoundingClientRect())
    .map(b => [(b.left + b.right) / 2, (b.top + b.bottom) / 2]);
  const names = [...svg.querySelectorAll('.name text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  return names.filter(([, b]) => [...lines, ...spots].some(([x, y]) => inside(b, x, y))).map(([name]) => name);
})"""


def choose(page, choice, value, problem=0):
    page.locator(f"#problem-{problem} [data-choice={choice}] button[data-value={value}]").first.click()


@pytest.mark.parametrize("scene", ["comparison", "two problems", "uneven"])
def test_no_name_covers_a_mark(visit, scene):
    page = visit(scene)
    names = page.locator("[data-chart=cost] .name text").count()
    assert names >= 2 and page.evaluate(COVERED) == []
    page.locator("[data-choice=axis] button[data-value=gradients]").first.click()  # curves of different lengths
    choose(page, "runs", "seeds")
    expect(page.locator("#problem-0 [data-choice=runs] button[aria-pressed=true]").first).to_have_text("each seed")
    assert page.evaluate(COVERED) == []


def test_each_seed_has_its_point_and_its_curve_in_each_panel(visit):
    page = visit("two problems")
    for problem, seeds in ((0, 3), (1, 2)):
        cost, curves = (page.locator(f"#problem-{problem} [data-chart={kind}]") for kind in ("cost", "curves"))
        assert cost.locator(".seed").count() == 0 and curves.locator(".each").count() == 0
        choose(page, "runs", "seeds", problem)
        expect(cost.locator('[data-series="SAM rho=0.1"] .seed')).to_have_count(seeds)
        expect(curves.locator('.each[data-series="SAM rho=0.1"] .line')).to_have_count(seeds)
        assert curves.locator(".band").count() == 0
    chart = page.locator("#problem-0 [data-chart=cost]")
    chart.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")  # from the mean to the first seed
    expect(chart.locator(".tip")).to_contain_text("seed 0: 94 %")
    choose(page, "runs", "mean")
    expect(chart.locator(".seed")).to_have_count(0)


def test_hovering_names_the_settings_and_the_learning_rate_is_a_curve(visit):
    page = visit("settings")
    chart = page.locator("[data-chart=cost]")
    chart.locator("svg").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(chart.locator(".tip b")).to_have_text("SAM rho=0.1")
    expect(chart.locator(".tip")).to_contain_text("ρ = 0.1, adaptive = no")
    page.locator("[data-choice=quantity]").get_by_role("button", name="learning rate").click()
    curves = page.locator("[data-chart=curves]")
    expect(curves.locator(".axes .title").last).to_have_text("learning rate")
    curves.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    expect(curves.locator(".tip")).to_contain_text("0.1")


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_verdicts_are_in_sight_at_every_size(visit, width):
    page = visit("two problems", width, scheme="dark" if width == 768 else "light")
    shown = page.locator("table.results .verdict").evaluate_all(
        """all => all.map(e => {
             const box = e.getBoundingClientRect();
             return box.width > 0 && box.left >= 0 && box.right <= innerWidth;
           })"""
    )
    assert len(shown) > 6 and all(shown)
    scrolls = page.locator("table.results").evaluate_all(
        "all => all.map(t => t.parentElement.scrollWidth > t.parentElement.clientWidth)"
    )
    assert not any(scrolls)
    head = page.locator("#problem-0 table.results thead button").nth(1)
    head.click()  # headers sort at every size
    values = page.locator("#problem-0 table.results tbody tr").evaluate_all(
        "all => all.map(r => +r.cells[1].dataset.value)"
    )
    assert values == sorted(values, reverse=True)
    page.set_viewport_size({"width": 390, "height": 800})
    until(page, f"innerWidth === 390 && {DRAWN}")
    wide = page.locator("#problem-0 section[aria-labelledby=flat-0] > .hint")
    expect(wide).to_be_visible()  # the table of curvature goes on
    page.locator("#problem-0 section[aria-labelledby=flat-0] > .scroll").evaluate("e => { e.scrollLeft = 9999; }")
    expect(wide).to_be_hidden()


def saved(page, button):
    with page.expect_download() as download:
        button.click()
    return download.value.suggested_filename, download.value.path().read_bytes()


def test_tables_are_saved_as_csv_and_json(visit):
    page = visit("two problems", 390)
    group = page.locator("#problem-1 [data-downloads]")
    rows = [row for row in summarise(SCENES["two problems"]()) if row.problem.startswith("mnist")]
    name, text = saved(page, group.get_by_text("table CSV"))
    assert name == "mnist-digits-mlp-methods.csv"
    lines = list(csv.DictReader(io.StringIO(text.decode())))
    expected = [line_of(row, "test_accuracy") for row in rows]
    assert [line["method"] for line in lines] == [row.label for row in rows]
    assert [float(line["test_accuracy"]) for line in lines] == [one["test_accuracy"] for one in expected]
    assert lines[0]["difference"] == "" and lines[-1]["verdict"] == "n too small to tell"
    name, text = saved(page, group.get_by_text("runs CSV"))
    runs = list(csv.DictReader(io.StringIO(text.decode())))
    assert name == "mnist-digits-mlp-runs.csv" and len(runs) == 8
    values = {(run["method"], int(run["seed"])): float(run["test_accuracy"]) for run in runs}
    assert values == {(r["label"], r["recipe"]["seed"]): r["final"]["test_accuracy"] for r in comparison(2)}
    name, text = saved(page, group.get_by_text("JSON"))
    found = json.loads(text)
    assert name == "mnist-digits-mlp.json" and found["metric"] == "test_accuracy"
    for method, one in zip(found["methods"], expected, strict=True):
        assert {key: method[key] for key in one} == one
        assert [run["seed"] for run in method["by_seed"]] == [0, 1]
        assert [point["epoch"] for point in method["curves"]["test_loss"]][:4] == [1, 2, 3, 4]


def test_names_with_commas_and_quotes_survive_csv(visit):
    page = visit("uneven")
    _, text = saved(page, page.locator("[data-downloads]").get_by_text("runs CSV"))
    runs = list(csv.DictReader(io.StringIO(text.decode())))
    assert {run["method"] for run in runs} == {row.label for row in summarise(SCENES["uneven"]())}
    assert [run["status"] for run in runs if run["method"] == "GAM"] == ["diverged"] * 3
    assert page.evaluate("""csv([{a: 'x, "y"', b: null}, {b: 2}])""") == 'a,b\n"x, ""y""",\n,2\n'


def test_two_reports_on_one_page_fit_and_sort_at_every_size(visit, paths, tmp_path):
    slower = [{**r, "recipe": {**r["recipe"], "lr": 0.05}} for r in comparison(3)]
    paths["against"] = write_report(comparison(3), tmp_path / "both.html", against=slower, names=("a", "b"))
    page = visit("against", 390)
    table = page.locator("section[aria-labelledby=differences] table")
    for width in (390, 768, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        until(page, f"innerWidth === {width} && {DRAWN}")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert table.locator("tbody tr").count() == 4
        boxes = table.locator(".verdict").evaluate_all("all => all.map(e => e.getBoundingClientRect().right)")
        assert len(boxes) == 4 and all(0 < right <= width for right in boxes)
    table.locator("thead button").nth(1).click()
    values = table.locator("tbody tr").evaluate_all("all => all.map(r => +r.cells[1].dataset.value)")
    assert values == sorted(values, reverse=True)
    name, _ = saved(page, page.locator("#problem-1 [data-downloads]").get_by_text("table CSV"))
    assert name == "b-digits-digits-mlp-methods.csv"
    del paths["against"]


def test_charts_are_saved_as_pictures(visit):
    page = visit("comparison", 390)
    for chart in ("cost", "spectrum", "landscape"):
        figure = page.locator(f"figure:has([data-chart={chart}])")
        name, image = saved(page, figure.get_by_text("PNG"))
        assert name.startswith("digits-digits-mlp-") and name.endswith(".png") and image.startswith(b"\x89PNG\r\n")
        width, height = (int.from_bytes(image[k : k + 4], "big") for k in (16, 20))
        assert width == 1920 and height > 700
        colours = page.evaluate(
            """async data => {
                 const image = new Image();
                 image.src = 'data:image/png;base64,' + data;
                 await image.decode();
                 const canvas = document.createElement('canvas');
                 [canvas.width, canvas.height] = [480, 270];
                 const pen = canvas.getContext('2d');
                 pen.drawImage(image, 0, 0, 480, 270);
                 const pixels = new Uint32Array(pen.getImageData(0, 0, 480, 270).data.buffer);
                 return new Set(pixels).size;
               }""",
            base64.b64encode(image).decode(),
        )
        assert colours > 50  # axes, names and marks, not an empty sheet
    assert page.locator(".offscreen").count() == 0
