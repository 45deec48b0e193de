"""Train digits with SGD and with SAM, and measure the curvature of the loss where each of them ended.

    python examples/measure_checkpoint.py --out measured

Takes about a minute on a CPU. It writes two checkpoints, which the command line can measure too:

    cd examples
    steppe measure ../measured/SGD.pt ../measured/SAM.pt \\
        --model measure_checkpoint:model --data measure_checkpoint:data --loss measure_checkpoint:loss
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import steppe
from steppe.curvature import (
    Estimate,
    Hessian,
    Krylov,
    Monitor,
    Objective,
    Record,
    along_trajectory,
    difference,
    eigenvalues,
    figures,
    frobenius_squared,
    line,
    spectrum,
    surrogate_gap,
    trace,
    zeroth_order,
)

METHODS = {"SGD": steppe.Plain(), "SAM": steppe.SAM(rho=0.2)}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 10))


def data() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16).float()[:600], torch.tensor(labels)[:600]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Smoothed labels keep the minimum finite. Without them the curvature falls with the loss."""
    return F.cross_entropy(output, target, label_smoothing=0.1)


@dataclass(frozen=True)
class Trained:
    """Where training ended, the largest eigenvalue during training, and the weights after each epoch."""

    objective: Objective
    history: list[Record]
    path: list[dict[str, Tensor]]


def train(method: steppe.Method, epochs: int) -> Trained:
    net, (x, y) = model(), data()
    optimizer = steppe.SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9), method, model=net)
    monitor = Monitor(Objective(net, loss, (x, y)), every=10)
    visited = []
    shuffle = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=shuffle).split(100):
            optimizer.step(lambda batch=batch: loss(net(x[batch]), y[batch]))
            monitor()
        visited.append({name: value.clone() for name, value in net.state_dict().items()})
    return Trained(Objective(net, loss, data()), monitor.history, visited)


def train_all(epochs: int = 60) -> dict[str, Trained]:
    return {name: train(method, epochs) for name, method in METHODS.items()}


def measure(objective: Objective, rho: float) -> dict[str, Estimate]:
    """One Krylov run for eigenvalues, trace and Frobenius norm; flatness in a ball beside it."""
    run = Krylov(Hessian(objective))
    top = eigenvalues(run, k=1)
    gap, worst = surrogate_gap(objective, rho), zeroth_order(objective, rho)
    return {
        "loss": Estimate.exact(float(objective.loss())),
        "largest eigenvalue": Estimate.exact(float(top.values[0]), float(top.errors[0])),
        "trace": trace(run),
        "Frobenius norm²": frobenius_squared(run),
        f"surrogate gap, ρ = {rho}": Estimate.exact(gap.gap),
        f"largest rise in the ball (at least), ρ = {rho}": Estimate.exact(worst.value),
    }


def draw(runs: dict[str, Trained]) -> dict[str, Figure]:
    """The figures by name. The documentation shows some of them."""
    objectives = {name: one.objective for name, one in runs.items()}
    spectra = {name: spectrum(Hessian(objective)) for name, objective in objectives.items()}
    tops = {name: eigenvalues(Hessian(objective), k=50).values for name, objective in objectives.items()}
    return {
        "density": figures.density_figure(spectra),
        "log-det": figures.log_det_figure({name: one.log_det() for name, one in spectra.items()}),
        "top-50": figures.top_figure(tops),
        "history": figures.history_figure({name: one.history for name, one in runs.items()}),
        "line": figures.line_figure(line(objectives, reach=1.0)),
        "trajectory": figures.contour_figure(along_trajectory(objectives["SGD"], runs["SGD"].path)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--rho", type=float, default=0.1, help="radius of the ball that flatness is measured in")
    parser.add_argument("--out", type=Path, help="a folder for checkpoints and figures")
    arguments = parser.parse_args()
    runs = train_all(arguments.epochs)
    found = {name: measure(one.objective, arguments.rho) for name, one in runs.items()}
    table = Table("", *METHODS, "SAM − SGD, paired")
    for row in found["SGD"]:
        change = difference(found["SAM"][row], found["SGD"][row])
        numbers = [found[name][row] for name in METHODS] + [change]
        table.add_row(row, *(f"{n.value:.4g} ± {n.standard_error:.1g}" for n in numbers))
    Console().print(table)
    if arguments.out is None:
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, one in runs.items():
        torch.save(one.objective.model.state_dict(), arguments.out / f"{name}.pt")
    for name, figure in draw(runs).items():
        print("wrote", figures.save(figure, arguments.out / f"{name}.png"))


if __name__ == "__main__":
    main()
