"""A second batch whose loss is not finite: what methods learn from it stays as it was, for no step is along it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import steppe
from helpers import problems
from helpers.captured_steps import data, make
from steppe import GAM, GapSAM, SharpnessAware

NOT_FINITE = [math.nan, math.inf, -math.inf]


def memory_of(opt: SharpnessAware) -> dict[str, Any]:
    """What the method remembers."""
    found = next(iter(opt.state_dict()["state"].values()))
    return {name.removeprefix("steppe_shared."): value.clone() for name, value in found.items()}


def unequal(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """The names of what differs."""
    return {name for name in one if not torch.equal(one[name], other[name])}


# GapSAM. The loss is w + a number and lr is 0: the slope is 1, and the loss rises by ρ.


def with_held_out(method: GapSAM, losses: list[tuple[float, float]]) -> tuple[list[float], list[dict[str, Any]]]:
    """ρ and the memory after each step."""
    w = nn.Parameter(torch.zeros((), dtype=torch.float64))
    opt = SharpnessAware(torch.optim.SGD([w], lr=0.0), method)
    memories = []
    for here, held in losses:
        opt.step(lambda here=here: w + here, auxiliary=lambda held=held: w * held + held)
        memories.append(memory_of(opt))
    return [float(memory["rho"]) for memory in memories], memories


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_an_update_without_a_finite_held_out_loss_is_left_out(bad):
    """Typed out. The sums go on: the third update has the mean of two training losses, 1.35.

    First 0.05 · (2 · 0.05/0.05)^0.2. Then the means, weighted with 1/3 and 2/3, are: loss 1.4, held 1.4633333, rise
    (0.05 + 2 · 0.0574349)/3 = 0.0549566, and ρ is 0.0574349 · (2 · 0.0633333/0.0549566)^0.2.
    """
    method = GapSAM(period=1, decay=0.5, least=0.05, ceiling=10.0)
    found, memories = with_held_out(method, [(1.5, 1.55), (1.4, bad), (1.3, 1.42)])
    assert found == pytest.approx([0.0574349177, 0.0574349177, 0.0678741622], rel=1e-8)
    assert unequal(memories[0], memories[1]) == {"loss", "rise", "count"}
    assert [float(memories[1][name]) for name in ("loss", "count")] == [1.4, 1.0]
    assert [float(memories[2][name]) for name in ("loss", "count", "rise")] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_the_loss_before_training_is_the_first_finite_one(bad):
    """Typed out: from 2.0 on, the target is 0.8 · (2.0 − 1.45) = 0.44, so that log ρ moves by 0.2."""
    found, memories = with_held_out(GapSAM(period=1, least=0.05), [(1.5, bad), (1.4, 2.0), (1.4, bad)])
    assert [float(memory["first_held"]) for memory in memories] == [0.0, 2.0, 2.0]
    assert found == pytest.approx([0.05, 0.0610701379, 0.0610701379], rel=1e-9)


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_a_turn_that_begins_without_a_finite_loss_still_drops_the_last_ones_offset(bad):
    """A turn has 2^n epochs, an epoch one step: 7 begins the fourth, which measures in step 7 only, 15 the fifth."""
    method = GapSAM(period=1, least=0.05, ceiling=10.0, epoch_steps=1)
    known = [(1.0, 1.3)] * 7
    _, memories = with_held_out(method, [*known, (1.0, bad), (1.0, 1.1), *[(1.0, 1.3)] * 6, (1.0, bad), (1.0, 1.2)])
    kept = [[round(float(memory[name]), 9) for name in ("offset", "offsets", "weight")] for memory in memories]
    assert kept[6] == [0.3, 1.0, 0.271], "the third turn measured in step 3; three updates since"
    assert kept[7] == [0.0, 0.0, 0.0] and kept[8] == [0.0, 0.0, 0.1]
    assert kept[15] == [0.0, 0.0, 0.0] and kept[16] == [0.2, 1.0, 0.0], "in the fifth turn the next update measures too"
    assert all(math.isfinite(float(value)) for memory in memories for value in memory.values())


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_the_gap_that_is_shown_is_the_one_that_is_known(bad):
    """Else its mean over an epoch, in a record, would not be finite."""
    w = nn.Parameter(torch.zeros((), dtype=torch.float64))
    opt, found = SharpnessAware(torch.optim.SGD([w], lr=0.0), GapSAM(period=1, decay=0.5)), []
    for held in (bad, 1.5, 1.2, bad):
        opt.step(lambda: w + 1.0, auxiliary=lambda held=held: w + held)
        found.append(float(opt.metrics["gap"]))
    assert found == pytest.approx([0.0, 0.5, 0.3, 0.3], rel=1e-12)


def test_a_member_without_a_finite_held_out_loss_waits_alone():
    method = GapSAM(period=1, decay=0.5, least=0.05, ceiling=10.0)
    w = nn.Parameter(torch.zeros(2, 1, dtype=torch.float64))
    opt = SharpnessAware(torch.optim.SGD([w], lr=0.0), method, members=2)
    own = [[(1.5, 1.55), (1.4, math.nan), (1.3, 1.42)], [(1.5, 1.52), (1.4, 1.44), (1.3, 1.36)]]
    found = []
    for step in range(3):
        here, held = torch.tensor([member[step] for member in own], dtype=torch.float64).T
        opt.step(lambda here=here: w[:, 0] + here, auxiliary=lambda held=held: w[:, 0] + held)
        found.append(opt.metrics["rho"].tolist())
    for member in (0, 1):
        assert [rho[member] for rho in found] == pytest.approx(with_held_out(method, own[member])[0], rel=1e-12)


def test_ignored_targets_leave_the_weights_finite():
    model, opt = make(GapSAM(period=2), "cpu")
    for step, day in enumerate(data("cpu", 8)):
        (x, y), (x2, y2) = day.main, day.auxiliary
        held = torch.full_like(y2, -100) if step == 2 else y2
        opt.step(partial(of, model, x, y), auxiliary=partial(of, model, x2, held))
    assert all(p.isfinite().all() for p in model.parameters()) and memory_of(opt)["rho"] > 0


def of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A batch's loss."""
    return F.cross_entropy(model(x), y)


# GAM. L = ½w², L̄ = ½bw² with b = ½, w = 1, lr 0 and T = 1: d¹ = 1, g = 1 + γ, ḡ = ½(1 + γ), ∂Δ/∂γ = −(1 + γ)


def learned(optimizer: Any, factors: list[float]) -> list[dict[str, Any]]:
    """GAM's memory after each step; the auxiliary loss is multiplied by a factor."""
    w = nn.Parameter(torch.ones((), dtype=torch.float64))
    opt = SharpnessAware(torch.optim.SGD([w], lr=0.0), GAM(T=1, optimizer=optimizer), hvp="exact")
    memories = []
    for factor in factors:
        opt.step(lambda: 0.5 * w**2, auxiliary=lambda factor=factor: factor * 0.25 * w**2)
        memories.append(memory_of(opt))
    assert float(w.detach()) == 1.0
    return memories


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_gamma_and_its_optimizer_stay_where_the_slope_is_not_finite(bad):
    """Typed out: γ ← γ + 0.1 (1 + γ)."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    found = [float(memory["gamma"]) for memory in learned(sgd, [1.0, 1.0, bad, 1.0])]
    assert found == pytest.approx([0.1, 0.21, 0.21, 0.331], rel=1e-12)
    assert [float(memory["gamma"]) for memory in learned(sgd, [bad, 1.0])] == pytest.approx([0.0, 0.1], rel=1e-12)
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    found = [float(memory["gamma"]) for memory in learned(momentum, [1.0, bad, 1.0])]
    assert found == pytest.approx([0.1, 0.1, 0.1 + 0.1 * (1.1 + 0.5)], rel=1e-12)


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_adams_means_and_its_count_of_steps_stay_too(bad):
    adam = partial(torch.optim.Adam, lr=0.01)
    skipped, without = learned(adam, [1.0, bad, 1.0, bad, 1.0]), learned(adam, [1.0] * 3)
    assert not unequal(skipped[0], skipped[1]) and not unequal(skipped[2], skipped[3])
    assert not unequal(skipped[4], without[2]) and float(skipped[4]["gamma.step"]) == 3
    assert float(skipped[0]["gamma"]) == pytest.approx(0.01, rel=1e-7), "Adam's first step is lr"
    first = learned(adam, [bad, 1.0])
    assert all(float(value) == 0.0 for value in first[0].values()) and not unequal(first[1], without[0])


def test_a_slope_whose_square_overflows_is_left_out_too():
    """Else Adam would divide by infinity for ever, and γ stay where it is."""
    adam = partial(torch.optim.Adam, lr=0.01)
    assert not unequal(learned(adam, [1.0, 1e200, 1.0])[2], learned(adam, [1.0, 1.0])[1])


def test_a_members_gamma_is_left_out_alone():
    w = nn.Parameter(torch.ones(2, 1, dtype=torch.float64))
    method = GAM(T=1, optimizer=partial(torch.optim.SGD, lr=0.1))
    opt = SharpnessAware(torch.optim.SGD([w], lr=0.0), method, members=2, hvp="exact")
    for factors in ([1.0, 1.0], [math.nan, 1.0], [1.0, 1.0]):
        scale = 0.25 * torch.tensor(factors, dtype=torch.float64)
        opt.step(lambda: 0.5 * w[:, 0] ** 2, auxiliary=lambda scale=scale: scale * w[:, 0] ** 2)
    assert memory_of(opt)["gamma"][0].tolist() == pytest.approx([0.21, 0.331], rel=1e-12)


# Recorded steps


class Operations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", [
    GapSAM(period=1), GapSAM(period=1, epoch_steps=1), GAM(optimizer=partial(torch.optim.SGD, lr=0.1)),
])  # fmt: skip
def test_the_host_reads_no_value(method):
    """On a GPU it would wait for the device. (Adam's count of steps is on the device there, and on the host here.)"""
    model = problems.seeded(problems.mlp)
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.05, fused=True), method, model)
    with Operations() as operations:
        for day in problems.steps(4):
            problems.by_closure(opt, model, day)
    assert not {name for name in operations.names if "local_scalar" in name or "nonzero" in name}
    with Operations() as operations:
        bool(torch.isfinite(torch.ones(())))
    assert "aten._local_scalar_dense.default" in operations.names, "it would be seen"


@pytest.mark.cuda
@pytest.mark.parametrize("method", [GapSAM(period=2), GapSAM(period=1, epoch_steps=1), GAM()])
def test_a_recorded_step_leaves_it_out(method):
    """The same recording serves a finite and a non-finite batch: all ends are finite and as those of eager steps."""
    ends = []
    for how in ("captured", "plain"):
        model, opt = make(method, "cuda")
        step = steppe.capture(partial(of, model), opt)
        before, skipped = {}, {}
        for count, day in enumerate(data("cuda", 16)):
            (x, y), (x2, y2) = day.main, day.auxiliary
            y2 = torch.full_like(y2, -100) if count == 12 else y2
            before = memory_of(opt) if count == 12 else before
            if how == "captured":
                step(x, y, auxiliary=(x2, y2))
            else:
                opt.step(partial(of, model, x, y), auxiliary=partial(of, model, x2, y2))
            skipped = memory_of(opt) if count == 12 else skipped
        assert how == "plain" or step.how.startswith("replayed")
        stays = ("rho", "mean_held", "mean_loss", "best_rho") if isinstance(method, GapSAM) else tuple(before)
        assert not unequal({name: before[name] for name in stays}, skipped)
        ends.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*ends, strict=True):
        assert one.isfinite().all() and torch.allclose(one, other, rtol=1e-3, atol=1e-4)
