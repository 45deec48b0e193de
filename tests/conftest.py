"""Shared by all tests."""

from __future__ import annotations

import contextlib

import pytest
import torch

with contextlib.suppress(ImportError):  # the tests that need it skip without it
    from hypothesis import settings

    settings.register_profile("steppe", deadline=None)  # how long an example takes depends on the machine's load
    settings.load_profile("steppe")
torch.set_num_threads(1)  # the nets are tiny: threads cost more than they bring


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)
