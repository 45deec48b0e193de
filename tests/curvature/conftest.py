"""The eleven problems and their dense Hessians, computed once."""

from __future__ import annotations

import pytest
import torch

from helpers.curvature_problems import Problem, problems


@pytest.fixture(scope="session")
def all_problems() -> list[tuple[Problem, torch.Tensor]]:
    found = []
    for problem in problems():
        dense = problem.dense()
        assert torch.allclose(dense, dense.T, atol=1e-12 * float(dense.abs().max()))
        found.append((problem, (dense + dense.T) / 2))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "index" in metafunc.fixturenames:
        names = [problem.name for problem in problems()]
        metafunc.parametrize("index", range(len(names)), ids=names)
