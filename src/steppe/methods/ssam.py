"""Sparse sharpness-aware minimization."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..method import HERE, Context, Look, Looks, Memory, Method, Number, ascent
from ..vector import Space, Vector
from . import require


@dataclass(frozen=True)
class SSAM(Method):
    """Sparse SAM (Mi et al.; NeurIPS 2022; arXiv 2210.05177).

    SAM that perturbs only a share 1 − s of the weights:

        e = m ⊙ ρ g/‖g‖,   d = g(w + e)                                     (1)

    with a 0/1 mask m, computed again on every `every`-th step (first normalised, then masked, so ‖e‖ < ρ):

    - ``rule="fisher"`` keeps the weights with the largest mean squared gradient of `samples` single examples.
      Call ``step(closure, sample=f)``, where f(i) is the loss of the i-th example.
    - ``rule="dynamic"`` starts with a random mask, then drops the share `drop` of the kept weights with the smallest
      |g| and adds as many at random. If `total` is given, the share decays by a cosine over that many steps.

    Limits: s = 0 gives SAM.

    Published code makes the mask right after a step, so that its first step, with a mask of zeros, is plain and the
    others come one step later: ``published=True``. Its dynamic mask cannot add what it has just dropped, and rounds
    its counts differently. It evaluates single examples in training mode, which changes BatchNorm's statistics; here
    only the first look does.

    Args:
        rho (distance, ≥ 0): SAM's radius; after masking the perturbation is shorter.
        sparsity (share, 0 to 1): Share of the weights that are not perturbed.
        rule ("fisher" or "dynamic"): How the perturbed weights are chosen.
        samples (count, ≥ 1): Single examples that Fisher's rule looks at; each costs a look.
        every (steps, ≥ 1): The mask is computed again on every `every`-th step.
        drop (share, 0 to 1): Share of the kept weights that the dynamic rule replaces each time.
        total (steps, ≥ 1; or None): Steps over which `drop` decays to zero; None: it does not decay.
        published (bool): Compute it as published code does, where that differs.
    """

    rho: Number = 0.1
    sparsity: float = 0.5
    rule: Literal["fisher", "dynamic"] = "fisher"
    samples: int = 16
    every: int = 100
    drop: Number = 0.5
    total: int | None = None
    published: bool = False

    paper = "arXiv 2210.05177"
    advice = "SAM on half the weights; saves no time on dense hardware."
    ranges = "rho 0.1 (0.2 on CIFAR-100), sparsity 0.5, 16 samples, a new mask every epoch."
    radius = "rho"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.sparsity, (int, float)) or not 0 <= self.sparsity < 1:
            raise ValueError(f"SSAM: sparsity must be a number, at least 0 and less than 1, not {self.sparsity!r}")
        require.one_of(self, "rule", "fisher", "dynamic")
        for name in ("samples", "every", *(() if self.total is None else ("total",))):
            require.whole_number(self, name)
        if isinstance(self.drop, (int, float)) and not 0 <= self.drop <= 1:
            raise ValueError(f"SSAM: drop is a share, at least 0 and at most 1, not {self.drop}")

    @property
    def copies(self) -> int:
        """The copies while a mask is made. In the steps between there are 3: the weights, the mask and g."""
        return 5 if self.rule == "fisher" else 6

    @property
    def cost(self) -> float:
        """Two looks, and one for every sample when the mask is made."""
        return 2 + (self.samples / self.every if self.rule == "fisher" else 0)

    @property
    def needs(self) -> frozenset[str]:
        """Single examples, for Fisher's mask."""
        return frozenset({"sample"}) if self.rule == "fisher" else frozenset()

    def looks(self, ctx: Context) -> Looks:
        """Equation (1). On every `every`-th step the mask is made first."""
        g = (yield HERE).grad
        mask = ctx.memory["mask"]
        mask_step = self._mask_step(ctx.step)
        if self._makes_mask(mask_step):
            first = mask_step == 0
            mask = (yield from self._fisher_mask(g)) if self.rule == "fisher" else self._dynamic_mask(ctx, g, first)
            ctx.remember(mask=mask)
        there = yield Look(self.rho * (mask * ascent(g)))
        return there.grad

    def _mask_step(self, step: int) -> int:
        """The step by which masks are scheduled; published code is one step late."""
        return step - 1 if self.published else step

    def _makes_mask(self, mask_step: int) -> bool:
        return mask_step >= 0 and mask_step % self.every == 0

    def phase(self, step: int) -> int | None:
        mask_step = self._mask_step(step)
        # A dynamic mask changes another number of weights each time if `total` is given, and the first is random.
        once = self.rule == "dynamic" and (mask_step == 0 or self.total is not None)
        return None if self._makes_mask(mask_step) and once else int(self._makes_mask(mask_step))

    def _fisher_mask(self, like: Vector) -> Looks:
        score = like.space.zeros()
        for i in range(self.samples):
            score.add_((yield Look(batch="sample", sample=i)).grad ** 2)
        return largest(score.perturbed(), self._kept_count(like.space))

    def _dynamic_mask(self, ctx: Context, g: Vector, first: bool) -> Vector:
        space, kept = g.space, self._kept_count(g.space)
        random = ctx.draws.uniform(0.5, 1.0)
        if first:
            return largest(random, kept)
        decay = 1.0 if self.total is None else (1 + math.cos(math.pi * min(ctx.step / self.total, 1.0))) / 2
        dropped = min(int(kept * self.drop * decay), space.moving() - kept)
        mask = ctx.memory["mask"]
        # A dropped weight may be added again immediately, like one that was never kept.
        survivors = largest(mask * (g.abs() + 1e-30 * random), kept - dropped)  # at random where g is zero
        added = largest(random - random * survivors, dropped) if dropped else 0.0 * survivors
        return survivors + added

    def _kept_count(self, space: Space) -> int:
        """How many weights are perturbed."""
        return int(round(space.moving() * (1 - self.sparsity), 3))  # rounded: 10 · (1 − 0.9) is a little less than 1

    def memory(self, space: Space) -> Memory:
        """The mask."""
        return {"mask": space.zeros()}

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(samples=3, every=2), cls(rule="dynamic", every=2, total=8), cls(samples=3, every=2, published=True)]


def largest(scores: Vector, count: int) -> Vector:
    """The 0/1 mask of the `count` largest entries, over all parameters, devices and shards together.

    Entries must not be negative. Then their bits, read as integers, have the order of the numbers, and the threshold is
    found bit by bit, from the highest, by counting: exact, the same on all ranks, and without synchronising with the
    device. All ties with the smallest of the largest entries are kept; zeros only if all entries are.
    """
    widest = functools.reduce(torch.promote_types, {t.dtype for t in scores.tensors})  # one dtype, to compare bits
    ints = [_as_int(t.to(widest)) for t in scores.tensors]
    bits = ints[0].element_size() * 8 - 1
    threshold = torch.zeros((), dtype=ints[0].dtype, device=ints[0].device)
    for bit in reversed(range(bits)):
        candidate = threshold | (1 << bit)
        reached = scores.space.total([(t >= candidate.to(t.device)).sum() for t in ints])
        threshold = torch.where(reached >= count, candidate, threshold)
    if count < scores.space.moving():
        threshold = threshold.clamp(min=1)
    masks = [(t >= threshold.to(t.device)).to(s.dtype) for t, s in zip(ints, scores.tensors, strict=True)]
    return Vector(masks, scores.space)


def _as_int(t: Tensor) -> Tensor:
    return t.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[t.element_size()])
