"""GAM's options in all combinations, with one held-out batch, against its equations implemented again in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import steppe
from helpers import problems, references

OPTIONS = [*product(("perturbed", "weights"), ("dot", "squared", "cosine"), ("raw", "sized", "unit"), (1, 3), (1, 3))]


def ends_of(method: steppe.GAM, steps: int = 5) -> None:
    model = problems.seeded(problems.mlp)
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.05), method, model, hvp="exact")
    days = problems.steps(steps, size=12)
    held_out = days[-1].auxiliary
    state: dict = {}
    for step, day in enumerate(days):
        data, w = problems.Data(day.main, held_out), problems.weights(model)
        expected = references.gam(
            references.Problem(model, data, step, 0.05, lambda *_: torch.empty(0)), w, method, state
        )
        opt.gradient(**data.closures(model))
        direction = problems.flat(p.grad for p in model.parameters())
        torch.testing.assert_close(direction, expected, rtol=1e-9, atol=1e-11)
        learns = step % method.period == 0
        assert opt.under_way.ready is not None and ("gamma" in opt.under_way.ready.ctx.remembered) == learns
        if learns:
            gamma = opt.under_way.ready.ctx.remembered["gamma"]
            torch.testing.assert_close(gamma, state["gamma"], rtol=1e-7, atol=1e-12)
        opt.step()
        more = 3 if method.reference == "perturbed" else 2
        assert opt.metrics["looks"] == method.T + 1 + (more if learns else 0)


@pytest.mark.parametrize(("reference", "discrepancy", "directions", "T", "period"), OPTIONS)
def test_every_combination_of_options_follows_the_equations(reference, discrepancy, directions, T, period):
    ends_of(
        steppe.GAM(T=T, reference=reference, discrepancy=discrepancy, directions=directions, period=period, eps=1e-2)
    )
