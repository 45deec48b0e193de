"""Train a population: regimes that share data, model and base, several settings of one method, several seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from before import BeforeRadius, held_in_before
from candidates import GapRadius, PairRadius, SlopeRadius, TrialRadius
from nets import Net
from population import Base, Population, Replayed
from regimes import Examples, Regime, examples, initial_weights, noisy
from relay import EarlyRadius, RelayRadius, held_in_early, held_in_relay
from scaled import ScaledRadius, WindowRadius
from torch import Tensor

from steppe import MSAM, SAM, Plain
from steppe.lab.models import build

FIXED = {"plain": Plain, "sam": SAM, "msam": MSAM}  # these hold nothing out
METHODS = FIXED | {
    "slope": SlopeRadius,
    "pair": PairRadius,
    "gap": GapRadius,
    "trial": TrialRadius,
    "scaled": ScaledRadius,
    "window": WindowRadius,
    "relay": RelayRadius,
    "early": EarlyRadius,
    "before": BeforeRadius,
}
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
    scheme: str = "fixed"  # which are held out in a pass: see `held_in`
    release: float = 0.0  # the last share of training, in which none is held out and ρ stays as it is
    average: float | None = None  # evaluate an exponential moving average of the weights too, with this decay

    def text(self, setting: dict[str, float]) -> str:
        """The candidate in a line."""
        words = [f"{name}={value:g}" for name, value in setting.items()]
        words += [f"{name}={value}" for name, value in self.fixed.items()]
        if self.method not in FIXED:
            words += [f"hold={self.hold or self.regimes[0].hold}"] + ([f"draw={self.draw}"] if self.draw else [])
            words += [f"scheme={self.scheme}"] if self.scheme != "fixed" else []
            words += [f"release={self.release:g}"] if self.release else []
        return " ".join([self.method, *words])


@dataclass
class Members:
    """What differs between the members of a population."""

    seeds: list[int]
    labels: Tensor  # members x examples, those of the test set last
    order: Tensor  # members x training examples: rows, by seed; the first are held out first
    held_out: Tensor  # members x test examples: rows


def members_of(job: Job, data: Examples, device: str) -> Members:
    """Regime-major, then setting, then seed."""
    count = len(data.targets)
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
    test = torch.arange(count, count + len(data.test_targets), device=device)
    return Members(seeds, torch.stack(labels), order, test.expand(len(seeds), -1))


def held_in(scheme: str, order: Tensor, hold: int, epoch: int) -> tuple[Tensor, Tensor]:
    """The rows that are held out in a pass (from 0), and those that are trained on.

    "fixed": the first `hold`, always. "shrink": they are released little by little and never taken back, 1/(pass + 1)
    of them stay, at least a tenth. "rotate-W": others every W passes, so that all are trained on. "double": others in
    passes 1, 2, 4, 8 … "rest": the same, and ρ stays as it is in the first half of each such window. "log-W": others W
    times as often as that. "previous": none; the auxiliary batch is the one
    that was trained on in the step before.
    """
    if scheme == "before":  # in turns; those who are next are looked at in the pass before
        return held_in_before(order, hold, epoch)
    if scheme == "early":
        return held_in_early(order, hold, epoch)
    if scheme == "relay":  # two groups, of which one is looked at
        return held_in_relay(order, hold, epoch)
    if scheme == "previous":
        return order[:, :0], order
    if scheme == "shrink":
        hold = max(round(hold / (epoch + 1)), hold // 10, 4)
    turn = 0
    if scheme.startswith("rotate"):
        turn = epoch // int(scheme.split("-")[1])
    elif scheme in ("double", "rest"):
        turn = (epoch + 1).bit_length() - 1
    elif scheme.startswith("log"):
        turn = int(int(scheme.split("-")[1]) * math.log2(epoch + 1))
    order = order.roll(-turn * hold, 1)
    return order[:, :hold], order[:, hold:]


def batches(job: Job, members: Members, hold: int, steps: int, device: str) -> Iterator[tuple[Tensor, Any]]:
    """Rows, members x batch, and held-out rows, or None where ρ stays; by passes, in the order of a member's seed."""
    size = job.regimes[0].batch
    distinct = sorted(set(members.seeds))
    where = torch.tensor([distinct.index(seed) for seed in members.seeds], device=device)
    done, epoch = 0, 0
    generator = torch.Generator(device).manual_seed(0)
    previous = None
    while True:
        resting = job.scheme == "rest" and 2 * (epoch + 1) < 3 * 2 ** ((epoch + 1).bit_length() - 1) and epoch > 1
        released = done >= (1 - job.release) * steps and job.release > 0
        if hold < 0 or released:
            held, trained_on = members.held_out, members.order
        else:
            held, trained_on = held_in(job.scheme, members.order, hold, epoch)
        count = trained_on.shape[1]
        keys = [
            torch.rand(count, generator=torch.Generator(device).manual_seed(10_000 * seed + epoch), device=device)
            for seed in distinct
        ]
        order = torch.stack(keys).argsort(1)[where]
        for start in range(0, count - size + 1, size):
            rows = trained_on.gather(1, order[:, start : start + size])
            other = (rows if previous is None else previous) if job.scheme == "previous" else held
            yield rows, None if resting or released else _drawn(other, job.draw, generator)
            previous = rows
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

    population = Population(
        weights, _method(job, len(members.seeds), device), _base(first), losses, precision, job.average
    )
    stepper = Replayed(population) if device == "cuda" else population
    epoch = len(data.targets) // first.batch
    steps = epoch * first.marks[-1]
    marks = {epoch * mark: mark for mark in first.marks}
    points = {round(steps * (i + 1) / POINTS) for i in range(POINTS)}
    curves: dict[str, list[Tensor]] = {"rho": [], "train_loss": [], "held_loss": [], "rise": []}
    ended: dict[str, tuple[Tensor, Tensor]] = {}
    hold = 0 if job.method in FIXED else (job.hold or first.hold)
    since, taken = torch.zeros(len(weights), device=device), 0
    for step, (rows, held) in enumerate(batches(job, members, hold, steps, device), 1):
        since += stepper.step(rows, held)
        taken += 1
        if step in points:
            curves["train_loss"].append(since / taken)
            since, taken = torch.zeros_like(since), 0
            for name, kept in (("rho", "rho"), ("held_loss", "mean.held"), ("rise", "mean.rise")):
                if kept in population.memory:
                    weight = population.memory["weight"] if name != "rho" else 1
                    curves[name].append(population.memory[kept] / weight)
        if step in marks:
            ended[str(marks[step])] = evaluate(net, population.weights, statistics, data)
            if job.average is not None:
                again = settled_statistics(net, population.averaged, data, first.batch)
                ended[f"{marks[step]} averaged"] = evaluate(net, population.averaged, again, data)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return list(_records(job, curves, ended, population.looks / steps, seconds))


def _drawn(rows: Tensor, draw: int | None, generator: torch.Generator) -> Tensor:
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
def settled_statistics(net: Net, weights: Tensor, data: Examples, batch: int) -> list[Tensor]:
    """BatchNorm's statistics for weights that no forward pass has seen: those of 100 batches of training examples."""
    statistics = net.fresh_statistics(weights)
    for x in data.train.split(batch)[:100]:
        net(weights, x.expand(len(weights), *x.shape), statistics, update=True)
    return statistics


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
                "accuracy": {m: _short(a[rows].tolist(), 2) for m, (a, _) in ended.items()},
                "test_loss": {m: _short(b[rows].tolist(), 4) for m, (_, b) in ended.items()},
                **{name: [_short(curve, 4) for curve in values[rows]] for name, values in stacked.items()},
                "looks": round(looks, 3),
                "seconds": round(seconds * n / (n * each * len(job.regimes)), 3),
                "population": n * each * len(job.regimes),
            }


def _short(values: list[float], digits: int) -> list[float]:
    return [round(value, digits) for value in values]
