"""Ways of spreading a model that are neither plain DDP nor plain FSDP2: right, or refused in a line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers.ranks import only_this_rank
from steppe import GSAM, SAM, DetSAM, Every, FrobSAM, Plain, SharpnessAware

RANKS = 2


class Block(nn.Module):
    """A normalisation and two layers: what tensor parallelism with sequence parallelism splits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.up, self.down = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 8, dtype=torch.float64)

    def forward(self, x):
        return self.down(F.softplus(self.up(self.norm(x))))


def sequence_parallel(model: Block) -> Block:
    mesh = init_device_mesh("cpu", (RANKS,))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)  # in place
    return model


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, 8, dtype=torch.float64, generator=generator) for _ in range(count)]


def full(model):
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


@pytest.mark.parametrize("method", [Plain(), SAM(rho=0.1), GSAM(rho=0.1)], ids=lambda m: m.name)
def test_sequence_parallel_equals_one_process(method):
    """The gradients of the normalisation arrive as partial sums."""
    alone, spread = Block(), sequence_parallel(Block())
    for model, opt in [
        (m, SharpnessAware(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), method, m)) for m in (alone, spread)
    ]:
        for x in batches():

            def loss(model=model, x=x):
                if model is alone:
                    return alone(x).square().mean()
                mesh = init_device_mesh("cpu", (RANKS,))
                return spread(distribute_tensor(x, mesh, [Shard(1)])).full_tensor().square().mean()

            opt.step(loss)
    for mine, theirs in zip(full(spread), full(alone), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


# Methods that decide by the loss, under a model whose wrapper is hidden


class Inside(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Softplus(), nn.Linear(6, 1)).double()


WRAPPERS = {
    "compiled DDP": lambda model: torch.compile(DDP(model), backend="eager"),
    "a module around DDP": lambda model: Inside(DDP(model)),
    "replicate": replicate,
    "compiled FSDP2": lambda model: torch.compile(fully_shard(model), backend="eager"),
    "a module around FSDP2": lambda model: Inside(fully_shard(model)),
}
BY_LOSS = [FrobSAM(lam=0.01), DetSAM(), Every(2, FrobSAM(lam=0.01))]


def train(opt, model, count=3):
    rank = dist.get_rank()
    for x in batches(count):
        part = x[rank : rank + 1]
        opt.step(lambda part=part: model(part.flatten(0, 1)).square().mean())


def alone_on_the_whole(method):
    model = net()
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), method, model, loss_group=only_this_rank())
    for x in batches():
        opt.step(lambda x=x: model(x.flatten(0, 1)).square().mean())
    return model


@pytest.mark.parametrize("wrap", WRAPPERS, ids=str)
@pytest.mark.parametrize("method", BY_LOSS, ids=lambda m: m.name)
def test_ranks_decide_by_the_mean_loss_however_the_model_is_wrapped(wrap, method):
    expected = full(alone_on_the_whole(method))
    model = WRAPPERS[wrap](net())
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), method, model)
    train(opt, model)
    for mine, theirs in zip(full(model), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("given", ["nothing", "the inner module"])
@pytest.mark.parametrize("method", BY_LOSS, ids=lambda m: m.name)
def test_unclear_how_ranks_share_the_loss_is_refused(given, method):
    inner = net()
    model = DDP(inner)
    shown = None if given == "nothing" else inner
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), method, shown)
    with pytest.raises(RuntimeError, match="give SharpnessAware the model as DDP or FSDP2 has wrapped it"):
        train(opt, model, count=1)


def test_a_model_on_some_of_the_ranks_does_not_say_with_whom_it_shares_the_loss():
    """Each rank trains a model of its own, sharded over one rank: losses of other trainings are not averaged in."""
    method, rank = FrobSAM(lam=0.01), dist.get_rank()
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("training", "shard"))["shard"]
    model, expected = net(), net()
    fully_shard(model, mesh=mesh)
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), method, model)
    with pytest.raises(RuntimeError, match="loss_group="):
        train(opt, model, count=1)
    for one in (model, expected):
        alone = SharpnessAware(torch.optim.SGD(one.parameters(), lr=0.1), method, one, loss_group=only_this_rank())
        train(alone, one)
    for mine, theirs in zip(full(model), full(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)
    others: list[Any] = [None] * RANKS
    dist.all_gather_object(others, full(model)[0])
    assert not torch.equal(others[rank], others[1 - rank])


def test_methods_that_do_not_decide_by_the_loss_do_not_need_the_model():
    inner = net()
    model = DDP(inner)
    train(SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM()), model)


# Pieces that are not DTensors


def test_norm_group_sums_norms_over_ranks_that_hold_different_parameters():
    """Each rank holds one layer of a model: ‖e‖ is ρ over both together."""
    torch.manual_seed(0)
    parts = [nn.Parameter(torch.randn(5, dtype=torch.float64)) for _ in range(RANKS)]
    slopes = [torch.randn(5, dtype=torch.float64) for _ in range(RANKS)]

    def loss_of(part, slope):
        return slope @ part + (part**3).sum()

    rank, mine = dist.get_rank(), copy.deepcopy(parts)
    whole = SharpnessAware(torch.optim.SGD(parts, lr=0.1), GSAM(rho=0.5))
    split = SharpnessAware(torch.optim.SGD([mine[rank]], lr=0.1), GSAM(rho=0.5), norm_group=dist.group.WORLD)
    for _ in range(3):
        whole.step(lambda: sum((loss_of(p, s) for p, s in zip(parts, slopes, strict=True)), torch.zeros(())))
        split.step(lambda: loss_of(mine[rank], slopes[rank]))
    torch.testing.assert_close(mine[rank], parts[rank], rtol=0, atol=1e-12)


def test_norm_group_may_be_of_some_parameters_only():
    """A shared layer on all ranks, and one expert on each: only the experts' norms are sums over ranks."""
    torch.manual_seed(0)
    shared = nn.Parameter(torch.randn(3, dtype=torch.float64))
    experts = [nn.Parameter(torch.randn(4, dtype=torch.float64)) for _ in range(RANKS)]
    rank = dist.get_rank()
    mine = [copy.deepcopy(shared), copy.deepcopy(experts[rank])]
    whole = SharpnessAware(torch.optim.SGD([shared, *experts], lr=0.1), SAM(rho=0.5))
    group = dist.group.WORLD
    split = SharpnessAware(
        torch.optim.SGD(mine, lr=0.1), SAM(rho=0.5), norm_group=lambda p: group if p is mine[1] else None
    )
    for _ in range(3):
        whole.step(lambda: sum(((p**3).sum() for p in (shared, *experts)), torch.zeros(())))
        split.step(lambda: sum(((p**3).sum() for p in mine), torch.zeros(())))
    torch.testing.assert_close(mine[0], shared, rtol=0, atol=1e-12)
    torch.testing.assert_close(mine[1], experts[rank], rtol=0, atol=1e-12)


class SumOverRanks(torch.autograd.Function):
    """The sum of what each rank has; its gradient goes to each as it is."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


class SharedByRanks(torch.autograd.Function):
    """What all ranks have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return SumOverRanks.apply(grads[0])


@pytest.mark.parametrize("method", [SAM(rho=0.3), GSAM(rho=0.3)], ids=lambda m: m.name)
def test_experts_that_are_dtensors_need_no_norm_group(method):
    """A router on all ranks, a plain tensor, and experts that a DTensor splits over the ranks."""
    torch.manual_seed(0)
    experts, router = torch.randn(2 * RANKS, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (RANKS,))
    mine = [nn.Parameter(distribute_tensor(experts.clone(), mesh, [Shard(0)])), nn.Parameter(router.clone())]
    whole = [nn.Parameter(experts), nn.Parameter(router)]

    def loss_of(experts, router):
        return (experts @ router).square().sum() + (experts**3).sum()

    for params in (mine, whole):
        opt = SharpnessAware(torch.optim.SGD(params, lr=0.01, momentum=0.9), method)
        for _ in range(3):
            if params is whole:
                opt.step(lambda: loss_of(*whole))
            else:
                here: Any = mine[0]
                opt.step(lambda here=here: SumOverRanks.apply(loss_of(here.to_local(), SharedByRanks.apply(mine[1]))))
    gathered: Any = mine[0]
    torch.testing.assert_close(gathered.full_tensor(), whole[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(mine[1], whole[1], rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("shown", ["the wrapper", "the inner module", "nothing"])
def test_fsdp1_is_refused(shown, original):
    inner = net()
    model = FullyShardedDataParallel(inner, use_orig_params=original, device_id=torch.device("cpu"))
    given = {"the wrapper": model, "the inner module": inner, "nothing": None}[shown]
    with pytest.raises(TypeError, match="use FSDP2"):
        SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(), given)


def test_a_tensor_parallel_model_that_was_prepared_for_ddp_is_refused():
    model = Block()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    _pre_dp_module_transform(model)
    assert not any(isinstance(p, DTensor) for p in model.parameters())  # nothing else shows that they are pieces
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(), model)
    with pytest.raises(RuntimeError, match=r"fully_shard on a mesh of two dimensions \(HSDP\) instead"):
        opt.step(lambda: model(batches(1)[0]).square().mean())
