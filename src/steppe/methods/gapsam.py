"""SAM whose radius follows the generalisation gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..auxiliary import turn_of
from ..method import HERE, Context, Look, Looks, Memory, Method, Number, ascent
from ..vector import TINY, Space
from . import require
from .some_steps import own_steps_before, training_step

_LEAP = 2.0  # the largest log(target / rise) where examples are held out in turns
_UPDATES = ("begin", "measure", "grow", "move")
_MEANS = ("mean_loss", "mean_rise", "mean_held")


@dataclass(frozen=True)
class GapSAM(Method):
    """SAM whose radius is set by the generalisation gap, measured on held-out examples: no radius to choose.

    The loss rises at SAM's perturbed point, and it is higher on examples that training has not seen. The radius is
    adjusted so that the first rise is `times` the second, which is measured on a batch X̄ that is held out of training:

        rise = L_X(w + ρĝ) − L_X(w),   gap = L_X̄(w) − L_X(w)                (1)
        every `period`-th step:   log ρ ← log ρ + rate · [log(target / rise)]₋₁¹           (2)
        target = min(times · gap, ceiling · (L̄₀ − L_X(w)))                  (3)
        d = g_X(w + ρĝ)                                                     (4)

    L_X and rise in (2) are means over all steps since the last update, and all three quantities are running means over
    updates (`decay`). ρ starts at `least`, which hardly changes a step, and falls back to it if there is no gap. Only
    losses are compared: no second gradient, no difference of gradients, nothing that suffers from mixed precision.

    L̄₀ is the held-out loss before the first step, about that of random guesses. Where the perturbed net is no better
    than guessing, its gradient teaches guessing: without (3) four of five trainings of MLP-3 on CIFAR-10 with 40 %
    wrong labels broke down, two of them to 10 %. A net that is already trained has a low L̄₀: ρ stays small until the
    loss is below it.

    As the auxiliary batch, use examples that training never sees: a validation set if there is one, else held-out
    examples (`steppe.hold_out`; ``--auxiliary held-out:500`` in the lab). Their number decides how precisely the gap is
    known: its error is the spread of the loss over the square root of their number. With a hundred examples and half of
    the labels wrong, that is as large as the gap itself early in training.

    On less than ten thousand examples, hold them out **in turns**: 5 % of them, others from epochs 1, 2, 4, 8 … on, and
    say how many steps an epoch has (`epoch_steps`; in the lab ``--auxiliary in-turns`` does both). So all examples are
    trained on. Until their turn begins the held-out ones are trained on like the others: if their loss is higher then,
    they are harder, and that is no gap. It is measured in the first eighth of a turn, but at least by the turn's first
    update, at which ρ stays, and subtracted:

        gap = L_X̄(w) − L_X(w) − offset,   offset = mean of L_X̄(w) − L_X(w) in the first eighth      (1')

    The net still remembers them for a while, which hides a part of the gap: until a quarter of the turn is over, ρ does
    not fall. In the first three epochs ρ stays at `least`. As a turn is short, ρ may grow faster: log(target / rise) is
    held between −1 and 2 in (2).

    If the same examples are always held out and data is small, the gap may never close, however large ρ becomes:
    training then perturbs until the net unlearns (a tenth of CIFAR-10, 60 epochs: ρ = 7). ``backtrack=0.03`` ends that.
    Let ρ_b, L_b and L̄_b be the radius and the two losses when L̄ was least. Once *both* losses are larger, fitting less
    does not help any more:

        ρ ≤ ρ_b  from  L_X(w) > (1 + backtrack) L_b and L_X̄(w) > (1 + backtrack) L̄_b  until  L_X̄(w) < L̄_b      (5)

    It falls to ρ_b by at most e^(−rate) an update.

    If the held-out loss is not finite, there is no update: ρ and all means stay, and the sums go on to the next one.

    Limits: ``times=0`` is SAM at `least`. In `Late`, what the first update measures is subtracted until the next turn
    begins, and a gap that is there already is a part of it.

    Measured (studies/radius). Digits, held out in turns, n = 24: within 0.3 points or one standard error of the best of
    six fixed radii in 20 of 24 regimes, and 0.2 points above it on average; below its base in 4, by 0.4 to 0.6 points.
    The same examples held out always: within it in 10. A tenth of CIFAR-10, CNN-5, Adam, 60 epochs, n = 10: 49.1 ± .1
    in turns, 43.8 ± .5 with the same held out always (with ``backtrack=0.03`` 49.1 ± .3, n = 5, three of which chose
    it); SAM with its best radius 50.3, Adam 45.9. All of CIFAR-10, 20 epochs, the same 500 held out always, n = 10:
    74.8 ± .1, clean, and 62.7 ± .2 with 40 % wrong labels, where SAM with its best radius has 72.9 and 59.7 and Adam
    68.5 and 37.7. ResNet-18 without augmentation, n = 3: 88.9 ± .3, SAM with its best radius 89.2, SGD 86.9. A small
    ViT, AdamW, 6 000 images of Fashion-MNIST, in turns, n = 5: 82.3 ± .1, SAM with its best radius, 0.02, 82.6, AdamW
    81.7.

    LE-SAM fixes the rise; LETS (arXiv 2408.08222) learns ρ by the gradient of ½(L_val − L_train)² after the step.

    Args:
        times (factor, ≥ 0): The target for the rise of the loss, in multiples of the gap.
        period (steps, ≥ 1): The radius is updated on every `period`-th step, with one look at the held-out batch.
        rate (number, ≥ 0): The largest change of log ρ in one update.
        decay (share, 0 to 1): How much of the running means each update keeps.
        least (distance, ≥ 0): The smallest radius, and the first one.
        most (distance, ≥ 0): The largest radius.
        ceiling (share, ≥ 0): How far the perturbed loss may rise towards the loss before training.
        backtrack (share, ≥ 0): How far both losses may rise above where the held-out loss was least, before ρ goes back
            to what it was there; 0: it never does. 0.03 for small data of which the same examples are always held out.
        epoch_steps (steps, ≥ 0): Steps in an epoch, where examples are held out in turns; 0: where the same ones always
            are. Steps of training: inside `Every`, `Late` and `Random` those of the other method too.
    """

    times: Number = 2.0
    period: int = 10
    rate: Number = 0.2
    decay: Number = 0.9
    least: Number = 1e-3
    most: Number = 20.0
    ceiling: Number = 0.8
    backtrack: Number = 0.0
    epoch_steps: int = 0

    paper = ""
    advice = (
        "Sets its own radius; give it a held-out batch. Best with wrong labels, or where training fits all it sees. "
        "With less than ten thousand examples, hold them out in turns."
    )
    ranges = "Defaults for all; 1 to 2 times the gap."
    stackable = True
    copies = 2
    needs = frozenset({"auxiliary", "held-out", "loss"})
    nonnegative = ("times", "rate", "decay", "least", "most", "ceiling", "backtrack")

    def __post_init__(self) -> None:
        super().__post_init__()
        require.whole_number(self, "period")
        require.whole_number(self, "epoch_steps", least=0)
        if isinstance(self.decay, (int, float)) and not 0 <= self.decay < 1:
            raise ValueError(f"GapSAM: decay must be at least 0 and below 1, not {self.decay!r}")

    @property
    def cost(self) -> float:
        """SAM's looks, and one at the held-out batch when ρ is updated."""
        return 2 + 1 / self.period

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) to (5)."""
        memory = ctx.memory
        there = yield Look(memory["rho"] * ascent((yield HERE).grad))
        here_loss, there_loss = ctx.losses[0], there.loss
        assert here_loss is not None and there_loss is not None
        loss, rise = memory["loss"] + here_loss, memory["rise"] + (there_loss - here_loss)
        count = memory["count"] + 1
        if ctx.step % self.period:
            ctx.remember(loss=loss, rise=rise, count=count)
            return there.grad
        held = (yield Look(batch="auxiliary")).loss
        assert held is not None
        zero = torch.zeros_like(loss)
        first = torch.where(memory["first_held"] == 0, held, memory["first_held"])
        ctx.remember(loss=zero, rise=zero, count=zero, first_held=first)
        new = {"mean_loss": loss / count, "mean_rise": rise / count, "mean_held": held}
        update = self._update(ctx.step)
        if update in ("begin", "measure"):
            self._measure_offset(ctx, new, afresh=update == "begin")
        else:
            self._move(ctx, new, first, falls=update == "move")
        self._undo_unless_finite(ctx, held, {"loss": loss, "rise": rise, "count": count}, update == "begin")
        return there.grad

    def _update(self, step: int) -> str:
        """What an update does: begin to measure the offset, go on with it, let ρ grow, or let it move."""
        if not self.epoch_steps:
            return "move"
        turn, done = self._turn(step)
        first_step = (2**turn - 1) * self.epoch_steps
        if step - self.period < own_steps_before(step, first_step):  # the last update was before this turn
            return "begin"
        if turn < 2 or done < 1 / 8:
            return "measure"
        return "grow" if done < 1 / 4 else "move"

    def _turn(self, step: int) -> tuple[int, float]:
        """In which turn a step is, and which share of it is over. All steps of training count, as for epochs."""
        epoch = training_step(step) / self.epoch_steps + 1
        turn = turn_of(int(epoch))
        return turn, epoch / 2**turn - 1

    def _measure_offset(self, ctx: Context, new: dict[str, Any], afresh: bool) -> None:
        """Add to the offset of (1'); the running means start again after it."""
        zero = torch.zeros_like(new["mean_held"])
        offset, offsets = (zero, zero) if afresh else (ctx.memory["offset"], ctx.memory["offsets"])
        ctx.remember(offset=offset + (new["mean_held"] - new["mean_loss"]), offsets=offsets + 1)
        ctx.remember(weight=zero, **dict.fromkeys(new, zero))
        ctx.metrics.update(rho=ctx.memory["rho"])

    def _undo_unless_finite(self, ctx: Context, held: Tensor, sums: dict[str, Tensor], begins: bool) -> None:
        """Without a finite held-out loss (all its targets ignored, an overflow) only the sums go on.

        Training never steps along that batch, so nothing else would notice it. What was measured in the turn before is
        dropped all the same where another begins: it is of other examples.
        """
        before: dict[str, Any] = {**ctx.memory, **sums}
        after: dict[str, Any] = dict(ctx.remembered)
        if begins:
            before |= dict.fromkeys(("offset", "offsets", *_MEANS, "weight"), torch.zeros_like(held))
        finite = torch.isfinite(held)  # a tensor, one entry per member: the host does not wait for it
        ctx.remember(**{name: torch.where(finite, new, before[name]) for name, new in after.items()})
        ctx.metrics.update(rho=ctx.remembered.get("rho", ctx.memory["rho"]))
        if "gap" in ctx.metrics:  # a mean over an epoch would be NaN: show the gap that is known
            mean = (before["mean_held"] - before["mean_loss"]) / before["weight"].clamp(min=TINY)
            known = mean - before["offset"] / before["offsets"].clamp(min=1)
            ctx.metrics.update(gap=torch.where(finite, ctx.metrics["gap"], known))

    def _move(self, ctx: Context, new: dict[str, Any], first: Tensor, falls: bool) -> None:
        """Equations (1) to (3) and (5), from this update's means."""
        memory = ctx.memory
        means = _running_means(memory, new, "weight", self.decay)
        loss, rise, held = (means[name] / means["weight"] for name in new)
        gap = held - loss - memory["offset"] / memory["offsets"].clamp(min=1)
        target = torch.minimum(self.times * gap, self.ceiling * (first - loss))
        ratio = torch.log(target.clamp(min=TINY) / rise.clamp(min=TINY))
        ratio = ratio.clamp(-1.0 if falls else 0.0, _LEAP if self.epoch_steps else 1.0)
        best = self._best(memory, loss, held)
        rho, lowest = (memory["rho"] * torch.exp(self.rate * by) for by in (ratio, torch.full_like(ratio, -1.0)))
        bound = torch.maximum(best["best_rho"], lowest)
        rho = torch.where(best["bounded"] > 0, torch.minimum(rho, bound), rho).clamp(self.least, self.most)
        ctx.remember(rho=rho, **means, **best)
        ctx.metrics.update(rho=rho, gap=gap)

    def _best(self, memory: Mapping[str, Any], loss: Tensor, held: Tensor) -> dict[str, Tensor]:
        """Where the held-out loss was least, and whether ρ is bounded by the radius there: equation (5)."""
        better = (memory["weight"] == 0) | (held < memory["best_held"])
        now = {"best_held": held, "best_loss": loss, "best_rho": memory["rho"]}
        best = {name: torch.where(better, value, memory[name]) for name, value in now.items()}
        most = 1 + self.backtrack
        both_worse = (held > most * best["best_held"]) & (loss > most * best["best_loss"]) & (self.backtrack > 0)
        bounded = (both_worse | (memory["bounded"] > 0)) & ~better
        return {**best, "bounded": bounded.to(held.dtype)}

    def phase(self, step: int) -> int:
        return 0 if step % self.period else 1 + _UPDATES.index(self._update(step))

    def memory(self, space: Space) -> Memory:
        """ρ, sums since the last update, running means, the first held-out loss, the best point, and the offset."""
        names = (
            "loss", "rise", "count", *_MEANS, "weight", "first_held", "best_held", "best_loss", "best_rho", "bounded",
            "offset", "offsets",
        )  # fmt: skip
        return {"rho": space.zero() + self.least, **{name: space.zero() for name in names}}

    @classmethod
    def variants(cls) -> list[Method]:
        low = {"times": 1.0, "period": 3, "least": 0.05, "ceiling": 0.1}
        in_turns = cls(period=1, least=0.05, epoch_steps=1)
        return [cls(period=2), cls(**low), cls(period=1, least=0.05, backtrack=0.01), in_turns]


def _running_means(memory: Mapping[str, Any], new: dict[str, Any], weight: str, keep: Any) -> dict[str, Any]:
    """Running means that started at zero, and the weight that corrects for that."""
    kept: dict[str, Any] = {name: keep * memory[name] + (1 - keep) * value for name, value in new.items()}
    return {**kept, weight: keep * memory[weight] + (1 - keep)}
