"""The site in a real browser: headless Chromium."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
PATIENCE = 300_000  # milliseconds: a condition is waited for, however busy the machine is


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without printing a log."""

    def log_message(self, format, *args):
        """Nothing."""


@pytest.fixture(scope="module")
def address(site):
    """The site, served."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens pages of one size; what went wrong in them is collected in `page.trouble`."""
    contexts = []

    def opened(width: int, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.trouble = []
        page.asked = set()
        page.on("console", lambda m: page.trouble.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.trouble.append(str(error)))
        page.on("requestfailed", lambda request: page.trouble.extend(failure_of(request)))
        page.on("response", lambda r: page.trouble.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
        page.on("request", lambda request: page.asked.add(urlsplit(request.url).netloc))
        return page

    yield opened
    for context in contexts:
        context.close()


def failure_of(request) -> list[str]:
    """Why a request failed; leaving a page before all of it has come is none."""
    return [] if request.failure == "net::ERR_ABORTED" else [f"{request.failure}: {request.url}"]


def pages_of(site: Path) -> list[str]:
    return [str(path.relative_to(site)) for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


@pytest.mark.slow
def test_every_page_on_a_phone(site, address, open_page):
    """No error in the console, nothing missing, nothing asked of another host, no page wider than the screen."""
    names = pages_of(site)
    methods = [name for name in names if name.startswith("methods/")]
    longest = max(methods, key=lambda name: (site / name).stat().st_size)  # stands for the others, all of one form
    visit([name for name in names if name not in methods or name == longest], address, open_page)
    assert len(names) > 30


@pytest.mark.slow
def test_every_method_page_on_a_phone(site, address, open_page):
    visit([name for name in pages_of(site) if name.startswith("methods/")], address, open_page)


def visit(names: list[str], address: str, open_page) -> None:
    """Open pages on a small screen."""
    page = open_page(360)
    wide = []
    for name in names:
        page.goto(f"{address}/{name}")
        if page.evaluate("document.documentElement.scrollWidth") > 360:
            wide.append(name)
    assert page.trouble == []
    assert wide == []
    assert {host for host in page.asked if host} == {urlsplit(address).netloc}


def test_search_finds_a_method(address, open_page):
    page = open_page(1280)
    page.goto(f"{address}/index.html")
    page.keyboard.press("/")
    page.keyboard.type("GSAM")
    page.locator(".md-search-result__item a[href*='methods/gsam.html']").first.wait_for(state="attached")
    assert page.trouble == []


COLOURS = """() => {
    const text = document.querySelector("SELECTOR text");
    const bar = document.querySelector("SELECTOR rect");
    return [getComputedStyle(text).fill, bar ? getComputedStyle(bar).fill : ""];
}"""


@pytest.mark.parametrize(
    ("name", "selector"),
    [("how.html", "svg.drawing"), ("benchmarks.html", "svg.chart"), ("curvature.html", "svg.figure")],
)
def test_drawings_follow_the_switch_between_light_and_dark(address, open_page, name, selector):
    page = open_page(1280)
    page.goto(f"{address}/{name}")
    colours = COLOURS.replace("SELECTOR", selector)
    text, bar = page.evaluate(colours)
    assert luminance(parts(text)[:3]) < 0.1
    page.locator("label[for=__palette_1]").click()
    page.wait_for_function("document.body.getAttribute('data-md-color-scheme') === 'slate'")
    page.wait_for_function(f"before => ({colours})()[0] !== before", arg=text)
    now, bar_now = page.evaluate(colours)
    assert luminance(parts(now)[:3]) > 0.5
    assert bar != bar_now or selector != "svg.chart"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_are_seen_in_the_scheme_of_the_page(address, open_page, scheme):
    page = open_page(1280, scheme)
    page.goto(f"{address}/benchmarks.html")
    behind = page.evaluate("getComputedStyle(document.body).backgroundColor")
    drawn = page.locator("svg.chart")
    assert drawn.count() > 20 and page.locator("article img").count() == 0
    for what in ("text", "rect"):
        front = drawn.first.locator(what).first.evaluate("element => getComputedStyle(element).fill")
        assert contrast(front, behind) >= (4.5 if what == "text" else 3), (what, front, behind)


def test_the_report_is_shown(address, open_page):
    page = open_page(1280)
    page.goto(f"{address}/compare.html")
    page.locator("iframe.report").scroll_into_view_if_needed()
    page.frame_locator("iframe.report").locator("table").first.wait_for()
    assert page.trouble == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(address, open_page, scheme):
    """Words, links and code, by the contrast that WCAG asks of text: 4.5 to 1."""
    page = open_page(1280, scheme)
    page.goto(f"{address}/index.html")
    body = page.evaluate("getComputedStyle(document.body).backgroundColor")
    for what in ("article p", "article td a", "article h2"):
        colour = page.locator(what).first.evaluate("element => getComputedStyle(element).color")
        assert contrast(colour, body) >= 4.5, (what, colour, body)


def contrast(front: str, back: str) -> float:
    """Of two colours: WCAG's ratio of relative luminances."""
    behind = parts(back)
    alpha = parts(front)[3]
    mixed = [alpha * f + (1 - alpha) * b for f, b in zip(parts(front)[:3], behind[:3], strict=True)]
    light, dark = sorted((luminance(mixed), luminance(behind[:3])), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def parts(colour: str) -> list[float]:
    red, green, blue, *alpha = (float(part) for part in colour[colour.index("(") + 1 : -1].split(","))
    return [red / 255, green / 255, blue / 255, *(alpha or [1.0])]


def luminance(rgb: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_search_works_when_the_site_is_opened_from_a_folder(open_page, site):
    page = open_page(1280)
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("radius")
    page.locator(".md-search-result__item").first.wait_for()
    assert page.asked <= {""}, "nothing comes from a host"


def test_contrast_follows_its_definition():
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgba(0, 0, 0, 0)", "rgb(9, 9, 9)") == pytest.approx(1)
