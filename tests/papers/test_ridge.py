"""S1's toy surface and the paths on it."""

from __future__ import annotations

import math

import pytest
import torch

from steppe import GSAM, SharpnessAware
from steppe.papers import ridge
from steppe.papers.definitions.s1 import trajectory


def test_heights_are_those_of_the_formula():
    depth, width, distance, far, flat_at, flat_depth, flat_width = 0.92, 0.21, 0.73, 0.3, 2.13, 1.62, 1.72
    for x, y in ((-1.4, 0.73), (-0.9, -0.7), (0.3, 0.1), (2.0, 1.0)):
        height = 0.04 * y**4 - flat_depth * math.exp(-((x - flat_at) ** 2 + y**2) / (2 * flat_width**2))
        for i in range(5):
            centre = -1.4 + i * (far + 1.4) / 4, distance if i in (0, 2, 4) else -distance
            height -= depth * math.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / (2 * width**2))
        assert float(ridge.PAPER(torch.tensor([x, y]))) == pytest.approx(height, abs=1e-6)


def test_minima_beside_the_ridge_are_sharp_and_the_one_at_its_end_is_flat():
    def curvature(x: float, y: float) -> float:
        hessian = torch.autograd.functional.hessian(ridge.PAPER, torch.tensor([x, y]))
        return float(torch.linalg.eigvalsh(hessian)[-1])

    assert min(curvature(-1.4, 0.73), curvature(-0.12, -0.73)) > 10 * curvature(2.13, 0.0)


def test_a_trajectory_is_gradient_descent():
    w = ridge.starts()[3 * ridge.STARTS // 4]
    for _ in range(5):
        w = w - 0.05 * torch.autograd.functional.jacobian(ridge.PAPER, w)
    assert trajectory("sgd", "smoke", 0)["end"] == pytest.approx(w.tolist(), rel=1e-5)


def test_many_paths_at_once_are_the_paths_one_by_one():
    two = ridge.random_ridges(2)
    begin = ridge.starts(3)
    together = ridge.paths(two.repeated(3), GSAM(rho=0.3, alpha=0.4), begin.repeat(2, 1), 20)
    for surface in range(2):
        one = ridge.Ridge(**{name: value[surface] for name, value in vars(two).items()})
        for number, start in enumerate(begin):
            w = start.clone().requires_grad_()
            optimizer = SharpnessAware(torch.optim.SGD([w], lr=0.05), GSAM(rho=0.3, alpha=0.4))
            for _ in range(20):
                optimizer.step(lambda one=one, w=w: one(w))
            assert torch.allclose(w, together[-1, 3 * surface + number], atol=1e-5)


@pytest.mark.parametrize(
    ("end", "place"),
    [
        ((2.0, 0.1), "the flat minimum"),
        ((-1.4, 0.7), "sharp minimum 1"),
        ((0.8, 0.5), "a place beside sharp minimum 5"),
    ],
)
def test_places_have_names(end, place):
    assert ridge.describe(ridge.PAPER, torch.tensor(end)) == place
