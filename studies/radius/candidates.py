"""Candidates: SAM with a radius that moves by itself. Three families, see protocol.md.

All keep log ρ, or ρ, and running means as 0-d tensors (in a population: one a member), wait for nothing, and look at
the auxiliary (held-out) batch every `period`-th step only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from steppe.method import HERE, HVP, Context, Look, Looks, Memory, Method, Number, ascent
from steppe.vector import TINY, Space, Vector


def agreement(form: str, g: Vector, g_bar: Vector) -> Tensor:
    """How well a direction agrees with the held-out gradient: cosine, product, or the part of g along ḡ."""
    product = g @ g_bar
    if form == "dot":
        return product
    length = g_bar.norm() + TINY
    return product / length if form == "projection" else product / (length * (g.norm() + TINY))


def agreement_slope(form: str, g: Vector, g_bar: Vector) -> Vector:
    """∂ agreement / ∂g."""
    if form == "dot":
        return g_bar
    towards = g_bar / (g_bar.norm() + TINY)
    if form == "projection":
        return towards
    length = g.norm() + TINY
    return (towards - ((g @ towards) / (length * length)) * g) / length


class _Mean:
    """A running mean of a number and of its square, corrected for having begun at zero; and how sure the mean is."""

    def __init__(self, name: str, ctx: Context, value: Tensor, decay: float):
        m, v, weight = (ctx.memory[f"{name}.{part}"] for part in ("mean", "square", "weight"))
        self.kept = {
            f"{name}.mean": decay * m + (1 - decay) * value,
            f"{name}.square": decay * v + (1 - decay) * value * value,
            f"{name}.weight": decay * weight + (1 - decay),
        }
        ctx.remember(**self.kept)
        weight = self.kept[f"{name}.weight"]
        self.mean, self.square = self.kept[f"{name}.mean"] / weight, self.kept[f"{name}.square"] / weight
        self.effective = (1 - decay) / (1 + decay)  # variance of such a mean, in variances of a value

    @staticmethod
    def memory(name: str, space: Space) -> Memory:
        """Before the first value."""
        return {f"{name}.{part}": space.zero() for part in ("mean", "square", "weight")}

    def over_size(self) -> Tensor:
        """Mean over root mean square, as Adam has it: between −1 and 1."""
        return self.mean / (self.square.sqrt() + TINY)

    def if_sure(self, at_least: float = 2.0) -> Tensor:
        """The sign where the mean is that many standard errors from zero, else 0."""
        error = ((self.square - self.mean * self.mean).clamp(min=0) * self.effective).sqrt() + TINY
        return torch.sign(self.mean) * (self.mean.abs() > at_least * error)


@dataclass(frozen=True)
class _Own(Method):
    """What all share: ρ and its bounds."""

    start: Number = 0.05
    rate: Number = 0.1
    decay: float = 0.9
    period: int = 10
    least: Number = 1e-3
    most: Number = 20.0

    needs: ClassVar[frozenset[str]] = frozenset({"auxiliary", "loss", "hvp"})

    def phase(self, step: int) -> int:
        return int(step % self.period == 0)

    def memory(self, space: Space) -> Memory:
        return {"rho": space.zero() + self.start, **_Mean.memory("signal", space)}

    def moved(self, ctx: Context, move: Tensor) -> None:
        """log ρ moves by this much, ρ stays in its bounds."""
        rho = (ctx.memory["rho"] * torch.exp(move)).clamp(self.least, self.most)
        ctx.remember(rho=rho)
        ctx.metrics.update(rho=rho)

    def move_by(self, kind: str, signal: _Mean) -> Tensor:
        """A step in log ρ from a running mean of slopes."""
        return self.rate * (signal.if_sure() if kind == "sure" else signal.over_size())


@dataclass(frozen=True)
class SlopeRadius(_Own):
    """∂ agreement(g(w + ρĝ), ḡ)/∂ρ by one Hessian-vector product: ĝ · H(w + ρĝ) ∂agreement/∂g."""

    form: str = "cos"
    by: str = "size"  # "size" or "sure" in log ρ; "adam": Adam in ρ itself, from `start` 0
    memory_of_g: float = 0.0  # decay of a running mean of ḡ

    @property
    def cost(self) -> float:
        return 2 + 2 / self.period

    def memory(self, space: Space) -> Memory:
        mean = {"g_bar": space.zeros()} if self.memory_of_g else {}
        return {**super().memory(space), **_Mean.memory("slow", space), **mean}

    def looks(self, ctx: Context) -> Looks:
        here = yield HERE
        up = ascent(here.grad)
        at = Look(ctx.memory["rho"] * up)
        seen = yield at
        if ctx.step % self.period:
            return seen.grad
        g_bar = (yield Look(batch="auxiliary")).grad.perturbed()
        if self.memory_of_g:
            g_bar = (self.memory_of_g * ctx.memory["g_bar"] + (1 - self.memory_of_g) * g_bar).settled()
            ctx.remember(g_bar=g_bar)
        product = yield HVP(agreement_slope(self.form, seen.grad.perturbed(), g_bar), at, seen)
        slope = up @ product
        if self.by == "adam":
            self._adam(ctx, slope)
        else:
            self.moved(ctx, self.move_by(self.by, _Mean("signal", ctx, slope, self.decay)))
        return seen.grad

    def _adam(self, ctx: Context, slope: Tensor) -> None:
        mean, size = _Mean("signal", ctx, slope, 0.9).mean, _Mean("slow", ctx, slope, 0.999).square.sqrt()
        rho = (ctx.memory["rho"] + self.rate * mean / (size + TINY)).clamp(0.0, self.most)
        ctx.remember(rho=rho)
        ctx.metrics.update(rho=rho)


@dataclass(frozen=True)
class PairRadius(_Own):
    """Agreement at ρ and at `ratio`·ρ, both measured: a difference in log ρ that needs no small step."""

    form: str = "cos"  # or "lookahead": the held-out loss after a step of the last step's length in either direction
    by: str = "size"
    ratio: float = 2.0

    @property
    def cost(self) -> float:
        return 2 + (3 if self.form == "lookahead" else 2) / self.period

    def memory(self, space: Space) -> Memory:
        before = {"before": space.zeros(), "length": space.zero()} if self.form == "lookahead" else {}
        return {**super().memory(space), **before}

    def looks(self, ctx: Context) -> Looks:
        here = yield HERE
        rho, up = ctx.memory["rho"], ascent(here.grad)
        seen = yield Look(rho * up)
        if self.form == "lookahead":
            ctx.remember(before=ctx.w.clone(), length=(ctx.w - ctx.memory["before"]).norm())
        if ctx.step % self.period or (self.form == "lookahead" and ctx.step == 0):
            return seen.grad
        far = yield Look((self.ratio * rho) * up)
        if self.form == "lookahead":
            length = ctx.remembered["length"]
            near_loss = (yield Look(-(length * ascent(seen.grad)), batch="auxiliary")).loss
            far_loss = (yield Look(-(length * ascent(far.grad)), batch="auxiliary")).loss
            better: Any = near_loss - far_loss
        else:
            g_bar = (yield Look(batch="auxiliary")).grad.perturbed()
            better = agreement(self.form, far.grad.perturbed(), g_bar)
            better = better - agreement(self.form, seen.grad.perturbed(), g_bar)
        self.moved(ctx, self.move_by(self.by, _Mean("signal", ctx, better, self.decay)))
        return seen.grad


@dataclass(frozen=True)
class GapRadius(_Own):
    """ρ is where the training loss at w + ρĝ is the held-out loss at w. Losses alone: no second gradient is used.

    `by` "ratio": log ρ += rate · log(gap/rise), with gap = L̄(w) − L(w) and rise = L(w + ρĝ) − L(w), held to ±1;
    "losses": log ρ += rate · log(L̄(w)/L(w + ρĝ)). L and rise are means over all steps since the last update, and all
    three running means over updates (decay). `times` multiplies the gap: 1 is the claim, others test it. `cap`: rise is
    asked to be at most this share of L̄₀ − L, L̄₀ the held-out loss before the first step, which is about the loss of
    guessing: where the perturbed net is no better than a guess, guessing is what is learned.
    """

    by: str = "ratio"
    times: Number = 1.0
    margin: Number = 0.0  # standard deviations of a batch's loss that the gap must exceed
    gate: bool = False  # whether ρ grows only where the slope of the cosine, on average, agrees
    gate_decay: float = 0.97
    cap: Number | None = None

    @property
    def cost(self) -> float:
        return 2 + (2 if self.gate else 1) / self.period

    def memory(self, space: Space) -> Memory:
        names = ("loss", "square", "rise", "count", "mean.loss", "mean.rise", "mean.held", "mean.spread", "weight")
        own = {"rho": space.zero() + self.start, **{name: space.zero() for name in names}}
        own |= {} if self.cap is None else {"first": space.zero()}
        return {**own, **_Mean.memory("signal", space)} if self.gate else own

    def looks(self, ctx: Context) -> Looks:
        here = yield HERE
        up = ascent(here.grad)
        at = Look(ctx.memory["rho"] * up)
        there = yield at
        loss, rise = ctx.memory["loss"] + here.loss, ctx.memory["rise"] + (there.loss - here.loss)
        count, square = ctx.memory["count"] + 1, ctx.memory["square"] + here.loss * here.loss
        if ctx.step % self.period:
            ctx.remember(loss=loss, rise=rise, count=count, square=square)
            return there.grad
        seen = yield Look(batch="auxiliary")
        held = seen.loss
        spread = (square / count - (loss / count) ** 2).clamp(min=0).sqrt()
        new = {"mean.loss": loss / count, "mean.rise": rise / count, "mean.held": held, "mean.spread": spread}
        kept = {name: self.decay * ctx.memory[name] + (1 - self.decay) * value for name, value in new.items()}
        weight = self.decay * ctx.memory["weight"] + (1 - self.decay)
        zero = torch.zeros_like(loss)
        ctx.remember(loss=zero, square=zero, rise=zero, count=zero, weight=weight, **kept)
        loss, rise, held, spread = (kept[name] / weight for name in new)
        wanted = held - self.margin * spread
        if self.cap is not None:
            first = torch.where(ctx.memory["weight"] == 0, held, ctx.memory["first"])
            ctx.remember(first=first)
            wanted = torch.minimum(wanted, loss + self.cap * (first - loss) / self.times)
        move = self._log_ratio(loss, rise, wanted).clamp(-1.0, 1.0)
        if self.gate:
            product = yield HVP(agreement_slope("cos", there.grad.perturbed(), seen.grad.perturbed()), at, there)
            slope = _Mean("signal", ctx, up @ product, self.gate_decay)
            move = torch.where(slope.mean > 0, move, torch.minimum(move, slope.over_size()))
        self.moved(ctx, self.rate * move)
        ctx.metrics.update(held_loss=held, loss=loss, rise=rise)
        return there.grad

    def _log_ratio(self, loss: Tensor, rise: Tensor, held: Tensor) -> Tensor:
        gap = self.times * (held - loss)
        if self.by == "losses":
            return torch.log((loss + gap).clamp(min=TINY) / (loss + rise).clamp(min=TINY))
        return torch.log(gap.clamp(min=TINY) / rise.clamp(min=TINY))


@dataclass(frozen=True)
class TrialRadius(_Own):
    """ρ by trial: for `period` steps the radius is √ratio·ρ, for the next ρ/√ratio, in the order + − − +.

    After each such phase the held-out loss is looked at. Where it fell more (than its running mean) in phases with the
    larger radius, ρ grows. The same held-out examples are compared with themselves, so whether they are harder than
    others does not matter; and what is compared is what training did, base optimizer, momentum and all.
    """

    ratio: float = 4.0
    by: str = "size"

    @property
    def cost(self) -> float:
        return 2 + 1 / self.period

    def phase(self, step: int) -> int:
        return (step // self.period) % 4 * 2 + int(step % self.period == 0)

    def memory(self, space: Space) -> Memory:
        return {**super().memory(space), **_Mean.memory("change", space), "held": space.zero()}

    def sign(self, step: int) -> int:
        """Which radius a step takes: + − − + by phases."""
        return 1 if (step // self.period) % 4 in (0, 3) else -1

    def looks(self, ctx: Context) -> Looks:
        here = yield HERE
        factor = self.ratio ** (0.5 * self.sign(ctx.step))
        there = yield Look((factor * ctx.memory["rho"]) * ascent(here.grad))
        if ctx.step % self.period:
            return there.grad
        held = (yield Look(batch="auxiliary")).loss
        if ctx.step:
            change, weight = held - ctx.memory["held"], ctx.memory["change.weight"]
            before = torch.where(weight > 0, ctx.memory["change.mean"] / weight.clamp(min=TINY), change)
            _Mean("change", ctx, change, self.decay)
            better = self.sign(ctx.step - 1) * (before - change)
            self.moved(ctx, self.move_by(self.by, _Mean("signal", ctx, better, self.decay)))
        ctx.remember(held=held)
        return there.grad
