"""Shared by the tests of integrations."""

from __future__ import annotations

import sys
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _accelerate_forgets():
    """All Accelerators of a process share their settings, and whether a data loader is at its end."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    state: Any = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
