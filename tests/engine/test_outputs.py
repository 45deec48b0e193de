"""Looks that are linear in the model's outputs: the loss's gradient by them is that of the first look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


def by_hand(net: nn.Module, outputs_of: Callable[[], list[Tensor]], loss_of: Callable[..., Tensor]) -> list[Tensor]:
    """The definition: the Jacobians of all outputs at w + e, each with its own gradient of the loss at w."""
    params, before = list(net.parameters()), weights(net)
    outputs = outputs_of()
    cut = [out.detach().requires_grad_() for out in outputs]  # no output depends on another
    partial = torch.autograd.grad(loss_of(*cut), cut)
    e = torch.autograd.grad(loss_of(*outputs), params)
    length = torch.cat([g.flatten() for g in e]).norm()
    with torch.no_grad():
        for p, g in zip(params, e, strict=True):
            p.add_(0.5 * g / length)
    expected = torch.autograd.grad(outputs_of(), params, partial)
    nn.utils.vector_to_parameters(before, params)
    return list(expected)


def by_steppe(net: nn.Module, closure: Any, method: steppe.Method = METHOD) -> list[Tensor]:
    net.zero_grad()
    steppe.SharpnessAware(sgd(net), method, net).gradient(closure)
    return [p.grad for p in net.parameters() if p.grad is not None]


def check(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_a_loss_of_several_outputs():
    def loss_of(hidden: Tensor, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, y) + (hidden**2).mean() * logits.square().mean()

    net, (x, y) = Several(seeded(problems.mlp)), DATA[0].main

    def outputs() -> list[Tensor]:
        out = net(x)
        return [out["hidden"][0], out["logits"]]

    expected = by_hand(net, outputs, loss_of)
    check(by_steppe(net, lambda: loss_of(*outputs())), expected)


def two_losses(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits, y), logits.pow(4).mean()


@pytest.mark.parametrize("loop", ["closure", "passes"])
@pytest.mark.parametrize("call", ["model", "checkpointed"])
def test_several_backward_passes_through_one_output(call, loop):
    """Of two losses, on two micro-batches."""
    net, halves = seeded(problems.mlp), [data.main for data in DATA[:2]]

    def loss_of(out: Tensor, other: Tensor) -> Tensor:
        return torch.stack([*two_losses(out, halves[0][1]), *two_losses(other, halves[1][1])]).sum()

    expected = by_hand(net, lambda: [net(x) for x, _ in halves], loss_of)

    def look() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for x, y in halves:
            out = net(x) if call == "model" else checkpoint(net, x, use_reentrant=False)
            first, second = two_losses(out, y)
            first.backward(retain_graph=True)
            second.backward()
            total += (first + second).detach()
        return total

    if loop == "closure":
        check(by_steppe(net, look), expected)
    else:
        opt = steppe.SharpnessAware(sgd(net), METHOD, net)
        for _ in opt.passes():
            look()
        check([p.grad for p in net.parameters()], expected)


def test_more_backward_passes_in_a_linear_look_than_in_the_first_add_nothing():
    net, (x, y), looks = seeded(problems.mlp), DATA[0].main, iter([1, 2])

    def closure() -> Tensor:
        losses = two_losses(net(x), y)
        if next(looks) == 1:
            return losses[0] + losses[1]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        return losses[0].detach()

    expected = by_hand(net, lambda: [net(x)], lambda out: two_losses(out, y)[0] + two_losses(out, y)[1])
    check(by_steppe(net, closure), expected)


def test_a_gradient_by_the_input_within_a_look():
    """It weighs the examples. Its backward pass gives nothing to the weights, and takes nothing from the other one."""
    net, (x, y) = seeded(problems.mlp), DATA[0].main
    x = x.clone().requires_grad_()

    def salience(out: Tensor) -> Tensor:
        return torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0].norm(dim=1)

    def loss_of(out: Tensor, salience: Tensor) -> Tensor:
        return (F.cross_entropy(out, y, reduction="none") * salience).mean()

    def closure() -> Tensor:
        out = net(x)
        return loss_of(out, salience(out))

    at_w = salience(net(x))
    expected = by_hand(net, lambda: [net(x)], lambda out: loss_of(out, at_w))
    check(by_steppe(net, closure), expected)


def test_a_penalty_on_the_gradient_by_the_input():
    """Also a derivative of the model is in the loss. Without a radius that is the base optimizer's gradient."""
    net, x, y = seeded(problems.mlp), DATA[0].main[0].clone().requires_grad_(), DATA[0].main[1]

    def closure() -> Tensor:
        loss = F.cross_entropy(net(x), y)
        return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()

    expected = torch.autograd.grad(closure(), list(net.parameters()))
    check(by_steppe(net, closure, steppe.FunctionalSAM(rho=0.0)), list(expected))


def test_a_model_that_returns_a_parameter_with_micro_batches():
    """What is kept of its gradient is not the memory in which autograd accumulates it."""

    class WithWeight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.linspace(-1, 1, 640, dtype=torch.float64).view(64, 10))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(x @ self.w), self.w

    net = WithWeight()
    x, y = DATA[0].main

    def closure() -> Tensor:
        net(x)[1].pow(3).sum().backward()
        F.cross_entropy(net(x)[0], y).backward()
        return torch.zeros(())

    expected = by_hand(net, lambda: [net(x)[0], net.w * 1], lambda out, w: F.cross_entropy(out, y) + w.pow(3).sum())
    check(by_steppe(net, closure), expected)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "mul": lambda out: out.mul_(2).add_(1),
    "mask": lambda out: out.masked_fill_(torch.arange(10) < 3, -5.0),
    "divide": lambda out: out.__itruediv__(3),
    "part": lambda out: out[:, 2:4].mul_(3),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_an_output_that_is_changed_in_place(change):
    net, (x, y) = seeded(problems.mlp), DATA[0].main

    def loss_of(out: Tensor) -> Tensor:
        change(out)
        return F.cross_entropy(out, y) + out.square().mean()

    expected = by_hand(net, lambda: [net(x)], lambda out: loss_of(out * 1))
    check(by_steppe(net, lambda: loss_of(net(x))), expected)


def test_one_of_two_outputs_is_changed_in_place():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh(self.trunk(x))
            return self.a(hidden), self.b(hidden)

    net, (x, y) = seeded(Heads), DATA[0].main

    def loss_of(a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(a.mul_(2), y) + b.square().mean()

    expected = by_hand(net, lambda: list(net(x)), lambda a, b: loss_of(a * 1, b))
    check(by_steppe(net, lambda: loss_of(*net(x))), expected)


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_compiled_model_of_which_the_optimizer_has_the_inside_is_the_same(backend):
    torch.compiler.reset()
    expected = trained(seeded(problems.mlp), problems.loss)
    net = seeded(problems.mlp)
    compiled: Any = torch.compile(net, backend=backend)
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


def test_fewer_backward_passes_than_in_the_first_look_are_refused():
    net, first, (x, y) = seeded(problems.mlp), iter([True, False]), DATA[0].main

    def closure() -> Tensor:
        losses = two_losses(net(x), y)
        if next(first):
            losses[0].backward(retain_graph=True)
        losses[1].backward()
        return losses[0].detach()

    refused(net, closure, "all looks of a step must run backward alike")


def test_what_cannot_be_changed_in_place_is_refused():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(problems.mlp)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.net(x)
            return logits, logits.flatten()

    net, (x, y) = Twice(), DATA[0].main

    def changes_the_other() -> Tensor:
        logits, flat = net(x)
        logits.mul_(2)
        return F.cross_entropy(logits, y) + flat.square().mean()

    refused(net, changes_the_other, "outputs of the model that share memory must not be changed in place")
    ends_with_tanh = nn.Sequential(seeded(problems.mlp), nn.Tanh())  # its backward needs the output as it was
    refused(ends_with_tanh, lambda: ends_with_tanh(x).mul_(2).square().mean(), "modified by an inplace operation")


def test_drive_has_no_model():
    with pytest.raises(TypeError, match="drive knows no model"):
        steppe.drive(METHOD, lambda w: w, torch.ones(2))
