"""A browser, and pages of made-up records in it."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.report_pages import CHROMIUM, DRAWN, PATIENCE, until
from helpers.report_records import SCENES


@pytest.fixture(scope="package")
def browsers():
    """Starts Chromium, and again if it was ended from outside: that costs one test and not all that follow."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-extensions", "--disable-background-networking"]
    started: list[Any] = []
    with sync_api.sync_playwright() as driver:

        def alive() -> Any:
            if not (started and started[-1].is_connected()):
                started.append(driver.chromium.launch(executable_path=CHROMIUM, args=flags, timeout=1000 * PATIENCE))
            return started[-1]

        yield alive
        if started:
            started[-1].close()


@pytest.fixture
def browser(browsers):
    return browsers()


@pytest.fixture(scope="package")
def paths(tmp_path_factory):
    """The page of a scene, written when it is first asked for. A test may add pages of its own."""
    from steppe.lab.report import write_report

    folder = tmp_path_factory.mktemp("pages")

    class Pages(dict[str, Any]):
        def __missing__(self, scene: str) -> Any:
            self[scene] = write_report(SCENES[scene](), folder / f"{scene}.html", command="steppe compare")
            return self[scene]

    return Pages()


@pytest.fixture
def visit(browser, paths):
    """Opens a scene; at the end nothing may have been complained about or asked for."""
    opened = []

    def go(scene="comparison", width=1280, scheme="light", touch=False):
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, has_touch=touch, reduced_motion="reduce"
        )
        context.set_default_timeout(1000 * PATIENCE)
        page = context.new_page()
        complaints, requests = [], []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(paths[scene].as_uri())
        until(page, DRAWN)
        opened.append((context, complaints, requests))
        return page

    yield go
    for context, complaints, requests in opened:
        assert complaints == []
        assert len([url for url in requests if url.startswith("file:")]) == 1
        assert [url for url in requests if not url.startswith(("file:", "blob:file:", "data:", "blob:null/"))] == []
        context.close()
