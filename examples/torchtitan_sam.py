"""torchtitan's trainer with a sharpness-aware method. Model, data, parallelism and checkpoints stay torchtitan's.

    cd examples
    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_sam --config llama3_debugmodel_sam ...

With torch 2.13 add ``--parallelism.spmd_backend partial_dtensor``: torchtitan's default needs a newer torch.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn
from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

import steppe


# --8<-- [start:trainer]
class SharpnessAwareTrainer(Trainer):
    """Runs forward and backward of a step's micro-batches once for each look of the method."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's settings, and the method."""

        method: Annotated[steppe.Method, tyro.conf.Suppress] = field(default_factory=steppe.SAM)

    def __init__(self, config: Config):
        if missing := config.method.needs & {"loss", "auxiliary", "sample"}:
            raise ValueError(
                f"{config.method.name} needs {', '.join(sorted(missing))}: this trainer gives gradients alone"
            )
        config.training.disable_cuda_graphs = True  # a graph would add to gradients that a look has taken away
        super().__init__(config)
        pipeline = self.parallel_dims.get_optional_mesh("pp")
        self.opt = steppe.SharpnessAware(
            self.optimizers.optimizers,
            config.method,
            nn.ModuleList(self.model_parts),
            norm_group=None if pipeline is None else pipeline.get_group(),
        )
        self.optimizers.optimizers = [self.opt]  # the trainer's zero_grad, step and checkpoints go through it
        self.micro_batches: list[dict[str, Any]] = []

    def forward_backward_step(self, **micro_batch: Any) -> Tensor:
        """Wait for a step's last micro-batch, then run them all. The trainer adds up the losses of a step."""
        self.micro_batches.append(micro_batch)
        loss, tokens = torch.zeros((), device=self.device), 0
        if len(self.micro_batches) < self.gradient_accumulation_steps:
            return loss
        batches, self.micro_batches = self.micro_batches, []
        for look in self.opt.passes():
            losses = [super(SharpnessAwareTrainer, self).forward_backward_step(**batch) for batch in batches]
            if look.index == 0:
                loss, tokens = torch.stack(losses).sum().detach(), self.ntokens_seen
        self.ntokens_seen = tokens
        return loss


# --8<-- [end:trainer]


def llama3_debugmodel_sam() -> SharpnessAwareTrainer.Config:
    """torchtitan's configuration of that name, with a method."""
    plain = config_registry.llama3_debugmodel()
    settings = {f.name: getattr(plain, f.name) for f in fields(plain)}
    return SharpnessAwareTrainer.Config(**settings, method=steppe.SAM(rho=0.05))
