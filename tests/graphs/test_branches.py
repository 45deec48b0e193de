"""Looks that a method yields together: the same bits one after another and side by side."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steppe
from helpers import problems
from helpers.captured_steps import auxiliary, data, loss_of, make
from helpers.problems import everything, same
from steppe.engine import side_by_side
from steppe.engine.isolation import Isolation
from steppe.method import one_by_one
from steppe.vector import Vector

METHODS = [
    steppe.SAMPa(rho=0.1),
    steppe.MARWP(sigma=0.1, lam=0.3),
    steppe.TraceSAM(rho=0.1, n=3, lam=0.5),
    steppe.UniversalSAM(psi=torch.tanh, rho=0.1, n=5, lam=0.1),
    steppe.GAM(period=2),
    steppe.GAM(T=1, reference="weights", discrepancy="cosine", directions="unit"),
    steppe.Every(2, steppe.SAMPa(rho=0.1)),
]
each = pytest.mark.parametrize("method", METHODS, ids=problems.ids(METHODS))


class OnOneStream:
    """Branches for a CPU: everything but the streams."""

    def __init__(self):
        self.calls: list[str | int] = []

    def fork(self, count):
        self.calls.append(f"fork {count}")

    @contextlib.contextmanager
    def branch(self, number):
        self.calls.append(number)
        yield

    def join(self):
        self.calls.append("join")


def run(method, branches, model=None, steps=4):
    torch.manual_seed(3)
    model, opt = make(method, "cpu")
    opt.under_way.branches = branches
    places = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    for day in data("cpu", steps):
        problems.by_closure(opt, model, day)
    assert places == [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    return everything(model), opt


@each
def test_looks_on_copies_give_the_same_bits(method):
    """Weights, BatchNorm's statistics and counts, and the random state that dropout draws from."""
    branches = OnOneStream()
    (one, opt), (other, opt2) = run(method, None), run(method, branches)
    assert same(one, other) and opt.metrics["looks"] == opt2.metrics["looks"]
    torch.testing.assert_close(opt.state_dict()["state"], opt2.state_dict()["state"], rtol=0, atol=0)
    assert branches.calls[0] in ("fork 2", "fork 3", "fork 5") and branches.calls.count("join") >= 2


def test_fork_branches_and_join_come_in_order():
    branches = OnOneStream()
    run(steppe.SAMPa(), branches, steps=2)
    assert branches.calls == ["fork 2", 0, 1, "join"] * 2


@dataclass(frozen=True)
class _SharesAnOffset(steppe.Method):
    cost, needs = 3, frozenset({"auxiliary"})

    def looks(self, ctx):
        here = yield steppe.HERE
        e = 0.1 * here.grad + 0.2 * ctx.w  # a sum, evaluated by who needs it first
        a, b = yield steppe.Look(e), steppe.Look(e, batch="auxiliary")
        return a.grad + b.grad


def test_a_shared_offset_is_evaluated_before_the_branches(monkeypatch):
    """Otherwise one branch would read what another has not computed yet."""
    branches, evaluated = OnOneStream(), Vector.as_one_term
    monkeypatch.setattr(Vector, "as_one_term", lambda v: (branches.calls.append("evaluated"), evaluated(v))[1])
    (one, _), (other, _) = run(_SharesAnOffset(), None, steps=2), run(_SharesAnOffset(), branches, steps=2)
    assert same(one, other) and branches.calls == ["evaluated", "evaluated", "fork 2", 0, 1, "join"] * 2


def test_a_branch_has_the_buffers_from_before_the_first_look():
    """Statistics in float32 and float64, counts in int64, one that is not contiguous, one that is missing."""
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2).double(), nn.BatchNorm1d(4, track_running_stats=False))
    net.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
    before = [b.clone() for b in net.buffers()]
    isolation = Isolation(net, list(net.parameters()))
    for b in net.buffers():
        b.add_(1)
    copies = isolation.buffers_before()
    assert same(copies, before) and [c.dtype for c in copies] == [b.dtype for b in before]
    assert {c.data_ptr() for c in copies}.isdisjoint(b.data_ptr() for b in net.buffers())
    copies[0].add_(7)
    assert same(isolation.buffers_before(), before)  # the saved values have not changed


@dataclass(frozen=True)
class _Breaks(steppe.Method):
    cost = 3

    def looks(self, ctx):
        here = yield steppe.HERE
        e = 0.1 * steppe.ascent(here.grad)
        there, behind = yield steppe.Look(e), steppe.Look(-e)
        return there.grad + behind.grad


def test_a_look_that_fails_restores_everything():
    model, opt = make(_Breaks(), "cpu")
    opt.under_way.branches = OnOneStream()
    before, places, calls = [t.clone() for t in everything(model)], [p.data_ptr() for p in model.parameters()], []
    (x, y) = data("cpu", 1)[0].main

    def loss():
        calls.append(F.cross_entropy(model(x), y))
        if len(calls) == 3:
            raise KeyError
        return calls[-1]

    with pytest.raises(KeyError):
        opt.step(loss)
    assert same(before, everything(model)) and places == [p.data_ptr() for p in model.parameters()]


def test_with_a_loss_scale_looks_run_one_after_another():
    """All looks write to the same note of whether a gradient has overflowed."""
    branches = OnOneStream()
    model, opt = make(steppe.SAMPa(), "cpu")
    opt.under_way.branches = branches
    closures = data("cpu", 1)[0].closures(model)
    opt.gradient(closures["closure"], auxiliary=closures["auxiliary"], scaler=torch.amp.GradScaler("cpu"))
    assert branches.calls == []


def test_when_looks_cannot_run_side_by_side():
    looks = [steppe.Look(), steppe.Look(batch="auxiliary")]
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    params = list(net.parameters())
    assert side_by_side.possible(looks, net, params)
    assert not side_by_side.possible(looks, None, params)  # without a model its buffers are unknown
    assert not side_by_side.possible(looks[:1], net, params)
    assert not side_by_side.possible([steppe.Look(batch="sample", sample=0), *looks], net, params)
    recurrent = nn.LSTM(2, 2)
    assert not side_by_side.possible(looks, recurrent, list(recurrent.parameters()))
    net.register_buffer("view", net.get_buffer("1.running_mean").view(-1))
    assert not side_by_side.possible(looks, net, params)  # two names for one memory
    large = nn.Linear(2**13, 2**12 + 1, device="meta")
    assert not side_by_side.possible(looks, large, list(large.parameters()))


def test_one_by_one_answers_looks_together():
    asked = []

    def looks():
        a, b = yield steppe.HERE, steppe.Look(batch="auxiliary")
        c = yield steppe.HERE
        asked.append((a, b, c, (yield iter(()))))
        yield steppe.HERE

    asks = one_by_one(looks())  # pyright: ignore[reportArgumentType]
    assert next(asks) is steppe.HERE
    assert [asks.send(n) for n in (1, 2, 3)] == [steppe.Look(batch="auxiliary"), steppe.HERE, steppe.HERE]
    assert asked == [(1, 2, 3, ())]


@pytest.mark.cuda
@each
def test_branches_of_a_graph_give_the_same_bits(method, exact):
    """Eager, recorded one after another, and recorded side by side."""
    ends, hows = [], []
    for how in ("eager", "one after another", "side by side"):
        torch.cuda.manual_seed(7)
        model, opt = make(method)
        step = steppe.capture(loss_of(model), opt, side_by_side=how == "side by side")
        for day in data("cuda", 40):
            if how == "eager":
                opt.step(**{k: v for k, v in day.closures(model).items() if k != "sample"})
            else:
                step(*day.main, **auxiliary(method, day))
        ends.append([*everything(model), torch.cuda.get_rng_state()])
        hows.append(step.how)
    assert "replayed" in hows[1] and "side by side" not in hows[1] and "side by side" in hows[2]
    assert same(ends[0], ends[1]) and same(ends[0], ends[2])


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_and_compiled_branches(compiled, exact):
    ends = []
    for branches in (False, True):
        model, opt = make(steppe.SAMPa())
        model[4].p = 0.0
        called = torch.compile(model) if compiled else model

        def loss(x, y, called=called):
            with torch.autocast("cuda", torch.bfloat16):
                return F.cross_entropy(called(x), y)

        step = steppe.capture(loss, opt, side_by_side=branches)
        for day in data("cuda", 20):
            step(*day.main, auxiliary=day.auxiliary)
        assert ("side by side" in step.how) == branches
        ends.append(everything(model)[:-1])
    assert same(*ends)
