"""Ctrl-C at any moment: afterwards weights, buffers and random state are those before or after a whole step."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch

import steppe
from helpers.adversarial import LONGER
from helpers.interrupts import RECOVER, Trial, by_closure, by_loop, net
from helpers.problems import everything, same, sgd, weights
from steppe.engine.looks import LookRunner


@pytest.mark.parametrize(
    "stride", [81, pytest.param(3, marks=pytest.mark.slow)], ids=["some lines", "all lines with the other two"]
)
@pytest.mark.parametrize("how", [by_closure, by_loop], ids=["closure", "passes"])
@pytest.mark.parametrize(("start", "recover"), list(enumerate(RECOVER, start=1)), ids=list(RECOVER))
def test_an_interrupt_at_any_line(how, start, recover, stride):
    assert Trial(how, steppe.SAM(rho=0.5), RECOVER[recover]).wrong(stride=stride, start=start) == []


@pytest.mark.slow
@pytest.mark.parametrize("home", ["device", "cpu"])
@pytest.mark.parametrize("method", [steppe.SAM(rho=0.5), steppe.GSAM(), steppe.GNAM()], ids=lambda m: m.name)
def test_an_interrupt_at_any_operation(method, home):
    """At bytecode instructions of steppe's own code: every 192nd, or more where the environment asks for more."""
    trial = Trial(by_closure, method, RECOVER["model.state_dict"], home=home)
    assert trial.wrong(stride=max(192 // LONGER, 1), operations=True) == []


def test_a_model_with_an_optimizer_is_pickled_and_copied():
    model, x = net(), torch.ones(6, 3, dtype=torch.float64)
    by_closure(steppe.SharpnessAware(sgd(model), steppe.SAM(), model), model, x)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert same(everything(twin), everything(model))
        assert len(twin._state_dict_pre_hooks) == len(model._state_dict_pre_hooks) == 1
    by_closure(steppe.SharpnessAware(sgd(model), steppe.SAM(), model), model, x)
    assert len(model._state_dict_pre_hooks) == len(model._load_state_dict_pre_hooks) == 1  # the newer optimizer's


@pytest.mark.parametrize(("method", "back"), [(steppe.SAM(rho=0.5), False), (steppe.WSAM(), True)], ids=["SAM", "WSAM"])
def test_an_interrupt_at_the_end_of_the_base_s_step(method, back):
    """The gradient mode is what it was; a step that has a second half, WSAM's, is undone."""
    model, opt, before = interrupted(method)
    opt.state_dict()
    assert torch.is_grad_enabled()
    assert torch.equal(weights(model), before) is back


def test_weights_that_are_loaded_after_an_interrupt_stay():
    model, opt, _ = interrupted(steppe.WSAM())
    loaded = {name: torch.full_like(value, 0.5) for name, value in net().state_dict().items()}
    model.load_state_dict(loaded)
    opt.zero_grad()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def left(stops):
    """A model and its optimizer after a loop that was left in its second look, whose iterator a variable keeps."""
    model, x = net(), torch.ones(6, 3, dtype=torch.float64)
    opt = steppe.SharpnessAware(sgd(model), steppe.SAM(rho=0.5), model)
    before, looks = everything(model), opt.passes()
    for look in looks:
        model(x).square().mean().backward()
        if look.index == stops:
            break
    return model, opt, before, looks


def test_weights_that_are_saved_after_a_break_are_not_perturbed():
    """An iterator in a variable is not freed when its loop is left, so it cannot restore the weights at once."""
    model, opt, before, looks = left(1)
    perturbed = weights(model)
    assert same(everything(model), before) and not torch.equal(weights(model), perturbed)  # by its state_dict
    assert next(looks, None) is None
    with pytest.raises(RuntimeError, match="needs a direction"):
        opt.step()


@pytest.mark.parametrize("stops", [0, 1])
def test_weights_that_are_loaded_after_a_break_stay(stops):
    model, opt, _, looks = left(stops)
    loaded = {name: torch.full_like(value, 0.5) for name, value in net().state_dict().items()}
    model.load_state_dict(loaded)
    looks.close()
    opt.zero_grad()
    opt.load_state_dict(opt.state_dict())
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def test_a_look_at_the_weights_may_save_them():
    model, x = net(), torch.ones(6, 3, dtype=torch.float64)
    opt = steppe.SharpnessAware(sgd(model), steppe.SAM(rho=0.5), model)
    saved, before, looks = [], weights(model), 0
    for look in opt.passes():
        looks += 1
        if look.index == 0:
            saved.append({name: value.clone() for name, value in model.state_dict().items()})
        model(x).square().mean().backward()
    opt.step()
    assert looks == 2 and not torch.equal(weights(model), before)
    model.load_state_dict(saved[0])
    assert torch.equal(weights(model), before)


def interrupted(method):
    """A model, its optimizer, and its weights before a step whose base was interrupted when it had stepped."""

    class Interrupted(torch.optim.SGD):
        now = False

        def step(self, closure=None):
            super().step()
            if self.now:
                torch.set_grad_enabled(False)
                raise KeyboardInterrupt

    model, x = net(), torch.ones(6, 3, dtype=torch.float64)
    base = Interrupted(model.parameters(), lr=0.1)
    opt = steppe.SharpnessAware(base, method, model)
    by_closure(opt, model, x)
    before, base.now = weights(model), True
    with pytest.raises(KeyboardInterrupt):
        by_closure(opt, model, x)
    return model, opt, before


def on_the_way_home(monkeypatch):
    """A model whose step was interrupted just before the weights were restored, its optimizer, and the weights."""
    model, x = net(), torch.ones(6, 3, dtype=torch.float64)
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.0), steppe.SAM(rho=0.5), model)
    by_closure(opt, model, x)
    saved, before = copy.deepcopy(opt.state_dict()), weights(model)

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LookRunner, "_restore_weights", interrupt)
        with pytest.raises(KeyboardInterrupt):
            by_closure(opt, model, x)
    assert not torch.equal(weights(model), before)
    return model, opt, saved, before


VERBS = {
    "step": lambda opt, model, saved: by_closure(opt, model, torch.ones(6, 3, dtype=torch.float64)),
    "passes": lambda opt, model, saved: opt.passes(),
    "begin": lambda opt, model, saved: opt.begin(),
    "train": lambda opt, model, saved: opt.train(),
    "eval": lambda opt, model, saved: opt.eval(),
    "load_state_dict": lambda opt, model, saved: opt.load_state_dict(saved),
    "pickle": lambda opt, model, saved: pickle.dumps(opt),
    "deepcopy": lambda opt, model, saved: copy.deepcopy(opt),
} | {name: lambda opt, model, saved, recover=recover: recover(opt, model) for name, recover in RECOVER.items()}


@pytest.mark.parametrize("verb", VERBS)
def test_whatever_is_called_next_restores_the_weights(verb, monkeypatch):
    model, opt, saved, before = on_the_way_home(monkeypatch)
    VERBS[verb](opt, model, saved)
    assert torch.equal(weights(model), before)


def test_an_interrupt_while_the_method_s_memory_is_made():
    @dataclass(frozen=True)
    class Interrupted(steppe.SAM):
        def memory(self, space):
            torch.set_grad_enabled(False)
            raise KeyboardInterrupt

    model = net()
    opt = steppe.SharpnessAware(sgd(model), Interrupted(), model)
    with pytest.raises(KeyboardInterrupt):
        by_closure(opt, model, torch.ones(6, 3, dtype=torch.float64))
    opt.zero_grad()
    assert torch.is_grad_enabled()
