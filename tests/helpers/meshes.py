"""A small model of blocks, and the ways in which a mesh of ranks splits it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from steppe import SharpnessAware

WIDTH, INNER, LENGTH, BATCH, BLOCKS = 6, 10, 4, 8, 4
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A normalisation and two layers. On four ranks their shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.softplus(self.up(self.norm(x))))


def blocks(norms: int = BLOCKS) -> nn.Sequential:
    """The model, the same on every rank. The first blocks have a normalisation."""
    torch.manual_seed(7)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).double()
    for block in list(model)[norms:]:
        block.norm = nn.Identity()
    return model


def batches(count: int = 2) -> list[Batch]:
    """Inputs and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2 * count)]
    return list(zip(draws[::2], draws[1::2], strict=True))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    whole = output.full_tensor() if isinstance(output, DTensor) else output
    return (whole - target).square().mean()


def part_of(batch: Batch, data: DeviceMesh) -> Batch:
    """What this rank sees of a batch that is split over one dimension of a mesh."""
    x, y = (t.chunk(data.size())[data.get_local_rank()] for t in batch)
    return x, y


def full(module: nn.Module) -> list[Tensor]:
    """Its weights, gathered."""
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in module.parameters()]


# Splitting


def split_tensors(block: nn.Module, mesh: DeviceMesh, sequence: bool = False) -> None:
    """Tensor parallelism in one block; with `sequence` the normalisation sees a part of each sequence."""
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)))
    parallelize_module(block, mesh, plan)


def shard(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """FSDP2: each block, then the rest."""
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


Spread = tuple[nn.Sequential, DeviceMesh]  # a model, and the dimension of the mesh that splits the batch


def hsdp() -> Spread:
    """Two replicas, each sharded over four ranks."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    model = blocks()
    shard(model, mesh)
    return model, mesh._flatten()


def sharded_and_split(sequence: bool = False) -> Spread:
    """FSDP2 over four ranks, tensor parallelism over two."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor"))
    model = blocks()
    for block in model:
        split_tensors(block, mesh["tensor"], sequence)
    shard(model, mesh["data"])
    return model, mesh["data"]


def hsdp_and_split() -> Spread:
    """Two replicas, each sharded over two ranks, tensor parallelism over two."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    model = blocks()
    for block in model:
        split_tensors(block, mesh["tensor"])
    shard(model, mesh["replicate", "shard"])
    return model, mesh["replicate", "shard"]._flatten()


class Pipeline:
    """Stages of the model over a dimension of a mesh, sharded and split over the others.

    Only the first block has a normalisation, which tensor parallelism does not split: the stages differ.
    """

    def __init__(self, shape: tuple[int, int, int], interleaved: bool = False):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("stage", "data", "tensor"))
        self.along, self.data, tensor = mesh["stage"], mesh["data"], mesh["tensor"]
        count = self.along.size() * (2 if interleaved else 1)
        mine = range(self.along.get_local_rank(), count, self.along.size())
        self.parts = [self.part_of(blocks(norms=1), i, count) for i in mine]
        for part in self.parts:
            for block in part if tensor.size() > 1 else ():
                split_tensors(block, tensor)
            if self.data.size() > 1:
                shard(part, self.data)
        stages: list[Any] = [
            PipelineStage(part, i, count, torch.device("cpu"), group=self.along.get_group())
            for i, part in zip(mine, self.parts, strict=True)
        ]
        self.model, self.numbers, self.count = nn.ModuleList(self.parts), list(mine), count
        self.stages = stages
        self.schedule = (
            ScheduleInterleaved1F1B(stages, 2, loss_fn=loss_of)
            if interleaved
            else Schedule1F1B(stages[0], 2, loss_fn=loss_of)
        )

    @staticmethod
    def part_of(model: nn.Sequential, i: int, count: int) -> nn.Sequential:
        """The i-th of `count` equal parts of the model."""
        size = BLOCKS // count
        return nn.Sequential(*list(model)[i * size : (i + 1) * size])

    def run(self, batch: Batch) -> list[Tensor]:
        """Forward and backward of all micro-batches; the losses, on the last stage's ranks."""
        x, y = part_of(batch, self.data)
        losses: list[Tensor] = []
        inputs = (x,) if self.numbers[0] == 0 else ()
        last = {"target": y, "losses": losses} if self.numbers[-1] == self.count - 1 else {}
        self.schedule.step(*inputs, **last)
        return losses

    def train(self, opt: SharpnessAware, data: list[Batch]) -> None:
        for batch in data:
            for _ in opt.passes():
                self.run(batch)
            opt.step()
            opt.zero_grad()

    def weights_beside(self, whole: nn.Sequential) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's weights, gathered from those that hold the same stage, and those of a whole model."""
        for i, part in zip(self.numbers, self.parts, strict=True):
            yield from zip(full(part), full(self.part_of(whole, i, self.count)), strict=True)
