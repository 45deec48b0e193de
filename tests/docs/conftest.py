"""The site, built once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from helpers.pages import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site. A warning of the build is an error."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f'needs {module}: pip install "steppe[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # about another version of mkdocs
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder
