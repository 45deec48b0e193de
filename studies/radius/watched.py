"""GapSAM that says whether `backtrack` has ever bounded ρ.

Where it never has, the training is the same to the bit as one without `backtrack`. For example:

    PYTHONPATH=src:studies/radius steppe train --data cifar-10 --model cnn-5 --base adam --lr 1e-3 --batch 100 \\
        --epochs 20 --label-noise 0.4 --auxiliary held-out --method watched:WatchedGapSAM

The record's metrics then have `ever`, the number of updates until then at which the bound held, and `nearest`, how far
both losses were at most above those at the best point, as a share of them (the bound holds from 1.03 on).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steppe import GapSAM
from steppe.method import Context, Looks, Memory
from steppe.vector import Space


@dataclass(frozen=True)
class WatchedGapSAM(GapSAM):
    """GapSAM with `backtrack`, whose metrics say whether the bound ever held."""

    backtrack: float = 0.03

    def memory(self, space: Space) -> Memory:
        """GapSAM's, and what is watched."""
        return {**super().memory(space), "ever": space.zero(), "nearest": space.zero()}

    def looks(self, ctx: Context) -> Looks:
        """GapSAM's."""
        direction = yield from super().looks(ctx)
        if ctx.step % self.period == 0:
            ctx.metrics.update({name: ctx.remembered[name] for name in ("ever", "nearest")})
        return direction

    def _best(self, memory: Mapping[str, Any], loss: Tensor, held: Tensor) -> dict[str, Tensor]:
        best = super()._best(memory, loss, held)
        now = torch.minimum(held / best["best_held"], loss / best["best_loss"])
        return {**best, "ever": memory["ever"] + best["bounded"], "nearest": torch.maximum(memory["nearest"], now)}
