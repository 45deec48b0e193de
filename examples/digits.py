"""Train scikit-learn's bundled digits with SGD, SAM and GSAM, three seeds each, and print a table.

    python examples/digits.py

Takes well under a minute on a CPU. With the same seed, all methods have the same initial weights and batches.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import steppe

METHODS = {"SGD": steppe.Plain(), "SAM": steppe.SAM(rho=0.1), "GSAM": steppe.GSAM(rho=0.1, alpha=0.2)}


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.5, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.as_tensor(a) for a in split)
    return x.float(), y, x_test.float(), y_test


def train(method: steppe.Method, seed: int, epochs: int, data: tuple[Tensor, ...], tick) -> tuple[float, float]:
    x, y, x_test, y_test = data
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Softplus(), nn.Dropout(0.1), nn.Linear(128, 10))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    opt = steppe.SharpnessAware(base, method, model=model)  # the one line that changes
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=epochs * (len(x) // 64))
    started = time.perf_counter()
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=order).split(64)[: len(x) // 64]:
            opt.step(lambda batch=batch: F.cross_entropy(model(x[batch]), y[batch]))
            schedule.step()
        tick()
    seconds = time.perf_counter() - started
    model.eval()
    with torch.no_grad():
        return (model(x_test).argmax(1) == y_test).float().mean().item(), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    data = load()
    table = Table("method", "test accuracy", "looks a step", "seconds", title="digits, half of them for training")
    with Progress(transient=True) as progress:
        task = progress.add_task("training", total=len(METHODS) * args.seeds * args.epochs)
        for name, method in METHODS.items():
            runs = [train(method, s, args.epochs, data, lambda: progress.advance(task)) for s in range(args.seeds)]
            accuracy = [run[0] for run in runs]
            error = statistics.stdev(accuracy) / len(accuracy) ** 0.5 if len(accuracy) > 1 else float("nan")
            mean = f"{100 * statistics.mean(accuracy):.2f} ± {100 * error:.2f} %"
            table.add_row(name, mean, f"{method.cost:g}", f"{statistics.mean(run[1] for run in runs):.1f}")
    Console().print(table)
    print(f"mean ± standard error over {args.seeds} seeds")


if __name__ == "__main__":
    main()
