"""`torch.compile` around a whole train step: the same bits as without, or one sentence on what to compile instead."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steppe import GSAM, SAM, SharpnessAware

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles


def by_closure(model, opt):
    return lambda x, y: opt.step(lambda: F.cross_entropy(model(x), y))


def by_backward(model, opt):
    def step(x, y):
        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return opt.step(closure)

    return step


def by_passes(model, opt):
    def step(x, y):
        loss = None
        for _ in opt.passes():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return step


def by_gradient(model, opt):
    def step(x, y):
        loss = opt.gradient(lambda: F.cross_entropy(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss

    return step


FORMS = [by_closure, by_backward, by_passes, by_gradient]


def trained(form, method, compiled):
    """Weights, statistics and the next random number after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), method, model=model)
    step = compiled(form(model, opt))
    for _ in range(3):
        step(torch.randn(16, 4), torch.randint(3, (16,)))
    return [*model.parameters(), *model.buffers(), torch.rand(1)]


def check(form, method, backend):
    torch.compiler.reset()
    ours = trained(form, method, lambda step: torch.compile(step, backend=backend))
    for mine, theirs in zip(ours, trained(form, method, lambda step: step), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_compiled_step_is_the_same_step(form):
    check(form, GSAM(rho=0.3), "eager")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("method", [SAM(rho=0.3), GSAM(rho=0.3)], ids=lambda m: m.name)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_with_every_backend_that_changes_no_arithmetic(form, method, backend):
    check(form, method, backend)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_runs_the_step():
    """Its kernels round in other ways, so this one is compared up to that."""
    torch.compiler.reset()
    ours = trained(by_passes, SAM(rho=0.3), lambda step: torch.compile(step, options={"fallback_random": True}))
    for mine, theirs in zip(ours, trained(by_passes, SAM(rho=0.3), lambda step: step), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_single_graph_is_refused_with_what_to_compile_instead(form):
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"compile the model or the loss function instead, or use steppe\.capture"):
        trained(form, SAM(), lambda step: torch.compile(step, backend="eager", fullgraph=True))


def test_a_loop_that_is_left_in_compiled_code_restores_the_weights():
    model = nn.Linear(4, 3)
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(rho=0.3), model=model)
    before = [p.detach().clone() for p in model.parameters()]

    def step(x, y):
        for look in opt.passes():
            F.cross_entropy(model(x), y).backward()
            if look.index == 1:
                break

    torch.compiler.reset()
    torch.compile(step, backend="eager")(torch.randn(16, 4), torch.randint(3, (16,)))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
