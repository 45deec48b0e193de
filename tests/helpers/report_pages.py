"""Report pages in a browser: where it is, and how to wait for something to happen on a page."""

from __future__ import annotations

import shutil
import time
from typing import Any

PATIENCE = 300  # seconds for anything to happen, on a machine with any load
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Waits until all charts are drawn for the current width: the page draws them again some time after it changes.
DRAWN = """[...document.querySelectorAll('[data-chart]')].every(
  host => host.querySelector('.tiles') || host.querySelector('svg')?.clientWidth === Math.max(240, host.clientWidth))"""


def until(page: Any, condition: str) -> None:
    """Wait for something on the page. Playwright's own waiting evaluates text, which the page's policy forbids."""
    end = time.monotonic() + PATIENCE
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never true: {condition}"
        page.wait_for_timeout(20)
