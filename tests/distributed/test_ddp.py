"""DistributedDataParallel: two ranks with half a batch each do what one process does with the whole."""

from __future__ import annotations

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
    Keeper,
    Net,
    assert_close,
    assert_identical,
    assert_ranks_agree,
    by_list,
    by_loop_in_passes,
    digits,
    loss_of,
    tolerance_of,
    train,
    train_any,
    whole,
)
from steppe import GAM, GNAM, GSAM, SAM, SharpnessAware

METHODS = {
    "sam": (SAM(rho=0.3), reference.sam(0.3)),
    "gsam": (GSAM(rho=0.3, alpha=0.4), reference.gsam(0.3, 0.4)),
}


@grid("kind, method, run", DDP_KINDS, METHODS, RUNS)
def test_two_ranks_equal_the_equations_on_the_whole_batch(kind, method, run):
    """Also: a parameter that some steps do not use is left alone in those, as by the base optimizer."""
    unused = kind.startswith("unused")
    (base, dtype), (method, equations) = RUNS[run], METHODS[method]
    batches = digits(dtype, detour=unused)

    alone = Net(dtype, detour=unused)
    reference.train_alone(alone, BASES[base](alone.parameters()), batches, equations)

    net = DDP(Net(dtype, detour=unused), **DDP_KINDS[kind])
    train(SharpnessAware(BASES[base](net.parameters()), method, net), net, batches)

    assert_ranks_agree(net)
    assert_close(net, alone, TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore:.*with momentum it overshoots")  # SASAM, SASGD: here only equality counts
@each_method()
def test_every_method_equals_itself_in_one_process(method):
    """With SGD as base; the same test under FSDP2 has AdamW. Bases and wrappers meet in the test above."""
    batches = digits(steps=3)
    alone = Net()
    train_any(SharpnessAware(BASES["sgd"](alone.parameters()), method, alone), alone, batches, alone=True)

    net = DDP(Net(), gradient_as_bucket_view=True)
    train_any(SharpnessAware(BASES["sgd"](net.parameters()), method, net), net, batches)

    assert_ranks_agree(net)
    assert_close(net, alone, tolerance_of(method))


@pytest.mark.parametrize("method", [GAM(), GNAM()], ids=lambda method: method.name)
def test_exact_products_are_those_of_the_whole_batch(method):
    """autograd.grad goes past DDP's hooks: the product is averaged by hand."""
    alone = Net()
    train_any(SharpnessAware(BASES["sgd"](alone.parameters()), method, alone, hvp="exact"), alone, digits(), alone=True)
    net = DDP(Net())
    train_any(SharpnessAware(BASES["sgd"](net.parameters()), method, net, hvp="exact"), net, digits())
    assert_ranks_agree(net)
    assert_close(net, alone, 1e-11)


@grid("kind, form", ["default", "bucket-view", "static-graph"], FORMS)
def test_every_way_to_step_is_the_same_step(kind, form):
    if kind == "static-graph" and form is by_loop_in_passes:
        kind = "tiny-buckets"  # no_sync in a static graph's first pass is the user's mistake, in plain DDP too
    batches = digits()
    method, equations = METHODS["gsam"]
    alone = Net()
    reference.train_alone(alone, BASES["sgd"](alone.parameters()), batches, equations)

    net = DDP(Net(), **DDP_KINDS[kind])
    train(SharpnessAware(BASES["sgd"](net.parameters()), method, net), net, batches, form)

    assert_ranks_agree(net)
    assert_close(net, alone, 1e-12)


def test_micro_batches_are_reduced_once():
    """A list of closures costs one all-reduce per look, not one per micro-batch."""
    net = DDP(Net())
    reductions = []

    def count(state, bucket):
        reductions.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        assert work is not None
        return work.get_future().then(lambda f: f.value()[0])

    net.register_comm_hook(None, count)
    opt = SharpnessAware(BASES["sgd"](net.parameters()), SAM(), net)
    train(opt, net, digits(steps=2), by_list)
    assert reductions.count(0) == 2 * 2, "two looks in each of two steps"


@grid("kind, form", ["default", "bucket-view", "tiny-buckets"], FORMS)
def test_kept_gradients_are_not_written_over(kind, form):
    net = DDP(Net(), **DDP_KINDS[kind])
    train(SharpnessAware(BASES["sgd"](net.parameters()), Keeper(), net), net, digits(steps=2), form)


def test_the_trap_is_real_ddp_writes_over_gradients_kept_by_reference():
    """Why gradients are copied: under gradient_as_bucket_view p.grad is a window on DDP's bucket."""
    net = DDP(Net(), gradient_as_bucket_view=True)
    first, second, third, _ = digits()
    loss_of(net, first.mine).backward()
    net.zero_grad()
    loss_of(net, second.mine).backward()
    kept = [p.grad for p in net.parameters() if p.grad is not None]
    copies = [g.clone() for g in kept]
    net.zero_grad()
    loss_of(net, third.mine).backward()
    assert not all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


@pytest.mark.parametrize("kind", ["unused-parameters", "unused-parameters-bucket-view"])
@pytest.mark.parametrize("base", BASES)
def test_a_parameter_that_only_one_rank_uses(base, kind):
    """Its gradient is the mean of that rank's and zero, on both ranks."""
    batches = digits(steps=3)
    method, _ = METHODS["gsam"]

    class Halves(Net):
        """Takes the detour for the first half of a whole batch: what rank 0 has."""

        def forward(self, x, detour=False):
            half = len(x) // 2
            return torch.cat([super().forward(x[:half], True), super().forward(x[half:], False)])

    alone = Halves(detour=True)
    reference.train_alone(alone, BASES[base](alone.parameters()), batches, METHODS["gsam"][1])

    net = DDP(Net(detour=True), **DDP_KINDS[kind])
    opt = SharpnessAware(BASES[base](net.parameters()), method, net)
    train(opt, net, [batch._replace(detour=dist.get_rank() == 0) for batch in batches])

    assert_ranks_agree(net)
    assert_close(net, alone, 1e-12)


def test_a_parameter_that_no_rank_uses_is_not_touched():
    """No weight decay, no momentum: also after looks that perturbed everything around it."""
    net = DDP(Net(detour=True), find_unused_parameters=True)
    before = [p.detach().clone() for p in net.module.detour.parameters()]
    opt = SharpnessAware(BASES["adamw"](net.parameters()), GSAM(rho=0.3), net)
    train(opt, net, digits())
    assert_identical(net.module.detour.parameters(), before)
    assert all(p.grad is None for p in net.module.detour.parameters())


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
@grid("broadcast, form, method", ["broadcast-buffers", "own-buffers"], FORMS, METHODS)
def test_buffers_are_as_plain_training_leaves_them(broadcast, form, method):
    """BatchNorm's statistics move once a step (once per micro-batch), on each rank as under plain DDP."""
    net, plain = (DDP(Net(norm=True), broadcast_buffers=broadcast == "broadcast-buffers") for _ in range(2))
    opt = SharpnessAware(BASES["sgd"](net.parameters()), METHODS[method][0], net)
    micro_batches = 2 if form.__name__ in ("by_list", "by_list_with_backward", "by_loop_in_passes") else 1
    for batch in digits():
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            theirs.data.copy_(ours.detach())
        for i in range(micro_batches):
            with plain.no_sync() if i < micro_batches - 1 else torch.enable_grad():
                loss_of(plain, batch.mine.part(i, micro_batches)).backward()
        form(opt, net, batch.mine)
        assert_identical(net.buffers(), plain.buffers())
    assert_ranks_agree(net)


@pytest.mark.parametrize("when", ["before forward", "before backward"])
def test_an_exception_in_a_look_leaves_everything_as_it_was(when):
    net = DDP(Net(norm=True))
    opt = SharpnessAware(BASES["sgd"](net.parameters()), GSAM(rho=0.3), net)
    batches = digits()
    train(opt, net, batches[:2])
    weights, buffers = whole(net), [b.clone() for b in net.buffers()]
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 2 and when == "before forward":
            raise KeyboardInterrupt
        loss = loss_of(net, batches[2].mine)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    assert_identical(whole(net), weights)
    assert_identical(net.buffers(), buffers)
    if when == "before forward":  # DDP itself cannot go on after a forward without its backward
        train(opt, net, batches[2:])
        assert_ranks_agree(net)
