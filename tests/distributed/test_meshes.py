"""Meshes of two and three dimensions on eight ranks: every split of the model takes the steps of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.meshes import (
    BLOCKS,
    Pipeline,
    batches,
    blocks,
    full,
    hsdp,
    hsdp_and_split,
    loss_of,
    part_of,
    sharded_and_split,
)
from steppe import GSAM, SAM, SSAM, XSAM, Plain, SharpnessAware
from steppe.engine.random_vectors import Draws
from steppe.vector import Space

pytestmark = [pytest.mark.ranks(8), pytest.mark.slow]

MESHES = {
    "HSDP": hsdp,
    "FSDP2 and TP": sharded_and_split,
    "FSDP2 and TP with sequence parallelism": lambda: sharded_and_split(sequence=True),
    "HSDP and TP": hsdp_and_split,
}
PIPELINES: dict[str, dict[str, Any]] = {
    "PP": {"shape": (2, 4, 1)},
    "PP, FSDP2 and TP": {"shape": (2, 2, 2)},
    "interleaved PP, FSDP2 and TP": {"shape": (2, 2, 2), "interleaved": True},
}
METHODS = [SAM(rho=0.3), GSAM(rho=0.3)]
ON_MESHES = [
    *((mesh, method) for mesh in MESHES for method in METHODS),
    ("FSDP2 and TP", Plain()),
    ("FSDP2 and TP", SSAM(rule="dynamic", every=2, total=8)),  # draws: a shard's numbers are cut out of the whole's
]


def full_of(shard: Any) -> torch.Tensor:
    return shard.full_tensor()


def base(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_process(method, norms=BLOCKS, **settings):
    model = blocks(norms)
    opt = SharpnessAware(base(model), method, model, **settings)
    for x, y in batches():
        opt.step(lambda x=x, y=y: loss_of(model(x), y))
    return model


@pytest.mark.parametrize(("mesh", "method"), ON_MESHES, ids=lambda value: getattr(value, "name", value))
def test_a_mesh_equals_one_process(mesh, method):
    model, data = MESHES[mesh]()
    opt = SharpnessAware(base(model), method, model)
    for batch in batches():
        x, y = part_of(batch, data)
        opt.step(lambda x=x, y=y: loss_of(model(x), y))
    for mine, theirs in zip(full(model), full(one_process(method)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_pipeline_equals_one_process(kind, method):
    """Stages have different kinds of shards, and nevertheless sum norms over `norm_group` equally often."""
    pipeline = Pipeline(**PIPELINES[kind])
    opt = SharpnessAware(base(pipeline.model), method, pipeline.model, norm_group=pipeline.along.get_group())
    pipeline.train(opt, batches())
    for mine, theirs in pipeline.weights_beside(one_process(method, norms=1)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_method_that_decides_by_the_loss_is_told_it_on_every_stage():
    method, pipeline = XSAM(trials=3, every=2), Pipeline((2, 2, 2))
    opt = SharpnessAware(base(pipeline.model), method, pipeline.model, norm_group=pipeline.along.get_group())
    for batch in batches():
        for look in opt.passes():
            losses = pipeline.run(batch)
            loss = torch.stack(losses).mean() if losses else torch.zeros((), dtype=torch.float64)
            dist.broadcast(loss, group=pipeline.along.get_group(), group_src=1)
            look.report(loss)
        opt.step()
    alone = [dist.new_group([rank]) for rank in range(8)][dist.get_rank()]
    for mine, theirs in pipeline.weights_beside(one_process(method, norms=1, loss_group=alone)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_a_pipeline_without_norm_group_is_refused():
    pipeline = Pipeline((2, 2, 2))
    for shown in (pipeline.model, None):
        opt = SharpnessAware(base(pipeline.model), SAM(), shown)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="norm_group="):
                opt.passes()


def test_stages_draw_numbers_of_their_own_and_replicas_the_same():
    pipeline = Pipeline((2, 4, 1))
    second: Any = pipeline.parts[0][1]
    # One tensor that has the same shape on both stages: after others of different sizes, all draws would differ.
    space = Space([second.up.weight], norm_group=pipeline.along.get_group())
    for drawn in (Draws(space, seed=0, step=0).normal(), Draws(space, seed=0, step=0).uniform(0.0, 1.0)):
        whole = full_of(space.wrap(drawn)[0])
        ranks: list[Any] = [None] * 8
        dist.all_gather_object(ranks, whole)
        for rank, other in enumerate(ranks):
            same_stage = rank // 4 == dist.get_rank() // 4
            assert torch.equal(other, whole) if same_stage else not torch.isclose(other, whole, atol=1e-9).any()


def test_a_sparse_mask_is_of_the_whole_model():
    """Each stage keeps its part of the largest entries of all, not half of its own."""
    pipeline = Pipeline((2, 4, 1))
    space = Space(pipeline.model.parameters(), norm_group=pipeline.along.get_group())
    assert space.moving() == sum(p.numel() for p in blocks(norms=1).parameters())
