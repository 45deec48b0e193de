"""The tenth round: groups that relieve each other.

At any time two groups are held out. One is looked at, and has been out for a turn; the other has just left training and
waits until it is forgotten. `Relay` is GapSAM with that estimate of the gap, `RelayBatches` the lab's batches for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from scaled import WindowRadius
from torch import Tensor

from steppe.auxiliary import turn_of
from steppe.lab.training.batches import Batches
from steppe.method import Context, Memory, Number
from steppe.methods.gapsam import GapSAM
from steppe.vector import TINY, Space


def measures(epoch: int) -> bool:
    """Whether the group that waits is looked at: in the first eighth of a turn, at least one epoch."""
    turn = turn_of(epoch)
    return epoch - 2**turn < max(2**turn // 8, 1)


class RelayBatches(Batches):
    """Half of the held-out examples act, half wait; who acts next waits first."""

    def split(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The rows that are looked at in an epoch, and those that are trained on."""
        looked_at, trained_on = held_in_relay(self._whose_turn[None], self.held_out, epoch - 1)
        return looked_at[0].sort().values, trained_on[0].sort().values


@dataclass(frozen=True)
class Relay(GapSAM):
    """GapSAM whose held-out group was out for a whole turn before its gap counts."""

    def _update(self, step: int) -> str:
        epoch = step // self.epoch_steps + 1
        if not measures(epoch):
            return "measure" if epoch < 4 else "move"
        first = step - (2 ** turn_of(epoch) - 1) * self.epoch_steps < self.period
        return "begin" if first else "measure"

    def _measure_offset(self, ctx: Context, new: dict[str, Any], afresh: bool) -> None:
        memory, zero = ctx.memory, torch.zeros_like(new["mean_held"])
        offset, offsets = memory["next_offset"], memory["next_offsets"]
        if afresh:
            ctx.remember(offset=offset, offsets=offsets)
            offset, offsets = zero, zero
        epoch = ctx.step // self.epoch_steps + 1
        if measures(epoch):
            ctx.remember(next_offset=offset + (new["mean_held"] - new["mean_loss"]), next_offsets=offsets + 1)
        ctx.remember(weight=zero, **dict.fromkeys(new, zero))
        ctx.metrics.update(rho=memory["rho"])

    def memory(self, space: Space) -> Memory:
        """GapSAM's, and the offset of the group that waits."""
        return {**super().memory(space), "next_offset": space.zero(), "next_offsets": space.zero()}


@dataclass(frozen=True)
class Half(GapSAM):
    """GapSAM in turns whose ρ does not fall in the first half of a turn, where it was the first quarter."""

    def _update(self, step: int) -> str:
        update = super()._update(step)
        return "grow" if update == "move" and self._turn(step)[1] < 1 / 2 else update


# For populations


def held_in_relay(order: Tensor, hold: int, epoch: int) -> tuple[Tensor, Tensor]:
    """The rows that are looked at in a pass (from 0), and those that are trained on."""
    half = hold // 2
    order = order.roll(-turn_of(epoch + 1) * half, 1)
    return order[:, half : 2 * half] if measures(epoch + 1) else order[:, :half], order[:, 2 * half :]


@dataclass(frozen=True)
class RelayRadius(WindowRadius):
    """`Relay` with numbers that may differ between the members of a population."""

    leap: Number = 2.0
    backtrack: Number = 0.03

    def kind(self, step: int) -> str:
        """What an update does: begin the offset of those who wait, go on with it, wait, or move ρ."""
        epoch = step // self.pass_steps + 1
        if not measures(epoch):
            return "wait" if epoch < 4 else "move"
        first = step - (2 ** turn_of(epoch) - 1) * self.pass_steps < self.period
        return "begin" if first else "offset"

    def phase(self, step: int) -> int:
        """Each kind of update is a phase of its own."""
        if step % self.period:
            return 0
        return 1 if step == 0 else 2 + ("begin", "offset", "wait", "move").index(self.kind(step))

    def memory(self, space: Space) -> Memory:
        """Sums, running means, both offsets, and the best point."""
        names = (
            "loss", "rise", "count", "mean.loss", "mean.rise", "mean.held", "weight", "first", "off", "offs",
            "next.off", "next.offs", "best.held", "best.loss", "best.rho", "bounded",
        )  # fmt: skip
        return {"rho": space.zero() + self.start, **{name: space.zero() for name in names}}

    def _update(self, ctx: Context, loss: Tensor, rise: Tensor, held: Tensor) -> None:
        kind, memory, zero = self.kind(ctx.step), ctx.memory, torch.zeros_like(loss)
        if ctx.step == 0:
            ctx.remember(first=held)
        if kind != "move":
            off, offs = memory["next.off"], memory["next.offs"]
            if kind == "begin":
                ctx.remember(off=off, offs=offs)
                off, offs = zero, zero
            if kind != "wait":
                ctx.remember(**{"next.off": off + (held - loss), "next.offs": offs + 1})
            ctx.remember(weight=zero, **{f"mean.{name}": zero for name in ("loss", "rise", "held")})
            return
        self._moved(ctx, memory, loss, rise, held)

    def _moved(self, ctx: Context, memory: Any, loss: Tensor, rise: Tensor, held: Tensor) -> None:
        zero = torch.zeros_like(loss)
        new = {"mean.loss": loss, "mean.rise": rise, "mean.held": held}
        kept = {name: self.decay * memory[name] + (1 - self.decay) * value for name, value in new.items()}
        weight = self.decay * memory["weight"] + (1 - self.decay)
        ctx.remember(weight=weight, **kept)
        loss, rise, held = (kept[name] / weight for name in new)
        gap = held - loss - memory["off"] / memory["offs"].clamp(min=1)
        target = torch.minimum(self.times * gap, self.cap * (memory["first"] - loss))
        move = torch.log(target.clamp(min=TINY) / rise.clamp(min=TINY)).clamp(-1.0)
        move = torch.minimum(move, torch.zeros_like(move) + self.leap)
        rho = memory["rho"] * torch.exp(self.rate * move)
        better = (memory["weight"] == 0) | (held < memory["best.held"])
        now = {"best.held": held, "best.loss": loss, "best.rho": memory["rho"]}
        best = {name: torch.where(better, value, memory[name]) for name, value in now.items()}
        most = 1 + self.backtrack
        worse = (held > most * best["best.held"]) & (loss > most * best["best.loss"]) & (zero + self.backtrack > 0)
        bounded = (worse | (memory["bounded"] > 0)) & ~better
        bound = torch.maximum(best["best.rho"], memory["rho"] * torch.exp(torch.as_tensor(-1.0 * self.rate)))
        rho = torch.where(bounded, torch.minimum(rho, bound), rho).clamp(self.least, self.most)
        ctx.remember(rho=rho, bounded=bounded.to(held.dtype), **best)
        ctx.metrics.update(rho=rho)


# The same, with the offset measured in the last pass before a group leaves


def looks_at(epoch: int) -> int:
    """The group that is looked at: in the last pass of a turn the one that leaves next, else the one that acts."""
    turn = turn_of(epoch)
    if epoch == 2:
        return 2
    return turn + 2 if turn_of(epoch + 1) > turn else turn


def held_in_early(order: Tensor, hold: int, epoch: int) -> tuple[Tensor, Tensor]:
    """The rows that are looked at in a pass (from 0), and those that are trained on."""
    half, turn, seen = hold // 2, turn_of(epoch + 1), looks_at(epoch + 1)
    looked_at = order.roll(-seen * half, 1)[:, :half]
    return looked_at, order.roll(-turn * half, 1)[:, 2 * half :]


@dataclass(frozen=True)
class EarlyRadius(RelayRadius):
    """`RelayRadius` with that offset."""

    def kind(self, step: int) -> str:
        """What an update does; after "shift-" the offsets of the groups move up first."""
        epoch = step // self.pass_steps + 1
        turn = turn_of(epoch)
        begins = step - (2**turn - 1) * self.pass_steps < self.period
        first = step - (epoch - 1) * self.pass_steps < self.period
        if epoch == 2:
            return "shift-next" if first else "next"
        if turn_of(epoch + 1) > turn:
            return "begin" if first else "offset"
        return "shift-move" if begins else "move"

    def phase(self, step: int) -> int:
        """Each kind of update is a phase of its own."""
        if step % self.period:
            return 0
        kinds = ("shift-next", "next", "begin", "offset", "shift-move", "move")
        return 1 if step == 0 else 2 + kinds.index(self.kind(step))

    def memory(self, space: Space) -> Memory:
        """One offset more."""
        return {**super().memory(space), "last.off": space.zero(), "last.offs": space.zero()}

    def _update(self, ctx: Context, loss: Tensor, rise: Tensor, held: Tensor) -> None:
        kind, zero = self.kind(ctx.step), torch.zeros_like(loss)
        memory = dict(ctx.memory)
        if kind.startswith("shift"):
            memory |= {"off": memory["next.off"], "offs": memory["next.offs"], "weight": zero}
            memory |= {"next.off": memory["last.off"], "next.offs": memory["last.offs"]}
            memory |= {f"mean.{name}": zero for name in ("loss", "rise", "held")}
        if kind == "shift-next":
            memory |= {"next.off": zero, "next.offs": zero}
        if kind == "begin":
            memory |= {"last.off": zero, "last.offs": zero}
        if kind.endswith("next"):
            memory |= {"next.off": memory["next.off"] + (held - loss), "next.offs": memory["next.offs"] + 1}
        if kind in ("begin", "offset"):
            memory |= {"last.off": memory["last.off"] + (held - loss), "last.offs": memory["last.offs"] + 1}
        if ctx.step == 0:
            memory["first"] = held
        ctx.remember(**{name: value for name, value in memory.items() if name not in ("loss", "rise", "count")})
        if kind.endswith("move"):
            self._moved(ctx, memory, loss, rise, held)
