"""Every method's equations, implemented again from its paper in plain float64 tensors, without the library.

A reference is a function of the problem (gradient, loss and Hessian-vector product of a flat weight vector), the
settings and a dict that it may keep things in between steps. It returns the direction, or (direction, move aside)
or sets ``state["lr"]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from helpers.problems import Data
from helpers.reference_of_gapsam import gapsam as gapsam


@dataclass
class Problem:
    """A net and a step's data as functions of one flat vector."""

    model: nn.Module
    data: Data
    step: int
    lr: float
    draw: Callable[[str], Tensor]  # random vectors, the same the library draws: "normal", "sphere", "uniform"

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        params, start = {}, 0
        for name, p in self.model.named_parameters():
            params[name] = w[start : start + p.numel()].view(p.shape)
            start += p.numel()
        return functional_call(self.model, params, (x,))

    def loss(self, w: Tensor, batch: str = "main", sample: int | None = None) -> Tensor:
        x, y = self.data.of(batch, sample)
        return F.cross_entropy(self.outputs(w, x), y)

    def g(self, w: Tensor, batch: str = "main", sample: int | None = None) -> Tensor:
        w = w.detach().requires_grad_()
        return torch.autograd.grad(self.loss(w, batch, sample), w)[0]

    def hv(self, w: Tensor, v: Tensor, batch: str = "main") -> Tensor:
        w = w.detach().requires_grad_()
        g = torch.autograd.grad(self.loss(w, batch), w, create_graph=True)[0]
        return torch.autograd.grad(g @ v, w)[0].detach()


def n(v: Tensor) -> Tensor:
    return v / v.norm()


def plain(p, w, m, state):
    return p.g(w)


def sam(p, w, m, state):
    g = p.g(w)
    e = m.rho * (n(g) if m.normalize else g)
    return p.g(w + e)


def functionalsam(p, w, m, state):
    x, y = p.data.of("main", None)
    v = w.detach().requires_grad_()
    f = p.outputs(v, x)
    df = torch.autograd.grad(F.cross_entropy(f, y), f)[0]
    v = (w + m.rho * n(p.g(w))).detach().requires_grad_()
    return torch.autograd.grad((p.outputs(v, x) * df).sum(), v)[0]


def asam(p, w, m, state):
    g, t = p.g(w), w.abs() + m.eta
    return p.g(w + m.rho * t**2 * g / (t * g).norm())


def gsam(p, w, m, state):
    g = p.g(w)
    t = w.abs() + m.eta
    e = m.rho * n(g) if m.ascent == "plain" else m.rho * t**2 * g / (t * g).norm()
    gp = p.g(w + e)
    if m.objective == "weighted":
        return gp + m.alpha * (gp - g)
    if m.objective == "f-h":
        return g + m.alpha * (gp - (gp @ g) / (g @ g) * g)
    return gp - m.alpha * (g - (g @ gp) / (gp @ gp) * gp)


def gnp(p, w, m, state):
    g = p.g(w)
    gp = p.g(w + m.r * n(g))
    return (1 - m.alpha) * (n(g) if m.normalize_first else g) + m.alpha * gp


def crsam(p, w, m, state):
    g = p.g(w)
    e = m.rho * n(g)
    gp, gm = p.g(w + e), p.g(w - e)
    return gp + m.gamma * (gp + gm - 2 * g) + m.beta * (gp - gm)


def gnam(p, w, m, state):
    g = p.g(w)
    f = p.hv(w, n(g))
    w_adv = w + m.rho * n(f)
    h_norm = m.rho * p.hv(w_adv, n(p.g(w_adv)))
    h_loss = g if m.oracle is None else sam(p, w, m.oracle, state)
    return h_loss + m.alpha * h_norm


def gnamfast(p, w, m, state):
    g0 = p.g(w)
    g1 = p.g(w + m.rho_prime * n(g0))
    w2 = w + m.rho * n(g1 - g0)
    g2 = p.g(w2)
    g3 = p.g(w2 + m.rho_prime * n(g2))
    plus = m.alpha * g1 + (1 - m.alpha) * g3
    minus = g0 + abs(1 - m.beta) * g2 if m.weighting == "published" else m.beta * g0 + (1 - m.beta) * g2
    return plus - m.gamma * (minus - (minus @ plus) / (plus @ plus) * plus)


def looksam(p, w, m, state):
    g = p.g(w)
    if p.step % m.k == 0:
        gs = p.g(w + m.rho * n(g))
        state["gv"] = gs - (gs @ g) / (g @ g) * g
        return gs
    return g + m.alpha * g.norm() / (state["gv"].norm() + 1e-12) * state["gv"]


def fsam(p, w, m, state):
    g = p.g(w)
    if "m" not in state:
        state["m"] = g
        return p.g(w + m.rho * n(g))
    d = p.g(w + m.rho * n(g - m.sigma * state["m"]))
    state["m"] = m.lam * state["m"] + (1 - m.lam) * g
    return d


def msam(p, w, m, state):
    v = state.get("v", torch.zeros_like(w))
    t = w.abs() + m.eta if m.adaptive else torch.ones_like(w)
    e = m.rho * t**2 * v / (t * v).norm() if v.any() else v
    d = p.g(w - e)
    state["v"] = m.beta * v + d
    return d


def stablesam(p, w, m, state):
    g = p.g(w)
    return g.norm() * n(p.g(w + m.rho * n(g)))


def lesam(p, w, m, state):
    g = p.g(w)
    return p.g(w + min(m.sigma / float(g.norm()), m.rho_max) * n(g))


def sampa(p, w, m, state):
    y = state.get("y")
    state["y"] = p.g(w if y is None else w - p.lr * y)
    return (1 - m.lam) * p.g(w if y is None else w + m.rho * n(y), "auxiliary") + m.lam * state["y"]


def xsam(p, w, m, state):
    g = p.g(w)
    g1 = p.g(w + m.rho * n(g))

    def turned(alpha):
        """In the plane of both, by alpha times their angle: by an orthogonal basis, not by the formula for slerp."""
        across = n(g1 - (g1 @ n(g)) * n(g))
        angle = torch.atan2(g1 @ across, g1 @ n(g))
        return torch.cos(alpha * angle) * n(g) + torch.sin(alpha * angle) * across

    if p.step % m.every == 0:
        alphas = torch.linspace(0, 2, m.trials, dtype=w.dtype)
        state["alpha"] = max(alphas, key=lambda alpha: float(p.loss(w + m.rho_max * turned(alpha))))
    return g1.norm() * turned(state["alpha"])


def arwp(p, w, m, state, batch="main"):
    xi, pieces, start = p.draw("normal"), [], 0
    fisher = state.get("F", torch.zeros_like(w))
    for q in p.model.parameters():
        mine = slice(start, start + q.numel())
        rows, draws, f = (t[mine].view(q.shape) for t in (w, xi, fisher))
        if q.dim() > 1:
            norm = torch.stack([row.norm() for row in rows]).view(-1, *[1] * (q.dim() - 1))
            f = torch.stack([row.sum() for row in f]).view(norm.shape)
        else:
            norm = rows.norm()
        pieces.append((m.sigma * norm * draws / torch.sqrt(1 + m.eta * f)).reshape(-1))
        start += q.numel()
    d = p.g(w + torch.cat(pieces), batch)
    state["F"] = m.beta * fisher + d**2
    return d


def marwp(p, w, m, state):
    return m.lam * arwp(p, w, m, state, "auxiliary") + (1 - m.lam) * p.g(w)


def wsam(p, w, m, state):
    g = p.g(w)
    gp = p.g(w + m.rho * n(g))
    a = m.gamma / (1 - m.gamma)
    return (g, a * (gp - g)) if m.decoupled else (1 - a) * g + a * gp


def entropysgd(p, w, m, state):
    x = mu = w
    for i in range(m.L + 1):
        g = p.g(x, "main" if i == 0 else "auxiliary")
        x = x - m.eta * (g - m.gamma * (w - x)) + math.sqrt(m.eta) * m.eps * p.draw("normal")
        mu = m.a * mu + (1 - m.a) * x
    return m.gamma * (w - mu)


def sasam(p, w, m, state, perturb=True):
    g = p.g(w)
    if "eta" not in state:
        grown = math.sqrt(1 + m.delta)
        state.update(eta=p.lr * grown if m.published else p.lr, theta=grown if m.published else math.inf)
        last = p.lr
    else:
        last = state["eta"]
        ratio = (w - state["w"]).norm() / (g - p.g(state["w"])).norm()
        if m.published:
            eta = min(math.sqrt(1 + m.delta * state["theta"]) * last, float(ratio)) + 1e-8
        else:
            eta = min(float(ratio) / 2, math.sqrt(1 + m.delta * state["theta"]) * last)
        state.update(eta=eta, theta=eta / last)
    state.update(w=w, lr=state["eta"])
    if not perturb:
        return g
    return p.g(w + math.sqrt(last if m.published else state["eta"]) * n(g))


def sasgd(p, w, m, state):
    return sasam(p, w, m, state, perturb=False)


def ssam(p, w, m, state):
    g = p.g(w)
    kept = int(round(len(w) * (1 - m.sparsity), 3))
    mask = old = state.get("mask", torch.zeros_like(w))
    turn = p.step - m.published
    if turn >= 0 and turn % m.every == 0:
        mask = torch.zeros_like(w)
        if m.rule == "fisher":
            score = sum((p.g(w, "sample", i) ** 2 for i in range(m.samples)), torch.zeros_like(w))
            mask[score.topk(kept).indices] = 1
        elif turn == 0:
            mask[p.draw("uniform", 0.5, 1.0).topk(kept).indices] = 1
        else:
            dropped = min(int(kept * m.drop * (1 + math.cos(math.pi * p.step / m.total)) / 2), len(w) - kept)
            random = p.draw("uniform", 0.5, 1.0)
            mask[(old * g.abs()).topk(kept - dropped).indices] = 1
            mask[(random * (1 - mask)).topk(dropped).indices] = 1
        state["mask"] = mask
    return p.g(w + mask * (m.rho * n(g)))


def universal(p, w, m, state):
    g, rows = p.g(w), []
    for kind in state["kinds"]:
        rows.append([w + m.rho * (n(g) if kind[0] == "steepest" else p.draw(*kind)) for _ in range(m.n)])
    delta = torch.stack([torch.stack([(p.loss(at) - p.loss(w)).detach() / m.rho**2 for at in row]) for row in rows])
    phi, psis = state["phi"], state["psis"]
    delta = delta.expand(len(psis), -1)
    rows = rows * (len(psis) // len(rows))
    means = [psi(row).mean() for psi, row in zip(psis, delta, strict=True)]
    slopes = torch.func.jacrev(lambda t: phi(*t))(torch.stack(means))
    d = g.clone()
    for slope, psi, row, places in zip(slopes, psis, delta, rows, strict=True):
        terms = [torch.func.grad(psi)(x) * (p.g(at) - g) for x, at in zip(row, places, strict=True)]
        d = d + m.lam * slope * torch.stack(terms).mean(0)
    return d


def universalsam(p, w, m, state):
    mus = m.mu if isinstance(m.mu, tuple) else (m.mu,)
    names = {"sphere": ("sphere",), "normal": ("normal",), "steepest": ("steepest",)}
    kinds = [names.get(getattr(mu, "__name__", ""), ("uniform", -0.1, 0.1)) for mu in mus]
    psis = m.psi if isinstance(m.psi, tuple) else (m.psi,)
    return universal(p, w, m, {"kinds": kinds, "phi": m.phi, "psis": psis})


def tracesam(p, w, m, state):
    one = lambda t: t  # noqa: E731
    return universal(p, w, m, {"kinds": [("normal",) if m.gaussian else ("sphere",)], "phi": one, "psis": (one,)})


def frobsam(p, w, m, state):
    """Algorithm 3: the covariance itself."""
    places = [w + m.rho * p.draw("normal") for _ in range(m.n)]
    losses = torch.stack([p.loss(at).detach() for at in places])
    grads = torch.stack([p.g(at) for at in places])
    covariance = ((losses - losses.mean())[:, None] * (grads - grads.mean(0))).sum(0) / (m.n - 1)
    return p.g(w) + m.lam * (1 if m.published else 4) / m.rho**2 * covariance


def productsam(p, w, m, state):
    kind = ("uniform", -m.half_width, m.half_width) if hasattr(m, "half_width") else ("normal",)
    psi = lambda t: torch.exp(m.sigma * t)  # noqa: E731
    return universal(p, w, m, {"kinds": [kind], "phi": lambda t: t**-2.0, "psis": (psi,)})


detsam = productsam


def gam(p, w, m, state):
    gamma = state.setdefault("gamma", torch.zeros(m.T, dtype=w.dtype)) if m.gamma is None else m.gamma
    g0 = p.g(w)
    length = {"raw": None, "sized": g0.norm(), "unit": 1.0}["sized" if m.normalize else m.directions]
    d = [g0 if length is None else length * n(g0)]
    for _ in range(1, m.T):
        d_t = (p.g(w + m.eps * d[-1]) - g0) / m.eps
        d.append(d_t if length is None else length * n(d_t))
    at = w + sum(c * d_t for c, d_t in zip(gamma, d, strict=True))
    g = p.g(at)
    if m.gamma is not None or p.step % m.period:
        return g
    # The discrepancy's derivative, by autograd through the gradients as functions of gamma.
    c = gamma.detach().clone().requires_grad_()
    both = []
    for batch in ("main", "auxiliary"):
        place = w + sum(c[t] * d[t].detach() for t in range(m.T))
        both.append(torch.autograd.grad(p.loss(place, batch), place, create_graph=True)[0])
    slope = torch.autograd.grad(discrepancy(m, both[0], both[1] if m.reference == "perturbed" else p.g(w, batch)), c)[0]
    if "optimizer" not in state:
        state["param"] = nn.Parameter(gamma.clone())
        state["optimizer"] = m.optimizer([state["param"]])
        if m.lr_times_period:
            state["optimizer"].param_groups[0]["lr"] *= m.period
    state["param"].grad = slope
    state["optimizer"].step()
    state["gamma"] = state["param"].detach().clone()
    return g


def discrepancy(m, g, g_bar):
    """GAM's Δ."""
    if m.discrepancy == "squared":
        return ((g - g_bar) ** 2).sum()
    return -g @ g_bar if m.discrepancy == "dot" else -(g @ g_bar) / (g.norm() * g_bar.norm())


def every(p, w, m, state):
    turn = math.floor(p.step / m.k)
    method = m.method
    if p.step > 0 and math.floor((p.step - 1) / m.k) == turn:
        method, turn = m.between, p.step - turn - 1
    return of_turn(p, w, method, turn, state)


def of_turn(p, w, method, turn, state):
    """Another method, at its own count of steps."""
    inner = Problem(p.model, p.data, turn, p.lr, p.draw)
    return globals()[method.name.lower()](inner, w, method, state)


def late(p, w, m, state):
    return p.g(w) if p.step < m.start else of_turn(p, w, m.method, p.step - m.start, state)


def random(p, w, m, state):
    """The chosen steps are listed here: they must not change in any later version."""
    steps = {(0.5, 3): "010010", (0.75, 8): "011111"}[m.p, m.seed]
    if steps[p.step] == "0":
        return p.g(w)
    return of_turn(p, w, m.method, steps[: p.step].count("1"), state)
