"""The wrapper as a torch optimizer: schedulers, groups, hooks, checkpoints, clipping, wrong input."""

from __future__ import annotations

import copy
import gc
import io
import math
import warnings
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook

import steppe
from helpers import problems
from helpers.problems import adamw, by_closure, everything, same, seeded, sgd, weights
from steppe import GSAM, HERE, SAM, Look, Method, Plain, SharpnessAware, ascent


@dataclass(frozen=True)
class Remembering(Method):
    """Keeps a vector and a number, so that the machinery around memory can be tested on its own."""

    cost = 2

    def looks(self, ctx):
        here = yield HERE
        m = 0.5 * ctx.memory["m"] + here.grad
        ctx.remember(m=m, count=ctx.memory["count"] + 1)
        there = yield Look(0.1 * ascent(m))
        return there.grad

    def memory(self, space):
        return {"m": space.zeros(), "count": torch.zeros(())}


def make(method=None, base=sgd, build=problems.mlp, **settings):
    model = seeded(build)
    return model, SharpnessAware(base(model), method or SAM(rho=0.1), model, **settings)


def run(model, opt, count=3, start=0):
    for data in problems.steps(start + count)[start:]:
        by_closure(opt, model, data)
    return weights(model)


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


# Hooks, checkpoints, copies


def test_hooks_fire_once():
    model, opt = make()
    fired = []
    opt.register_step_pre_hook(lambda *_: fired.append("pre"))
    opt.register_step_post_hook(lambda *_: fired.append("post"))
    opt.base.register_step_pre_hook(lambda *_: fired.append("base"))
    opt.register_state_dict_pre_hook(lambda o: fired.append("saving"))
    opt.register_state_dict_post_hook(lambda o, s: {**s, "extra": 1})
    opt.register_load_state_dict_pre_hook(lambda o, s: fired.append("loading"))
    opt.register_load_state_dict_post_hook(lambda o: fired.append("loaded"))
    run(model, opt, 1)
    state = opt.state_dict()
    assert state.pop("extra") == 1
    opt.load_state_dict(state)
    assert fired == ["pre", "base", "post", "saving", "loading", "loaded"]


def test_hooks_of_all_optimizers_fire_once():
    """torch's global hooks: for the base's step, not for the wrapper's and the base's."""
    model, opt = make()
    fired = []
    handle = register_optimizer_step_post_hook(lambda o, a, k: fired.append(type(o).__name__))
    try:
        opt.step(**problems.steps(1)[0].closures(model))
    finally:
        handle.remove()
    assert fired == ["SGD"]


def test_a_hook_on_the_base_sees_only_the_direction():
    model, opt = make(GSAM())
    opt.base.register_step_pre_hook(lambda o, a, k: nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None)
    other, its_opt = make(GSAM())
    for data in problems.steps(3):
        by_closure(opt, model, data)
        its_opt.gradient(**data.closures(other))
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        its_opt.step()
    assert torch.equal(weights(model), weights(other))


@pytest.mark.parametrize("base", [sgd, adamw])
def test_memory_is_saved_with_the_base(base):
    model, opt = make(Remembering(), base)
    run(model, opt)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    fresh, its_opt = make(Remembering(), base)
    fresh.load_state_dict(model.state_dict())
    its_opt.load_state_dict(torch.load(file, weights_only=True))
    assert its_opt.steps == 3
    assert torch.equal(run(model, opt, 2, 3), run(fresh, its_opt, 2, 3))


def test_saving_leaves_the_base_alone():
    model, opt = make(Remembering(), adamw)
    opt.gradient(**problems.steps(1)[0].closures(model))
    opt.state_dict()  # before the base's first step: Adam takes any entry as a sign that its state exists
    opt.step()
    opt.state_dict()
    assert all(set(s) == {"step", "exp_avg", "exp_avg_sq"} for s in opt.base.state.values())


def test_a_plain_checkpoint_loads_and_ours_loads_into_the_base():
    model, opt = make(Remembering())
    plain = seeded(problems.mlp)
    base = sgd(plain)
    for data in problems.steps(2):
        base.zero_grad()
        problems.loss(plain, data.main).backward()
        base.step()
    opt.load_state_dict(base.state_dict())
    assert opt.steps == 0 and len(opt.base.state) == 4
    run(model, opt)
    base.load_state_dict(opt.state_dict())
    base.step()


def test_memory_keeps_its_own_precision():
    """torch casts what it loads to the parameter's dtype: a float32 average of bfloat16 weights would lose it."""
    model = seeded(problems.mlp, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="half-precision"):
        opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), Remembering(), model)
    params = list(model.parameters())
    opt._memory.prepare(opt.method, opt._space())
    opt._memory.keep(params, {"m": steppe.Vector([torch.full(p.shape, 1 + 2**-20) for p in params])})
    opt.load_state_dict(opt.state_dict())
    assert opt.state_dict()["state"][0]["steppe.m"][0, 0] == 1 + 2**-20


def test_numbers_alone_survive_a_distributed_checkpoint():
    """GAM on a base without state: torch wants state of every parameter, and gamma is kept with one."""
    model, opt = make(steppe.GAM(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    run(model, opt)
    saved = copy.deepcopy(get_optimizer_state_dict(model, opt))
    fresh, its_opt = make(steppe.GAM(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    fresh.load_state_dict(model.state_dict())
    set_optimizer_state_dict(fresh, its_opt, saved)
    assert torch.equal(run(model, opt, 2, 3), run(fresh, its_opt, 2, 3))


def test_a_checkpoint_that_is_refused_changes_nothing():
    model, opt = make(Remembering())
    run(model, opt)
    same_model, same_opt = copy.deepcopy((model, opt))
    small = nn.Linear(2, 1)
    its_opt = SharpnessAware(sgd(small), Remembering(), small)
    its_opt.step(lambda: small(torch.ones(3, 2)).square().mean())
    with pytest.raises(ValueError, match="parameter group"):
        opt.load_state_dict(its_opt.state_dict())
    assert torch.equal(run(model, opt, 2, 3), run(same_model, same_opt, 2, 3))


def test_a_seed_of_numpy_is_a_seed():
    model, opt = make(steppe.TraceSAM(), seed=np.int64(7))
    other, its_opt = make(steppe.TraceSAM(), seed=7)
    assert torch.equal(run(model, opt), run(other, its_opt))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    torch.load(file, weights_only=True)


def test_memory_goes_where_the_parameters_are():
    """A checkpoint is often read with map_location="cpu". (Here it goes the other way: a CPU is always there.)"""
    model, opt = make(steppe.GAM())
    run(model, opt, 1)
    saved = opt.state_dict()
    there = seeded(problems.mlp).to("meta")
    other = SharpnessAware(sgd(there), steppe.GAM(), there)
    other.load_state_dict(saved)
    memory = other._memory.recall(other._space())
    assert memory["gamma"].shape == (2,)
    assert {name: value.device.type for name, value in memory.items()} == {
        "gamma": "meta", "gamma.exp_avg": "meta", "gamma.exp_avg_sq": "meta", "gamma.step": "cpu",
    }  # fmt: skip


def test_copies_share_nothing_and_forget_patched_steps():
    model, opt = make(Remembering())
    schedulers.ExponentialLR(opt, 0.9)  # leaves a patched step in the instance
    run(model, opt)
    other, its_opt = copy.deepcopy((model, opt))
    assert its_opt.base is not opt.base and its_opt.model is other and "step" not in its_opt.__dict__
    end = run(other, its_opt)
    assert torch.equal(end, run(model, opt)) and opt.steps == its_opt.steps == 6


def test_repr_names_method_and_base():
    _, opt = make()
    assert repr(opt).startswith("SharpnessAware(method=SAM(rho=0.1, normalize=True), base=SGD")


def test_wrap_by_name():
    model = seeded(problems.mlp)
    opt = steppe.wrap(sgd(model), "gsam", model=model, rho=0.2, seed=3)
    assert opt.method == GSAM(rho=0.2)
    assert steppe.wrap(sgd(model), "gam-norm", model=model).method == steppe.GNAM()
    with pytest.raises(ValueError, match="did you mean 'gsam'"):
        steppe.wrap(sgd(model), "gsan")
    with pytest.raises(TypeError, match=r"GSAM.*unexpected keyword argument 'roh'"):
        steppe.wrap(sgd(model), "gsam", roh=0.1)
    with pytest.raises(TypeError, match="give these to the method itself: rho"):
        steppe.wrap(sgd(model), SAM(), rho=0.1)


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


def test_the_loss_is_that_of_the_weights():
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


def test_gradients_of_another_optimizer_are_its_to_free():
    model = seeded(problems.mlp)
    ours = SharpnessAware(torch.optim.SGD(model[0].parameters(), lr=0.1), SAM(rho=0.5), model)
    ours.step(**problems.steps(1)[0].closures(model))
    held = weakref.ref(model[2].weight.grad)
    model.zero_grad()
    assert held() is None


def test_an_unfinished_loop_is_closed_by_the_next():
    model, opt = make()
    before = everything(model)
    loop = opt.passes()
    next(loop)
    problems.loss(model, problems.steps(1)[0].main).backward()
    next(loop)  # the weights are away
    assert not same(everything(model), before)
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


def test_kept_gradients_are_not_those_that_clipping_changes():
    """A method may return what it remembers; clipping and unscaling then work in place."""

    @dataclass(frozen=True)
    class _Returning(Method):
        def looks(self, ctx):
            g = (yield HERE).grad
            ctx.remember(m=g)
            return g

        def memory(self, space):
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
def test_a_step_lets_go_of_all_it_held(method, monkeypatch):
    """A reference cycle would keep vectors as large as the model until garbage collection."""
    contexts = []
    init = steppe.engine.looks.LookRunner.__init__

    def noting(self, *args, **settings):
        init(self, *args, **settings)
        contexts.append(weakref.ref(self.ctx))

    monkeypatch.setattr(steppe.engine.looks.LookRunner, "__init__", noting)
    model, opt = make(method)
    gc.disable()
    try:
        run(model, opt)
        assert [ref() for ref in contexts] == [None] * 3
    finally:
        gc.enable()


# Wrong input


@pytest.mark.parametrize("rho", [-0.1, float("nan"), float("inf"), "0.1", True])
def test_a_radius_must_be_a_number(rho):
    with pytest.raises(ValueError, match="SAM: rho must"):
        SAM(rho=rho)
    model = seeded(problems.mlp)
    if rho is not True:
        with pytest.raises(ValueError, match="group's rho"):
            SharpnessAware(torch.optim.SGD([{"params": model.parameters(), "rho": rho}], lr=0.1), SAM())


def test_a_schedule_is_checked_when_it_speaks():
    model, opt = make(SAM(rho=lambda step, lr: -1.0))
    with pytest.raises(ValueError, match="rho must not be negative"):
        run(model, opt, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m: SharpnessAware(torch.optim.LBFGS(m.parameters()), SAM()), "LBFGS cannot be the base"),
        (lambda m: SharpnessAware(torch.optim.SGD, SAM()), "build it first"),
        (lambda m: SharpnessAware(sgd(m), "sam"), "by name: steppe.wrap"),
        (lambda m: SharpnessAware(sgd(m), SAM(), model=m.parameters()), "model must be the module that is trained"),
        (lambda m: SharpnessAware(SharpnessAware(sgd(m), SAM()), SAM()), "SharpnessAware cannot be the base"),
        (lambda m: SharpnessAware(sgd(nn.ParameterList([torch.ones(2, dtype=torch.cfloat)])), SAM()), "complex"),
    ],
)
def test_what_cannot_be_wrapped(wrong, message):
    with pytest.raises(TypeError, match=message):
        wrong(seeded(problems.mlp))


def test_local_needs_ddp_and_hvp_a_known_name():
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        make(local=True)
    with pytest.raises(ValueError, match="hvp must be"):
        make(hvp="magic")


def test_step_needs_a_direction():
    model, opt = make()
    with pytest.raises(RuntimeError, match=r"step\(\) needs a direction"):
        opt.step()
    problems.loss(model, problems.steps(1)[0].main).backward()
    with pytest.raises(RuntimeError, match=r"step\(\) needs a direction"):
        opt.step()  # the defect: silently the base's step


@pytest.mark.parametrize(
    ("closure", "error", "message"),
    [
        (lambda: None, TypeError, "it returned None"),
        (lambda: 1.5, TypeError, "it returned 1.5"),
        (lambda: torch.ones(3, requires_grad=True), TypeError, r"shape \(3,\)"),
        (lambda: torch.tensor(1.0), RuntimeError, "has no graph"),
        (lambda: torch.tensor(float("nan")), RuntimeError, "has no graph"),
        ([], ValueError, "list of closures is empty"),
        (torch.tensor(1.0), TypeError, "a function that returns the loss, not the loss"),
    ],
)
def test_what_a_closure_must_return(closure, error, message):
    model, opt = make()
    before = everything(model)
    with pytest.raises(error, match=message):
        opt.step(closure)
    assert same(everything(model), before)


def test_gradients_of_an_unfinished_accumulation_are_not_dropped():
    model, opt = make()
    first, second = problems.steps(2)
    problems.loss(model, first.main).backward()
    with pytest.raises(RuntimeError, match="gradients that no step has used"):
        opt.step(**second.closures(model))
    with pytest.raises(RuntimeError, match="gradients that no step has used"):
        opt.passes()
    opt.zero_grad()
    opt.step(**second.closures(model))
    problems.loss(model, first.main).backward()  # on top of the last step's: not used either
    with pytest.raises(RuntimeError, match="gradients that no step has used"):
        opt.step(**second.closures(model))


def test_first_done_needs_a_gradient():
    model, opt = make()
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        opt.gradient(**problems.steps(1)[0].closures(model), first_done=True)


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(3, 1))
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(), model)
    with pytest.raises(TypeError, match="sparse gradients"):
        opt.step(lambda: model(torch.tensor([[1], [2]])).sum())


def test_parameters_may_not_change_between_the_halves():
    model, opt = make()
    opt.gradient(**problems.steps(1)[0].closures(model))
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    with pytest.raises(RuntimeError, match="parameters changed"):
        opt.step()


def test_nothing_to_train():
    model, opt = make()
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="no parameter that requires a gradient"):
        opt.step(lambda: torch.tensor(1.0))


def test_missing_batches_and_losses_are_asked_for():
    model, opt = make(steppe.GAM())
    data = problems.steps(1)[0]
    with pytest.raises(RuntimeError, match="GAM looks at a batch called 'auxiliary'"):
        opt.step(data.closures(model)["closure"])
    model, opt = make(steppe.SSAM())
    with pytest.raises(RuntimeError, match="SSAM looks at a batch called 'sample'"):
        opt.step(data.closures(model)["closure"])
    model, opt = make(steppe.TraceSAM())
    loop = opt.passes()
    next(loop)
    problems.loss(model, data.main).backward()
    with pytest.raises(RuntimeError, match=r"TraceSAM needs the loss of every look: call look.report"):
        next(loop)


def test_a_method_that_sets_the_learning_rate_refuses_a_scheduler():
    model, opt = make(steppe.SASAM(), base=lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    schedulers.ExponentialLR(opt, 0.9)
    with pytest.raises(RuntimeError, match="SASAM sets the learning rate itself"):
        run(model, opt, 1)
    model, opt = make(steppe.SASAM(), base=lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    run(model, opt, 1)
    opt.param_groups[0]["lr"] = 0.01
    with pytest.raises(RuntimeError, match="SASAM sets the learning rate itself"):
        run(model, opt, 1)


def test_a_method_that_sets_the_learning_rate_sets_one_for_all_groups():
    model = seeded(problems.mlp)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1e-4}]
    opt = SharpnessAware(torch.optim.SGD(groups, lr=0.05), steppe.SASAM(), model)
    before = weights(model)
    with pytest.raises(RuntimeError, match="SASAM sets one learning rate for all weights"):
        run(model, opt, 1)
    assert torch.equal(weights(model), before) and [g["lr"] for g in opt.param_groups] == [0.05, 1e-4]
    opt.param_groups[1]["lr"] = 0.05
    run(model, opt, 2)
    assert opt.param_groups[0]["lr"] == opt.param_groups[1]["lr"] != 0.05


def test_a_group_added_later_takes_the_learning_rate_of_a_method_that_sets_it():
    """Also right after a resume; but not that of a method which is there no more."""
    base = lambda m: torch.optim.SGD(m[2].parameters(), lr=0.05)  # noqa: E731
    model, opt = make(steppe.SASAM(), base=base)
    run(model, opt, 3)
    saved = opt.state_dict()
    opt.method = SAM()
    opt.add_param_group({"params": [model[0].bias], "lr": 0.3})
    assert opt.param_groups[1]["lr"] == 0.3
    model, opt = make(steppe.SASAM(), base=base)
    opt.load_state_dict(saved)
    opt.add_param_group({"params": model[0].parameters()})
    assert opt.param_groups[1]["lr"] == opt.param_groups[0]["lr"] != 0.05
    run(model, opt, 1)


@pytest.mark.parametrize(
    ("make_method", "message"),
    [
        (lambda: steppe.FrobSAM(n=1), "n must be at least 2"),
        (lambda: steppe.GAM(T=0), "T must be"),
        (lambda: steppe.GAM(eps=0.0), "eps must be positive"),
        (lambda: steppe.GAM(eps=-1.0), "eps must be positive"),
        (lambda: steppe.GAM(gamma=(0.1,)), "1 fixed coefficients"),
        (lambda: steppe.GAM(discrepancy="cosine"), "discrepancy must be"),
        (lambda: steppe.GAM(period=0), "period must be"),
        (lambda: steppe.Every(0, SAM()), "k must be"),
        (lambda: steppe.Every(2, "sam"), "needs a method"),
        (lambda: steppe.GSAM(objective="x"), "objective must be"),
        (lambda: steppe.GSAM(ascent="x"), "ascent must be"),
        (lambda: steppe.GNAMFast(weighting="x"), "weighting must be"),
        (lambda: steppe.LookSAM(k=0), "k must be"),
        (lambda: steppe.WSAM(gamma=1.0), "gamma must be"),
        (lambda: steppe.SSAM(sparsity=1.0), "sparsity must be"),
        (lambda: steppe.SSAM(rule="x"), "rule must be"),
        (lambda: steppe.SSAM(samples=0), "at least 1"),
        (lambda: steppe.SSAM(samples=2.5), "samples must be a whole number"),
        (lambda: steppe.SSAM(every=2.5), "every must be a whole number"),
        (lambda: steppe.SSAM(rule="dynamic", total=0), "total must be a whole number"),
        (lambda: steppe.SSAM(rule="dynamic", drop=1.5), "drop is a share"),
        (lambda: steppe.SSAM(sparsity=lambda step, lr: 0.5), "sparsity must be a number"),
        (lambda: steppe.GNAM(oracle="sam"), "oracle must be a method"),
        (lambda: steppe.GNAM(oracle=SAM), "oracle must be a method"),
        (lambda: steppe.GAM(T=1, gamma=0.1), "must be finite numbers, T of them"),
        (lambda: steppe.GAM(gamma=(0.1, math.nan)), "must be finite numbers"),
        (lambda: steppe.GAM(gamma=("a", "b")), "must be finite numbers"),
        (lambda: steppe.DetSAM(half_width=math.nan), "half_width must be a finite number"),
        (lambda: steppe.TraceSAM(n=0), "n must be"),
        (lambda: steppe.TraceSAM(rho=0.0), "rho must be positive"),
        (lambda: steppe.EntropySGD(L=-1), "L must be"),
        (lambda: steppe.linear_in_lr(0.1, 0.2, 1.0), "rho_min <= rho_max"),
        (lambda: steppe.UniversalSAM(mu=(steppe.methods.universal.normal,) * 2), "one sampler mu"),
    ],
)
def test_methods_refuse_what_makes_no_sense(make_method, message):
    with pytest.raises(ValueError, match=message):
        make_method()
