"""Shared by all tests."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # the nets are tiny: threads cost more than they bring


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)
