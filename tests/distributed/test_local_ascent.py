"""local=True under DDP: every rank perturbs by its own half; only the directions are averaged (m-sharpness)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers import ranks_reference as reference
from helpers.grids import each_method, grid
from helpers.ranks import (
    BASES,
    DDP_KINDS,
    FORMS,
    RUNS,
    TOLERANCE,
    Net,
    assert_close,
    assert_identical,
    assert_ranks_agree,
    by_first_done,
    digits,
    loss_of,
    sharded,
    train,
    train_any,
)
from steppe import GSAM, SAM, SharpnessAware, wrap

METHODS = {
    "sam": (SAM(rho=0.3), reference.sam(0.3)),
    "gsam": (GSAM(rho=0.3, alpha=0.4), reference.gsam(0.3, 0.4)),
}


def train_on_shards(net, base, batches, equations, static_graph=False):
    """Each half of a batch finds its own direction. A static graph's first step looks at the whole batch."""
    whole_steps = batches[:1] if static_graph else []
    reference.train_alone(net, base, whole_steps, equations)
    return reference.train_alone(net, base, batches[len(whole_steps) :], equations, parts=2)


KINDS = [kind for kind in DDP_KINDS if not kind.startswith("unused")]


@grid("kind, method, run", KINDS, METHODS, RUNS)
def test_equals_the_equations_on_each_half(kind, method, run):
    (base, dtype), (method, equations) = RUNS[run], METHODS[method]
    batches, alone = digits(dtype), Net(dtype)
    train_on_shards(alone, BASES[base](alone.parameters()), batches, equations, kind.startswith("static-graph"))

    net = DDP(Net(dtype), **DDP_KINDS[kind])
    train(SharpnessAware(BASES[base](net.parameters()), method, net, local=True), net, batches)

    assert_ranks_agree(net)
    assert_close(net, alone, TOLERANCE[dtype])


def test_is_not_the_global_ascent():
    """The halves are different enough for the tests above to tell the two apart."""
    batches, (_, equations) = digits(), METHODS["sam"]
    one, two = Net(), Net()
    reference.train_alone(one, BASES["sgd"](one.parameters()), batches, equations)
    train_on_shards(two, BASES["sgd"](two.parameters()), batches, equations)
    with pytest.raises(AssertionError, match="differ"):
        assert_close(one, two, 1e-4)


@grid("kind, form", ["default", "bucket-view"], [form for form in FORMS if form is not by_first_done])
def test_every_way_to_step(kind, form):
    """All but by_first_done: there the first pass is the framework's, which synchronises it."""
    batches, (method, equations) = digits(), METHODS["gsam"]
    alone = Net()
    train_on_shards(alone, BASES["sgd"](alone.parameters()), batches, equations)
    net = DDP(Net(), **DDP_KINDS[kind])
    train(SharpnessAware(BASES["sgd"](net.parameters()), method, net, local=True), net, batches, form)
    assert_ranks_agree(net)
    assert_close(net, alone, 1e-12)


@each_method()
def test_ranks_stay_identical_with_every_method(method):
    net, batches = DDP(Net(torch.float32), gradient_as_bucket_view=True), digits(torch.float32, steps=3)
    train_any(SharpnessAware(BASES["adamw"](net.parameters()), method, net, local=True), net, batches)
    assert_ranks_agree(net)


def test_costs_no_gradient_reduction_in_the_looks():
    net = DDP(Net())
    reductions = []

    def count(state, bucket):
        reductions.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        assert work is not None
        return work.get_future().then(lambda f: f.value()[0])

    net.register_comm_hook(None, count)
    train(SharpnessAware(BASES["sgd"](net.parameters()), SAM(), net, local=True), net, digits())
    assert reductions == []


@pytest.mark.parametrize("base", BASES)
def test_a_parameter_that_only_one_rank_uses(base):
    """Both ranks must step on it, or both must not."""
    batches, (method, equations) = digits(steps=3), METHODS["gsam"]
    alone = Net(detour=True)
    alone_base = BASES[base](alone.parameters())
    for batch in batches:
        halves = [batch.part(i, 2)._replace(detour=i == 0) for i in range(2)]
        reference.descend(alone_base, [*alone.parameters()], reference.mean_direction(alone, halves, equations))

    net = DDP(Net(detour=True), find_unused_parameters=True)
    opt = SharpnessAware(BASES[base](net.parameters()), method, net, local=True)
    train(opt, net, [batch._replace(detour=dist.get_rank() == 0) for batch in batches])

    assert_ranks_agree(net)
    assert_close(net, alone, 1e-12)


def test_a_parameter_that_no_rank_uses_is_not_touched():
    net = DDP(Net(detour=True), find_unused_parameters=True)
    before = [p.detach().clone() for p in net.module.detour.parameters()]
    train(SharpnessAware(BASES["adamw"](net.parameters()), SAM(rho=0.3), net, local=True), net, digits())
    assert_identical(net.module.detour.parameters(), before)


def test_a_static_graph_can_be_resumed():
    """What must be synchronised is the first pass of the DDP object, not the first step of the training."""
    batches = digits(steps=4)

    def build():
        net = DDP(Net(), static_graph=True)
        return net, SharpnessAware(BASES["sgd"](net.parameters()), SAM(rho=0.3), net, local=True)

    net, opt = build()
    train(opt, net, batches[:2])
    saved = copy.deepcopy((net.module.state_dict(), opt.state_dict()))

    again, opt = build()
    again.module.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    train(opt, again, batches[2:])
    assert opt.steps == 4
    assert_ranks_agree(again)


@pytest.mark.parametrize("method", [SAM(rho=0.3), GSAM(rho=0.3)], ids=["sam", "gsam"])
def test_buffers_are_as_plain_training_leaves_them(method):
    """DDP hands rank 0's buffers to all before each step. Looking locally must not switch that off."""
    net, plain = DDP(Net(norm=True)), DDP(Net(norm=True))
    opt = SharpnessAware(BASES["sgd"](net.parameters()), method, net, local=True)
    for batch in digits():
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            theirs.data.copy_(ours.detach())
        loss_of(plain, batch.mine).backward()
        opt.step(lambda batch=batch: loss_of(net, batch.mine))
        assert_identical(net.buffers(), plain.buffers())


@pytest.mark.parametrize("model", [None, Net, lambda: sharded(Net())], ids=["none", "bare", "fsdp2"])
def test_needs_ddp(model):
    net = Net() if model is None else model()
    base = BASES["sgd"](net.parameters())
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        SharpnessAware(base, SAM(), None if model is None else net, local=True)
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        wrap(base, "sam", None if model is None else net, local=True)
