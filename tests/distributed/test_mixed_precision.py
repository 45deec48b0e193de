"""The stock GradScaler loop on two ranks: an overflow seen by one rank makes both skip, and nothing remembers it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers import ranks_reference as reference
from helpers.grids import grid
from helpers.ranks import (
    BASES,
    Drift,
    Net,
    assert_close,
    assert_identical,
    assert_ranks_agree,
    digits,
    loss_of,
    sharded,
    unchanged,
    whole,
)
from steppe import GSAM, SAM, SharpnessAware

WRAPPERS = {
    "ddp": DDP,
    "ddp-bucket-view": lambda net: DDP(net, gradient_as_bucket_view=True),
    "fsdp2": sharded,
    "fsdp2-keep-gathered": lambda net: sharded(net, reshard_after_forward=False),
}
SCALE = 2.0**16


def by_passes(opt, scaler, loss):
    for look in opt.passes(scaler):
        scaler.scale(loss(look.index)).backward()


def by_closure(opt, scaler, loss):
    looks = iter(range(9))
    opt.gradient(lambda: loss(next(looks)), scaler=scaler)


def by_backward(opt, scaler, loss):
    looks = iter(range(9))

    def closure():
        value = loss(next(looks))
        scaler.scale(value).backward()
        return value

    opt.gradient(closure, scaler=scaler)


LOOKING = [by_passes, by_closure, by_backward]


def scaled_step(opt, scaler, look_around, loss, clip=None):
    """The loop everyone has."""
    look_around(opt, scaler, loss)
    scaler.unscale_(opt)
    if clip is not None:
        torch.nn.utils.clip_grad_norm_([p for group in opt.param_groups for p in group["params"]], clip)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()


@grid("wrapper, base, look_around", WRAPPERS, BASES, LOOKING)
def test_scaling_changes_nothing(wrapper, base, look_around):
    """The scale is a power of two: what comes out is the unscaled step."""
    batches = digits()
    alone = Net()
    reference.train_alone(alone, BASES[base](alone.parameters()), batches, reference.gsam(0.3, 0.4))

    net = WRAPPERS[wrapper](Net())
    opt = SharpnessAware(BASES[base](net.parameters()), GSAM(rho=0.3, alpha=0.4), net)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for batch in batches:
        scaled_step(opt, scaler, look_around, lambda look, batch=batch: loss_of(net, batch.mine))

    assert scaler.get_scale() == SCALE
    assert opt.steps == len(batches)
    assert_ranks_agree(net)
    assert_close(net, alone, 1e-12)


BAD = {"rank1-first-look": (1, 0), "rank0-second-look": (0, 1), "rank1-second-look": (1, 1)}  # rank and look


@grid("wrapper, bad, look_around", [*WRAPPERS, "ddp-local"], BAD, LOOKING)
def test_an_overflow_on_one_rank_is_a_step_that_never_was(wrapper, bad, look_around):
    batches = digits(steps=4)
    bad_batch, (bad_rank, bad_look) = 2, BAD[bad]
    clip = 0.5 if look_around is by_passes else None

    def run(overflow):
        local = wrapper == "ddp-local"
        net = (DDP if local else WRAPPERS[wrapper])(Net())
        opt = SharpnessAware(BASES["adamw"](net.parameters()), Drift(rho=0.3), net, local=local)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for i, batch in enumerate(batches):
            if i == bad_batch and not overflow:
                continue

            def loss(look, spoilt=i == bad_batch, batch=batch):
                value = loss_of(net, batch.mine)
                here = spoilt and look == bad_look and dist.get_rank() == bad_rank
                return value * float("inf") if here else value

            if i == bad_batch:
                with unchanged(net, opt):
                    scaled_step(opt, scaler, look_around, loss, clip)
                assert scaler.get_scale() == SCALE / 2
                assert opt.steps == bad_batch
            else:
                scaled_step(opt, scaler, look_around, loss, clip)
        assert_ranks_agree(net)
        assert opt.steps == len(batches) - 1
        return whole(net)

    assert_identical(run(overflow=True), run(overflow=False))


@pytest.mark.parametrize("bad_look", [0, 1], ids=["first-look", "second-look"])
@pytest.mark.parametrize("method", [SAM(rho=0.3), GSAM(rho=0.3), Drift(rho=0.3)], ids=["sam", "gsam", "drift"])
def test_an_overflow_in_a_shard_that_only_one_rank_holds(method, bad_look):
    """`heat` has one entry and lies on rank 0 alone; rank 1 sees nothing but finite numbers, and must skip too."""
    net = sharded(Net())
    opt = SharpnessAware(BASES["sgd"](net.parameters()), method, net)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    first, second, third, _ = digits()
    scaled_step(opt, scaler, by_passes, lambda look: loss_of(net, first.mine))

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
            return grad * float("inf")

    def spoil(module, args, output):
        return output + 0 * Spoilt.apply(module.heat)

    def loss(look):
        hook = net.register_forward_hook(spoil) if look == bad_look else None
        try:
            return loss_of(net, second.mine)
        finally:
            if hook is not None:
                hook.remove()

    with unchanged(net, opt):
        scaled_step(opt, scaler, by_passes, loss)
    assert scaler.get_scale() == SCALE / 2
    scaled_step(opt, scaler, by_passes, lambda look: loss_of(net, third.mine))
    assert opt.steps == 2
    assert all(w.isfinite().all() for w in whole(net))
    assert_ranks_agree(net)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_half_precision_activations(wrapper):
    """bfloat16 autocast around everything: the second look must not see the first one's cached weights."""
    net = WRAPPERS[wrapper](Net(torch.float32))
    opt = SharpnessAware(BASES["sgd"](net.parameters()), SAM(rho=2.0), net)
    batch = digits(torch.float32)[0].mine
    losses = []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in opt.passes():
            loss = loss_of(net, batch)
            losses.append(loss.item())
            loss.backward()
    opt.step()
    assert losses[1] > losses[0] + 0.1
    assert_ranks_agree(net)
