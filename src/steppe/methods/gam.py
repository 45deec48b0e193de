"""Generalization aware minimization: perturbations that are learned."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from ..method import HERE, HVP, Context, Look, Looks, Memory, Method, Number, Seen
from ..vector import TINY, Space, Vector, unit
from . import require
from .sam import SAM

ADAM = partial(Adam, lr=1e-3)  # the γ-optimizer of the document


@dataclass(frozen=True)
class GAM(Method):
    """Generalization Aware Minimization (anonymous, under review), Algorithm 1.

    Learns how to perturb so that the gradient of one batch becomes that of another. From minibatch X, auxiliary
    minibatch X̄ and coefficients γ (which start at zero):

        d¹ = g_X(w),   dᵗ = (g_X(w + ε dᵗ⁻¹) − d¹)/ε,   t = 2 … T           (1)
        ŵ  = w + Σ_t γ_t dᵗ,   g = g_X(ŵ),   ḡ = g_X̄(ŵ)                     (2)
        γ ← step of the γ-optimizer on ∂Δ(g, ḡ)/∂γ;   d = g                 (3)

    with the discrepancy Δ = −g·ḡ ("dot"), ‖g − ḡ‖² ("squared") or −g·ḡ/‖g‖‖ḡ‖ ("cosine", which does not reward long
    gradients), over the weights that looks may move. dᵗ ≈ Hᵗ⁻¹g does not depend on γ, so whatever T is, two
    Hessian-vector products give the derivative, ∂Δ/∂γ_t = dᵗ·u:

        u = H_X(ŵ) ∂Δ/∂g + H_X̄(ŵ) ∂Δ/∂ḡ
        "dot"      ∂Δ/∂g = −ḡ                               ∂Δ/∂ḡ = −g
        "squared"  ∂Δ/∂g = 2 (g − ḡ)                        ∂Δ/∂ḡ = −2 (g − ḡ)
        "cosine"   ∂Δ/∂g = −(ḡ/‖ḡ‖ − cos·g/‖g‖)/‖g‖         ∂Δ/∂ḡ = −(g/‖g‖ − cos·ḡ/‖ḡ‖)/‖ḡ‖

    **What the paper says, and what it prints.** Theorem 2 (eq. 12) and the synthetic experiment (Appendix D) compare
    the gradient at ŵ with the test loss's gradient at w itself; Algorithm 1, line 12, takes ḡ at ŵ too. The two are
    different methods. ``reference="perturbed"``, the default, is what is printed: both gradients grow and become alike
    uphill, so that γ grows for as long as training lasts. ``reference="weights"`` is what the theorem says,
    ḡ = g_X̄(w): ḡ does not depend on γ, and u = H_X(ŵ) ∂Δ/∂g is one product. Then γ settles, and steps that update it
    take T + 3 looks, not T + 4.

    **What follows.** With the printed form the final γ depends on how long training lasts: in 37 of the 38 finished
    trainings of Table 1 |γ₁| still grew in the last quarter. It is the form that our runs of the paper's tables use.
    With the theorem's form an X̄ of training data stands for test data only until it is fitted, then γ goes to zero;
    one that is held out of training does not.
    ``GAM(T=1, reference="weights", discrepancy="cosine", directions="unit", period=10)`` with a held-out batch is SAM
    with a radius that it sets itself, at 2.2 looks. In the radius study (digits, Adam at 0.02 on ρ, n = 24) it was near
    the best of six fixed radii in 20 of 24 regimes; on CIFAR-10 with CNN-5 (0.01, n = 4) 1 point
    below the best radius with clean labels and 10 with 40 % wrong ones: too slow there. See `GapSAM`.

    Every `period`-th step updates γ; the others take T + 1 looks and no auxiliary batch. With
    ``lr_times_period=True`` the γ-optimizer's learning rate makes up for the updates left out; too much of it
    in 400 steps on a fifth of CIFAR-10, where CNN-5 fell from 49 % at period 1 to 19 % at 20 (n = 3).
    ``gamma=(…)`` fixes the coefficients.

    ``directions="sized"`` (or ``normalize=True``) scales each dᵗ to ‖d¹‖, ``"unit"`` each dᵗ, d¹ too, to length one:
    then γ_t are distances, and T = 1 is SAM with a learned radius. With raw directions and large T, dᵗ grows like
    λ_max^{t−1} and training can diverge. Of our runs of the paper's table, T = 3 lost three of five on MNIST
    with CNN-3 and none with MLP-3; T = 2 lost none of 30, but on Fashion-MNIST CNN-14 began slowly and one of
    five ended at 79 % (the others at 92 to 93). With ``normalize=True`` none of three was lost on MNIST (96.5 to
    96.9 %), nor on a fifth of CIFAR-10 with CNN-5 (49 %), where T = 3 lost three of three (10 %).

    Which auxiliary batch: Algorithm 1 samples it once, the text speaks of auxiliary minibatches. The caller gives
    it; `steppe.with_auxiliary` pairs a loader's batches with a fresh, fixed or previous one, or with one that is held
    out of training (``--auxiliary held-out:500`` in the lab). Take it before the step, not in the closure: a
    Hessian-vector product is a difference of two calls, which must see the same batch. If its loss is not finite, γ is
    not updated.

    Limits: T = 1 with γ₁ fixed is SAM without normalisation; with unit directions, SAM. No code by the authors is
    public.

    Args:
        T (count, ≥ 1): How many directions d¹ … dᵀ; each costs a look.
        eps (number, > 0): ε, the step of the differences that make dᵗ, in multiples of the direction before.
        discrepancy ("dot", "squared" or "cosine"): Δ, what γ makes small.
        period (steps, ≥ 1): γ is updated on every `period`-th step.
        gamma (T numbers, or None): Fixed coefficients; None: they are learned.
        optimizer (function): Makes the γ-optimizer from a list of parameters.
        lr_times_period (bool): Multiply the γ-optimizer's learning rate by `period`.
        normalize (bool): The same as directions="sized".
        reference ("perturbed" or "weights"): Where ḡ is taken: at ŵ, as printed, or at w, as in the theorem.
        directions ("raw", "sized" or "unit"): Lengths of the dᵗ: as they are, that of d¹, or one.
    """

    T: int = 2
    eps: Number = 1e-3
    discrepancy: Literal["dot", "squared", "cosine"] = "dot"
    period: int = 1
    gamma: Sequence[float] | None = None
    optimizer: Callable[..., Optimizer] = ADAM
    lr_times_period: bool = False
    normalize: bool = False
    reference: Literal["perturbed", "weights"] = "perturbed"
    directions: Literal["raw", "sized", "unit"] = "raw"

    paper = "Generalization Aware Minimization"
    advice = (
        "Finds its own perturbation; give it a second batch, and period > 1 if six looks are too many. Keep T at 2."
    )
    ranges = "T 3 on MNIST and 2 elsewhere, eps 1e-3, coefficients by Adam at 1e-3 on every step."
    stackable = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require.whole_number(self, "T")
        require.whole_number(self, "period")
        require.one_of(self, "discrepancy", "dot", "squared", "cosine")
        require.one_of(self, "reference", "perturbed", "weights")
        require.one_of(self, "directions", "raw", "sized", "unit")
        if isinstance(self.eps, (int, float)) and self.eps <= 0:
            raise ValueError(f"GAM: eps must be positive, not {self.eps}")
        if self.normalize and self.directions == "unit":
            raise ValueError('GAM: normalize=True means directions="sized", which contradicts "unit": drop one of them')
        if self.gamma is not None and (not hasattr(self.gamma, "__len__") or not all(map(_is_valid, self.gamma))):
            raise ValueError(f"GAM: fixed coefficients gamma must be finite numbers, T of them, not {self.gamma!r}")
        if self.gamma is not None and len(self.gamma) != self.T:
            raise ValueError(f"GAM: {len(self.gamma)} fixed coefficients gamma for T = {self.T}: give T of them")

    @property
    def cost(self) -> float:
        """T + 1 looks; when γ is updated, the auxiliary gradient and one or two Hessian-vector products more."""
        more = 3 if self.reference == "perturbed" else 2
        return self.T + 1 + (more / self.period if self.gamma is None else 0)

    @property
    def copies(self) -> int:
        """The weights, the dᵗ, the offset (of one dᵗ it is that one, scaled) and, while γ is updated, g, ḡ and u."""
        held = self.T + (self.T > 1) + 1
        if self.gamma is not None:
            return held
        return held + (3 if self.discrepancy == "dot" else 4) - (self.reference == "weights")

    @property
    def needs(self) -> frozenset[str]:
        """A second batch, if γ is learned."""
        return frozenset({"auxiliary", "hvp"}) if self.gamma is None else frozenset()

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) to (3)."""
        here = yield HERE
        d = [self._first(here.grad.perturbed())]
        for _ in range(1, self.T):
            there = yield Look(self.eps * d[-1])
            d.append(self._sized((there.grad - here.grad).perturbed() / self.eps, d[0]))
            del there
        gamma = ctx.memory["gamma"] if self.gamma is None else self.gamma
        at = Look(_weighted_sum(gamma, d))
        if self.gamma is not None or ctx.step % self.period:
            return (yield at).grad
        seen, u = yield from self._look_and_differentiate(at)
        self._update_gamma(ctx, torch.stack([d_t @ u for d_t in d]))
        return seen.grad

    def _first(self, g: Vector) -> Vector:
        """d¹."""
        return unit(g) if self.directions == "unit" else g

    def _sized(self, d_t: Vector, d_1: Vector) -> Vector:
        """dᵗ with the length that `directions` asks for."""
        if self.directions == "unit":
            return unit(d_t)
        return d_t * (d_1.norm() / (d_t.norm() + TINY)) if self.normalize or self.directions == "sized" else d_t

    def _look_and_differentiate(self, at: Look) -> Generator[Any, Any, tuple[Seen, Vector]]:
        """What is seen at ŵ, and the vector u with ∂Δ/∂γ_t = dᵗ·u."""
        other = Look(at.offset if self.reference == "perturbed" else None, batch="auxiliary")
        seen, seen_other = yield at, other
        g, g_bar = seen.grad.perturbed(), seen_other.grad.perturbed()
        squared = self.discrepancy == "squared"
        u = yield HVP(_discrepancy_gradient(self.discrepancy, g, g_bar), at, seen)
        if self.reference == "weights":  # ḡ does not depend on γ
            return seen, 2 * u if squared else -u
        pair = (g, g_bar) if squared else (g_bar, g)
        u_bar = yield HVP(_discrepancy_gradient(self.discrepancy, *pair), other, seen_other)
        return seen, 2 * (u - u_bar) if squared else -(u + u_bar)

    def _update_gamma(self, ctx: Context, slope: Tensor) -> None:
        """Take a step of the γ-optimizer along the slope ∂Δ/∂γ."""
        # In the first step the optimizer makes its own state: SGD, for example, applies no dampening in its first step.
        names = [name for name in ctx.memory if name == "gamma" or (ctx.step and name.startswith("gamma."))]
        state = optimizer_step(self._optimizer, {name: ctx.memory[name] for name in names}, slope)
        state = _if_finite(state, ctx.memory, slope)
        ctx.remember(**state)
        ctx.metrics.update(gamma=state["gamma"], slope=slope)

    def _optimizer(self, params: list[Tensor]) -> Optimizer:
        optimizer = self.optimizer(params)
        group = optimizer.param_groups[0]
        if self.lr_times_period:
            group["lr"] *= self.period
        if params[0].is_cuda and "fused" in group and group["foreach"] is None:
            group["fused"] = True  # one kernel, with all state on the device
            if "capturable" in group:
                group["capturable"] = True
        return optimizer

    def phase(self, step: int) -> int | None:
        if self.gamma is not None:
            return 0
        return None if step == 0 else int(step % self.period == 0)

    def memory(self, space: Space) -> Memory:
        """γ and the γ-optimizer's state."""
        if self.gamma is not None:
            return {}
        param = torch.nn.Parameter(torch.stack([space.zero()] * self.T))
        optimizer = self._optimizer([param])
        state = optimizer.state[param] = _InitialState(optimizer.state.get(param, {}))
        param.grad = torch.zeros_like(param)
        optimizer.step()  # makes its state
        initial = {f"gamma.{name}": value for name, value in state.initial.items()}
        return {"gamma": torch.zeros_like(param.grad), **initial}

    @classmethod
    def variants(cls) -> list[Method]:
        return [
            cls(),
            cls(T=3, discrepancy="squared", period=2, lr_times_period=True),
            cls(normalize=True),
            cls(gamma=(0.1, 0.01)),
            cls(discrepancy="cosine"),
            cls(reference="weights", directions="sized"),
            cls(T=1, reference="weights", discrepancy="cosine", directions="unit", period=2),
            cls(T=3, reference="weights", discrepancy="squared", directions="unit"),
        ]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [
            (cls(T=1, gamma=(0.1,)), SAM(rho=0.1, normalize=False)),
            (cls(T=1, gamma=(0.1,), directions="unit"), SAM(rho=0.1)),
            (cls(directions="sized"), cls(normalize=True)),
        ]


def transformation(gamma: Sequence[float] | Tensor, eigenvalues: Tensor) -> Tensor:
    """P(λ) = λ + Σ_t γ_t λ^{t+1}: how learned coefficients change a quadratic's eigenvalues.

    Only of raw directions: with the others, what γ_t multiplies has another length in every step.

    >>> transformation([0.5], torch.tensor([0.0, 1.0, 2.0]))
    tensor([0.0000, 1.5000, 4.0000])
    """
    return eigenvalues + sum(g * eigenvalues ** (t + 2) for t, g in enumerate(gamma))


class _InitialState(dict):
    """An optimizer's state that also keeps the initial values of its entries, which a step changes in place."""

    def __init__(self, entries: dict[str, Any]):
        super().__init__()
        self.initial: dict[str, Tensor] = {}
        for name, value in entries.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.initial.setdefault(name, value.detach().clone())
        super().__setitem__(name, value)


def optimizer_step(make: Callable[[list[Tensor]], Optimizer], state: dict[str, Any], grad: Tensor) -> dict[str, Tensor]:
    """The state after one step of a torch optimizer on "gamma". The given state is not changed."""
    param = torch.nn.Parameter(state["gamma"].clone())
    optimizer = make([param])
    saved = {name.removeprefix("gamma."): v.clone() for name, v in state.items() if name.startswith("gamma.")}
    if saved:
        fused = optimizer.param_groups[0].get("fused")  # then its step count is on the device, else on the CPU
        optimizer.state[param] = {k: v.to(param.device) if fused else v for k, v in saved.items()}
    param.grad = grad.to(param.dtype)
    optimizer.step()
    new = {f"gamma.{name}": v for name, v in optimizer.state[param].items() if isinstance(v, Tensor)}
    return {"gamma": param.detach(), **new}


def _if_finite(new: dict[str, Tensor], before: Mapping[str, Any], slope: Tensor) -> dict[str, Tensor]:
    """The state after a step of the γ-optimizer, or the one before if that step is not finite: γ would stay NaN.

    Training never steps along X̄, so nothing else would notice that its loss is NaN or infinite. Members are skipped one
    by one. Two things go on: the step count that members share, unless all are skipped, and one on the CPU (optimizers
    without a fused kernel), which a value on the device cannot hold back without waiting for it.
    """
    finite = torch.isfinite(slope)
    for name, value in new.items():
        if value.shape == slope.shape:  # γ, and what the optimizer keeps for each coefficient: ∂Δ/∂γ² may overflow
            finite = finite & (torch.isfinite(value) | ~torch.isfinite(before[name]))
    finite = finite.all(dim=0)
    kept = dict(new)
    for name, value in new.items():
        if value.device == slope.device:
            kept[name] = torch.where(finite if value.shape == slope.shape else finite.any(), value, before[name])
    return kept


def _discrepancy_gradient(discrepancy: str, g: Vector, g_bar: Vector) -> Vector:
    """∂Δ/∂g, without the factor −1 ("dot", "cosine") or 2 ("squared")."""
    if discrepancy == "dot":
        return g_bar
    if discrepancy == "squared":
        return g - g_bar
    size, size_bar = g.norm() + TINY, g_bar.norm() + TINY
    cos = (g @ g_bar) / (size * size_bar)
    return (g_bar / size_bar - cos / size * g) / size


def _is_valid(coefficient: object) -> bool:
    """Whether a fixed coefficient is a finite number, or a tensor. Reading a tensor's value would synchronise."""
    if isinstance(coefficient, (int, float)):
        return math.isfinite(coefficient)
    return isinstance(coefficient, Tensor)


def _weighted_sum(gamma: Sequence[float] | Tensor, d: list[Vector]) -> Vector:
    """Σ_t γ_t dᵗ."""
    total = gamma[0] * d[0]
    for g, d_t in zip(gamma[1:], d[1:], strict=True):
        total = total + g * d_t
    return total
