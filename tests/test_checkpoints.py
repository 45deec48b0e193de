"""Hooks, checkpoints and copies of the optimizer."""

from __future__ import annotations

import copy
import io
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook

import steppe
from helpers import problems
from helpers.optimizers import Remembering, make, run
from helpers.problems import adamw, by_closure, seeded, sgd, weights
from steppe import GSAM, SAM, SharpnessAware


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


def test_saving_does_not_change_the_base():
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


def test_a_memory_without_vectors_survives_a_distributed_checkpoint():
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


def test_the_seed_may_be_a_numpy_integer():
    model, opt = make(steppe.TraceSAM(), seed=np.int64(7))
    other, its_opt = make(steppe.TraceSAM(), seed=7)
    assert torch.equal(run(model, opt), run(other, its_opt))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    torch.load(file, weights_only=True)


def test_loaded_memory_is_moved_to_the_device_of_the_parameters():
    """A checkpoint is often read with map_location="cpu". (Here it goes the other way: a CPU is always there.)"""
    model, opt = make(steppe.GAM())
    run(model, opt, 1)
    saved = opt.state_dict()
    there = seeded(problems.mlp).to("meta")
    other = SharpnessAware(sgd(there), steppe.GAM(), there)
    other.load_state_dict(saved)
    memory = cast(dict[str, torch.Tensor], other._memory.recall(other._space()))
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
