"""Several models in one step: each ends where it ends when it is trained alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import steppe
from helpers import problems
from helpers.problems import Data, adamw, by_closure, seeded, sgd

MEMBERS = 3
VARIANTS = [method for cls in steppe.Method.registry.values() for method in cls.variants()]
STACKABLE = [method for method in VARIANTS if method.stackable]
OTHERS = [method for method in VARIANTS if not method.stackable]


class Stacked(nn.Module):
    """Nets of one kind as one module, by torch.func: every parameter has the members as its first dimension."""

    def __init__(self, nets: list[nn.Module]):
        super().__init__()
        self.skeleton = [nets[0]]  # in a list, so that its weights are none of this module's
        params, _ = stack_module_state(nets)
        self.names = list(params)
        self.stacked = nn.ParameterList([nn.Parameter(p.detach()) for p in params.values()])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        def outputs(params, x):
            return functional_call(self.skeleton[0], params, (x,))

        return vmap(outputs)(dict(zip(self.names, self.stacked, strict=True)), inputs)

    def losses(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return vmap(F.cross_entropy)(self(inputs), targets)


def data_of(member: int, count: int) -> list[Data]:
    """A member's own batches."""
    return problems.steps(count + MEMBERS)[member : member + count]


def alone(method, base, count):
    ends, losses = [], []
    for member in range(MEMBERS):
        net = seeded(problems.mlp, seed=member)
        opt = steppe.SharpnessAware(base(net), method, net)
        losses.append([float(by_closure(opt, net, data)) for data in data_of(member, count)])  # pyright: ignore[reportArgumentType]
        ends.append((problems.weights(net), {k: v for k, v in opt.metrics.items() if k != "looks"}))
    return ends, losses


def together(method, base, count):
    net = Stacked([seeded(problems.mlp, seed=member) for member in range(MEMBERS)])
    opt = steppe.SharpnessAware(base(net), method, net, members=MEMBERS)
    losses = []
    for step in range(count):
        own = [data_of(member, count)[step] for member in range(MEMBERS)]
        main, auxiliary = (
            tuple(torch.stack(parts) for parts in zip(*(getattr(data, name) for data in own), strict=True))
            for name in ("main", "auxiliary")
        )
        losses.append(opt.step(lambda b=main: net.losses(*b), auxiliary=lambda b=auxiliary: net.losses(*b)).tolist())
    ends = [problems.flat([p[member] for p in net.stacked]) for member in range(MEMBERS)]
    return ends, losses, opt


@pytest.mark.parametrize("base", [sgd, adamw])
@pytest.mark.parametrize("method", STACKABLE, ids=[f"{i}-{method.name}" for i, method in enumerate(STACKABLE)])
def test_each_member_ends_where_it_ends_alone(method, base):
    rounding = 1e-6 if "hvp" in method.needs else 1e-10  # differences of gradients enlarge it
    ends, losses, opt = together(method, base, count=5)
    alone_ends, alone_losses = alone(method, base, count=5)
    for member in range(MEMBERS):
        weights, metrics = alone_ends[member]
        assert torch.allclose(ends[member], weights, rtol=rounding, atol=rounding)
        assert [step[member] for step in losses] == pytest.approx(alone_losses[member], rel=rounding)
        for name, value in metrics.items():
            assert torch.allclose(opt.metrics[name][..., member], value, rtol=1e3 * rounding, atol=1e3 * rounding)


def test_members_differ_from_one_model_with_one_norm():
    """The test above could not tell if all members shared one norm and one radius by chance: here they do not."""
    ends, _, _ = together(steppe.SAM(rho=0.5), sgd, count=2)
    net = Stacked([seeded(problems.mlp, seed=member) for member in range(MEMBERS)])
    opt = steppe.SharpnessAware(sgd(net), steppe.SAM(rho=0.5), net)
    for step in range(2):
        own = [data_of(member, 2)[step].main for member in range(MEMBERS)]
        inputs, targets = (torch.stack(parts) for parts in zip(*own, strict=True))
        opt.step(lambda x=inputs, y=targets: net.losses(x, y).sum())
    assert not torch.allclose(ends[0], problems.flat([p[0] for p in net.stacked]), rtol=1e-3)


@pytest.mark.parametrize("method", OTHERS, ids=[f"{i}-{method.name}" for i, method in enumerate(OTHERS)])
def test_methods_that_cannot_be_stacked_are_refused(method):
    with pytest.raises(ValueError, match="cannot train several members at once"):
        together(method, lambda net: torch.optim.SGD(net.parameters(), lr=0.1), count=1)


def test_what_would_mix_members_is_refused():
    net = Stacked([seeded(problems.mlp, seed=member) for member in range(MEMBERS)])
    (x, y) = problems.steps(1)[0].main
    batch = x.expand(MEMBERS, *x.shape), y.expand(MEMBERS, *y.shape)
    opt = steppe.SharpnessAware(sgd(net), steppe.SAM(), net, members=MEMBERS)
    with pytest.raises(TypeError, match=r"one loss for each of the 3 members, .* shape \(3,\); it returned .* \(\)"):
        opt.step(lambda: net.losses(*batch).sum())
    with pytest.raises(ValueError, match="members have no GradScaler"):
        opt.gradient(lambda: net.losses(*batch), scaler=torch.amp.GradScaler("cpu"))
    wrong = steppe.SharpnessAware(sgd(net), steppe.SAM(), net, members=2)
    with pytest.raises(ValueError, match=r"members=2, but a parameter has the shape \(3, 16, 64\)"):
        wrong.step(lambda: net.losses(*batch))


def test_exact_hessian_products_and_resuming_keep_members_apart():
    method = steppe.GAM(T=1, reference="weights", discrepancy="cosine", directions="unit")
    net = Stacked([seeded(problems.mlp, seed=member) for member in range(MEMBERS)])
    opt = steppe.SharpnessAware(sgd(net), method, net, members=MEMBERS, hvp="exact")
    for member_step in range(3):
        data = problems.steps(3)[member_step]
        batch = [t.expand(MEMBERS, *t.shape) for t in data.main]
        opt.step(lambda b=batch: net.losses(*b), auxiliary=lambda b=batch: net.losses(*b))
        if member_step == 1:  # a checkpoint in the middle
            saved = opt.state_dict()
            opt = steppe.SharpnessAware(sgd(net), method, net, members=MEMBERS, hvp="exact")
            opt.load_state_dict(saved)
    for member in range(MEMBERS):
        single = seeded(problems.mlp, seed=member)
        one = steppe.SharpnessAware(sgd(single), method, single, hvp="exact")
        for data in problems.steps(3):
            one.step(
                lambda d=data, s=single: problems.loss(s, d.main),
                auxiliary=lambda d=data, s=single: problems.loss(s, d.main),
            )
        assert torch.allclose(
            problems.flat([p[member] for p in net.stacked]), problems.weights(single), rtol=1e-9, atol=1e-11
        )
