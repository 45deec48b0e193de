"""A small language model on a mesh: pipeline, FSDP2 and tensor parallelism, with torch's own building blocks.

    python examples/scale.py                                               # 8 processes on this CPU
    torchrun --nproc-per-node 8 examples/scale.py --pipeline 2 --tensor 2  # on GPUs, if there are any

The steps are those of torchtitan's loop, in its order: split the model into pipeline stages, split matrices, shard,
make the optimizer. steppe adds two things: `SharpnessAware` around AdamW, and the loop over `opt.passes()` around the
pipeline schedule's step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import steppe

WORDS, WIDTH, LENGTH, BATCH = 64, 32, 16, 16


class Block(nn.Module):
    """Attention and two layers. Heads are counted from the weights, of which a rank may hold a part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states in, hidden states out."""
        h = self.norm_1(x)
        q, k, v = (layer(h).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.silu(self.up(self.norm_2(x))))


SPLIT: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")} | {
    n: RowwiseParallel() for n in ("out", "down")
}


def build(mesh: DeviceMesh, device: torch.device, layers: int) -> tuple[nn.Sequential, PipelineStage]:
    """This rank's stage of the model, split and sharded."""
    pipeline, tensor = mesh["pipeline"], mesh["tensor"]
    torch.manual_seed(0)
    whole = [
        nn.Embedding(WORDS, WIDTH),
        *(Block() for _ in range(layers)),
        nn.Sequential(nn.Linear(WIDTH, WORDS), nn.LogSoftmax(-1)),
    ]
    number, stages = pipeline.get_local_rank(), pipeline.size()
    cuts = [round(len(whole) * i / stages) for i in range(stages + 1)]
    part = nn.Sequential(*whole[cuts[number] : cuts[number + 1]]).to(device)
    for block in part:
        if isinstance(block, Block):
            if tensor.size() > 1:
                parallelize_module(block, tensor, SPLIT)
            fully_shard(block, mesh=mesh["replicate", "shard"])
    fully_shard(part, mesh=mesh["replicate", "shard"])
    return part, PipelineStage(part, number, stages, device, group=pipeline.get_group())


def loss_of(log_probabilities: Tensor, words: Tensor) -> Tensor:
    return F.nll_loss(log_probabilities.flatten(0, 1), words.flatten())


def batches(seed: int, steps: int, device: torch.device):
    """Sequences in which each word says which one follows; the same on all ranks that share a part of the data."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        first = torch.randint(WORDS, (BATCH, 1), generator=generator)
        words = (first * 5 ** torch.arange(LENGTH + 1) + 1) % WORDS
        yield words[:, :-1].to(device), words[:, 1:].to(device)


def train(args: argparse.Namespace) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    shard = dist.get_world_size() // (args.pipeline * args.replicate * args.tensor)
    shape = args.pipeline, args.replicate, shard, args.tensor
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    data = mesh["replicate", "shard"]._flatten("data")
    part, stage = build(mesh, device, args.layers)
    schedule = Schedule1F1B(stage, n_microbatches=2 * args.pipeline, loss_fn=loss_of)

    base = torch.optim.AdamW(part.parameters(), lr=3e-3)
    method = steppe.by_name(args.method)
    opt = steppe.SharpnessAware(base, method, model=part, norm_group=mesh["pipeline"].get_group())

    for number, (words, following) in enumerate(batches(data.get_local_rank(), args.steps, device)):
        losses: list[Tensor] = []
        for look in opt.passes():
            first = (words,) if stage.is_first else ()
            last = {"target": following, "losses": losses if look.index == 0 else []} if stage.is_last else {}
            schedule.step(*first, **last)
        opt.step()
        opt.zero_grad()
        if stage.is_last and dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {number}: loss {torch.stack(losses).mean():.6f}", flush=True)
    dist.destroy_process_group()
    if device.type == "cpu":
        os._exit(0)  # FSDP2 keeps gloo's threads alive, and one that runs while Python exits can abort the process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="gsam")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pipeline", type=int, default=2, help="stages of the pipeline")
    parser.add_argument("--replicate", type=int, default=1, help="replicas, each sharded over all remaining ranks")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that split each matrix")
    args = parser.parse_args()
    if "RANK" in os.environ:
        train(args)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8"]
        command = [*torchrun, __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env={"OMP_NUM_THREADS": "1"} | os.environ).returncode)


if __name__ == "__main__":
    main()
