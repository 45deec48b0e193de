"""A candidate after GapSAM's `retreat`: go back to the radius at which the held-out loss was least, and stay there.

It is a method of its own, so that the lab can run it from this folder, on the regimes of the map:

    PYTHONPATH=studies/radius steppe train --method backtrack:Backtrack --auxiliary held-out --data cifar-10 …
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from steppe.method import HERE, Context, Look, Looks, Memory, Number, ascent
from steppe.methods.gapsam import GapSAM, _running_means
from steppe.vector import TINY, Space


@dataclass(frozen=True)
class Backtrack(GapSAM):
    """GapSAM that remembers where its held-out loss was least, and the radius there.

    Once the running means of training *and* held-out loss are `margin` above what they were there, ρ goes back to that
    radius, and does not grow beyond it until the held-out loss is less than ever. `stay=False`: only while both are
    above (ρ then swings).

    Args:
        margin (share, ≥ 0): How far both losses may be above those at the best point.
        stay (whether): The bound on ρ holds until there is a new best point.
    """

    margin: Number = 0.03
    stay: bool = True

    def memory(self, space: Space) -> Memory:
        names = ("loss", "rise", "count", "mean_loss", "mean_rise", "mean_held", "weight", "first_held")
        best = ("best_held", "best_loss", "best_rho", "bounded")
        return {"rho": space.zero() + self.least, **{name: space.zero() for name in (*names, *best)}}

    def looks(self, ctx: Context) -> Looks:
        memory = ctx.memory
        here = yield HERE
        there = yield Look(memory["rho"] * ascent(here.grad))
        loss, rise = memory["loss"] + here.loss, memory["rise"] + (there.loss - here.loss)
        count = memory["count"] + 1
        if ctx.step % self.period:
            ctx.remember(loss=loss, rise=rise, count=count)
            return there.grad
        held = (yield Look(batch="auxiliary")).loss
        self._update(ctx, {"mean_loss": loss / count, "mean_rise": rise / count, "mean_held": held})
        zero = torch.zeros_like(loss)
        ctx.remember(loss=zero, rise=zero, count=zero)
        return there.grad

    def _update(self, ctx: Context, new: dict[str, Any]) -> None:
        memory = ctx.memory
        means = _running_means(memory, new, "weight", self.decay)
        loss, rise, held = (means[name] / means["weight"] for name in new)
        first = torch.where(memory["weight"] == 0, held, memory["first_held"])
        target = torch.minimum(self.times * (held - loss), self.ceiling * (first - loss))
        ratio = torch.log(target.clamp(min=TINY) / rise.clamp(min=TINY)).clamp(-1.0, 1.0)
        better = (memory["weight"] == 0) | (held < memory["best_held"])
        now = {"best_held": held, "best_loss": loss, "best_rho": memory["rho"]}
        best = {name: torch.where(better, value, memory[name]) for name, value in now.items()}
        worse = (held > best["best_held"] * (1 + self.margin)) & (loss > best["best_loss"] * (1 + self.margin))
        before = torch.where(better, torch.zeros_like(held), memory["bounded"]) if self.stay else torch.zeros_like(held)
        bounded = torch.maximum(before, worse.to(held.dtype))
        back = (torch.log(best["best_rho"] / memory["rho"]) / self.rate).clamp(-1.0, 1.0)
        ratio = torch.where(bounded > 0, torch.minimum(ratio, back), ratio)
        rho = (memory["rho"] * torch.exp(self.rate * ratio)).clamp(self.least, self.most)
        ctx.remember(rho=rho, first_held=first, bounded=bounded, **means, **best)
        ctx.metrics.update(rho=rho, gap=held - loss, bounded=bounded)
