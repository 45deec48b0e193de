"""The best base at no more than a method's cost, chosen without looking at the seed that it is compared on.

What a user could do instead of the method belongs to the base: training longer, up to the method's cost, stopping
early, and other rivals that were run (role "rival"). The best of several, chosen on the same numbers that judge it,
would look better than it is. So each seed is compared with the rival that is best on the *other* seeds. Of many rivals
that are alike, the one that seems best is often a lucky one. So it has to be ahead of the base itself by more than one
standard error; otherwise the base is the rival.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..records import number, seed_of
from .family import Difference, difference_of
from .groups import EQUAL, LENGTH, METHOD, Group, average, larger_is_better, same_recipe
from .means import CONFIDENCE

STOPS = 10  # a run may be stopped after each tenth of its epochs


@dataclass(frozen=True)
class Rival:
    """A base, or the base stopped after some epoch: its cost and its result by seed."""

    label: str
    gradients: float
    values: Mapping[Hashable, float]
    plain: bool = False  # the base itself, as it was asked for


def against_rivals(
    group: Group, bases: Sequence[Group], metric: str, confidence: float = CONFIDENCE
) -> Difference | None:
    """The method minus the best rival at no more than its cost; None if no base was trained for as long as it costs."""
    mine = average(group, "gradients")
    alike = [g for g in bases if g.role == "rival" or same_recipe(group, g, METHOD + LENGTH)] or list(bases)
    sound = [g for g in alike if not g.diverged and average(g, "gradients")]
    if not mine or not any(abs((average(g, "gradients") or 0.0) / mine - 1) <= EQUAL for g in sound):
        return None
    limit = mine * (1 + EQUAL)
    rivals = [rival for g in sound for rival in _rivals(g, metric) if rival.gradients <= limit]
    own = group.finished(metric)
    chosen = {seed: best for seed in own if (best := _best_elsewhere(rivals, seed, larger_is_better(metric)))}
    if not chosen:
        return None
    theirs = {seed: rival.values[seed] for seed, rival in chosen.items()}
    return difference_of(own, theirs, _name([rival.label for rival in chosen.values()]), confidence)


def _rivals(base: Group, metric: str) -> list[Rival]:
    """The base at its end, and stopped after each tenth of its epochs."""
    found = [Rival(base.label, average(base, "gradients") or 0.0, base.finished(metric), base.role == "base")]
    if not found[0].values:
        return []
    by_epoch: dict[int, dict[Hashable, tuple[float, float]]] = {}
    for record in base.done:
        epochs = record.get("epochs")
        for epoch in _stops(epochs) if isinstance(epochs, list) else []:  # a paper's kept results have no such list
            value, cost = number(epoch.get(metric)), number(epoch.get("gradients"))
            if value is not None and cost is not None:
                by_epoch.setdefault(epoch["epoch"], {})[seed_of(record)] = value, cost
    for seen in by_epoch.values():
        if len(seen) == len(base.done):
            cost = math.fsum(cost for _, cost in seen.values()) / len(seen)
            found.append(
                Rival(f"{base.label}, stopped early", cost, {seed: value for seed, (value, _) in seen.items()})
            )
    return found


def _stops(epochs: list[Any]) -> list[Any]:
    """The epochs after which a run may be stopped, without the last."""
    places = sorted({round(k * len(epochs) / STOPS) for k in range(1, STOPS)} - {0, len(epochs)})
    return [epochs[place - 1] for place in places]


def _best_elsewhere(rivals: Sequence[Rival], seed: Hashable, larger: bool) -> Rival | None:
    """The rival with the best mean over the other seeds; the base itself if that is not clearly ahead of it.

    With one seed there are no others: then it is the one that costs most.
    """
    having = [rival for rival in rivals if seed in rival.values]
    bases = [rival for rival in having if rival.plain]

    def elsewhere(rival: Rival) -> dict[Hashable, float]:
        return {other: value for other, value in rival.values.items() if other != seed}

    def place(rival: Rival) -> tuple[float, float]:
        others = elsewhere(rival)
        mean = math.fsum(others.values()) / len(others) if others else 0.0
        return (mean if larger else -mean), rival.gradients

    best = max(having, key=place, default=None)
    if best is None or not bases or best in bases or not elsewhere(best):
        return best
    ahead = difference_of(elsewhere(best), elsewhere(bases[0]), bases[0].label)
    sure = ahead is not None and abs(ahead.mean.value) > (ahead.mean.error or 0.0)
    return best if sure else bases[0]


def _name(labels: Sequence[str]) -> str:
    """The rival that was chosen most often, and in how many seeds where it was not chosen in all."""
    (label, times), *rest = Counter(labels).most_common()
    return f"{label} ({times} of {len(labels)} seeds)" if rest else label
