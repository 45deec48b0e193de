"""The copy of the weights on the host: the same bits as with the copy on the device, and no memory of the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import steppe
from helpers import problems
from helpers.problems import by_closure, everything, same, seeded, sgd
from steppe.engine.home import OnHost

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def on(device, data):
    return problems.Data(*[(x.to(device), y.to(device)) for x, y in (data.main, data.auxiliary)])


def train(method, home, device="cpu", count=4, dtype=torch.float64, build=problems.batchnorm_dropout):
    model = seeded(build, dtype=dtype).to(device)
    lr_is_set = "lr" in method.needs
    base = torch.optim.SGD(model.parameters(), lr=0.05) if lr_is_set else sgd(model)
    opt = steppe.SharpnessAware(base, method, model, home=home)
    for data in problems.steps(count, dtype=dtype):
        by_closure(opt, model, on(device, data))
    return model, opt


@pytest.mark.parametrize("device", DEVICES)
@problems.each_variant()
def test_every_method_gives_the_same_bits_with_either_home(method, device):
    dtype = torch.float64 if device == "cpu" else torch.float32
    there, here = (train(method, home, device, dtype=dtype) for home in ("cpu", "device"))
    assert same(everything(there[0]), everything(here[0]))
    assert str(there[1].state_dict()) == str(here[1].state_dict())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("leave", [KeyboardInterrupt, "break", "abandon"])
def test_the_weights_are_restored_from_the_host(leave, device):
    model, opt = train(steppe.SAM(rho=0.5), "cpu", device, count=2)
    before, moved = problems.weights(model), False
    data = on(device, problems.steps(3)[2])
    opt.zero_grad()
    try:
        for look in opt.passes():
            problems.loss(model, data.main).backward()
            if look.index == 1:
                moved = not torch.equal(problems.weights(model), before)
                if leave == "abandon":
                    opt.abandon()
                if isinstance(leave, str):
                    break
                raise leave
    except KeyboardInterrupt:
        pass
    assert moved and torch.equal(problems.weights(model), before)


class Decaying(nn.Module):
    """Writes to its own weight in the forward pass, or gives it other memory."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.how = nn.Linear(64, 10), how

    def forward(self, x):
        with torch.no_grad():
            if self.how == "in place":
                self.inner.weight.mul_(0.9)
            else:
                self.inner.weight.data = self.inner.weight * 0.9
        return self.inner(x)


@pytest.mark.parametrize("how", ["in place", "other memory"])
@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_the_first_look_changes_are_copied_again(how, device):
    there, here = (train(steppe.SAM(rho=0.1), home, device, build=lambda: Decaying(how)) for home in ("cpu", "device"))
    assert same(everything(there[0]), everything(here[0]))


def test_a_copy_and_a_checkpoint_continue_with_the_same_bits():
    straight = train(steppe.GSAM(), "device", count=4)[0]
    model, opt = train(steppe.GSAM(), "cpu", count=2)
    twin, its = copy.deepcopy((model, opt))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict(), torch.get_rng_state()))
    assert its.home == "cpu"
    for data in problems.steps(4)[2:]:
        by_closure(opt, model, data)
    fresh = seeded(problems.batchnorm_dropout)
    resumed = steppe.wrap(sgd(fresh), "gsam", model=fresh, home="cpu")
    fresh.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for other, its_opt in ((twin, its), (fresh, resumed)):
        torch.set_rng_state(saved[2])
        for data in problems.steps(4)[2:]:
            by_closure(its_opt, other, data)
        assert same(everything(other), everything(model))
    assert torch.equal(problems.weights(model), problems.weights(straight))


def test_an_unknown_home_is_refused():
    model = seeded(problems.mlp)
    with pytest.raises(ValueError, match='home must be "device" or "cpu", not \'disk\''):
        steppe.wrap(sgd(model), "sam", home="disk")


def test_the_host_keeps_its_memory_between_steps():
    model = seeded(problems.mlp)
    home = OnHost(steppe.Space(model.parameters()).live())
    place = [t.data_ptr() for t in home._copy]
    for _ in range(2):
        home.start(steppe.Space(model.parameters()).live())
    assert [t.data_ptr() for t in home._copy] == place


@pytest.mark.cuda
def test_the_peak_of_a_step_is_the_base_s():
    """Requested bytes of the device: those of the plain base, with a copy on the device those of a copy more."""

    def peak(method, home):
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)]).cuda()
        x = torch.randn(2, 1024, device="cuda")
        opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.0), method, model, home=home)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            opt.step(lambda: model(x).square().mean())
        return torch.cuda.memory_stats()["requested_bytes.all.peak"]

    size = 16 * 1024**2 * 4
    base, there, here = peak(steppe.Plain(), "device"), peak(steppe.SAM(), "cpu"), peak(steppe.SAM(), "device")
    assert abs(there - base) < 0.02 * base and abs(here - base - size) < 0.02 * base


@pytest.mark.cuda
def test_a_copy_that_takes_long_is_waited_for():
    """The weights are large, the first look is short, and the device is busy when the step begins."""
    ends = []
    for home in ("cpu", "device"):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(1 << 26, device="cuda"))
        opt = steppe.SharpnessAware(torch.optim.SGD([w], lr=0.1), steppe.SAM(rho=1.0), home=home)
        for _ in range(4):
            torch.cuda._sleep(10_000_000)
            opt.step(lambda w=w: (w[:1000] ** 3).sum() + w.square().mean())
        ends.append(w.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.cuda
def test_a_captured_step_says_why_it_is_eager():
    model = seeded(problems.mlp, dtype=torch.float32).cuda()
    opt = steppe.SharpnessAware(sgd(model), steppe.SAM(), model, home="cpu")
    step = steppe.capture(lambda x, y: problems.loss(model, (x, y)), opt)
    assert step.how == 'eager: the weights are copied to the host (home="cpu")'
