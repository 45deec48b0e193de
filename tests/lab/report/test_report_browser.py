"""The page in a real browser: it draws, sorts, answers pointer and keyboard, and fits on a phone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("scipy")
playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")

from helpers.report_pages import CHROMIUM, DRAWN, PATIENCE, until  # noqa: E402
from helpers.report_records import SCENES  # noqa: E402
from steppe.lab.statistics import summarise  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
expect = playwright.expect
expect.set_options(timeout=1000 * PATIENCE)


def column(page, index):
    return page.locator("table.results tbody tr").evaluate_all(f"rows => rows.map(r => r.cells[{index}].dataset.value)")


def inside(page, selector):
    """All elements are drawn, and within the width of the window."""
    return page.evaluate(
        """selector => [...document.querySelectorAll(selector)].map(e => e.getBoundingClientRect())
             .every(b => b.left >= -0.5 && b.right <= innerWidth + 0.5)""",
        selector,
    )


@pytest.mark.parametrize("scene", SCENES)
def test_nothing_is_wider_than_the_window(visit, scene):
    page = visit(scene, 360)
    for width in (360, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        until(page, f"innerWidth === {width} && {DRAWN}")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert inside(
            page, ".chart svg, canvas, h1, h2, h3, h4, li, figcaption, p, pre, details, .chip, .choice button"
        )
        page.locator("details").evaluate_all("all => all.forEach(d => { d.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", [360, 1280])
def test_charts_are_drawn_inside_their_frame(visit, width):
    page = visit("comparison", width)
    assert page.locator("[data-chart] > svg").count() == 5
    assert page.locator("[data-chart] canvas").count() == 4
    shapes = page.evaluate(
        """() => [...document.querySelectorAll('[data-chart] > svg')].map(svg => {
             const frame = svg.getBoundingClientRect();
             const marks = [...svg.querySelectorAll('.series .line, .series .marker, .axes text, .name text')];
             const boxes = marks.map(m => m.getBoundingClientRect());
             const fits = b => b.left >= frame.left - 1 && b.right <= frame.right + 1
               && b.top >= frame.top - 9 && b.bottom <= frame.bottom + 1;
             return [frame.width, frame.height, marks.length, boxes.every(fits)];
           })"""
    )
    for wide, high, marks, fits in shapes:
        assert 300 <= wide <= width and high >= 200 and marks > 5 and fits
    painted = page.locator("canvas").evaluate_all(
        "all => all.map(c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size)"
    )
    assert min(painted) > 30  # many colours, not an empty canvas


def test_error_bars_stand_where_the_numbers_say(visit):
    page = visit("comparison")
    rows: list[Any] = [row for row in summarise(SCENES["comparison"]()) if row.role == "method"]
    drawn = page.evaluate(
        """() => [...document.querySelectorAll('[data-chart=cost] .series')].map(g => {
             const bar = g.querySelector('.interval'), moved = g.querySelector('.marker').transform.baseVal[0].matrix;
             return [g.dataset.series, bar.y1.baseVal.value, bar.y2.baseVal.value, moved.f];
           })"""
    )
    places = {name: rest for name, *rest in drawn}
    # Pixels are linear in values: two means fix the scale, the ends of the intervals must lie on it.
    (_, _, first), (_, _, second) = (places[row.label] for row in rows)
    slope = (second - first) / (rows[1].mean.value - rows[0].mean.value)
    for row in rows:
        bottom, top, middle = places[row.label]
        assert bottom == pytest.approx(middle + slope * (row.mean.low - row.mean.value), abs=0.5)
        assert top == pytest.approx(middle + slope * (row.mean.high - row.mean.value), abs=0.5)


def test_points_at_one_cost_are_side_by_side(visit):
    page = visit("comparison")
    across = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('[data-chart=cost] .series')].map(
             g => [g.dataset.series, g.querySelector('.marker').transform.baseVal[0].matrix.e]))"""
    )
    assert across["SAM rho=0.1"] - across["SGD, 2x longer"] == pytest.approx(10)
    assert across["SGD, 2x longer"] - across["SGD"] > 50


def test_an_outlier_becomes_an_arrow_and_does_not_flatten_the_rest(visit):
    page = visit("uneven")
    chart = page.locator("[data-chart=cost]")
    assert chart.locator(".marker.outside").count() == 1
    low = page.evaluate("Number(document.querySelector('[data-chart=cost] .axes text').textContent)")
    assert low > 90
    assert page.get_by_text("<b>bold</b>").count() > 1  # as text


def test_the_table_sorts_by_number_and_back(visit):
    page = visit("comparison")
    first = column(page, 0)
    head = page.locator("table.results th").nth(1)
    head.locator("button").click()
    values = [float(v) for v in column(page, 1)]
    assert values == sorted(values, reverse=True) and head.get_attribute("aria-sort") == "descending"
    head.locator("button").click()
    assert [float(v) for v in column(page, 1)] == sorted(values) and head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    assert column(page, 0) == first and head.get_attribute("aria-sort") == "none"


def test_the_table_sorts_by_keyboard_and_keeps_what_is_missing_last(visit):
    page = visit("uneven")
    button = page.locator("table.results th").nth(1).locator("button")
    button.focus()
    for _ in range(2):
        page.keyboard.press("Enter")
        values = column(page, 1)
        assert values[-1] == "" and "" not in values[:-1]
    page.keyboard.press("Tab")  # to the next header
    page.keyboard.press("Space")
    assert page.locator("table.results th").nth(2).get_attribute("aria-sort") == "descending"
    assert page.locator("table.results th").nth(1).get_attribute("aria-sort") == "none"


def test_hovering_over_a_point_shows_its_numbers(visit):
    page = visit("comparison")
    chart = page.locator("[data-chart=cost]")
    chart.scroll_into_view_if_needed()
    box = chart.locator('[data-series="SAM rho=0.1"] .marker').bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = chart.locator(".tip")
    expect(tip).to_be_visible()
    expect(tip.locator("b")).to_have_text("SAM rho=0.1")
    expect(tip).to_contain_text("96.18 % ± 0.13, n = 3")
    expect(chart.locator(".series.cold")).to_have_count(3)
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()
    expect(chart.locator(".cold")).to_have_count(0)


def test_touching_a_point_shows_its_numbers(visit):
    page = visit("comparison", 360, touch=True)
    chart = page.locator("[data-chart=cost]")
    chart.scroll_into_view_if_needed()
    chart.locator('[data-series="GAM T=2"] .marker').tap(force=True)
    tip = chart.locator(".tip")
    expect(tip.locator("b")).to_have_text("GAM T=2")
    assert tip.is_visible()


def test_arrow_keys_read_a_chart(visit):
    page = visit("comparison", 360)
    chart = page.locator("[data-chart=curves]")
    chart.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    tip = chart.locator(".tip")
    expect(tip.locator("b")).to_have_text("SGD")
    expect(tip).to_contain_text("epoch 1,")
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("epoch 2,")
    page.keyboard.press("ArrowDown")
    expect(tip.locator("b")).to_have_text("SAM rho=0.1")
    expect(tip).to_contain_text("epoch 2,")
    box = tip.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_choices_change_the_chart(visit):
    page = visit("comparison")
    chart = page.locator("[data-chart=curves]")
    titles = chart.locator(".axes .title")
    assert titles.all_text_contents() == ["epochs", "test error, %"]
    assert chart.locator('[data-series="SGD, 2x longer"]').count() == 0
    page.get_by_role("group", name="Show", exact=True).get_by_role("button", name="training loss").click()
    page.get_by_role("group", name="over").get_by_role("button", name="gradients").click()
    expect(titles).to_have_text(["gradient evaluations", "training loss"])
    expect(chart.locator('[data-series="SGD, 2x longer"] .line')).to_have_count(1)
    assert page.get_by_role("group", name="over").get_by_role("button", pressed=True).inner_text() == "gradients"


def test_the_legend_hides_everywhere(visit):
    page = visit("comparison")
    before = page.locator('[data-chart] [data-series="SAM rho=0.1"]').count()
    chip = page.locator(".chip[data-label='SAM rho=0.1']").first
    chip.focus()
    page.keyboard.press("Enter")
    assert before > 2
    expect(page.locator('[data-chart] [data-series="SAM rho=0.1"]')).to_have_count(0)
    expect(page.locator(".chip[data-label='SAM rho=0.1'][aria-pressed=false]")).to_have_count(2)
    expect(page.locator("canvas")).to_have_count(3)
    chip.click()
    expect(page.locator('[data-chart] [data-series="SAM rho=0.1"]')).to_have_count(before)


def test_forty_methods_are_faint_until_chosen(visit):
    page = visit("forty")
    chart = page.locator("[data-chart=cost]")
    assert chart.locator(".series").count() == 41
    assert chart.locator(".series:not(.faint)").count() == 7
    page.locator("details.folded").first.evaluate("d => { d.open = true; }")
    page.locator(".chip[aria-pressed=false]").first.click()
    expect(chart.locator(".series:not(.faint)")).to_have_count(8)
    assert len(column(page, 0)) == 41


def test_landscapes_turn_together_and_can_be_read(visit):
    page = visit("comparison")
    canvases = page.locator("canvas")
    look = "all => all.map(c => c.toDataURL())"
    before = canvases.evaluate_all(look)
    canvases.first.focus()
    page.keyboard.press("ArrowRight")
    after = canvases.evaluate_all(look)
    assert all(a != b for a, b in zip(before, after, strict=True))
    page.get_by_role("button", name="maps").click()
    canvases.first.scroll_into_view_if_needed()
    box = canvases.first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator(".tile-said").first).to_have_text("loss 0.01 at (0, 0)")
    canvases.first.focus()
    page.keyboard.press("ArrowRight")  # one of nine points further: 0.01 + 2 · 0.25²
    expect(page.locator(".tile-said").first).to_have_text("loss 0.135 at (0.25, 0)")


def test_dark_mode_changes_colours_and_keeps_contrast(visit):
    def luminance(colour):
        parts = [int(x) / 255 for x in colour.strip("rgba()").split(",")[:3]]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a, b):
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    papers = []
    for scheme in ("light", "dark"):
        page = visit("comparison", scheme=scheme)
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        papers.append(paper)
        for selector in (
            "body",
            "figcaption",
            "thead button",
            ".verdict.better",
            ".answers em",
            ".chip",
            ".p",
            "a, summary",
        ):
            colour = page.locator(selector).first.evaluate("e => getComputedStyle(e).color")
            assert contrast(colour, paper) >= 4.5, (scheme, selector)
        lines = page.locator("[data-chart=curves] .line").evaluate_all(
            "all => all.map(e => getComputedStyle(e).stroke)"
        )
        assert len(set(lines)) == 3
        for k in range(8):
            colour = page.evaluate(
                """k => {
                     const probe = document.body.appendChild(document.createElement('i'));
                     probe.style.color = `var(--c${k})`;
                     return getComputedStyle(probe).color;
                   }""",
                k,
            )
            assert contrast(colour, paper) >= 3, (scheme, k)
    assert luminance(papers[0]) > 0.9 and luminance(papers[1]) < 0.05


def test_methods_differ_in_more_than_colour(visit):
    page = visit("forty")
    looks = page.locator("table.results .key svg").evaluate_all(
        """all => all.map(s => [s.style.getPropertyValue('--colour'),
             s.querySelector('line').getAttribute('stroke-dasharray'),
             s.querySelector('path').getAttribute('d')].join('|'))"""
    )
    assert len(looks) == 41 and len(set(looks)) == 41
    shapes = [look.split("|", 1)[1] for look in looks[1:7]]
    assert len(set(shapes)) == 6  # the first ones without colour, too


def test_names_do_not_cover_each_other(visit):
    for scene in ("comparison", "uneven"):
        page = visit(scene)
        overlaps = page.evaluate(
            """() => [...document.querySelectorAll('[data-chart] > svg')].flatMap(svg => {
                 const boxes = [...svg.querySelectorAll('.name text')].map(t => t.getBoundingClientRect());
                 return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => a.left < b.right && b.left < a.right
                   && a.top + 2 < b.bottom && b.top + 2 < a.bottom));
               }).length"""
        )
        assert overlaps == 0


def test_everything_can_be_reached_by_keyboard_and_has_a_name(visit):
    page = visit("comparison")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, [tabindex="0"], [role=img], [role=region], [role=group]')]
             .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim()
               || document.getElementById(e.getAttribute('aria-labelledby'))?.textContent)).length"""
    )
    assert unnamed == 0
    levels = page.locator("h1, h2, h3, h4").evaluate_all("all => all.map(h => Number(h.tagName[1]))")
    assert levels[0] == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_charts_are_redrawn_when_the_width_changes(visit):
    page = visit("comparison")
    wide = page.locator("[data-chart=cost] > svg").bounding_box()["width"]
    page.set_viewport_size({"width": 400, "height": 800})
    until(page, f"innerWidth === 400 && {DRAWN}")
    assert page.locator("[data-chart=cost] > svg").bounding_box()["width"] < 400
    assert wide > 1000
    assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_without_scripts_the_answer_and_the_table_are_there(browser, paths):
    context = browser.new_context(java_script_enabled=False)
    context.set_default_timeout(1000 * PATIENCE)
    page = context.new_page()
    page.goto(paths["comparison"].as_uri())
    assert page.locator("table.results tbody tr").count() == 4
    assert page.locator("h1.conclusion").is_visible() and page.locator("table.results .verdict").first.is_visible()
    assert page.locator(".saves, .hint").count() == 0  # nothing that would need a script
    assert page.get_by_text("This chart needs JavaScript, which is disabled.").first.is_visible()
    context.close()
