"""The wrapper as a torch optimizer: schedulers, groups, hooks, checkpoints, clipping, wrong input."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import steppe
from helpers import problems
from helpers.optimizers import Remembering, make, run
from helpers.problems import by_closure, everything, same, seeded, sgd, weights
from steppe import GSAM, HERE, SAM, Method, Plain, SharpnessAware
from steppe.engine.looks import LookRunner
from steppe.method import Memory

# Schedulers


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: schedulers.OneCycleLR(o, max_lr=0.2, total_steps=10),
        lambda o: schedulers.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2),
        lambda o: schedulers.CosineAnnealingLR(o, T_max=5),
        lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)], [2]),
        lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
        lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    ],
)
def test_schedulers_on_the_wrapper_move_the_base(schedule):
    model, opt = make(Plain())
    reference = seeded(problems.mlp)
    base = sgd(reference)
    ours, theirs = schedule(opt), schedule(base)
    for data in problems.steps(5):
        by_closure(opt, model, data)
        base.zero_grad()
        problems.loss(reference, data.main).backward()
        base.step()
        for s in (ours, theirs):
            s.step(1.0) if isinstance(s, schedulers.ReduceLROnPlateau) else s.step()
        assert opt.param_groups[0]["lr"] == opt.base.param_groups[0]["lr"] == base.param_groups[0]["lr"]
    assert torch.equal(weights(model), weights(reference))


def test_any_field_may_be_a_schedule():
    seen = []

    def rho(step, lr):
        seen.append((step, lr))
        return 0.1 * lr

    model, opt = make(GSAM(rho=rho, alpha=lambda step, lr: 0.1 * step))
    scheduler = schedulers.ExponentialLR(opt, 0.5)
    for i, data in enumerate(problems.steps(3)):
        offset = weights(model)
        for look in opt.passes():
            if look.index == 1:
                torch.testing.assert_close((weights(model) - offset).norm().item(), 0.01 * 0.5**i)
            problems.loss(model, data.main).backward()
        opt.step()
        scheduler.step()
    assert seen == [(0, 0.1), (1, 0.05), (2, 0.025)]


def test_a_cubes_width_may_be_a_schedule():
    ends = []
    for half_width in (0.1, lambda step, lr: lr, lambda step, lr: torch.tensor(lr, dtype=torch.float64)):
        model, opt = make(steppe.DetSAM(half_width=half_width))
        run(model, opt, 2)
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


# Parameter groups


def test_rho_by_group():
    """One common norm; each group its own radius; groups without one take the method's."""
    model = seeded(problems.mlp)
    first, second = list(model[0].parameters()), list(model[2].parameters())
    opt = SharpnessAware(
        torch.optim.SGD([{"params": first, "rho": 0.3}, {"params": second}], lr=0.1), SAM(rho=0.1), model
    )
    data = problems.steps(1)[0]
    grads = torch.autograd.grad(problems.loss(model, data.main), list(model.parameters()))
    norm = problems.flat(grads).norm()
    start = [p.detach().clone() for p in model.parameters()]
    for look in opt.passes():
        if look.index == 1:
            for p, w, g, rho in zip(model.parameters(), start, grads, [0.3, 0.3, 0.1, 0.1], strict=True):
                torch.testing.assert_close(p.detach() - w, rho * g / norm)
        problems.loss(model, data.main).backward()


def test_the_norm_counts_only_what_may_be_perturbed():
    model = seeded(problems.mlp)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "perturb": False}]
    opt = SharpnessAware(torch.optim.SGD(groups, lr=0.1), SAM(rho=0.1), model)
    start, data = weights(model), problems.steps(1)[0]
    for look in opt.passes():
        if look.index == 1:
            torch.testing.assert_close((weights(model) - start).norm(), torch.tensor(0.1, dtype=torch.float64))
        problems.loss(model, data.main).backward()
    assert model[2].weight.grad.abs().sum() > 0  # it trains all the same


def test_a_group_may_be_added_later():
    model = seeded(problems.mlp)
    opt = SharpnessAware(torch.optim.SGD(model[0].parameters(), lr=0.1), Remembering(), model)
    run(model, opt)
    model.zero_grad()
    opt.add_param_group({"params": model[2].parameters(), "rho": 0.2})
    before = model[2].weight.detach().clone()
    run(model, opt)
    assert not torch.equal(before, model[2].weight) and len(opt.base.param_groups) == 2


def test_a_frozen_parameter_stays():
    model, opt = make()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    run(model, opt)
    assert torch.equal(before, model[0].weight) and not model[0].weight.requires_grad


# The two halves


def test_a_closure_after_gradient_is_only_called():
    """What Lightning does: its closure clips and runs hooks, and the step must not look around again."""
    model, opt = make()
    other, its_opt = make()
    data = problems.steps(1)[0]
    calls = []
    opt.gradient(**data.closures(model))
    opt.step(lambda: calls.append(1) or torch.tensor(7.0))
    by_closure(its_opt, other, data)
    assert calls == [1] and torch.equal(weights(model), weights(other))


def test_step_returns_the_loss_at_the_weights():
    model, opt = make(SAM(rho=1.0))
    data = problems.steps(1)[0]
    expected = problems.loss(model, data.main).detach()
    assert torch.equal(opt.step(**data.closures(model)), expected)
    assert opt.metrics["surrogate_gap"] > 0 and opt.metrics["looks"] == 2


def test_the_same_batch_again_after_zeroing_in_place():
    model, opt = make()
    data = problems.steps(2)
    by_closure(opt, model, data[0])
    opt.zero_grad(set_to_none=False)
    by_closure(opt, model, data[1])
    model.zero_grad(set_to_none=False)  # behind the optimizer's back, but harmless
    by_closure(opt, model, data[0])


def test_zero_grad_inside_the_closure():
    """The closure that LBFGS and Lightning expect."""
    model, opt = make(GSAM())
    other, its_opt = make(GSAM())
    for data in problems.steps(2):

        def closure(data=data):
            opt.zero_grad()
            loss = problems.loss(model, data.main)
            loss.backward()
            return loss

        opt.step(closure)
        by_closure(its_opt, other, data)
    assert torch.equal(weights(model), weights(other))


def test_gradients_of_another_optimizer_are_those_of_one_pass():
    """Two optimizers share a model and a loss: the second one's gradients must not add up over the looks."""
    model = seeded(problems.mlp)
    ours = SharpnessAware(torch.optim.SGD(model[0].parameters(), lr=0.1), SAM(rho=0.5), model)
    data = problems.steps(1)[0]
    expected = torch.autograd.grad(problems.loss(model, data.main), list(model[2].parameters()))
    ours.step(**data.closures(model))
    assert all(torch.equal(p.grad, g) for p, g in zip(model[2].parameters(), expected, strict=True))


def test_no_reference_to_gradients_of_another_optimizer_is_kept():
    model = seeded(problems.mlp)
    ours = SharpnessAware(torch.optim.SGD(model[0].parameters(), lr=0.1), SAM(rho=0.5), model)
    ours.step(**problems.steps(1)[0].closures(model))
    held = weakref.ref(model[2].weight.grad)
    model.zero_grad()
    assert held() is None


def test_a_new_loop_closes_an_unfinished_one():
    model, opt = make()
    before, start = everything(model), weights(model)
    loop = opt.passes()
    next(loop)
    problems.loss(model, problems.steps(1)[0].main).backward()
    next(loop)
    assert not torch.equal(weights(model), start)
    opt.passes()
    assert same(everything(model), before)


def test_restoring_is_exact_in_every_dtype():
    """Adding and subtracting e would not restore: the defect that lets replicas drift."""
    for dtype in (torch.float32, torch.bfloat16):
        model = seeded(problems.mlp, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.0), SAM(rho=0.5), model)
        before = everything(model)
        for data in problems.steps(5, dtype=dtype):
            by_closure(opt, model, data)
        assert same(everything(model), before)


def test_clipping_does_not_change_what_a_method_remembers():
    """A method may return what it remembers; clipping and unscaling then work in place."""

    @dataclass(frozen=True)
    class _Returning(Method):
        def looks(self, ctx):
            g = (yield HERE).grad
            ctx.remember(m=g)
            return g

        def memory(self, space) -> Memory:
            return {"m": space.zeros()}

    model, opt = make(_Returning())
    opt.gradient(**problems.steps(1)[0].closures(model))
    expected = problems.flat(p.grad for p in model.parameters())
    for p in model.parameters():
        p.grad.zero_()
    opt.step()
    kept = problems.flat(state["steppe.m"] for state in opt.state_dict()["state"].values())
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("method", [steppe.WSAM(), steppe.GAM(), Remembering(), SAM()], ids=lambda m: m.name)
def test_a_step_frees_its_vectors_without_garbage_collection(method, monkeypatch):
    """A reference cycle would keep vectors as large as the model until garbage collection."""
    contexts = []
    init = LookRunner.__init__

    def noting(self, *args, **settings):
        init(self, *args, **settings)
        contexts.append(weakref.ref(self.ctx))

    monkeypatch.setattr(LookRunner, "__init__", noting)
    model, opt = make(method)
    gc.disable()
    try:
        run(model, opt)
        assert [ref() for ref in contexts] == [None] * 3
    finally:
        gc.enable()


# A GradScaler, and a base that is wrapped again


def overflow(opt, model, data, scaler):
    """A step that the scaler skips."""
    for _ in opt.passes(scaler):
        scaler.scale(problems.loss(model, data.main) * float("inf")).backward()
    scaler.step(opt)
    scaler.update()
    assert opt.steps == 0


@pytest.mark.parametrize("cleared", [False, True])
def test_a_closure_after_a_step_that_a_scaler_skipped_starts_a_new_step(cleared):
    """The direction of the skipped step is NaN: along it no step is taken."""
    model, opt = make(SAM(rho=0.1))
    first, second = problems.steps(2)
    overflow(opt, model, first, torch.amp.GradScaler("cpu", init_scale=4.0))
    if cleared:
        opt.zero_grad()
    by_closure(opt, model, second)
    other, its_opt = make(SAM(rho=0.1))
    by_closure(its_opt, other, second)
    assert opt.steps == 1 and torch.equal(weights(model), weights(other))


def test_to_ask_for_amp_support_is_not_taken_for_a_scaler():
    """Not before a step, and not between its halves."""
    ends = []
    for asks in (True, False):
        model, opt = make()
        for data in problems.steps(2):
            assert not asks or hasattr(opt, "_step_supports_amp_scaling")
            by_closure(opt, model, data)
            opt.gradient(**data.closures(model))
            assert not asks or hasattr(opt, "_step_supports_amp_scaling")
            seen = []
            opt.step(lambda seen=seen: seen.append(1) or torch.zeros(()))
            assert seen == [1]
        ends.append(weights(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("several", [False, True])
def test_a_base_that_is_wrapped_again_starts_anew(several):
    """Its random vectors are those of the new seed, from the first step on."""
    model = seeded(problems.mlp)
    base = [sgd(model[0]), sgd(model[2])] if several else sgd(model)
    run(model, SharpnessAware(base, SAM(), model, seed=1), 2)
    opt = SharpnessAware(base, SAM(), model, seed=7)
    assert (opt.steps, opt.param_groups[0]["steppe_seed"]) == (0, 7)
    run(model, opt, 2)
    assert opt.steps == 2


def test_a_base_that_has_loaded_a_checkpoint_before_it_is_wrapped_goes_on():
    """Also if it was wrapped before, and whether it or its wrapper loads."""
    model, opt = make(seed=1)
    run(model, opt, 3)
    saved = opt.state_dict()
    fresh, wrapped = sgd(model), sgd(model)
    SharpnessAware(wrapped, SAM(), model, seed=5)
    for base in (fresh, wrapped):
        base.load_state_dict(saved)
    through = SharpnessAware(sgd(model), SAM(), model, seed=5)
    through.load_state_dict(saved)
    for again in (fresh, wrapped, through.base):
        assert (resumed := SharpnessAware(again, SAM(), model, seed=7)).steps == 3
        assert resumed.param_groups[0]["steppe_seed"] == 1
    twin_model, twin = copy.deepcopy((model, opt))
    assert (twin.steps, twin.param_groups[0]["steppe_seed"]) == (3, 1) and twin_model is not model
