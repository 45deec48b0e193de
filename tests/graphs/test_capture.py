"""Recorded steps: that they can be recorded (on any machine), and that replaying equals running (on a GPU)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import steppe
from helpers import problems
from helpers.captured_steps import data, loss_of, make, net, with_sgd_for_gamma
from helpers.problems import everything, same, seeded
from steppe.graphs.recorder import LiveNumbers

every_variant = problems.each_variant()


class Program(TorchDispatchMode):
    """Notes every operation: its name, the kinds of its tensors, and its numbers."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def kind(x):
            if isinstance(x, torch.Tensor):
                return tuple(x.shape), x.dtype
            return x if isinstance(x, (int, float, bool, str, torch.dtype)) else type(x)

        self.operations.append(str((func, tree_map(kind, args), tree_map(kind, kwargs or {}))))
        return func(*args, **(kwargs or {}))


@every_variant
def test_steps_of_a_phase_run_the_same_operations(method):
    """The same operations with the same constants: only then can one recording be replayed for all of them."""
    method = with_sgd_for_gamma(method)
    model = seeded(net)
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.05, fused=True), method, model)
    programs: dict[int, list[list[str]]] = {}
    for step in problems.steps(12, size=16):
        phase = method.phase(opt.steps)
        with Program() as program:
            problems.by_closure(opt, model, step)
        if phase is not None:
            programs.setdefault(phase, []).append(program.operations)
    assert programs
    for runs in programs.values():
        assert all(run == runs[1] for run in runs[2:])  # the first of a phase makes room


def test_a_method_that_hides_a_phase_is_found():
    """The test above can fail: it finds a method whose operations depend on the step while its phase does not."""

    class Hides(steppe.LookSAM):
        def phase(self, step):
            return 0

    with pytest.raises(AssertionError):
        test_steps_of_a_phase_run_the_same_operations(Hides(k=3))


@dataclass(frozen=True)
class _Ahead(steppe.Method):
    rho: steppe.Number = 0.1


def test_schedules_are_recognised_however_number_is_imported():
    """The value that a recorded step reads is written before every replay: it is not the value while recording."""
    _, opt = make(_Ahead(rho=lambda step, lr: 10 * lr), "cpu")
    live = LiveNumbers(opt, opt.method, whole=False)
    rho = cast(Any, live._method.at(0, 0.05)).rho
    assert rho.item() == 0.5
    opt.param_groups[0]["lr"] = 0.025
    live.refresh()
    assert rho.item() == 0.25


def test_on_a_cpu_a_captured_step_runs_eagerly():
    ends = []
    for how in ("captured", "plain"):
        model, opt = make(steppe.GAM(), "cpu")
        step = steppe.capture(loss_of(model), opt)
        for day in data("cpu", 4):
            if how == "captured":
                step(*day.main, auxiliary=day.auxiliary)
            else:
                problems.by_closure(opt, model, day)
        ends.append(everything(model))
    assert same(*ends)
    assert "not on a CUDA device" in step.how


def test_the_first_parameter_group_may_be_empty():
    model = torch.nn.Linear(3, 2)
    base = torch.optim.SGD([{"params": []}, {"params": model.parameters()}], lr=0.1)
    step = steppe.capture(lambda x: model(x).square().mean(), steppe.SharpnessAware(base, steppe.SAM(), model=model))
    before = model.weight.clone()
    step(torch.ones(4, 3))
    assert not torch.equal(model.weight, before)


def count_right(device, steps):
    """Right answers, counted while training: once a step, in its first look."""
    method = steppe.GAM(period=2)
    model, opt = make(method, device, momentum=0.0)
    model[4].p = 0.0
    right = torch.zeros((), device=device)
    expected = torch.zeros((), device=device)

    def loss(x, y):
        logits = model(x)
        if step.look == 0:
            right.add_((logits.argmax(1) == y).sum())
        return F.cross_entropy(logits, y)

    step = steppe.capture(loss, opt)
    for day in data(device, steps):
        with torch.no_grad():
            x, y = day.main
            kept = copy.deepcopy(model.state_dict())
            expected += (model(x).argmax(1) == y).sum()
            model.load_state_dict(kept)
        step(*day.main, auxiliary=day.auxiliary)
    assert right == expected
    assert step.looks == sum(6 if i % 2 == 0 else 3 for i in range(steps))


def test_looks_are_numbered_and_counted():
    count_right("cpu", 5)


@pytest.mark.cuda
def test_looks_are_numbered_and_counted_when_replayed(exact):
    count_right("cuda", 12)


def test_between_and_scaler_on_a_cpu():
    """Clipping happens between the looks and the step, on unscaled gradients."""
    ends = []
    for how in ("captured", "plain"):
        model, opt = make(steppe.SAM(), "cpu")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.1)
        step = steppe.capture(loss_of(model), opt, scaler=scaler, between=clip)
        for day in data("cpu", 4):
            if how == "captured":
                step(*day.main)
                continue
            opt.gradient(partial(loss_of(model), *day.main), scaler=scaler)
            scaler.unscale_(opt)
            clip()
            scaler.step(opt)
            scaler.update()
        ends.append(everything(model))
    assert same(*ends)


# Functions


def test_on_a_cpu_a_replayed_function_is_called():
    total = torch.zeros(())
    add = steppe.Replayed(lambda x: total.add_(x.sum()))
    for n in (1, 2, 3, 4):
        add(torch.full((2,), float(n)))
    assert total == 20


@pytest.mark.cuda
def test_a_function_is_replayed(exact):
    calls, total = [], torch.zeros((), device="cuda")

    def f(x):
        calls.append(1)
        return total.add_((x**2).sum())

    replay = steppe.Replayed(f)
    xs = [torch.full((3,), float(n), device="cuda") for n in range(8)]
    for x in xs:
        replay(x)
    assert total == sum(3 * n * n for n in range(8)) and len(calls) == 3
    assert replay(torch.ones(1, device="cuda")) == sum(3 * n * n for n in range(8)) + 1


def test_recorded_learning_rates_are_float32_whatever_the_default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        opt = steppe.SharpnessAware(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), steppe.SAM())
        live = LiveNumbers(opt, opt.method, whole=True)
        with live.in_use():
            assert opt.param_groups[0]["lr"].dtype is torch.float32
    finally:
        torch.set_default_dtype(before)
