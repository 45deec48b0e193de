"""What users do around a step: freeze layers, add groups, change the method, skip, hook; and methods of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook

import steppe
from steppe import FSAM, GAM, HERE, SAM, SASAM, Every, Look, LookSAM, SharpnessAware, ascent
from steppe.engine.groups import SEED, STEP
from steppe.engine.state import MethodState
from steppe.method import Context
from steppe.vector import Space, Vector

DOUBLE = torch.float64


def weights(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=DOUBLE))


def quartic(*params: Tensor) -> Tensor:
    return torch.stack([(p**4).sum() for p in params]).sum()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("way", ["closure", "passes"])
def test_a_layer_that_is_frozen_stays(way, momentum):
    """Without zero_grad: the last direction is still in its gradient."""
    p, layer = weights(0.5), weights(0.7)
    opt = SharpnessAware(SGD([p, layer], lr=0.1, momentum=momentum, weight_decay=0.1), SAM())
    for step in range(4):
        layer.requires_grad_(step != 1 and step != 2)
        before = layer.item()
        if way == "closure":
            opt.step(lambda: quartic(p, layer))
        else:
            for _ in opt.passes():
                quartic(p, layer).backward()
            opt.step()
        assert (layer.item() == before) == (step in (1, 2))


def test_a_gradient_of_the_users_on_a_frozen_layer_is_left_alone():
    p, layer = weights(0.5), weights(0.7)
    layer.requires_grad_(False)
    layer.grad = torch.ones_like(layer)
    opt = SharpnessAware(SGD([p, layer], lr=0.1), SAM())
    opt.step(lambda: quartic(p))
    assert layer.item() == pytest.approx(0.6)


def test_step_takes_no_scaler():
    p = weights(0.5)
    opt = SharpnessAware(SGD([p], lr=0.1), SAM())
    with pytest.raises(TypeError, match="step takes no scaler"):
        opt.step(lambda: quartic(p), scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert p.item() == 0.5


def test_reading_amp_support_in_a_closure_is_not_taken_for_a_scaler():
    """Lightning does, before it clips there."""
    p = weights(0.5)
    opt = SharpnessAware(SGD([p], lr=0.1), SAM())

    def closure():
        loss = quartic(p)
        loss.backward()
        assert not opt._step_supports_amp_scaling
        return loss

    for _ in range(2):
        opt.step(closure)
    assert opt.steps == 2


def test_after_a_skipped_step_the_next_one_looks_around_again():
    p = nn.Parameter(torch.tensor([0.5]))
    opt = SharpnessAware(SGD([p], lr=0.1), SAM(rho=0.05))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for _ in range(30):  # until the scale has come down; the loop has no zero_grad
        for _ in opt.passes(scaler):
            scaler.scale(100 * quartic(p)).backward()
        scaler.step(opt)
        scaler.update()
        if opt.steps:
            break
    assert opt.steps == 1 and p.item() == pytest.approx(0.5 - 0.1 * 400 * 0.55**3)


def test_gradients_that_no_step_used_are_still_refused():
    p = weights(0.5)
    opt = SharpnessAware(SGD([p], lr=0.1), SAM())
    quartic(p).backward()
    with pytest.raises(RuntimeError, match="no step has used"):
        opt.passes()


def test_a_group_that_joins_sa_sam_has_its_learning_rate():
    p, late = weights(0.5), weights(0.3)
    opt = SharpnessAware(SGD([p], lr=0.01), SASAM())
    for step in range(4):
        if step == 2:
            opt.add_param_group({"params": [late], "lr": 7.0})
        opt.step(lambda step=step: quartic(p, late) if step >= 2 else quartic(p))
    first, second = opt.param_groups
    assert first["lr"] == second["lr"] < 1


@pytest.mark.parametrize("change", ["removed", "reversed", "put before"])
def test_the_step_count_and_the_seed_outlive_the_first_group(change):
    """Layers that are trained are sometimes removed from the optimizer, the first ones first."""
    p, layer = weights(0.5), weights(0.7)
    opt = SharpnessAware(SGD([{"params": [layer]}, {"params": [p]}], lr=0.1), SAM(), seed=7)
    for _ in range(3):
        opt.step(lambda: quartic(p, layer))
    groups = opt.param_groups
    if change == "removed":
        del groups[0]
    elif change == "reversed":
        groups.reverse()
    else:
        opt.add_param_group({"params": [weights(0.1)]})
        groups.insert(0, groups.pop())
    saved = opt.state_dict()["param_groups"]
    assert [(g.get(STEP), g.get(SEED)) for g in saved] == [(3, 7)] + [(None, None)] * (len(groups) - 1)
    opt.step(lambda: quartic(p))
    assert opt.steps == 4


def test_a_group_that_is_refused_is_not_added():
    p, late = weights(0.5), weights(0.3)
    opt = SharpnessAware(SGD([p], lr=0.01), SAM())
    with pytest.raises(ValueError, match="group's rho"):
        opt.add_param_group({"params": [late], "rho": -1.0})
    assert len(opt.param_groups) == 1
    opt.add_param_group({"params": [late], "rho": 1.0})


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Every(2, LookSAM(k=2)), Every(2, FSAM())),
        (GAM(gamma=(0.1, 0.1)), GAM()),
        (GAM(), GAM(T=3)),
        (GAM(), GAM(optimizer=torch.optim.Rprop)),
    ],
    ids=["inside", "learned", "longer", "optimizer"],
)
def test_a_method_with_other_settings_finds_its_memory(first, then):
    p = weights(0.5, 0.3)
    opt = SharpnessAware(SGD([p], lr=0.01), first)
    for method in (first, then):
        opt.method = method
        for _ in range(3):
            opt.step(lambda: quartic(p), auxiliary=lambda: 2 * quartic(p))
    assert torch.isfinite(p).all() and opt.steps == 6


def test_a_base_may_have_no_learning_rate():
    """COCOB, for example, has none."""

    class Tenth(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                p.sub_(0.1 * p.grad)

    ours, expected = weights(0.5), weights(0.5)
    opt = SharpnessAware(Tenth([ours]), SAM(rho=0.1))
    opt.step(lambda: quartic(ours))
    SharpnessAware(SGD([expected], lr=0.1), SAM(rho=0.1)).step(lambda: quartic(expected))
    torch.testing.assert_close(ours, expected, rtol=1e-15, atol=0)
    with pytest.raises(RuntimeError, match="needs a direction"):
        opt.step()


def test_a_base_that_maximizes_is_refused():
    """Perturbations ascend the loss: for a base that maximizes, they would lead to sharp places, not away from them."""
    with pytest.raises(ValueError, match="minimise -loss"):
        SharpnessAware(SGD([weights(0.5)], lr=0.1, maximize=True), SAM())
    opt = SharpnessAware(SGD([weights(0.5)], lr=0.1), SAM())
    with pytest.raises(ValueError, match="minimise -loss"):
        opt.add_param_group({"params": [weights(0.7)], "maximize": True})
    assert len(opt.param_groups) == 1


def test_hooks_for_all_optimizers_run_once_beside_the_optimizers_own():
    p, calls = weights(0.5), []
    opt = SharpnessAware(SGD([p], lr=0.1), SAM())
    opt.register_step_pre_hook(lambda opt, args, kwargs: calls.append(f"before {len(args)}"))
    opt.register_step_post_hook(lambda opt, args, kwargs: calls.append("after"))
    handle = register_optimizer_step_post_hook(lambda opt, *_: calls.append(type(opt).__name__))
    try:
        loss = opt.step(lambda: quartic(p))
    finally:
        handle.remove()
    assert calls == ["before 2", "SGD", "after"] and loss == pytest.approx(0.5**4)


def test_a_hook_may_change_what_step_is_given():
    p = weights(0.5)
    opt = SharpnessAware(SGD([p], lr=0.1), SAM())
    opt.register_step_pre_hook(lambda opt, args, kwargs: ((args[0], lambda: 2 * quartic(p)), kwargs))
    assert opt.step(lambda: quartic(p)) == pytest.approx(2 * 0.5**4)


def test_state_contains_the_method_s_memory():
    p, other = weights(0.5), weights(0.3)
    opt = SharpnessAware(SGD([p], lr=0.1), LookSAM())
    opt.step(lambda: quartic(p))
    assert p in opt.state and other not in opt.state and other not in opt.base.state


# Methods of one's own


@dataclass(frozen=True)
class _Ahead(steppe.Method):
    """Looks ahead first; its radius is annotated by the module's name."""

    rho: steppe.Number = 0.1

    def looks(self, ctx: Context) -> steppe.method.Looks:
        seen = yield Look(self.rho * ascent(ctx.w))
        return seen.grad


def test_number_is_recognised_however_it_is_imported():
    assert _Ahead.__annotations__["rho"] == "steppe.Number"
    with pytest.raises(ValueError, match="rho must not be negative"):
        _Ahead(rho=-1.0)
    p = weights(0.5)
    opt = SharpnessAware(SGD([p], lr=1.0), _Ahead(rho=lambda step, lr: 0.25))
    opt.step(lambda: quartic(p))
    assert p.grad is not None and p.grad.item() == pytest.approx(4 * 0.75**3)


def test_the_first_gradient_is_not_taken_from_a_method_that_looks_elsewhere():
    p = weights(0.5)
    opt = SharpnessAware(SGD([p], lr=1.0), _Ahead())
    opt.begin()
    quartic(p).backward()
    with pytest.raises(RuntimeError, match="does not look at the weights first"):
        opt.gradient(lambda: quartic(p), first_done=True)
    assert p.item() == 0.5


@dataclass(frozen=True)
class _Forgetful(steppe.Method):
    def looks(self, ctx: Context) -> steppe.method.Looks:
        seen = yield HERE
        ctx.remember(count=3.0)  # pyright: ignore[reportArgumentType]
        return seen.grad


def test_what_cannot_be_remembered_is_refused_before_the_step():
    p = weights(0.5)
    opt = SharpnessAware(SGD([p], lr=1.0), _Forgetful())
    with pytest.raises(TypeError, match=r"remember\(count=...\) takes a Vector or a tensor"):
        opt.step(lambda: quartic(p))
    assert p.item() == 0.5


def test_pinned_memory_does_not_overwrite_metrics():
    """A value that is remembered may be a metric too."""
    p = weights(0.5)
    opt = SharpnessAware(SGD([p], lr=0.1), steppe.SASAM())
    logged, values = [], []
    for step in range(6):
        if step == 3:
            opt.prepare_recording()
        opt.step(lambda: quartic(p))
        logged.append(opt.metrics["eta"])
        values.append(opt.metrics["eta"].item())
    assert [eta.item() for eta in logged] == values and len(set(values)) > 3


@pytest.mark.parametrize("pinned", [False, True])
def test_memory_may_move_from_one_name_to_another(pinned):
    """With pinned memory, as recorded steps need it, no value is overwritten before it is read."""
    p = weights(0.5)
    store, space = MethodState(), Space([p])
    store.pinned = pinned
    for value in (1.0, 2.0, 3.0):
        memory = store.recall(space) if value > 1 else {}
        new = {"now": Vector([torch.full((1,), value)], space), "last_loss": torch.tensor(value)}
        if memory:
            new |= {"before": memory["now"], "loss_before": memory["last_loss"]}
        else:
            store.prepare(_Ahead(), space)
        store.keep([p], new)
    memory = cast(dict[str, Any], store.recall(space))
    assert [memory[name].tensors[0].item() for name in ("before", "now")] == [2.0, 3.0]
    assert [memory[name].item() for name in ("loss_before", "last_loss")] == [2.0, 3.0]
