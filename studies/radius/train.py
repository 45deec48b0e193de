"""Train a population: regimes that share data, model and base, several settings of one method, several seeds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from candidates import GapRadius, PairRadius, SlopeRadius, TrialRadius
from nets import Net
from population import Base, Population
from regimes import Examples, Regime, examples, initial_weights, noisy
from torch import Tensor

from steppe import SAM
from steppe.lab.models import build

METHODS = {"sam": SAM, "slope": SlopeRadius, "pair": PairRadius, "gap": GapRadius, "trial": TrialRadius}
POINTS = 20  # along a training at which ρ and losses are kept


@dataclass(frozen=True)
class Job:
    """One population. `fixed` settings are shared; each of `settings` is tried with each seed in each regime."""

    regimes: tuple[Regime, ...]
    method: str
    settings: tuple[dict[str, float], ...]
    seeds: tuple[int, ...]
    fixed: dict[str, Any] = field(default_factory=dict)
    hold: int | None = None  # held-out examples; None: the regime's; −1: the test set itself, to see what is possible
    draw: int | None = None  # how many of them make a batch; None: all

    def text(self, setting: dict[str, float]) -> str:
        """The candidate in a line."""
        words = [f"{name}={value:g}" for name, value in setting.items()]
        words += [f"{name}={value}" for name, value in self.fixed.items()]
        if self.method != "sam":
            words += [f"hold={self.hold or self.regimes[0].hold}"] + ([f"draw={self.draw}"] if self.draw else [])
        return " ".join([self.method, *words])


@dataclass
class Members:
    """What differs between the members of a population."""

    seeds: list[int]
    labels: Tensor  # members x examples, those of the test set last
    trained_on: Tensor  # members x examples: rows
    held_out: Tensor  # members x K: rows, perhaps none


def members_of(job: Job, data: Examples, device: str) -> Members:
    """Regime-major, then setting, then seed."""
    count = len(data.targets)
    hold = 0 if job.method == "sam" else (job.hold or job.regimes[0].hold)
    seeds = [seed for _ in job.regimes for _ in job.settings for seed in job.seeds]
    by_regime = {
        (regime.name, seed): torch.cat(
            [
                noisy(data.targets, regime.noise, data.classes, seed),
                noisy(data.test_targets, regime.noise, data.classes, seed),
            ]
        )
        for regime in job.regimes
        for seed in job.seeds
    }
    labels = [by_regime[regime.name, seed] for regime in job.regimes for _ in job.settings for seed in job.seeds]
    rows = {
        seed: torch.randperm(count, generator=torch.Generator().manual_seed(2000 + seed)).to(device)
        for seed in job.seeds
    }
    order = torch.stack([rows[seed] for seed in seeds])
    if hold < 0:
        test = torch.arange(count, count + len(data.test_targets), device=device)
        return Members(seeds, torch.stack(labels), order, test.expand(len(seeds), -1))
    return Members(seeds, torch.stack(labels), order[:, hold:], order[:, :hold])


def batches(members: Members, size: int, steps: int, device: str) -> Iterator[Tensor]:
    """Rows, members x batch; each member goes through its examples in its seed's order, a new one every pass."""
    distinct = sorted(set(members.seeds))
    where = torch.tensor([distinct.index(seed) for seed in members.seeds], device=device)
    count, done, epoch = members.trained_on.shape[1], 0, 0
    while True:
        keys = [
            torch.rand(count, generator=torch.Generator(device).manual_seed(10_000 * seed + epoch), device=device)
            for seed in distinct
        ]
        order = torch.stack(keys).argsort(1)[where]
        for start in range(0, count - size + 1, size):
            yield members.trained_on.gather(1, order[:, start : start + size])
            done += 1
            if done == steps:
                return
        epoch += 1


def train(job: Job, root: Path | None, device: str, precision: str = "float32") -> list[dict[str, Any]]:
    """One record for each regime and setting, with a list over seeds in each."""
    first = job.regimes[0]
    data = examples(first.data, first.model, first.first, root, device)
    began = time.perf_counter()
    members = members_of(job, data, device)
    net = Net(build(first.model, data.shape, data.classes))  # type: ignore[arg-type]
    starts = {seed: initial_weights(first.model, data.shape, data.classes, seed) for seed in job.seeds}
    inputs = torch.cat([data.train, data.test]) if job.hold == -1 else data.train
    weights = torch.stack([starts[seed] for seed in members.seeds]).to(device)
    statistics = net.fresh_statistics(weights)

    def losses(w: Tensor, rows: Tensor, is_first: bool) -> Tensor:
        logits = net(w, inputs[rows], statistics if is_first else None, update=is_first)
        targets = members.labels.gather(1, rows)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)

    population = Population(weights, _method(job, len(members.seeds), device), _base(first), losses, precision)
    epoch = len(data.targets) // first.batch
    steps = epoch * first.marks[-1]
    marks = {epoch * mark: mark for mark in first.marks}
    points = {round(steps * (i + 1) / POINTS) for i in range(POINTS)}
    curves: dict[str, list[Tensor]] = {"rho": [], "train_loss": [], "held_loss": [], "rise": []}
    ended: dict[int, tuple[Tensor, Tensor]] = {}
    generator = torch.Generator(device).manual_seed(0)
    since, taken = torch.zeros(len(weights), device=device), 0
    for step, rows in enumerate(batches(members, first.batch, steps, device), 1):
        since += population.step(rows, _held(members.held_out, job.draw, generator))
        taken += 1
        if step in points:
            curves["train_loss"].append(since / taken)
            since, taken = torch.zeros_like(since), 0
            for name in ("rho", "held_loss", "rise"):
                source = population.memory if name == "rho" else population.metrics
                if name in source:
                    curves[name].append(source[name].clone())
        if step in marks:
            ended[marks[step]] = evaluate(net, population.weights, statistics, data)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return list(_records(job, curves, ended, population.looks / steps, seconds))


def _held(rows: Tensor, draw: int | None, generator: torch.Generator) -> Tensor:
    if draw is None or rows.shape[1] <= draw:
        return rows
    return rows[:, torch.randperm(rows.shape[1], generator=generator, device=rows.device)[:draw]]


def _method(job: Job, count: int, device: str) -> Any:
    names = job.settings[0].keys()
    numbers = {
        name: torch.tensor([s[name] for _ in job.regimes for s in job.settings for _ in job.seeds], device=device)
        for name in names
    }
    return METHODS[job.method](**numbers, **job.fixed)


def _base(regime: Regime) -> Base:
    return Base(regime.base, regime.lr)


@torch.no_grad()
def evaluate(net: Net, weights: Tensor, statistics: list[Tensor], data: Examples) -> tuple[Tensor, Tensor]:
    """Test accuracy in % and test loss of every member."""
    right = torch.zeros(len(weights), device=weights.device)
    loss = torch.zeros_like(right)
    for x, y in zip(data.test.split(250), data.test_targets.split(250), strict=True):
        logits = net(weights, x.expand(len(weights), *x.shape), statistics)
        right += (logits.argmax(2) == y).sum(1)
        every = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(weights)), reduction="none")
        loss += every.view(len(weights), -1).sum(1)
    return 100 * right / len(data.test_targets), loss / len(data.test_targets)


def _records(job: Job, curves: dict, ended: dict, looks: float, seconds: float) -> Iterator[dict[str, Any]]:
    n, each = len(job.seeds), len(job.settings)
    stacked = {name: torch.stack(values, 1).tolist() for name, values in curves.items() if values}
    for i, regime in enumerate(job.regimes):
        for j, setting in enumerate(job.settings):
            rows = slice((i * each + j) * n, (i * each + j + 1) * n)
            yield {
                "regime": regime.name,
                "candidate": job.text(setting),
                "seeds": list(job.seeds),
                "accuracy": {str(m): _short(a[rows].tolist(), 2) for m, (a, _) in ended.items()},
                "test_loss": {str(m): _short(b[rows].tolist(), 4) for m, (_, b) in ended.items()},
                **{name: [_short(curve, 4) for curve in values[rows]] for name, values in stacked.items()},
                "looks": round(looks, 3),
                "seconds": round(seconds * n / (n * each * len(job.regimes)), 3),
                "population": n * each * len(job.regimes),
            }


def _short(values: list[float], digits: int) -> list[float]:
    return [round(value, digits) for value in values]
