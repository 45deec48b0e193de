"""The site, built once for all tests that look at it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.pages import ROOT

PATIENCE = 900.0  # seconds: far more than a build takes on a busy machine


@pytest.hookimpl(tryfirst=True)  # before tests that are slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Building the site takes as long as a fifth of all other tests: what it shows is for CI (slow).

    What is said in it is tested without: the code of every page, the shown commands, the pages of the methods.
    """
    for item in items:
        if "site" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. A warning of the build is an error."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f'needs {module}: pip install "steppe[docs]"')
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site-built-once"
    try:
        shared.mkdir()
    except FileExistsError:  # another worker builds it
        wait_for(shared / "done")
    else:
        (shared / "log").write_text(build(shared / "site"), "utf-8")
        (shared / "done").touch()
    log = (shared / "log").read_text("utf-8")
    assert not log, log
    return shared / "site"


def build(folder: Path) -> str:
    """Build the site; what went wrong."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # about another version of mkdocs
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    return built.stderr or f"mkdocs ended with {built.returncode}" if built.returncode else ""


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    end = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.1)
