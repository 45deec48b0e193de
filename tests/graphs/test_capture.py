"""Recorded steps: that they can be recorded (on any machine), and that replaying equals running (on a GPU)."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass, fields, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import steppe
from helpers import problems
from helpers.problems import everything, same, seeded
from steppe.graphs.recorder import LiveNumbers
from steppe.graphs.replayed import no_garbage_collection

VARIANTS = problems.all_variants()
every_variant = pytest.mark.parametrize("method", VARIANTS, ids=problems.ids(VARIANTS))


class Program(TorchDispatchMode):
    """Writes down every operation: which one, on what kinds of tensors, with which numbers."""

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


def with_sgd_for_gamma(method):
    """Adam's bias correction is a number that changes on a CPU; on a GPU it is on the device."""
    values = {f.name: getattr(method, f.name) for f in fields(method)}
    inner = {k: with_sgd_for_gamma(v) for k, v in values.items() if isinstance(v, steppe.Method)}
    if isinstance(method, steppe.GAM):
        inner["optimizer"] = partial(torch.optim.SGD, lr=0.01)
    return replace(method, **inner) if inner else method


@every_variant
def test_steps_of_a_phase_are_the_same_program(method):
    """The same operations with the same numbers: only then may one recording stand for all of them."""
    method = with_sgd_for_gamma(method)
    model = seeded(net)
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.05, fused=True), method, model)
    programs: dict[int, list[list[str]]] = {}
    for data in problems.steps(12, size=16):
        phase = method.phase(opt.steps)
        with Program() as program:
            problems.by_closure(opt, model, data)
        if phase is not None:
            programs.setdefault(phase, []).append(program.operations)
    assert programs
    for runs in programs.values():
        assert all(run == runs[1] for run in runs[2:])  # the first of a phase makes room


def test_phases_are_told_apart():
    """The test above can fail: a method that hides what it does with the step is found out."""

    class Hides(steppe.LookSAM):
        def phase(self, step):
            return 0

    try:
        with pytest.raises(AssertionError):
            test_steps_of_a_phase_are_the_same_program(Hides(k=3))
    finally:
        del steppe.Method.registry["hides"]


def data(device, count, dtype=torch.float32, size=32):
    def batch(b):
        return b[0].to(device, dtype), b[1].to(device)

    days = problems.steps(9, size, dtype)
    return [problems.Data(batch(d.main), batch(d.auxiliary)) for d in (days * (count // 9 + 1))[:count]]


def net():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Softplus(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(288, 10),
    )  # fmt: skip


def make(method, device="cuda", base=torch.optim.SGD, dtype=torch.float32, **settings):
    model = seeded(net, dtype=dtype).to(device)
    settings.setdefault("lr", 0.05 if base is torch.optim.SGD else 0.01)
    if base is torch.optim.SGD and "lr" not in method.needs:
        settings.setdefault("momentum", 0.9)
    if device == "cuda" and base in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        settings["fused"] = True  # as captured steps have it
    return model, steppe.SharpnessAware(base(model.parameters(), **settings), method, model)


def loss_of(model):
    return lambda x, y: F.cross_entropy(model(x), y)


def auxiliary(method, day):
    return {"auxiliary": day.auxiliary} if "auxiliary" in method.needs else {}


@dataclass(frozen=True)
class _Ahead(steppe.Method):
    rho: steppe.Number = 0.1


def test_a_recorded_schedule_is_known_by_any_spelling():
    """What a recorded step reads is written anew in every step, not the number that it had while recording."""
    _, opt = make(_Ahead(rho=lambda step, lr: 10 * lr), "cpu")
    live = LiveNumbers(opt, opt.method, whole=False)
    rho = live._method.at(0, 0.05).rho
    assert rho.item() == 0.5
    opt.param_groups[0]["lr"] = 0.025
    live.refresh()
    assert rho.item() == 0.25


def test_on_a_cpu_it_is_the_step_itself():
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


def test_looks_are_told_and_counted():
    count_right("cpu", 5)


@pytest.mark.cuda
def test_looks_are_told_and_counted_when_replayed(exact):
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


# On a GPU


@pytest.fixture
def exact():
    """Kernels that give the same bits every time."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = before


def state(model):
    return [*everything(model), torch.cuda.get_rng_state()]


def run_eager(method, days, schedule=True, clip=False, base=torch.optim.SGD, log=None, **settings):
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


def run_captured(method, days, schedule=True, clip=False, base=torch.optim.SGD, log=None, **settings):
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
def test_replaying_equals_running_to_the_last_bit(method, exact):
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
def test_bases(base, exact):
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
    """The last batch of an epoch is smaller; and training goes on from a checkpoint in another captured step."""
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
def test_fp16_scaler_skips_and_goes_on(exact):
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
def test_an_old_recording_may_become_garbage_while_a_new_one_is_made(exact):
    """Freeing a CUDA graph while another is recorded would spoil it, and Python collects when it likes."""
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


def test_a_captured_step_is_freed_when_it_is_let_go():
    """Its optimizer does not hold it; and goes on without it."""
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
def test_what_cannot_be_recorded_says_so_and_runs_as_ever(exact):
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


# Functions


def test_a_function_on_a_cpu_is_itself():
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


def test_learning_rates_are_where_fused_kernels_read_them_whatever_the_default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        opt = steppe.SharpnessAware(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), steppe.SAM())
        live = LiveNumbers(opt, opt.method, whole=True)
        with live.in_use():
            assert opt.param_groups[0]["lr"].dtype is torch.float32
    finally:
        torch.set_default_dtype(before)
