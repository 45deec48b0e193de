"""The eleven problems and their dense Hessians, computed once."""

from __future__ import annotations

import pytest
import torch

from helpers.curvature_problems import NAMES, Problem, problems


@pytest.fixture(scope="session")
def all_problems() -> list[tuple[Problem, torch.Tensor]]:
    found = []
    for problem in problems():
        dense = problem.dense()
        assert torch.allclose(dense, dense.T, atol=1e-12 * float(dense.abs().max()))
        found.append((problem, (dense + dense.T) / 2))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = any("index" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "index" in metafunc.fixturenames and not chosen:
        metafunc.parametrize("index", range(len(NAMES)), ids=NAMES)
