"""Candidates of the second round: the cosine's direction with a rate that has a unit, and votes with the gap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from candidates import _Mean, _Own, agreement, agreement_slope
from torch import Tensor

from steppe.method import HERE, HVP, Context, Look, Looks, Memory, Number, ascent
from steppe.vector import TINY, Space


@dataclass(frozen=True)
class ScaledRadius(_Own):
    """log(ρ + ρ₀) moves by rate · vote, with ρ₀ = `unit` · ‖w‖: additive while ρ is small, a factor where it is not.

    `statistic`: "slope", of the cosine between g(w + ρĝ) and ḡ, by a Hessian-vector product; or "secant", that cosine
    less the one at w, which costs no look more than ḡ: zero where the perturbed gradient is no better than the plain
    one. Its vote is the running mean over its size (`decay`), times `boost`, held to ±1. `slow` is the decay of the
    size's mean; None: the same.

    `mix`: "cos" alone; "bound": ρ grows only while the rise is below `times` the gap; "sum": the mean of the cosine's
    vote and of the gap's, log(times · gap/rise) held to ±1; "least": the smaller of both.
    """

    statistic: str = "slope"
    unit: Number = 0.02
    boost: Number = 1.0
    slow: float | None = None
    mix: str = "cos"
    times: Number = 2.0
    cap: Number = 0.8
    start: Number = 0.0
    least: Number = 0.0  # in multiples of ρ₀; a secant needs some

    @property
    def cost(self) -> float:
        return 2 + (2 if self.statistic == "slope" else 1) / self.period

    def memory(self, space: Space) -> Memory:
        names = ("loss", "rise", "count", "mean.loss", "mean.rise", "mean.held", "weight", "first")
        sums = {name: space.zero() for name in names}
        return {**super().memory(space), **_Mean.memory("slow", space), **sums}

    def looks(self, ctx: Context) -> Looks:
        here = yield HERE
        up = ascent(here.grad)
        at = Look(ctx.memory["rho"] * up)
        there = yield at
        loss, rise = ctx.memory["loss"] + here.loss, ctx.memory["rise"] + (there.loss - here.loss)
        count = ctx.memory["count"] + 1
        if ctx.step % self.period:
            ctx.remember(loss=loss, rise=rise, count=count)
            return there.grad
        held = yield Look(batch="auxiliary")
        g, g_bar = there.grad.perturbed(), held.grad.perturbed()
        if self.statistic == "slope":
            value: Any = up @ (yield HVP(agreement_slope("cos", g, g_bar), at, there))
        else:
            better = agreement("cos", g, g_bar) - agreement("cos", here.grad.perturbed(), g_bar)
            value = better / (ctx.memory["rho"] + TINY)
        cosine = self._cosine(ctx, value)
        gap = self._gap(ctx, loss / count, rise / count, held.loss)
        vote = self._mixed(cosine, gap)
        scale = self.unit * ctx.w.norm()
        rho = (ctx.memory["rho"] + scale) * torch.exp(self.rate * vote) - scale
        rho = torch.maximum(rho, self.least * scale).clamp(max=self.most)
        zero = torch.zeros_like(loss)
        ctx.remember(rho=rho, loss=zero, rise=zero, count=zero)
        ctx.metrics.update(rho=rho)
        return there.grad

    def _cosine(self, ctx: Context, value: Tensor) -> Tensor:
        signal = _Mean("signal", ctx, value, self.decay)
        size = signal.square if self.slow is None else _Mean("slow", ctx, value, self.slow).square
        return (self.boost * signal.mean / (size.sqrt() + TINY)).clamp(-1.0, 1.0)

    def _gap(self, ctx: Context, loss: Tensor, rise: Tensor, held: Tensor) -> Tensor:
        """The gap's vote."""
        new = {"mean.loss": loss, "mean.rise": rise, "mean.held": held}
        kept = {name: 0.9 * ctx.memory[name] + 0.1 * value for name, value in new.items()}
        weight = 0.9 * ctx.memory["weight"] + 0.1
        first = torch.where(ctx.memory["weight"] == 0, held, ctx.memory["first"])
        ctx.remember(weight=weight, first=first, **kept)
        loss, rise, held = (kept[name] / weight for name in new)
        target = torch.minimum(self.times * (held - loss), self.cap * (first - loss))
        return torch.log(target.clamp(min=TINY) / rise.clamp(min=TINY)).clamp(-1.0, 1.0)

    def _mixed(self, cosine: Tensor, gap: Tensor) -> Tensor:
        if self.mix == "sum":
            return (cosine + gap) / 2
        if self.mix == "least":
            return torch.minimum(cosine, gap)
        return torch.where((cosine > 0) & (gap < 0), gap, cosine) if self.mix == "bound" else cosine


@dataclass(frozen=True)
class WindowRadius(_Own):
    """The gap, with the held-out examples' own hardness taken off: they were trained on until their window began.

    Others are held out from passes 1, 2, 4, 8 … on. In the first quarter of a window L̄ − L is the new ones' offset:
    they are harder or easier than others, and still remembered. After it the gap is L̄ − L less that offset, and ρ moves
    as in `GapRadius`. What is remembered hides a part of the gap: in the first half of a window ρ does not fall.
    `pass_steps`: steps in a pass. `leap`: the largest vote upwards, where the smallest downwards is −1.
    """

    pass_steps: int = 20
    times: Number = 2.0
    cap: Number = 0.8
    start: Number = 1e-3
    rate: Number = 0.2
    quarter: float = 0.25
    half: float = 0.5
    offset: bool = True
    leap: Number = 1.0

    @property
    def cost(self) -> float:
        return 2 + 1 / self.period

    def place(self, step: int) -> tuple[int, float]:
        """Which window a step is in, and which share of it is over."""
        passes = step / self.pass_steps + 1
        window = int(passes).bit_length() - 1
        return window, passes / 2**window - 1

    def kind(self, step: int) -> str:
        """What an update does: begin the offset, go on with it, let ρ grow, or let it move."""
        window, over = self.place(step)
        if over < self.quarter or window < 2:
            return "begin" if step == 0 or self.place(step - self.period)[0] != window else "offset"
        return "grow" if over < self.half else "move"

    def phase(self, step: int) -> int:
        if step % self.period:
            return 0
        return 1 if step == 0 else 2 + ("begin", "offset", "grow", "move").index(self.kind(step))

    def memory(self, space: Space) -> Memory:
        names = ("loss", "rise", "count", "mean.loss", "mean.rise", "mean.held", "weight", "first", "off", "offs")
        return {"rho": space.zero() + self.start, **{name: space.zero() for name in names}}

    def looks(self, ctx: Context) -> Looks:
        here = yield HERE
        there = yield Look(ctx.memory["rho"] * ascent(here.grad))
        loss, rise = ctx.memory["loss"] + here.loss, ctx.memory["rise"] + (there.loss - here.loss)
        count = ctx.memory["count"] + 1
        if ctx.step % self.period:
            ctx.remember(loss=loss, rise=rise, count=count)
            return there.grad
        held = (yield Look(batch="auxiliary")).loss
        self._update(ctx, loss / count, rise / count, held)
        zero = torch.zeros_like(loss)
        ctx.remember(loss=zero, rise=zero, count=zero)
        return there.grad

    def _update(self, ctx: Context, loss: Tensor, rise: Tensor, held: Tensor) -> None:
        kind, memory, zero = self.kind(ctx.step), ctx.memory, torch.zeros_like(loss)
        if ctx.step == 0:
            ctx.remember(first=held)
        off, offs = memory["off"], memory["offs"]
        if kind in ("begin", "offset"):
            off, offs = (zero, zero) if kind == "begin" else (off, offs)
            ctx.remember(off=off + (held - loss), offs=offs + 1, weight=zero)
            ctx.remember(**{f"mean.{name}": zero for name in ("loss", "rise", "held")})
            return
        new = {"mean.loss": loss, "mean.rise": rise, "mean.held": held}
        kept = {name: self.decay * memory[name] + (1 - self.decay) * value for name, value in new.items()}
        weight = self.decay * memory["weight"] + (1 - self.decay)
        ctx.remember(weight=weight, **kept)
        loss, rise, held = (kept[name] / weight for name in new)
        gap = held - loss - (off / offs.clamp(min=1) if self.offset else 0)
        target = torch.minimum(self.times * gap, self.cap * (memory["first"] - loss))
        move = torch.log(target.clamp(min=TINY) / rise.clamp(min=TINY)).clamp(min=-1.0)
        move = torch.minimum(move, torch.zeros_like(move) + self.leap)
        if kind == "grow":
            move = move.clamp(min=0.0)
        self.moved(ctx, self.rate * move)
