"""Autocast and loss scaling: every look sees the weights of its own step, and an overflow changes nothing."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steppe
from helpers import problems
from helpers.problems import seeded
from steppe import GSAM, SAM, Plain, SharpnessAware


def frozen(model):
    return torch.optim.SGD(model.parameters(), lr=0.0)


def test_autocast_around_the_step_sees_moved_weights():
    """Autocast caches low-precision weights: an extra look inside it would see those of the first."""
    model = seeded(problems.mlp, dtype=torch.float32)
    opt = SharpnessAware(frozen(model), SAM(rho=5.0), model)
    batch = problems.steps(1, dtype=torch.float32)[0].main
    losses = []

    def closure():
        loss = problems.loss(model, batch)
        losses.append(loss.item())
        return loss

    with torch.autocast("cpu", torch.bfloat16):
        opt.step(closure)
        after = problems.loss(model, batch).item()
    assert losses[1] > losses[0] + 1
    assert after == losses[0]  # and after the step the restored ones


@pytest.mark.parametrize(
    "method", [Plain(), steppe.Every(2, SAM(rho=0.1)), steppe.LookSAM(k=2, alpha=0.1)], ids=lambda m: m.name
)
def test_autocast_around_the_loop_sees_the_weights_of_each_step(method):
    """Also where no look moves the weights: it is the step before that has."""

    def closure(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return problems.loss(model, batch)

    ends = []
    for around in (torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext()):
        model = seeded(problems.mlp, dtype=torch.float32)
        opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), method, model)
        with around:
            for d in problems.steps(4, dtype=torch.float32):
                opt.step(functools.partial(closure, model, d.main))
        ends.append(problems.weights(model))
    assert torch.equal(ends[0], ends[1])


def test_bf16_autocast_matches_a_written_out_sam():
    batches = [d.main for d in problems.steps(4, dtype=torch.float32)]

    def loss_of(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    model = seeded(problems.mlp, dtype=torch.float32)
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(rho=0.1), model)
    for batch in batches:
        opt.step(lambda batch=batch: loss_of(model, batch))

    other = seeded(problems.mlp, dtype=torch.float32)
    params = list(other.parameters())
    for batch in batches:
        grads = torch.autograd.grad(loss_of(other, batch), params)
        norm = problems.flat(grads).norm()
        start = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p += 0.1 * g / norm
        grads = torch.autograd.grad(loss_of(other, batch), params)
        with torch.no_grad():
            for p, w, g in zip(params, start, grads, strict=True):
                p.copy_(w - 0.1 * g)
    torch.testing.assert_close(problems.weights(model), problems.weights(other), rtol=1e-4, atol=1e-5)


def scaled_steps(opt, model, scaler, count=3, clip=None):
    for d in problems.steps(count, dtype=torch.float32):
        opt.zero_grad()
        for _ in opt.passes(scaler):
            scaler.scale(problems.loss(model, d.main)).backward()
        scaler.unscale_(opt)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_the_stock_scaler_loop_with_clipping(fused):
    """A fused base claims to unscale by itself; through a wrapper the update would be 1024 times too large."""
    ends = []
    for scale in (None, 2.0**10):
        model = seeded(problems.mlp, dtype=torch.float32)
        base = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
        opt = SharpnessAware(base, GSAM(), model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        scaled_steps(opt, model, scaler, clip=0.05)
        ends.append(problems.weights(model))
    assert torch.equal(ends[0], ends[1])


def test_scaler_step_with_a_closure_never_applies_scaled_gradients():
    model = seeded(problems.mlp, dtype=torch.float32)
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaled_steps(opt, model, scaler, count=1)
    batch = problems.steps(1, dtype=torch.float32)[0].main
    before = problems.everything(model)

    def closure():
        loss = scaler.scale(problems.loss(model, batch))
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"call opt.gradient\(closure"):
        scaler.step(opt, closure)
    assert problems.same(problems.everything(model), before)
    scaler.update()
    opt.zero_grad()
    opt.gradient(closure, scaler=scaler)
    scaler.step(opt)  # the way out that the message names


def test_fp16_weights_with_a_zero_gradient_stay_finite():
    model = nn.Linear(4, 4).half()
    with pytest.warns(UserWarning, match="half-precision"):
        opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(), model)
    opt.step(lambda: (model.weight * 0).sum() + (model.bias * 0).sum())
    assert torch.isfinite(model.weight).all()


def test_a_nan_loss_makes_the_direction_nan():
    """Nobody branches on a value: weights come back exactly, and the direction says what happened."""
    model = seeded(problems.mlp)
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), GSAM(), model)
    before = problems.weights(model)
    opt.gradient(lambda: problems.loss(model, problems.steps(1)[0].main) * float("nan"))
    assert torch.equal(problems.weights(model), before)
    assert all(p.grad.isnan().all() for p in model.parameters())
