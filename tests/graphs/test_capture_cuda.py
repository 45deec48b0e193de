"""On a GPU: replaying a recorded step equals running it."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steppe
from helpers import problems
from helpers.captured_steps import auxiliary, data, loss_of, make
from helpers.problems import everything, same
from steppe.graphs.replayed import no_garbage_collection

VARIANTS = problems.all_variants()
every_variant = pytest.mark.parametrize("method", VARIANTS, ids=problems.ids(VARIANTS))


def state(model):
    return [*everything(model), torch.cuda.get_rng_state()]


def run_eager(method, days, schedule=True, clip=False, base: Any = torch.optim.SGD, log=None, **settings):
    model, opt = make(method, base=base, **settings)
    lr = schedule and "lr" not in method.needs
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.97**t) if lr else None
    for day in days:
        closures = day.closures(model)
        opt.gradient(**closures)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        if scheduler:
            scheduler.step()
        if log is not None:
            log.append(opt.metrics)
    return model, opt


def run_captured(method, days, schedule=True, clip=False, base: Any = torch.optim.SGD, log=None, **settings):
    model, opt = make(method, base=base, **settings)
    lr = schedule and "lr" not in method.needs
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.97**t) if lr else None
    clipping = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.5) if clip else None
    step = steppe.capture(loss_of(model), opt, between=clipping)
    for day in days:
        step(*day.main, **auxiliary(method, day))
        if scheduler:
            scheduler.step()
        if log is not None:
            log.append(opt.metrics)
    return model, opt, step


@pytest.mark.cuda
@every_variant
def test_replayed_steps_equal_eager_steps_to_the_last_bit(method, exact):
    """100 steps: weights, BatchNorm's statistics, dropout masks, random state; with a learning rate that falls.

    And the metrics of every step, read after the last.
    """
    days = data("cuda", 100)
    logs: tuple[list, list] = [], []
    torch.cuda.manual_seed(7)
    eager, opt = run_eager(method, days, log=logs[0])
    expected = state(eager)
    torch.cuda.manual_seed(7)
    captured, opt2, step = run_captured(method, days, log=logs[1])
    assert step.how.startswith("replayed"), step.how
    assert same(expected, state(captured)), steppe_distance(eager, captured)
    assert opt2.steps == opt.steps == 100
    for one, other in zip(*logs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def steppe_distance(a, b):
    return (problems.weights(a) - problems.weights(b)).abs().max().item()


@pytest.mark.cuda
@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_base_optimizers_are_recorded_or_step_eagerly(base, exact):
    """Adam, AdamW and RMSprop whole; Adagrad's own step runs eagerly."""
    method, days = steppe.GSAM(), data("cuda", 30)
    # Small gradients over small eps would magnify the rounding of the learning rate, a float32 when recorded.
    settings = {"capturable": True, "eps": 1e-2} if base is torch.optim.RMSprop else {}
    eager, _ = run_eager(method, days, clip=True, base=base, **settings)
    captured, _, step = run_captured(method, days, clip=True, base=base, **settings)
    whole = base is not torch.optim.Adagrad
    assert ("the whole step" in step.how) == whole
    assert torch.allclose(problems.weights(eager), problems.weights(captured), rtol=1e-4, atol=1e-6)


@pytest.mark.cuda
def test_schedules_need_no_new_recording(exact):
    rho = steppe.linear_in_lr(rho_max=0.2, rho_min=0.01, lr_max=0.05)
    method = steppe.Every(2, steppe.GSAM(rho=rho, alpha=lambda step, lr: 0.4 / (1 + step)))
    days = data("cuda", 40)
    eager, _ = run_eager(method, days)
    captured, _, step = run_captured(method, days)
    assert "2 recorded" in step.how
    # Scheduled numbers are float32 when recorded.
    assert torch.allclose(problems.weights(eager), problems.weights(captured), rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
def test_a_ragged_batch_and_a_checkpoint(exact):
    """The last batch of an epoch is smaller; and training is resumed from a checkpoint in another captured step."""
    method = steppe.LookSAM(k=3)
    days = data("cuda", 24)
    for i in (7, 15, 23):
        (x, y), other = days[i].main, days[i].auxiliary
        days[i] = problems.Data((x[:5], y[:5]), other)
    eager, _ = run_eager(method, days, schedule=False)
    model, opt, _ = run_captured(method, days[:13], schedule=False)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict(), torch.cuda.get_rng_state()))
    model, opt = make(method)
    step = steppe.capture(loss_of(model), opt)
    for day in days[:9]:
        step(*day.main)  # recorded, and then to be forgotten
    model.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    torch.cuda.set_rng_state(saved[2])
    for day in days[13:]:
        step(*day.main)
    assert step.how.startswith("replayed")
    assert same(everything(eager)[:-1], everything(model)[:-1])


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_autocast_and_compile(compiled, exact):
    ends = []
    for captured in (False, True):
        model, opt = make(steppe.CRSAM())
        model[4].p = 0.0
        called = torch.compile(model) if compiled else model

        def loss(x, y, called=called):
            with torch.autocast("cuda", torch.bfloat16):
                return F.cross_entropy(called(x), y)

        step = steppe.capture(loss, opt)
        for day in data("cuda", 12):
            if captured:
                step(*day.main)
            else:
                opt.step(lambda day=day, loss=loss: loss(*day.main))
        ends.append(everything(model)[:-1])
    assert step.how.startswith("replayed")
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(*ends, strict=True))


@pytest.mark.cuda
def test_a_replayed_step_that_overflows_is_skipped(exact):
    """A batch that overflows in the middle: the step is skipped, memory and count stay, the scale falls."""
    ends = []
    for captured in (False, True):
        model, opt = make(steppe.FSAM())
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=5)
        torch.cuda.manual_seed(3)

        def loss(x, y, model=model):
            with torch.autocast("cuda", torch.float16):
                return F.cross_entropy(model(x), y)

        step = steppe.capture(loss, opt, scaler=scaler)
        for i, day in enumerate(data("cuda", 20)):
            x, y = day.main
            x = x * float("inf") if i == 9 else x
            if captured:
                step(x, y)
            else:
                opt.gradient(lambda x=x, y=y, loss=loss: loss(x, y), scaler=scaler)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        assert opt.steps == 19
        ends.append([t for n, t in model.state_dict().items() if "running" not in n])  # the infinite batch is in those
    assert step.how.startswith("replayed") and "eagerly" in step.how
    assert same(*ends)


@pytest.mark.cuda
def test_fp16_with_a_fixed_scale_is_recorded_whole(exact):
    ends = []
    for captured in (False, True):
        model, opt = make(steppe.FSAM())
        scaler = steppe.FixedScale("cuda", 2.0**10)
        torch.cuda.manual_seed(3)

        def loss(x, y, model=model):
            with torch.autocast("cuda", torch.float16):
                return F.cross_entropy(model(x), y)

        step = steppe.capture(loss, opt, scaler=scaler)
        for day in data("cuda", 20):
            if captured:
                step(*day.main)
            else:
                opt.gradient(lambda day=day, loss=loss: loss(*day.main), scaler=scaler)
                scaler.step(opt)
                scaler.update()
        ends.append(everything(model)[:-1])
    assert step.how == "replayed (1 recorded): the whole step"
    assert same(*ends)


@pytest.mark.cuda
def test_an_old_recording_may_become_garbage_while_a_new_one_is_recorded(exact):
    """Freeing a CUDA graph while another is recorded would invalidate it, and Python may free garbage at any time."""
    days = data("cuda", 4)
    before = gc.get_threshold()
    gc.collect()
    run_captured(steppe.SAM(), days)  # the optimizer and its recorded step hold each other: garbage from here on
    gc.set_threshold(1, 1, 1)
    try:
        *_, step = run_captured(steppe.SAM(), days)
    finally:
        gc.set_threshold(*before)
    assert step.how.startswith("replayed"), step.how


def test_a_captured_step_is_freed_without_garbage_collection():
    """The optimizer holds no reference to it, and continues without it."""
    model = torch.nn.Linear(2, 1)
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.SAM(), model=model)
    step = steppe.capture(lambda x: model(x).square().mean(), opt)
    step(torch.ones(3, 2))
    gone = weakref.ref(step)
    gc.disable()
    try:
        del step
        assert gone() is None
    finally:
        gc.enable()
    opt.load_state_dict(opt.state_dict())


def test_nothing_is_collected_while_recording():
    assert gc.isenabled()
    with no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


@pytest.mark.cuda
def test_hooks_still_run(exact):
    model, opt = make(steppe.SAM())
    calls = []
    opt.base.register_step_post_hook(lambda *_: calls.append(1))
    step = steppe.capture(loss_of(model), opt)
    for day in data("cuda", 6):
        step(*day.main)
    assert len(calls) == 6 and "base optimizer's step runs eagerly" in step.how


@pytest.mark.cuda
def test_what_cannot_be_recorded_says_so_and_runs_eagerly(exact):
    ends = []
    for captured in (False, True):
        model, opt = make(steppe.SAM(), momentum=0.0)
        model[4].p = 0.0

        def loss(x, y, model=model):
            value = F.cross_entropy(model(x), y)
            return value if value.item() > -1 else 2 * value  # waits for the device

        step = steppe.capture(loss, opt)
        for i, day in enumerate(data("cuda", 6)):
            if not captured:
                opt.step(lambda day=day, loss=loss: loss(*day.main))
            elif i == 2 or i == 5:
                with pytest.warns(UserWarning, match="cannot be recorded"):
                    step(*day.main)
            else:
                step(*day.main)
        ends.append(everything(model)[:-1])
    assert step.how.startswith("eager: recording failed")
    assert same(*ends)
    F.dropout(torch.ones(8, device="cuda"), 0.5)  # raises if a recording that broke off has left its mark
