"""The interactive surface of `figures.surface_html`, in a real browser and without a network."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helpers.curvature_problems import digits, mlp
from steppe.curvature import Objective, figures, plane

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
pytest.importorskip("plotly", reason="plotly is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Slow: WebGL without a graphics card. The contents of the file are checked in test_landscape.py.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

PATIENCE = 600_000  # milliseconds: for a machine that has much else to do
PLOT = "document.querySelector('.js-plotly-plot')"
# What plotly draws, and how many colours are on the WebGL canvas: one where nothing is drawn.
DRAWN = """() => {
    const plot = document.querySelector('.js-plotly-plot'), scene = plot._fullLayout.scene._scene;
    scene.glplot.redraw();
    const gl = scene.glplot.gl, width = gl.drawingBufferWidth, height = gl.drawingBufferHeight;
    const pixels = new Uint8Array(4 * width * height);
    gl.readPixels(0, 0, width, height, gl.RGBA, gl.UNSIGNED_BYTE, pixels);
    const colours = new Set();
    for (let i = 0; i < pixels.length; i += 4) colours.add((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
    const eye = scene.getCamera().eye;
    return {colours: colours.size, eye: [eye.x, eye.y, eye.z], z: plot.data[0].z, axes: [
        plot._fullLayout.scene.xaxis.title.text, plot._fullLayout.scene.zaxis.title.text]};
}"""


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "surface.html"
    figures.surface_html(plane(Objective(mlp(4).double(), F.cross_entropy, digits(30, side=4)), points=9), path)
    return path


@pytest.fixture
def page() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=PATIENCE)
        try:
            context = browser.new_context(viewport={"width": 900, "height": 700}, offline=True)
            context.set_default_timeout(PATIENCE)
            yield context.new_page()
        finally:
            browser.close()


def repeat_until(page: Any, act: Callable[[], None], condition: str) -> None:
    """Act until a condition holds: a page that is still drawing may miss what the mouse did."""
    end = time.monotonic() + PATIENCE / 1000
    while True:
        act()
        try:
            page.wait_for_function(f"() => {condition}", polling=100, timeout=1_500)
            return
        except playwright.TimeoutError:
            if time.monotonic() > end:
                raise


def test_the_surface_is_drawn_turns_and_tells_its_values(page: Any, page_file: Path):
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(page_file.as_uri())
    page.wait_for_function(f"() => !!{PLOT}?._fullLayout?.scene?._scene?.glplot", polling=200)
    page.wait_for_function(f"() => ({DRAWN})().colours > 50", polling=1_000)  # a shaded surface, not a blank canvas
    before = page.evaluate(DRAWN)
    assert before["axes"] == ["first direction", "loss"]
    assert len(before["z"]) == 9 and all(len(row) == 9 and all(v > 0 for v in row) for row in before["z"])
    box = page.locator(".js-plotly-plot").bounding_box()
    assert box is not None and box["height"] > 500
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def point() -> None:
        page.mouse.move(x - 3, y)
        page.mouse.move(x, y)

    repeat_until(page, point, "!!document.querySelector('.hovertext')")
    told = page.locator(".hovertext").first.text_content()
    assert told is not None and told.startswith("loss ") and "first direction" in told

    def drag() -> None:
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 150, y, steps=4)
        page.mouse.up()

    eye = f"{PLOT}._fullLayout.scene._scene.getCamera().eye"
    repeat_until(page, drag, f"Math.abs({eye}.x - ({before['eye'][0]})) > 0.1")
    after = page.evaluate(DRAWN)
    assert after["eye"][2] == pytest.approx(before["eye"][2], abs=1e-6)  # turned, not tilted
    assert after["colours"] > 50
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
