"""The universal class of sharpness measures, and its named members."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..engine.random_vectors import Draws
from ..method import HERE, Context, Look, Looks, Method, Number, ascent
from ..vector import MOST_TERMS, Vector
from . import require
from .sam import SAM

Sampler = Callable[[Draws, Vector], Vector]  # draws a direction to look in, which may depend on the gradient


def normal(draws: Draws, grad: Vector) -> Vector:
    """μ = N(0, I)."""
    return draws.normal()


def sphere(draws: Draws, grad: Vector) -> Vector:
    """μ uniform on the unit sphere."""
    return draws.sphere()


def steepest(draws: Draws, grad: Vector) -> Vector:
    """μ a point mass on g/‖g‖."""
    return ascent(grad)


@dataclass(frozen=True)
class Cube:
    """μ uniform on the cube [−c, c]^d."""

    half_width: float

    def __call__(self, draws: Draws, grad: Vector) -> Vector:
        return draws.uniform(-self.half_width, self.half_width)


def identity(t: Tensor) -> Tensor:
    """The identity, t."""
    return t


class _Sampled(Method):
    """The base class of the members: look in random directions, and weight the gradients there by ∂φ/∂δ."""

    rho: Number  # not dataclass fields here: a subclass declares them in its own order
    n: int
    lam: Number

    paper = "arXiv 2406.03682"
    needs: ClassVar[frozenset[str]] = frozenset({"loss"})

    def __post_init__(self) -> None:
        super().__post_init__()
        require.whole_number(self, "n")
        if isinstance(self.rho, (int, float)) and self.rho == 0:
            raise ValueError(f"{self.name}: rho must be positive")

    def samplers(self) -> Sequence[Sampler]:
        """The μ_ℓ."""
        raise TypeError(f"{self.name} does not say what to draw: implement samplers")

    def measure(self, delta: Tensor) -> Tensor:
        """φ of the means of ψ; δ has one row per sampler."""
        raise TypeError(f"{self.name} does not say what it measures: implement measure")

    def coefficients(self, delta: Tensor) -> Tensor:
        """∂φ/∂δ, the weight of the gradient at each draw."""
        with torch.enable_grad():
            delta = delta.detach().requires_grad_()
            return torch.autograd.grad(self.measure(delta), delta)[0]

    @property
    def cost(self) -> float:
        """One look at w and one for every draw."""
        return 1 + self.n * len(self.samplers())

    @property
    def copies(self) -> int:
        """The gradients of all draws are held until the coefficients are known; a sum of many needs one copy more."""
        return int(self.cost) + (self.cost > MOST_TERMS)

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) and (2) of `UniversalSAM`."""
        here = yield HERE
        samplers = [mu for mu in self.samplers() for _ in range(self.n)]
        seen = yield (Look(self.rho * mu(ctx.draws, here.grad)) for mu in samplers)
        delta = torch.stack([(there.loss - here.loss) / self.rho**2 for there in seen]).reshape(-1, self.n)
        ctx.metrics["sharpness"] = self.measure(delta)
        c = self.lam * self.coefficients(delta)
        direction = (1 - c.sum()) * here.grad
        for c_i, there in zip(c.reshape(-1), seen, strict=True):
            direction = direction + c_i * there.grad
        return direction


@dataclass(frozen=True)
class UniversalSAM(_Sampled):
    """The (φ, ψ, μ) class (Tahmasebi, Soleymani, Bahri, Jegelka, Jaillet; ICML 2024; arXiv 2406.03682), Algorithm 2.

    A sharpness is a function φ of means of functions ψ_ℓ of loss differences in random directions v ~ μ_ℓ:

        δ_{iℓ} = (L(w + ρ v_{iℓ}) − L(w))/ρ²,   t_ℓ = mean_i ψ_ℓ(δ_{iℓ})                         (1)
        d = g + λ Σ_ℓ ∂_ℓφ(t_1, …, t_m) · mean_i[ ψ_ℓ'(δ_{iℓ}) (g(w + ρ v_{iℓ}) − g) ]            (2)

    φ takes m tensors, ψ is one function or m of them; write them with torch, derivatives come from autograd.
    μ is one sampler, whose draws all ψ share, or m samplers. (2) is evaluated with one number c per look,
    d = (1 − λ Σc) g + λ Σ c g(w + ρv), so that large terms cancel as numbers, before they multiply vectors.

    The document prints φ' with one argument; all m means are meant. Like its published code, (2) has no 1/ρ² in
    front: it is the gradient of L + λ ρ² φ.

    Limits: φ = ψ = identity and μ a point mass on g/‖g‖ (`steepest`) give SAM.

    Args:
        phi (function): φ, of m tensors, written with torch.
        psi (function or sequence of them): The ψ_ℓ, each of one tensor.
        mu (sampler or sequence of them): What the directions are drawn from: `sphere`, `normal`, `Cube`, `steepest`, or
            your own.
        rho (factor, > 0): Multiplies the drawn directions.
        n (count, ≥ 1): Random directions a step; each costs a look.
        lam (number): Weight of the sharpness.
    """

    phi: Callable[..., Tensor] = identity
    psi: Callable[[Tensor], Tensor] | Sequence[Callable[[Tensor], Tensor]] = identity
    mu: Sampler | Sequence[Sampler] = sphere
    rho: Number = 0.01
    n: int = 1
    lam: Number = 1.0

    advice = "For trying a sharpness measure of your own: write phi and psi."

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.mu) and len(self.mu) != (1 if callable(self.psi) else len(self.psi)):
            raise ValueError("UniversalSAM: give one sampler mu, or as many as there are functions psi")

    def samplers(self) -> Sequence[Sampler]:
        """The μ_ℓ."""
        return [self.mu] if callable(self.mu) else self.mu

    def measure(self, delta: Tensor) -> Tensor:
        """φ of the means of ψ; δ has one row per sampler."""
        psis = [self.psi] if callable(self.psi) else self.psi
        return self.phi(*(psi(row).mean() for psi, row in zip(psis, delta.expand(len(psis), -1), strict=True)))

    @classmethod
    def variants(cls) -> list[Method]:
        two = cls(phi=torch.mul, psi=(torch.square, torch.exp), mu=(sphere, Cube(0.1)), rho=0.5, n=2, lam=0.1)
        return [cls(mu=steepest, rho=0.05), cls(psi=torch.tanh, mu=normal, n=2, lam=0.1), two]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(mu=steepest, rho=0.05), SAM())]


@dataclass(frozen=True)
class TraceSAM(_Sampled):
    """Trace-SAM (arXiv 2406.03682): φ = ψ = identity, μ uniform on the sphere; the measure is tr(H)/2d.

        d = (1 − λ) g + λ mean_i g(w + ρ v_i)

    Published code draws v from a normal distribution and never normalises it: ``gaussian=True``.

    Args:
        rho (distance, > 0): How far from the weights the gradients are taken; with `gaussian`, the standard deviation
            of each weight's noise.
        n (count, ≥ 1): Random directions a step; each costs a look.
        lam (share): Weight of the gradients there; the gradient at w has the rest.
        gaussian (bool): Draw from a normal distribution and do not normalise, as published code does.
    """

    rho: Number = 0.01
    n: int = 1
    lam: Number = 1.0
    gaussian: bool = False

    advice = "Cheap smoothing in random directions."
    ranges = "rho 0.01, n 1, lam 1."

    def samplers(self) -> Sequence[Sampler]:
        """The sphere."""
        return [normal if self.gaussian else sphere]

    def measure(self, delta: Tensor) -> Tensor:
        """The mean of δ."""
        return delta.mean()

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(), cls(n=3, lam=0.5), cls(gaussian=True)]


@dataclass(frozen=True)
class FrobSAM(_Sampled):
    """Frob-SAM (arXiv 2406.03682, Algorithm 3): φ = 2(t₂ − t₁²), ψ = (t, t²), μ = N(0, I); the measure is ‖H‖²_F.

        d = g + λ (4/ρ²) ĉov(L(w + ρv), g(w + ρv))                          (unbiased; n ≥ 2)

    Away from a critical point the leading term is 4λHg, a penalty on the gradient norm; the Frobenius part is of
    order λρ². Published code leaves out the 4: ``published=True``.

    Args:
        rho (number, > 0): Standard deviation of the noise of each weight, in the unit of a weight.
        n (count, ≥ 2): Random directions a step; each costs a look.
        lam (number): Weight of the sharpness.
        published (bool): Leave out the factor 4, as published code does.
    """

    rho: Number = 0.005
    n: int = 2
    lam: Number = 1e-3
    published: bool = False

    advice = "In practice a penalty on the gradient norm; lam 1e-4 to 5e-3."
    ranges = "rho 0.005 and 0.01, lam 1e-4 to 5e-3, n 2 and 10."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n < 2:
            raise ValueError("FrobSAM: n must be at least 2, a covariance of one sample does not exist")

    def samplers(self) -> Sequence[Sampler]:
        """N(0, I)."""
        return [normal]

    def measure(self, delta: Tensor) -> Tensor:
        """2 Var(δ), unbiased; published code's is a quarter of it."""
        return (0.5 if self.published else 2.0) * delta.var()

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(), cls(n=4, rho=0.01), cls(published=True)]


@dataclass(frozen=True)
class ProductSAM(_Sampled):
    """The last row of the document's Table 1: φ = 1/t², ψ = exp(σt), μ = N(0, I); the measure is ∏(1 − σλ_i).

    Computed in logarithms: the exponential of a loss difference over ρ² overflows easily. σ must stay below
    1/λ_max, or the mean it estimates does not exist; negative σ is always safe.

    Args:
        rho (number, > 0): Standard deviation of the noise of each weight, in the unit of a weight.
        n (count, ≥ 1): Random directions a step; each costs a look.
        lam (number): Weight of the sharpness.
        sigma (number): σ in ψ = exp(σt); below 1/λ_max.
    """

    rho: Number = 0.01
    n: int = 1
    lam: Number = 1.0
    sigma: Number = -0.01

    advice = "A row of the paper's table, for completeness."

    def samplers(self) -> Sequence[Sampler]:
        """N(0, I)."""
        return [normal]

    def measure(self, delta: Tensor) -> Tensor:
        """mean(exp σδ)⁻²."""
        return torch.exp(-2 * (torch.logsumexp(self.sigma * delta.reshape(-1), 0) - math.log(self.n)))

    def coefficients(self, delta: Tensor) -> Tensor:
        """−2σ φ exp(σδ_i)/Σ_j exp(σδ_j). By autograd, parts of it would overflow."""
        return -2 * self.sigma * self.measure(delta) * torch.softmax(self.sigma * delta, dim=-1)

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(rho=0.1), cls(rho=0.1, n=3)]


@dataclass(frozen=True)
class DetSAM(ProductSAM):
    """Det-SAM (arXiv 2406.03682): φ = 1/t², ψ = exp(−t), μ uniform on [−c, c]^d; the measure is det H, up to a factor.

        d = g + λ 2 t⁻³ mean_i[ exp(−δ_i) (g(w + ρ v_i) − g) ],   t = mean_i exp(−δ_i)

    The document's (2π)^d is part of λ. Published code has ψ = exp(−t/2): ``sigma=-0.5``.

    Args:
        rho (factor, > 0): Multiplies the drawn directions.
        sigma (number): σ in ψ = exp(σt); published code has -0.5.
        half_width (number, ≥ 0): c: before rho, the noise of each weight is uniform from −c to c.
    """

    rho: Number = 1.0
    sigma: Number = -1.0
    half_width: Number = 0.01

    nonnegative = ("rho", "half_width")
    advice = "Uniform noise of a fixed width; strong on small data sets in its paper."
    ranges = "rho 1, half_width 0.01, n 1, lam 0.01 to 1."

    def samplers(self) -> Sequence[Sampler]:
        """The cube."""
        return [Cube(self.half_width)]

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(), cls(n=3, half_width=0.05), cls(sigma=-0.5)]
