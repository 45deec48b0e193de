"""FSDP2: sharding the weights over two ranks changes nothing that a single process would do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from helpers import ranks_reference as reference
from helpers.grids import each_method, grid
from helpers.ranks import (
    BASES,
    FORMS,
    RUNS,
    TOLERANCE,
    Keeper,
    Net,
    assert_close,
    assert_identical,
    assert_ranks_agree,
    by_passes,
    digits,
    loss_of,
    sharded,
    tolerance_of,
    train,
    train_any,
    unchanged,
    whole,
)
from steppe import GSAM, SAM, SharpnessAware
from steppe.engine.home import OnHost

METHODS = {
    "sam": (SAM(rho=0.3), reference.sam(0.3)),
    "gsam": (GSAM(rho=0.3, alpha=0.4), reference.gsam(0.3, 0.4)),
}


def leave_heat_whole(net: Net) -> Net:
    return sharded(net, unsharded=[net.heat])


def replicate_and_shard(net: Net) -> Net:
    """HSDP: two replicas of one shard each, so that a sum over *all* ranks counts everything twice."""
    return sharded(net, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


KINDS = {
    "default": sharded,
    "reshard": lambda net: sharded(net, reshard_after_forward=True),
    "keep-gathered-after-forward": lambda net: sharded(net, reshard_after_forward=False),
    "keep-gathered-after-backward": lambda net: sharded(net, reshard_after_backward=False),
    "keep-gathered": lambda net: sharded(net, reshard_after_forward=False, reshard_after_backward=False),
    "one-parameter-whole": leave_heat_whole,
    "replicated-and-sharded": replicate_and_shard,
}


def test_the_net_is_as_awkward_as_promised():
    """Uneven shards, an empty one, a parameter that is no DTensor."""
    net: Any = leave_heat_whole(Net())
    assert not isinstance(net.heat, DTensor)
    spread: Any = sharded(Net())
    sizes = [spread.heat.to_local().numel(), net.first.weight.to_local().shape[0]]
    assert sizes == ([1, 4] if dist.get_rank() == 0 else [0, 3])


@grid("kind, method, run", KINDS, METHODS, RUNS)
def test_two_ranks_equal_the_equations_on_the_whole_batch(kind, method, run):
    (base, dtype), (method, equations) = RUNS[run], METHODS[method]
    batches, alone = digits(dtype), Net(dtype)
    reference.train_alone(alone, BASES[base](alone.parameters()), batches, equations)

    net = KINDS[kind](Net(dtype))
    train(SharpnessAware(BASES[base](net.parameters()), method, net), net, batches)

    assert_ranks_agree(net)
    assert_close(net, alone, TOLERANCE[dtype])


@each_method()
def test_every_method_equals_itself_in_one_process(method):
    batches = digits(steps=3)
    alone = Net()
    train_any(SharpnessAware(BASES["adamw"](alone.parameters()), method, alone), alone, batches, alone=True)
    net = sharded(Net())
    train_any(SharpnessAware(BASES["adamw"](net.parameters()), method, net), net, batches)
    assert_ranks_agree(net)
    assert_close(net, alone, tolerance_of(method))


@grid("kind, method", KINDS, METHODS)
def test_a_home_on_the_host_changes_no_bit_and_is_copied_to_once_a_step(kind, method, monkeypatch):
    copies, start = [], OnHost.start
    monkeypatch.setattr(OnHost, "start", lambda home, weights: copies.append(home) or start(home, weights))
    nets = []
    for home in ("cpu", "device"):
        nets.append(KINDS[kind](Net()))
        opt = SharpnessAware(BASES["adamw"](nets[-1].parameters()), METHODS[method][0], nets[-1], home=home)
        train(opt, nets[-1], digits(steps=3))
    assert_identical(whole(nets[0]), whole(nets[1]))
    assert len(copies) == 3


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_way_to_step_is_the_same_step(form):
    batches, (method, equations) = digits(), METHODS["gsam"]
    alone = Net()
    reference.train_alone(alone, BASES["sgd"](alone.parameters()), batches, equations)
    net = sharded(Net())
    train(SharpnessAware(BASES["sgd"](net.parameters()), method, net), net, batches, form)
    assert_close(net, alone, 1e-12)


@grid("kind, form", ["default", "keep-gathered"], FORMS)
def test_kept_gradients_are_not_written_over(kind, form):
    net = KINDS[kind](Net())
    train(SharpnessAware(BASES["sgd"](net.parameters()), Keeper(), net), net, digits(steps=2), form)


@pytest.mark.parametrize("kind", KINDS)
def test_the_perturbation_is_as_long_as_rho(kind):
    """Over all shards: norms of local shards would make it 0.7 ρ, or count replicas twice."""
    net = KINDS[kind](Net())
    opt = SharpnessAware(BASES["sgd"](net.parameters()), SAM(rho=0.3), net)
    batch = digits()[0]
    home, lengths = whole(net), []
    for _ in opt.passes():
        offsets = [a - b for a, b in zip(whole(net), home, strict=True)]
        lengths.append(torch.cat([e.flatten() for e in offsets]).norm().item())
        loss_of(net, batch.mine).backward()
    assert lengths == pytest.approx([0.0, 0.3], abs=1e-12)
    assert_identical(whole(net), home)


@pytest.mark.parametrize("kind", KINDS)
def test_every_look_sees_the_weights_as_they_are_now(kind):
    """Not the ones that FSDP2 gathered before they were moved: also in looks that run no backward."""
    net, alone = KINDS[kind](Net()), Net()
    batch = digits()[0]
    opt = SharpnessAware(BASES["sgd"](net.parameters()), SAM(rho=0.3), net)

    def mean_loss():
        value = loss_of(net, batch.mine)
        total = value.detach().clone()
        dist.all_reduce(total)
        return value, total.item() / 2

    params = list(alone.parameters())
    g = reference.gradients(lambda: loss_of(alone, batch), params)
    here = loss_of(alone, batch).item()
    with torch.no_grad():
        for p, x in zip(params, g, strict=True):
            assert x is not None
            p += 0.3 * x / reference.length(g)
        there = loss_of(alone, batch).item()

    seen = []
    for look in opt.passes():
        if look.index == 0:
            loss, value = mean_loss()
            loss.backward()
        else:
            with torch.no_grad():
                _, value = mean_loss()
        seen.append(value)
    with torch.no_grad():
        seen.append(mean_loss()[1])
    assert seen == pytest.approx([here, there, here], abs=1e-12)
    assert there - here > 1e-3


def test_the_trap_is_real_fsdp2_remembers_gathered_weights():
    """Why gathered shards are let go: after a forward without backward, FSDP2 computes with the old weights."""
    net: Any = sharded(Net(), reshard_after_forward=False)
    batch = digits()[0]
    shards = list(net.parameters())
    with torch.no_grad():
        before = loss_of(net, batch.mine)
        for p in shards:
            p.mul_(3.0)
        stale = loss_of(net, batch.mine)
        for module in (net, net.first, net.middle):
            module.reshard()
        fresh = loss_of(net, batch.mine)
    assert stale == before
    assert fresh != before


@grid("kind, when", KINDS, ["before forward", "after forward", "after backward"])
def test_an_exception_in_the_second_look_leaves_everything_as_it_was(kind, when):
    net = KINDS[kind](Net())
    opt = SharpnessAware(BASES["adamw"](net.parameters()), GSAM(rho=0.3), net)
    first, second, third, _ = digits()
    train(opt, net, [first, second])
    looks = []

    def closure():
        looks.append(1)
        if len(looks) == 2 and when == "before forward":
            raise KeyboardInterrupt
        loss = loss_of(net, third.mine)
        if len(looks) == 2 and when == "after forward":
            raise KeyboardInterrupt
        loss.backward()
        if len(looks) == 2:
            raise KeyboardInterrupt
        return loss

    with unchanged(net, opt), pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    with torch.no_grad():  # and forward sees the restored weights
        alone = Net()
        for p, w in zip(alone.parameters(), whole(net), strict=True):
            p.copy_(w)
        assert loss_of(net, third.mine).item() == pytest.approx(loss_of(alone, third.mine).item(), abs=1e-12)


def test_training_goes_on_after_an_exception():
    batches, (method, equations) = digits(), METHODS["gsam"]
    alone = Net()
    reference.train_alone(alone, BASES["sgd"](alone.parameters()), batches, equations)

    net = sharded(Net())
    opt = SharpnessAware(BASES["sgd"](net.parameters()), method, net)
    for batch in batches:
        for look in opt.passes():
            loss_of(net, batch.mine).backward()
            if look.index == 1:
                break
        by_passes(opt, net, batch.mine)
    assert_close(net, alone, 1e-12)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", ["default", "one-parameter-whole"])
def test_clipping_between_looking_and_stepping(kind, base):
    """clip_grad_norm_ sees the direction, with its norm over all shards."""
    batches, (method, equations) = digits(), METHODS["gsam"]
    alone = Net()
    reference.train_alone(alone, BASES[base](alone.parameters()), batches, equations, clip=0.1)

    net: Any = KINDS[kind](Net())
    opt = SharpnessAware(BASES[base](net.parameters()), method, net)
    for batch in batches:
        opt.gradient(lambda batch=batch: loss_of(net, batch.mine))
        if kind == "default":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        else:  # torch does not mix DTensors and tensors in one norm
            grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()]
            factor = (0.1 / reference.length(grads)).clamp(max=1.0)
            for p in net.parameters():
                p.grad.mul_(factor.item())
        opt.step()
    assert_close(net, alone, 1e-6 if kind == "default" else 1e-12)  # torch's own clip adds 1e-6 to the norm


@pytest.mark.parametrize("kind", KINDS)
def test_rho_by_group_and_a_group_left_alone(kind):
    batches = digits()
    alone = Net()
    names = [name for name, _ in alone.named_parameters()]
    rhos = [None if name.startswith("middle") else 0.5 if name.startswith("last") else 0.2 for name in names]
    reference.train_alone(alone, BASES["sgd"](alone.parameters()), batches, reference.grouped_sam(rhos))

    net = KINDS[kind](Net())
    groups = [
        {"params": [net.heat, *net.first.parameters()]},
        {"params": net.middle.parameters(), "perturb": False},
        {"params": net.last.parameters(), "rho": 0.5},
    ]
    opt = SharpnessAware(BASES["sgd"](groups), SAM(rho=0.2), net)
    train(opt, net, batches)
    assert_close(net, alone, 1e-12)


def test_buffers_move_once_a_step():
    net, plain = sharded(Net(norm=True)), Net(norm=True)
    opt = SharpnessAware(BASES["sgd"](net.parameters()), GSAM(rho=0.3), net)
    for batch in digits():
        with torch.no_grad():
            for p, w in zip(plain.parameters(), whole(net), strict=True):
                p.copy_(w)
        loss_of(plain, batch.mine)
        opt.step(lambda batch=batch: loss_of(net, batch.mine))
        for ours, theirs in zip(net.buffers(), plain.buffers(), strict=True):
            assert torch.allclose(ours.double(), theirs.double(), rtol=0, atol=1e-14)
    assert net.norm.num_batches_tracked == len(digits())


def test_an_optimizer_is_copied_by_its_state():
    """torch itself copies no model that FSDP2 shards. The error says what to do, and that works."""
    batches = digits(steps=3)
    net = sharded(Net())
    opt = SharpnessAware(BASES["adamw"](net.parameters()), SAM(rho=0.3), net)
    train(opt, net, batches[:2])
    for copied in (opt, (opt, net)):
        with pytest.raises(TypeError, match=r"copy the state_dict\(\) of both"):
            copy.deepcopy(copied)
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(net)

    states = copy.deepcopy((net.state_dict(), opt.state_dict()))
    twin = sharded(Net())
    its = SharpnessAware(BASES["adamw"](twin.parameters()), SAM(rho=0.3), twin)
    twin.load_state_dict(states[0])
    its.load_state_dict(states[1])
    train(opt, net, batches[2:])
    train(its, twin, batches[2:])
    assert_identical(whole(twin), whole(net))
