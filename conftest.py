"""Shared by all tests and by the examples in docstrings."""

import gc
import importlib.util
import os
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "tests" / "distributed"
TRAINERS = ("accelerate", "keras", "lightning", "timm", "transformers")

# Integrations whose trainer is not installed: their examples cannot run.
collect_ignore = [
    f"src/steppe/integrations/{file}.py"
    for file, package in [*((name, name) for name in TRAINERS), ("fabric", "lightning")]
    if importlib.util.find_spec(package) is None
]
collect_ignore += ["tests/integrations/titan_worlds.py"]  # a script: importing it changes torchtitan


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """All tests on several ranks are marked slow: if those are left out, they are not imported either."""
    return True if collection_path == RANKS and config.getoption("markexpr") == "not slow" else None


def pytest_collection_finish():
    """What is imported and collected is not garbage. A collection that visits all of it takes as long as many tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """As many workers as cores. Every worker imports everything, which takes as long as a hundred tests."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.fixture(autouse=True)
def _same_methods():
    """A method that a test makes is unknown to the next one, which may make another of the same name."""
    from steppe import Method

    known = dict(Method.registry)
    yield
    Method.registry.clear()
    Method.registry.update(known)
