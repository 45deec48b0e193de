"""Adaptive random weight perturbation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.shards import Groups, shard_groups, sharded
from ..method import HERE, Context, Look, Looks, Memory, Method, Number
from ..vector import Space, Vector
from .plain import Plain


@dataclass(frozen=True)
class ARWP(Method):
    """Adaptive random weight perturbation (Li, Tao, Yan et al.; TMLR 2024; OpenReview WbbgOHpoPX): one look.

    Looks at a random point near w. A filter f (the weights of one output of a layer: a slice along the first dimension)
    is perturbed in proportion to its own norm, and less if its gradients were large:

        n_f = σ ‖w_f‖ ξ_f / √(1 + η F_f),   ξ ~ N(0, I)                     (1)
        d   = g(w + n)                                                      (2)
        F   ← β F + d²,   F = 0 before the first step                       (3)

    F_f is the sum of F over the filter. A tensor of one dimension (a bias, a scale) has one norm for the whole tensor
    and an F for each entry.

    In published code σ grows by a cosine from 0.001 to 0.011: use a schedule. The step's only look is away from w: the
    reported loss and BatchNorm's statistics are those there. In a trainer the logged loss is the one there.
    `MARWP` looks at w too.

    Limits: σ = 0 gives the base optimizer.

    Published code adds and subtracts n in the weights' own precision; here the weights are restored exactly. Its
    classes have η 1 and β 0.9, its scripts η 0.1 and β 0.99, the defaults here. Parameters that are sharded along their
    first dimension (FSDP2) are supported; those that are sharded along another one (tensor parallelism) raise an error.

    Args:
        sigma (share of a filter's norm, ≥ 0): Standard deviation of the noise of each weight.
        eta (number, ≥ 0): How strongly large gradients reduce the noise; 0: not at all.
        beta (factor a step, ≥ 0): Decay of the sum of squared gradients.
    """

    sigma: Number = 0.01
    eta: Number = 0.1
    beta: Number = 0.99

    paper = "OpenReview WbbgOHpoPX"
    advice = "Random perturbation at the cost of the base optimizer; let sigma grow during training."
    ranges = "sigma 0.001 to 0.011 by a cosine, eta 0.1, beta 0.99; 0.015 in its two-look form."
    cost = 1
    copies = 4
    nonnegative = ("sigma", "eta", "beta")

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) to (3)."""
        there = yield Look(self._noise(ctx))
        self._remember(ctx, there.grad)
        return there.grad

    def _noise(self, ctx: Context) -> Vector:
        """n: equation (1)."""
        noise, fisher = ctx.draws.normal(), ctx.memory["F"]
        pairs = zip(filter_norms(ctx.w), filter_sums(fisher), strict=True)
        scales = [norm / (1 + self.eta * total).sqrt() for norm, total in pairs]
        return self.sigma * Vector([t.mul_(s) for t, s in zip(noise.tensors, scales, strict=True)], noise.space)

    def _remember(self, ctx: Context, grad: Vector) -> None:
        """F: equation (3)."""
        ctx.remember(F=(self.beta * ctx.memory["F"] + grad**2).settled())

    def memory(self, space: Space) -> Memory:
        """F."""
        return {"F": space.zeros()}

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(sigma=0.1)]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(sigma=0.0), Plain())]


@dataclass(frozen=True)
class MARWP(ARWP):
    """mARWP (OpenReview WbbgOHpoPX): the mean of the gradients at w and at `ARWP`'s point, on two batches.

        d = λ g_X̄(w + n) + (1 − λ) g_X(w)

    The auxiliary batch X̄ should not be the batch of the step: ``with_auxiliary(loader, "fresh")``. The two looks are
    independent: a captured step runs them side by side. Limits: λ = 0 gives the base optimizer.

    Args:
        lam (share, ≥ 0): Weight of the gradient at the perturbed point; the gradient at w has the rest.
    """

    sigma: Number = 0.015
    lam: Number = 0.5

    aliases = ("mixed-arwp",)
    advice = "ARWP that also looks at w: larger perturbations at two looks a step."
    ranges = "sigma 0.015, lam 0.5, eta 0.1, beta 0.99."
    cost = 2
    copies = 4
    nonnegative = ("sigma", "eta", "beta", "lam")
    needs = frozenset({"auxiliary"})

    def looks(self, ctx: Context) -> Looks:
        """Both looks, and equation (3) of `ARWP`."""
        here, there = yield self._two_looks(ctx)
        self._remember(ctx, there.grad)
        return self.lam * there.grad + (1 - self.lam) * here.grad

    def _two_looks(self, ctx: Context) -> Iterator[Look]:
        """Two independent looks. An iterator, so that the noise is drawn only after the first look."""
        yield HERE
        yield Look(self._noise(ctx), batch="auxiliary")

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(sigma=0.1, lam=0.3)]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(lam=0.0), Plain())]


def filter_norms(w: Vector) -> list[Tensor]:
    """‖w_f‖ of every filter of tensors with two or more dimensions; the norm of the whole tensor for others."""
    _require_whole_filters(w.space)
    return [t.sqrt() for t in filter_sums(w**2, each_entry=False)]


def filter_sums(v: Vector, each_entry: bool = True) -> list[Tensor]:
    """Sums over every filter of tensors with two or more dimensions; for others each entry itself, or one sum."""
    sums = []
    for t in v.tensors:
        if t.dim() > 1:
            sums.append(t.sum(dim=tuple(range(1, t.dim())), keepdim=True))
        else:
            sums.append(t if each_entry else t.sum())
    return sums if each_entry else _summed_over_shards(sums, v.space)


def _summed_over_shards(sums: list[Tensor], space: Space) -> list[Tensor]:
    """The sums of tensors of one dimension, over all ranks that hold shards of them."""
    by_groups: dict[Groups, list[int]] = {}
    for i, p in enumerate(space.params):
        if p.dim() < 2 and (groups := shard_groups(p)):
            by_groups.setdefault(groups, []).append(i)
    for groups, indices in by_groups.items():
        total = torch.stack([sums[i] for i in indices])
        for group in groups:
            torch.distributed.all_reduce(total, group=group)
        for i, value in zip(indices, total, strict=True):
            sums[i] = value
    return sums


def _require_whole_filters(space: Space) -> None:
    """Raise for parameters that are sharded along another dimension than the first."""
    for p in space.params:
        if sharded(p) and p.dim() > 1 and any(not (s.is_replicate() or s.is_shard(0)) for s in p.placements):
            raise RuntimeError(
                f"ARWP needs the norms of whole filters, but a parameter of shape {tuple(p.shape)} has the placements "
                f"{p.placements}: shard it along its first dimension, as FSDP2 does, or use another method"
            )
