"""Looks that are linear in the model's outputs: the loss's gradient by them is that of the first look."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steppe
from helpers import problems
from helpers.problems import everything, same, seeded, sgd, weights

METHOD = steppe.FunctionalSAM(rho=0.5)
DATA = problems.steps(3)


def trained(net: Any, loss: Any, method: steppe.Method = METHOD, **settings: Any) -> list[Tensor]:
    opt = steppe.SharpnessAware(sgd(net), method, net, **settings)
    for data in DATA:
        opt.step(lambda data=data: loss(net, data.main))
    return everything(net)


def linear_loss(net: nn.Module, batch: Any) -> Tensor:
    return (net(batch[0]) * (batch[1][:, None] - torch.arange(10))).mean()


def test_a_loss_that_is_linear_in_the_outputs_gives_sam_to_the_last_bit():
    ends = [trained(seeded(problems.mlp), linear_loss, m) for m in (METHOD, steppe.SAM(rho=0.5))]
    assert same(*ends)


def test_only_the_jacobian_is_perturbed():
    """With outputs that are linear in the weights the Jacobian is the same everywhere: the gradient is that at w."""
    build = lambda: nn.Linear(64, 10)  # noqa: E731
    ends = [trained(seeded(build), problems.loss, m) for m in (METHOD, steppe.Plain(), steppe.SAM(rho=0.5))]
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-12, atol=1e-14)
    assert (ends[2][0] - ends[1][0]).abs().max() > 1e-4


class Several(nn.Module):
    """A net that also returns what it computes on the way, in a dictionary."""

    def __init__(self, net: nn.Sequential):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.net[:2](x)
        return {"hidden": [hidden, None], "logits": self.net[2](hidden), "seen": x}


def test_outputs_on_the_way_to_others_change_nothing_if_the_loss_does_not_use_them():
    expected = trained(seeded(problems.mlp), problems.loss)
    actual = trained(
        Several(seeded(problems.mlp)), lambda net, batch: F.cross_entropy(net(batch[0])["logits"], batch[1])
    )
    assert same(actual, expected)


def test_a_loss_of_several_outputs():
    """Against the definition: the Jacobians of both outputs at w + e, each with its own gradient of the loss at w."""

    def loss_of(out: dict[str, Any], batch: Any) -> Tensor:
        return F.cross_entropy(out["logits"], batch[1]) + (out["hidden"][0] ** 2).mean() * out["logits"].square().mean()

    net = Several(seeded(problems.mlp))
    params, batch = list(net.parameters()), DATA[0].main
    out = net(batch[0])
    hidden, logits = (out["hidden"][0].detach().requires_grad_(), out["logits"].detach().requires_grad_())
    partial = torch.autograd.grad(loss_of({"hidden": [hidden], "logits": logits}, batch), [hidden, logits])
    e = torch.autograd.grad(loss_of(out, batch), params)
    length = torch.cat([g.flatten() for g in e]).norm()
    before = weights(net)
    with torch.no_grad():
        for p, g in zip(params, e, strict=True):
            p.add_(0.5 * g / length)
    there = net(batch[0])
    expected = torch.autograd.grad([there["hidden"][0], there["logits"]], params, partial)
    nn.utils.vector_to_parameters(before, params)
    opt = steppe.SharpnessAware(sgd(net), METHOD, net)
    opt.gradient(lambda: loss_of(net(batch[0]), batch))
    for p, g in zip(params, expected, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-10, atol=1e-12)


def test_an_evaluation_within_a_look_does_not_count():
    def loss(net: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            net(batch[0][:3])
        return problems.loss(net, batch)

    assert same(trained(seeded(problems.mlp), loss), trained(seeded(problems.mlp), problems.loss))


def test_an_output_that_the_first_loss_did_not_use_counts_as_zero():
    looks = iter([0.0, 1.0])
    net = Several(seeded(problems.mlp))

    def closure() -> Tensor:
        out = net(DATA[0].main[0])
        loss = F.cross_entropy(out["logits"], DATA[0].main[1])
        return loss + out["hidden"][0].sum() if next(looks) else loss

    opt = steppe.SharpnessAware(sgd(net), METHOD, net)
    opt.gradient(closure)
    plain = seeded(problems.mlp)
    other = steppe.SharpnessAware(sgd(plain), METHOD, plain)
    other.gradient(lambda: problems.loss(plain, DATA[0].main))
    grads = [[p.grad for p in trained.parameters() if p.grad is not None] for trained in (net, plain)]
    assert len(grads[0]) == len(list(net.parameters())) and same(*grads)


def test_a_framework_that_runs_the_first_pass():
    """`begin` watches it, also where it accumulates."""
    ends = []
    for by_framework in (False, True):
        net = seeded(problems.batchnorm_dropout)
        opt = steppe.SharpnessAware(sgd(net), METHOD, net)
        halves = [lambda net=net, half=data.main: problems.loss(net, half) / 2 for data in DATA[:2]]
        if by_framework:
            opt.begin()
            for half in halves:
                half().backward()
        opt.gradient(halves, first_done=by_framework)
        opt.step()
        ends.append(everything(net))
    assert same(*ends)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_compiled_model_is_the_same(backend):
    torch.compiler.reset()
    expected = trained(seeded(problems.mlp), problems.loss)
    assert same(trained(torch.compile(seeded(problems.mlp), backend=backend), problems.loss), expected)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_compiled_model_of_which_the_optimizer_has_the_inside_is_the_same():
    torch.compiler.reset()
    expected = trained(seeded(problems.mlp), problems.loss)
    net = seeded(problems.mlp)
    compiled: Any = torch.compile(net, backend="eager")
    opt = steppe.SharpnessAware(sgd(net), METHOD, net)
    for data in DATA:
        opt.step(lambda data=data: problems.loss(compiled, data.main))
    assert same(everything(net), expected)


def refused(net: Any, closure: Any, match: str, model: Any = None) -> None:
    before = everything(net)
    opt = steppe.SharpnessAware(sgd(net), METHOD, net if model is None else model)
    with pytest.raises(RuntimeError, match=match):
        opt.step(closure)
    assert same(everything(net), before)
    assert not net._forward_hooks, "the hooks are gone"


def test_what_has_no_outputs_is_refused():
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(problems.mlp)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, y), "logits": logits}

    net = WithLoss()
    refused(net, lambda: net(*DATA[0].main)["loss"], "return predictions, not the loss")
    net = seeded(problems.mlp)
    refused(net, lambda: problems.loss(net[:], DATA[0].main), "must be the module that the closure or loop calls")
    opt = steppe.SharpnessAware(sgd(net), METHOD)
    with pytest.raises(RuntimeError, match="FunctionalSAM needs the model's outputs: give SharpnessAware model="):
        opt.step(lambda: problems.loss(net, DATA[0].main))
    net.compile(backend="eager")
    refused(net, lambda: problems.loss(net, DATA[0].main), r"which model.compile\(\) hides")


def test_looks_that_call_the_model_differently_are_refused():
    for other in (lambda: DATA[0].main, lambda: tuple(t[:5] for t in DATA[0].main)):
        net, calls = seeded(problems.mlp), []

        def closure(net: Any = net, calls: Any = calls, other: Any = other) -> Tensor:
            calls.append(None)
            loss = problems.loss(net, DATA[0].main if len(calls) == 1 else other())
            return loss + problems.loss(net, DATA[0].main) if len(calls) == 2 and len(other()[0]) > 5 else loss

        refused(net, closure, "all looks of a step must call the model alike")
    net, first = seeded(problems.mlp), iter([True, False])
    refused(
        net,
        lambda: problems.loss(net, DATA[0].main) + (problems.loss(net, DATA[1].main) if next(first) else 0),
        "all looks of a step must call the model alike",
    )


def test_drive_has_no_model():
    with pytest.raises(TypeError, match="drive knows no model"):
        steppe.drive(METHOD, lambda w: w, torch.ones(2))
