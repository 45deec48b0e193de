"""Ctrl-C at any moment: afterwards weights, buffers and random state are those before or after a whole step."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import steppe
from helpers.problems import everything, same, sgd

PACKAGE = str(Path(steppe.__file__).parent)


class InterruptAt:
    """Raises KeyboardInterrupt before the k-th line (or operation) of steppe's own code that is executed."""

    def __init__(self, k: int, operations: bool):
        self.left, self.operations, self.fired = k, operations, False

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = self.operations
        if event == ("opcode" if self.operations else "line"):
            self.left -= 1
            if self.left == 0:
                self.fired = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def state_of(model):
    return [p.detach().clone() for p in model.parameters()], [b.clone() for b in model.buffers()]


def by_closure(opt, model, x):
    opt.step(lambda: model(x).square().mean())


def by_loop(opt, model, x):
    for _ in opt.passes():
        model(x).square().mean().backward()
    opt.step()


def net():
    torch.manual_seed(0)
    layers = nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Dropout(0.5), nn.Softplus(), nn.Linear(4, 2)
    return nn.Sequential(*layers).double()


class Trial:
    """One step, the second, that can be interrupted as often as wanted."""

    def __init__(self, how, method, recover):
        self.how, self.recover = how, recover
        self.model = net()
        self.opt = steppe.SharpnessAware(sgd(self.model), method, self.model)
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randn(6, 3, dtype=torch.float64, generator=generator) for _ in range(2)]
        how(self.opt, self.model, self.batches[0])  # allocates what steps reuse
        self.before, self.random_before = state_of(self.model), torch.get_rng_state()
        model, opt = copy.deepcopy((self.model, self.opt))
        how(opt, model, self.batches[1])
        self.after, self.random_after = state_of(model), torch.get_rng_state()

    def interrupted(self, k, operations=False):
        """Whether there was an interrupt at k, and whether what it left is right."""
        model, opt = copy.deepcopy((self.model, self.opt))
        torch.set_rng_state(self.random_before)
        trace = InterruptAt(k, operations)
        sys.settrace(trace)
        try:
            self.how(opt, model, self.batches[1])
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        self.recover(opt, model)
        enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        weights, buffers = state_of(model)
        random = torch.get_rng_state()
        right = (
            (same(weights, self.before[0]) or same(weights, self.after[0]))
            and (same(buffers, self.before[1]) or same(buffers, self.after[1]))
            and (random.equal(self.random_before) or random.equal(self.random_after))
        )
        return trace.fired, right and enabled

    def wrong(self, stride, operations=False, start=1):
        """Where an interrupt leaves something wrong, of every `stride`-th place."""
        wrong, k = [], start
        while True:
            fired, right = self.interrupted(k, operations)
            if not right:
                wrong.append(k)
            if not fired:
                assert k > 100
                return wrong
            k += stride


RECOVER = {
    "opt.state_dict": lambda opt, model: opt.state_dict(),
    "opt.zero_grad": lambda opt, model: opt.zero_grad(),
    "model.state_dict": lambda opt, model: model.state_dict(),
}


@pytest.mark.parametrize(
    "stride", [27, pytest.param(3, marks=pytest.mark.slow)], ids=["some lines", "all lines with the other two"]
)
@pytest.mark.parametrize("how", [by_closure, by_loop], ids=["closure", "passes"])
@pytest.mark.parametrize(("start", "recover"), list(enumerate(RECOVER, start=1)), ids=list(RECOVER))
def test_an_interrupt_at_any_line(how, start, recover, stride):
    assert Trial(how, steppe.SAM(rho=0.5), RECOVER[recover]).wrong(stride=stride, start=start) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", [steppe.SAM(rho=0.5), steppe.GSAM(), steppe.GNAM()], ids=lambda m: m.name)
def test_an_interrupt_at_any_operation(method):
    """At every fifth bytecode instruction of steppe's own code."""
    assert Trial(by_closure, method, RECOVER["model.state_dict"]).wrong(stride=5, operations=True) == []


def test_a_model_with_an_optimizer_is_pickled_and_copied():
    model, x = net(), torch.ones(6, 3, dtype=torch.float64)
    by_closure(steppe.SharpnessAware(sgd(model), steppe.SAM(), model), model, x)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert same(everything(twin), everything(model))
        assert len(twin._state_dict_pre_hooks) == len(model._state_dict_pre_hooks) == 1
    by_closure(steppe.SharpnessAware(sgd(model), steppe.SAM(), model), model, x)
    assert len(model._state_dict_pre_hooks) == 1  # the newer optimizer's
