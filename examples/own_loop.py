"""Your own loop, with half precision, accumulation, clipping, a schedule and a checkpoint.

    python examples/own_loop.py

Trains scikit-learn's digits on a CPU in well under a minute, stops every run half-way, resumes it from a checkpoint,
and prints a table. Arrows mark the two lines that differ from plain PyTorch.
"""

from __future__ import annotations

import argparse
import io
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

METHODS = {"SGD": steppe.Plain(), "SAM": steppe.SAM(rho=0.1), "LookSAM": steppe.LookSAM(rho=0.1, k=5)}
MICRO_BATCHES = 2


class Run:
    """A model and everything that its training needs."""

    def __init__(self, method: steppe.Method, steps: int):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
        )
        base = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        self.opt = steppe.SharpnessAware(base, method, model=self.model)  # <- 1. wrap
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.opt, max_lr=0.1, total_steps=steps)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)  # so high that the first steps overflow
        self.parts = (self.model, self.opt, self.schedule, self.scaler)

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step on a batch."""
        before = self.opt.steps
        for _ in self.opt.passes(self.scaler):  # <- 2. loop
            for xb, yb in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
                with torch.autocast("cpu", torch.float16):
                    loss = F.cross_entropy(self.model(xb), yb) / MICRO_BATCHES
                self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()
        if self.opt.steps > before:  # not skipped
            self.schedule.step()

    def save(self) -> io.BytesIO:
        """A checkpoint; the method's memory is in the optimizer's state."""
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self.parts], file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        """Resume from a checkpoint."""
        for part, state in zip(self.parts, torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)

    @torch.no_grad()
    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """The share of correct predictions."""
        self.model.eval()
        return (self.model(x).argmax(1) == y).float().mean().item()


def train(method: steppe.Method, epochs: int, data: list[Tensor], tick) -> tuple[float, Run, float]:
    x, x_test, y, y_test = data
    started = time.perf_counter()
    steps_an_epoch = len(x) // 64
    run = Run(method, epochs * steps_an_epoch)
    for epoch in range(epochs):
        if epoch == epochs // 2:  # as if the machine had stopped here
            file, run = run.save(), Run(method, epochs * steps_an_epoch)
            run.load(file)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(64)[:steps_an_epoch]:
            run.step(x[batch], y[batch])
        tick()
    return run.accuracy(x_test, y_test), run, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the net is small: more threads are slower
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.5, random_state=0, stratify=labels)
    data = [torch.as_tensor(part) for part in split]
    data = [part.float() if part.is_floating_point() else part for part in data]
    table = Table("method", "test accuracy", "steps taken", "skipped (overflow)", "looks a step", "seconds")
    with Progress(transient=True) as progress:
        task = progress.add_task("training", total=len(METHODS) * args.epochs)
        for name, method in METHODS.items():
            accuracy, run, seconds = train(method, args.epochs, data, lambda: progress.advance(task))
            skipped = args.epochs * (len(data[0]) // 64) - run.opt.steps
            row = [f"{accuracy:.1%}", run.opt.steps, skipped, f"{method.cost:g}", f"{seconds:.1f}"]
            table.add_row(name, *(str(cell) for cell in row))
    Console().print(table)


if __name__ == "__main__":
    main()
