"""The interactive surface that `steppe landscape` writes, in a real browser and without a network."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch

from helpers.curvature_problems import mlp

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
pytest.importorskip("plotly", reason="plotly is not installed")
typer = pytest.importorskip("typer", reason="typer is not installed")
from typer.testing import CliRunner  # noqa: E402

from steppe.cli.app import app  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

MODULE = """
import torch
from helpers.curvature_problems import digits, mlp
def model(): return mlp(4).double()
def data(): return digits(30, side=4)
"""

# What plotly says it draws, and the middle pixel row of the WebGL canvas: one colour where nothing is drawn.
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
def page_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_page.py").write_text(MODULE)
    sys.modules.pop("a_page", None)
    torch.manual_seed(0)
    torch.save(mlp(4).double().state_dict(), tmp_path / "net.pt")
    options = ["--model", "a_page:model", "--data", "a_page:data", "--points", "9"]
    result = CliRunner().invoke(app, ["landscape", "net.pt", *options])
    assert result.exit_code == 0, result.output
    return tmp_path / "landscape" / "net.html"


def test_the_surface_is_drawn_turns_and_tells_its_values(page_file):
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
        )
        try:
            context = browser.new_context(viewport={"width": 900, "height": 700}, offline=True)
            page = context.new_page()
            page.set_default_timeout(120_000)  # drawing without a graphics card takes its time
            errors: list[str] = []
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            requests: list[str] = []
            page.on("request", lambda request: requests.append(request.url))
            page.goto(page_file.as_uri())
            ready = "() => !!document.querySelector('.js-plotly-plot')?._fullLayout?.scene?._scene?.glplot"
            page.wait_for_function(ready, polling=200)
            before = page.evaluate(DRAWN)
            assert before["colours"] > 50  # a shaded surface, not a blank canvas
            assert before["axes"] == ["first direction", "loss"]
            assert len(before["z"]) == 9 and all(len(row) == 9 and all(v > 0 for v in row) for row in before["z"])
            box = page.locator(".js-plotly-plot").bounding_box()
            assert box is not None and box["height"] > 500
            middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
            page.mouse.move(*middle)
            page.wait_for_function("() => !!document.querySelector('.hovertext')", polling=200)
            told = page.locator(".hovertext").first.text_content()
            assert told is not None and told.startswith("loss ") and "first direction" in told
            page.mouse.down()
            page.mouse.move(middle[0] + 150, middle[1], steps=4)
            page.mouse.up()
            eye = "document.querySelector('.js-plotly-plot')._fullLayout.scene._scene.getCamera().eye"
            page.wait_for_function(f"() => Math.abs({eye}.x - ({before['eye'][0]})) > 0.1", polling=200)
            after = page.evaluate(DRAWN)
            assert after["eye"][2] == pytest.approx(before["eye"][2], abs=1e-6)  # turned, not tilted
            assert after["colours"] > 50
            assert errors == []
            assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
            page.screenshot(path=str(page_file.with_suffix(".png")))
        finally:
            browser.close()
