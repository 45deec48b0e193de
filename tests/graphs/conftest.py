"""Shared by the tests of recorded steps."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def exact():
    """Kernels that give the same bits every time."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = before
