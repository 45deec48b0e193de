"""One method over several base optimizers."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steppe
from helpers.problems import same

DOUBLE = torch.float64


class Tiny(nn.Module):
    """A small transformer: matrices for Muon, and the rest."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)
        self.to(DOUBLE)

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens)))


def bases(model):
    matrices = [p for p in model.block.parameters() if p.dim() == 2]
    known = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(11, (4, 7), generator=generator) for _ in range(count)]


def train(model, opt, data):
    for tokens in data:
        opt.step(lambda tokens=tokens: loss_of(model, tokens))


def test_one_perturbation_over_both_equals_the_equations_typed_again():
    """e = ρ g/‖g‖ over all parameters together; each optimizer steps its own along the gradient at w + e."""
    model, other = Tiny(), Tiny()
    train(model, steppe.SharpnessAware(bases(model), steppe.SAM(rho=0.3), model), batches(4))
    theirs = bases(other)
    for tokens in batches(4):
        params = list(other.parameters())
        grads = torch.autograd.grad(loss_of(other, tokens), params)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        start = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p.add_(g, alpha=0.3 / float(norm))
        grads = torch.autograd.grad(loss_of(other, tokens), params)
        with torch.no_grad():
            for p, home, g in zip(params, start, grads, strict=True):
                p.copy_(home)
                p.grad = g
        for base in theirs:
            base.step()
    for mine, expected in zip(model.parameters(), other.parameters(), strict=True):
        # The gradient of the keys' bias is zero but for rounding, which AdamW divides by its own size.
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


def test_plain_equals_both_optimizers_alone_to_the_last_bit():
    model, other = Tiny(), Tiny()
    train(model, steppe.wrap(bases(model), "plain", model=model), batches(3))
    theirs = bases(other)
    for tokens in batches(3):
        for base in theirs:
            base.zero_grad()
        loss_of(other, tokens).backward()
        for base in theirs:
            base.step()
    assert same(list(model.state_dict().values()), list(other.state_dict().values()))


def test_a_resumed_run_is_equal_to_the_last_bit():
    data = batches(6)
    model = Tiny()
    opt = steppe.SharpnessAware(bases(model), steppe.FSAM(rho=0.1), model)
    train(model, opt, data[:3])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = Tiny()
    resumed = steppe.SharpnessAware(bases(again), steppe.FSAM(rho=0.1), again)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    train(model, opt, data[3:])
    train(again, resumed, data[3:])
    assert resumed.steps == opt.steps == 6
    assert same(list(model.state_dict().values()), list(again.state_dict().values()))


def test_schedulers_and_copies_reach_each_optimizer():
    model = Tiny()
    opt = steppe.SharpnessAware(bases(model), steppe.SAM(), model)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    train(model, opt, batches(1))
    scheduler.step()
    assert [group["lr"] for group in opt.param_groups] == [0.01, 5e-4]
    assert [base.param_groups[0]["lr"] for base in opt.base.bases] == [0.01, 5e-4]
    twins = copy.deepcopy((model, opt))
    train(model, opt, batches(2))
    train(*twins, batches(2))
    assert same(list(model.state_dict().values()), list(twins[0].state_dict().values()))


def test_mistakes_raise_helpful_errors():
    model = Tiny()
    muon, adamw = bases(model)
    with pytest.raises(ValueError, match="belongs to two of the base optimizers"):
        steppe.SharpnessAware([adamw, torch.optim.SGD(model.parameters(), lr=0.1)], steppe.SAM())
    with pytest.raises(TypeError, match=r"base must be a torch\.optim\.Optimizer"):
        steppe.SharpnessAware([], steppe.SAM())
    with pytest.raises(TypeError, match="does not step on one dense gradient"):
        steppe.SharpnessAware([muon, torch.optim.LBFGS([nn.Parameter(torch.ones(1))])], steppe.SAM())
    opt = steppe.SharpnessAware([muon, adamw], steppe.SAM(), model)
    with pytest.raises(RuntimeError, match=r"opt\.base\.bases"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert steppe.SharpnessAware([adamw], steppe.SAM()).base is adamw


def both(model, first, second):
    """Two optimizers: for the first parameters, and for the others."""
    params = list(model.parameters())
    return [first(params[:4]), second(params[4:])]


SGD_, ADAM, ADAGRAD = (
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.Adam(params, lr=0.01),
    lambda params: torch.optim.Adagrad(params, lr=0.01),
)


@pytest.mark.parametrize("pair", [(SGD_, ADAM), (ADAM, SGD_), (ADAM, ADAM), (SGD_, SGD_)], ids=["sa", "as", "aa", "ss"])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=6),
        lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, base_lr=0.01, max_lr=0.1, step_size_up=2),
    ],
    ids=["one", "cyclic"],
)
def test_a_scheduler_cycles_the_momentum_of_each_optimizer(pair, schedule):
    """As if each had one of its own, to the last bit; Adam's momentum is its first beta."""
    model, other = Tiny(), Tiny()
    opt, theirs = steppe.wrap(both(model, *pair), "plain", model=model), both(other, *pair)
    scheduler, their_schedulers = schedule(opt), [schedule(base) for base in theirs]
    for tokens in batches(4):
        train(model, opt, [tokens])
        scheduler.step()
        for base in theirs:
            base.zero_grad()
        loss_of(other, tokens).backward()
        for base, its_scheduler in zip(theirs, their_schedulers, strict=True):
            base.step()
            its_scheduler.step()
    assert same(list(model.state_dict().values()), list(other.state_dict().values()))


def test_a_momentum_that_one_of_them_does_not_have_cannot_be_cycled():
    model = Tiny()
    opt = steppe.wrap(both(model, ADAM, ADAGRAD), "plain", model=model)
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=6)
    torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=6, cycle_momentum=False)
