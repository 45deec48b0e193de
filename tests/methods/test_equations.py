"""Each method, driven by the optimizer on a real net, against its equations implemented again in float64."""

from __future__ import annotations

import pytest
import torch

import steppe
from helpers import problems, references
from steppe.engine.random_vectors import Draws
from steppe.vector import Space

VARIANTS = problems.all_variants()
WITH_PRODUCTS = [m for m in VARIANTS if "hvp" in m.needs]


def draw_like(model, step: int):
    """The library's random vectors of a step, flattened: the equations are tested, not the generator."""
    draws = Draws(Space(list(model.parameters())), seed=0, step=step)
    return lambda kind, *args: problems.flat(getattr(draws, kind)(*args).tensors)


@pytest.mark.parametrize("method", VARIANTS, ids=problems.ids(VARIANTS))
def test_direction_follows_the_equations(method):
    reference = getattr(references, method.name.lower(), None)
    assert reference is not None, f"add {method.name}'s equations, in plain float64, to tests/helpers/references.py"
    model = problems.seeded(problems.mlp)
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = steppe.SharpnessAware(base, method, model, hvp="exact")
    state: dict = {}
    for step, data in enumerate(problems.steps(6)):
        w, lr = problems.weights(model), float(base.param_groups[0]["lr"])
        problem = references.Problem(model, data, step, lr, draw_like(model, step))
        expected = reference(problem, w, method, state)
        expected, aside = expected if isinstance(expected, tuple) else (expected, torch.zeros_like(w))
        opt.gradient(**data.closures(model))
        direction = problems.flat(p.grad for p in model.parameters())
        assert torch.equal(problems.weights(model), w)
        # The guard of 1e-12 in divisions by a norm shows at this size where small differences are scaled up (LookSAM).
        torch.testing.assert_close(direction, expected, rtol=1e-10, atol=2e-11)
        opt.step()
        lr = state.get("lr", lr)
        torch.testing.assert_close(problems.weights(model), w - lr * (expected + aside), rtol=1e-10, atol=2e-11)


@pytest.mark.parametrize("method", WITH_PRODUCTS, ids=problems.ids(WITH_PRODUCTS))
@pytest.mark.parametrize("hvp", ["forward", "central"])
def test_finite_difference_products_give_nearly_the_same_direction(method, hvp):
    ends, looks = {}, {}
    for mode in (hvp, "exact"):
        model = problems.seeded(problems.mlp)
        opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.05), method, model, hvp=mode)
        for data in problems.steps(3):
            opt.step(**data.closures(model))
            looks[mode] = max(looks.get(mode, 0), opt.metrics["looks"])
        ends[mode] = problems.weights(model)
    torch.testing.assert_close(ends[hvp], ends["exact"], rtol=1e-5, atol=1e-6)
    products = 1 if getattr(method, "reference", None) == "weights" else 2
    assert looks[hvp] - looks["exact"] == (products if hvp == "central" else 0)  # one more look for each


def test_exact_products_work_with_attention():
    """The fast attention kernels have no second derivative: the math kernel is used for the product."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 10)

        def forward(self, x):
            q, k, v = self.project(x.view(-1, 8, 8)).chunk(3, -1)
            return self.head(torch.nn.functional.scaled_dot_product_attention(q, k, v).mean(1))

    ends = []
    for hvp in ("exact", "central"):
        model = problems.seeded(Attention)
        opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.GNAM(alpha=1.0), model, hvp=hvp)
        for data in problems.steps(3):
            opt.step(**data.closures(model))
        ends.append(problems.weights(model))
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-8)


def test_exact_products_need_closures_that_return_a_graph():
    model = problems.seeded(problems.mlp)
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.GNAM(), model, hvp="exact")
    data = problems.steps(1)[0]
    with pytest.raises(RuntimeError, match="needs closures that return a graph"):
        opt.passes()
    with pytest.raises(RuntimeError, match="does not call backward"):
        opt.step(**data.closures(model, backward=True))


@pytest.mark.parametrize("rule", ["fisher", "dynamic"])
def test_a_mask_of_everything_gives_sam(rule):
    """To rounding only: the mask is one more product. Some pixels are black in all samples: their score is zero."""
    ends = []
    for method in (steppe.SSAM(sparsity=0.0, samples=2, rule=rule, every=1), steppe.SAM(rho=0.1)):
        model = problems.seeded(problems.mlp)
        opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), method, model)
        for data in problems.steps(3):
            opt.step(**data.closures(model))
        ends.append(problems.weights(model))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-13)
