"""Is a population what steppe trains? The same batches through both; and do candidates run under `steppe.capture`?

PYTHONPATH=src python studies/radius/check.py [cpu|cuda]
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from candidates import GapRadius, PairRadius, SlopeRadius, TrialRadius
from nets import Net
from population import Base, Population, Replayed
from scaled import ScaledRadius, WindowRadius

import steppe
from steppe.lab.models import build

CANDIDATES = [
    steppe.SAM(rho=0.1),
    SlopeRadius(),
    SlopeRadius(by="adam", start=0.0, rate=0.02, memory_of_g=0.9),
    PairRadius(by="sure"),
    PairRadius(form="lookahead"),
    GapRadius(),
    GapRadius(gate=True),
    TrialRadius(),
    ScaledRadius(unit=0.02, rate=0.1),
    ScaledRadius(statistic="secant", least=0.05, period=5, mix="sum"),
    WindowRadius(pass_steps=2, period=2),
]


def compare(model: str, shape: tuple[int, ...], method: steppe.Method, base: str, device: str, steps: int = 25) -> str:
    """Largest difference of the weights after some steps, over their change; and how steppe ran them."""
    torch.manual_seed(0)
    nets = [build(model, shape, 10).to(device) for _ in range(2)]
    rows = torch.stack([torch.cat([p.detach().flatten() for p in net.parameters()]) for net in nets])
    x = torch.randn(2, steps + 1, 16, *shape, device=device)
    y = torch.randint(10, (2, steps + 1, 16), device=device)
    net = Net(build(model, shape, 10))
    statistics = net.fresh_statistics(rows)

    def losses(w, batch, first):
        logits = net(w, _laid_out(batch[0], model), statistics if first else None, update=first)
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none").view(2, -1).mean(1)

    lr = 0.05 if base == "sgd" else 1e-3
    population = Population(rows.clone(), method, Base(base, lr), losses)
    for t in range(steps):
        population.step((x[:, t], y[:, t]), (x[:, -1], y[:, -1]))
    worst, how = 0.0, ""
    for i, single in enumerate(nets):
        make = {"sgd": lambda p: torch.optim.SGD(p, lr, 0.9), "adam": lambda p: torch.optim.Adam(p, lr)}[base]
        opt = steppe.SharpnessAware(make(single.parameters()), method, model=single)
        step = steppe.capture(lambda a, b, m=single: F.cross_entropy(m(a), b), opt)
        for t in range(steps):
            step(x[i, t], y[i, t], auxiliary=(x[i, -1], y[i, -1]) if method.needs else None)
        end = torch.cat([p.detach().flatten() for p in single.parameters()])
        worst = max(worst, float((end - population.weights[i]).norm() / (end - rows[i]).norm()))
        how = step.how
    return f"{worst:.1e} ({how})"


def replayed_alike(method: steppe.Method, steps: int = 60) -> str:
    """Difference of weights after steps as they are and replayed ones, over their change."""
    torch.manual_seed(0)
    single = build("cnn-3", (1, 12, 12), 10)
    net = Net(single)
    rows = torch.cat([p.detach().flatten() for p in single.parameters()]).cuda().repeat(2, 1)
    x, y = torch.randn(400, 12, 12, 1, device="cuda"), torch.randint(10, (400,), device="cuda")
    ends = []
    for replayed in (False, True):
        statistics = net.fresh_statistics(rows)

        def losses(w, batch, first, statistics=statistics):
            logits = net(w, x[batch], statistics if first else None, update=first)
            return F.cross_entropy(logits.flatten(0, 1), y[batch].flatten(), reduction="none").view(2, -1).mean(1)

        population = Population(rows.clone(), method, Base("adam", 1e-3), losses)
        stepper = Replayed(population) if replayed else population
        drawn = torch.Generator("cuda").manual_seed(0)
        for _ in range(steps):
            batch = torch.randint(300, (2, 16), device="cuda", generator=drawn)
            stepper.step(batch, torch.arange(300, 400, device="cuda").expand(2, -1))
        ends.append((population.weights.clone(), population.memory.get("rho"), population.steps, population.looks))
    (w, rho, *counts), (other, other_rho, *other_counts) = ends
    gap = float((w - other).norm() / (w - rows).norm())
    radii = "" if rho is None else f" radii {rho.tolist()} {other_rho.tolist()}"
    return f"{gap:.1e}{radii} {counts} {other_counts}"


def _laid_out(x: torch.Tensor, model: str) -> torch.Tensor:
    return x.flatten(2) if "mlp" in model else x.permute(0, 1, 3, 4, 2)


if __name__ == "__main__":
    place = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.backends.cudnn.allow_tf32 = False
    for model_name, size in (("digits-mlp", (1, 8, 8)), ("cnn-3", (1, 12, 12)), ("mlp-3", (1, 8, 8))):
        for candidate in CANDIDATES:
            for base_name in ("sgd", "adam"):
                print(model_name, base_name, candidate, compare(model_name, size, candidate, base_name, place))
    if place == "cuda":
        for candidate in CANDIDATES:
            print("replayed", candidate, replayed_alike(candidate))
