"""Distributed training: everything that differs from training in one process.

torchrun starts the processes. Each rank trains on its part of every batch; rank 0 writes the records.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...support.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks; the default is a single process."""

    kind: str = ""  # "", "ddp" or "fsdp2"
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def wrapped(self, net: nn.Module, device: torch.device, compiled: bool = False) -> Any:
        """The module to call in training. `net` itself stays unwrapped: curvature differentiates it twice."""
        if self.kind == "ddp":
            inner: Any = torch.compile(net) if compiled else net
            return nn.parallel.DistributedDataParallel(inner, device_ids=[device] if device.type == "cuda" else None)
        if self.kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for part in net.children():
                if any(True for _ in part.parameters()):
                    fully_shard(part)
            fully_shard(net)
        return torch.compile(net) if compiled else net

    def mean_(self, totals: Tensor) -> Tensor:
        """The mean over the ranks, in place."""
        if self.kind:
            dist.all_reduce(totals)
            totals /= self.world
        return totals

    def minimum_(self, value: Tensor) -> Tensor:
        """The smallest of the ranks' values, in place."""
        if self.kind:
            dist.all_reduce(value, dist.ReduceOp.MIN)
        return value

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, on every rank."""
        if not self.kind:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def state(self, net: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Unsharded weights and optimizer state. Every rank must call it."""
        if self.kind != "fsdp2":
            return net.state_dict(), optimizer.state_dict()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_state_dict(net, optimizer, options=options)

    def load(self, net: nn.Module, optimizer: Optimizer, weights: dict[str, Any], state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        if self.kind != "fsdp2":
            net.load_state_dict(weights)
            optimizer.load_state_dict(state)
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        options = StateDictOptions(full_state_dict=True)
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)


ALONE = Ranks()


def join(kind: str, device: str) -> Ranks:
    """Join the process group of the ranks that torchrun has started."""
    if kind not in ("ddp", "fsdp2"):
        raise UserError(f"--distributed must be ddp or fsdp2, not {kind!r}")
    if "LOCAL_RANK" not in os.environ:
        raise UserError(f"--distributed {kind} needs torchrun: torchrun --nproc-per-node 2 -m steppe train ...")
    if not dist.is_initialized():
        if device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return Ranks(kind, dist.get_rank(), dist.get_world_size())
