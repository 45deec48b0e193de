"""Write a method of your own, check it on a function, and train with it.

    python examples/new_method.py

The idea: the gradient of a batch is noisy, so this method perturbs the weights along a running mean of gradients. A
method yields where to evaluate the gradient, is sent the result, and returns the direction to step along; `memory`
declares what it keeps between steps. Half precision, accumulation, DDP, FSDP2, checkpoints and the trainers work
without further code.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import steppe
from steppe import HERE, Context, Look, Looks, Memory, Method, Number, Space, ascent, drive


@dataclass(frozen=True)
class MeanSAM(Method):
    """SAM that perturbs along a running mean of gradients.

        m ← β m + (1 − β) g(w),   e = ρ m/‖m‖                               (1)
        d = g(w + e)                                                        (2)

    Limits: β = 0 gives SAM.
    """

    rho: Number = 0.05
    beta: Number = 0.9

    advice = "An example."
    cost = 2
    copies = 2
    radius = "rho"

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) and (2)."""
        here = yield HERE
        mean = self.beta * ctx.memory["mean"] + (1 - self.beta) * here.grad
        ctx.remember(mean=mean)
        there = yield Look(self.rho * ascent(mean))
        return there.grad

    def memory(self, space: Space) -> Memory:
        """The mean, before the first step."""
        return {"mean": space.zeros()}


def check() -> None:
    """Compare with numbers computed by hand: a method runs on any gradient function, without a model."""
    w = torch.tensor([3.0, 4.0], dtype=torch.float64)
    direction = drive(MeanSAM(rho=0.5), lambda w: w, w)  # L = ½‖w‖²: expected is w (1 + ρ/‖w‖) = 1.1 w
    print(f"on ½‖w‖² at w = {w.tolist()}: {direction}, expected {1.1 * w}")
    like_sam = drive(MeanSAM(rho=0.5, beta=0.0), lambda w: w**3, w)
    print(f"with β = 0 it is SAM: {torch.equal(like_sam, drive(steppe.SAM(rho=0.5), lambda w: w**3, w))}")


def train(method: Method, seed: int, epochs: int, x: Tensor, y: Tensor, tick: Callable[[], None]) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    opt = steppe.SharpnessAware(base, method, model=model)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            opt.step(lambda batch=batch: F.cross_entropy(model(x[batch]), y[batch]))
        tick()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the net is small: more threads are slower
    check()
    images, labels = load_digits(return_X_y=True)
    x, y = torch.as_tensor(images).float() / 16, torch.as_tensor(labels)
    methods = {"SGD": steppe.Plain(), "SAM": steppe.SAM(rho=0.1), "MeanSAM": steppe.by_name("meansam", rho=0.1)}
    table = Table("method", "test accuracy", "looks a step", title=f"digits, half for training, {args.seeds} seeds")
    with Progress(transient=True) as progress:
        task = progress.add_task("training", total=len(methods) * args.seeds * args.epochs)
        for name, method in methods.items():
            accuracies = []
            for seed in range(args.seeds):
                model = train(method, seed, args.epochs, x[::2], y[::2], lambda: progress.advance(task))
                with torch.no_grad():
                    accuracies.append((model(x[1::2]).argmax(1) == y[1::2]).double().mean())
            mean, error = torch.stack(accuracies).mean(), torch.stack(accuracies).std() / args.seeds**0.5
            table.add_row(name, f"{100 * mean:.2f} ± {100 * error:.2f} %", f"{method.cost:g}")
    Console().print(table)


if __name__ == "__main__":
    main()
