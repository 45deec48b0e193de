"""What a user could do instead of a method, at no more than its cost.

These rivals are the base trained longer, up to the method's cost; the base stopped early; and other variants of the
base that were run (role "rival"). A method is compared with each of them, and shown beside the one that is hardest to
beat. Choosing that rival does not bias the test: better than the best rival means better than every one, so the method
has to beat each at the level of the table. (Choosing the best rival by the other seeds does not work: among many
similar rivals a lucky one is chosen for most seeds, and 10 % of tables are wrong instead of 5 %.)
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..records import number, seed_of
from .family import Difference, difference_of
from .groups import EQUAL, LENGTH, METHOD, Group, average, larger_is_better, same_recipe

STOPS = 10  # early stopping is considered after each tenth of the epochs


@dataclass(frozen=True)
class Rival:
    """A base, or the base stopped early: its cost and its result by seed."""

    label: str
    gradients: float
    values: Mapping[Hashable, float]


def against_rivals(group: Group, bases: Sequence[Group], metric: str, cost: float | None = None) -> list[Difference]:
    """The method minus each rival at no more than its cost; empty if no base was trained for as long as it costs.

    `cost` is the number of gradients that a rival may take; by default that of the method.
    """
    mine = average(group, "gradients") if cost is None else cost
    alike = [g for g in bases if g.role == "rival" or same_recipe(group, g, METHOD + LENGTH)] or list(bases)
    sound = [g for g in alike if not g.diverged and average(g, "gradients")]
    if not mine or not any(abs((average(g, "gradients") or 0.0) / mine - 1) <= EQUAL for g in sound):
        return []
    limit = mine * (1 + EQUAL)
    rivals = [rival for g in sound for rival in rivals_of(g, metric, limit)]
    found = [difference_of(group.finished(metric), rival.values, rival.label) for rival in rivals]
    return [one for one in found if one is not None]


def rivals_of(base: Group, metric: str, limit: float) -> list[Rival]:
    """The base at the end of training, and stopped early, if they take no more gradients than the limit.

    It is stopped after the tenth of its epochs that is best on all seeds, which favours the base.
    """
    ended = Rival(base.label, average(base, "gradients") or 0.0, base.finished(metric))
    by_epoch: dict[int, dict[Hashable, tuple[float, float]]] = {}
    for record in base.done:
        epochs = record.get("epochs")
        for epoch in _stops(epochs) if isinstance(epochs, list) else []:  # not in a paper's kept results
            value, cost = number(epoch.get(metric)), number(epoch.get("gradients"))
            if value is not None and cost is not None:
                by_epoch.setdefault(epoch["epoch"], {})[seed_of(record)] = value, cost
    stopped = []
    for seen in by_epoch.values():
        cost = math.fsum(cost for _, cost in seen.values()) / len(seen)
        if len(seen) == len(base.done) and cost <= limit:
            values = {seed: value for seed, (value, _) in seen.items()}
            stopped.append(Rival(f"{base.label}, stopped early", cost, values))
    sign = 1 if larger_is_better(metric) else -1
    best = max(stopped, key=lambda rival: sign * math.fsum(rival.values.values()), default=None)
    return [one for one in (ended, best) if one is not None and one.values and one.gradients <= limit]


def _stops(epochs: list[Any]) -> list[Any]:
    """The epochs after which a run may be stopped, without the last."""
    places = sorted({round(k * len(epochs) / STOPS) for k in range(1, STOPS)} - {0, len(epochs)})
    return [epochs[place - 1] for place in places]


def hardest(differences: Sequence[Difference], larger: bool) -> Difference | None:
    """The difference to the rival that is hardest to beat.

    Rivals that the method is not better than come first. Among them it is the one whose interval reaches furthest to
    the wrong side; without an interval (few seeds, or the same difference in every seed) its mean counts.
    """

    def ease(one: Difference) -> tuple[bool, float, float]:
        end = one.mean.low if larger else one.mean.high
        sign = 1 if larger else -1
        return one.verdict == "better", sign * (one.mean.value if end is None else end), sign * one.mean.value

    return min(differences, key=ease, default=None)
