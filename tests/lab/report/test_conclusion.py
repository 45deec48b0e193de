"""The sentence at the top, and the warnings below it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("scipy")

from helpers.report_records import comparison, diverged, record
from steppe.lab.report.conclusion import conclusion, warnings
from steppe.lab.statistics import summarise

SEEDS = (0.0, 0.004, 0.001, 0.003, 0.002, 0.005, 0.0035, 0.0015)


def said(records: list[Any]) -> str:
    return conclusion([summarise(records)], "test_accuracy")


def runs(label: str, start: float, slope: float = 1.0, **rest: Any) -> list[Any]:
    """A run for each seed: its accuracy is `start` and the seed's own part times `slope`."""
    return [record(label, start + slope * bump, seed, **rest) for seed, bump in enumerate(SEEDS)]


def pair(base: float, longer: float) -> list[Any]:
    found = runs("SGD", base, role="base") + runs("SGD, 2x longer", longer, 0.9, role="equal-cost", epochs=8)
    return [{**one, "epochs": []} for one in found]


def test_worth_its_cost():
    text = said(pair(0.90, 0.91) + runs("SAM", 0.95, 1.1, cost=2.0) + runs("ASAM", 0.94, 1.2, cost=2.0))
    assert text.startswith("SAM is worth its cost: +4.05 points [+")
    assert text.endswith("] over the best base at no more cost (SGD, 2x longer), n = 8; also worth it: ASAM.")


def test_better_but_not_worth_it():
    text = said(pair(0.90, 0.96) + runs("SAM", 0.95, 1.1, cost=2.0))
    assert text.startswith("SAM is better than SGD: +5.02 points")
    assert "against the best base at no more cost (SGD, 2x longer) −0.95 points" in text


def test_conclusions_without_a_gain():
    same = [record("SAM", 0.90 + bump, (seed + 3) % 8) for seed, bump in enumerate(SEEDS)]
    text = said(runs("SGD", 0.90, role="base") + same)
    assert text.startswith("no method is told apart from SGD; the largest difference is SAM's, 0.00 points [−0.")
    assert said(runs("SGD", 0.90, role="base") + runs("SAM", 0.80, 1.1)) == "every method is worse than SGD (n = 8)."
    mixed = said(runs("SGD", 0.90, role="base") + runs("SAM", 0.92, 1.1) + runs("GAM", 0.8, 1.1))
    assert mixed.startswith("SAM is") and mixed.endswith("; worse than SGD: GAM.")
    harm = said(runs("SGD", 0.90, role="base") + same + runs("GAM", 0.8, 1.1))
    assert harm.startswith(
        "no method is shown to be better than SGD; of those not told apart the largest difference is SAM's, 0.00 points"
    )
    assert harm.endswith("; worse than SGD: GAM.")
    few = said([record("SGD", 0.9, 0, role="base"), record("SAM", 0.95, 0)])
    assert few == "nothing can be said with fewer than 3 seeds."
    lost = said([record("SGD", 0.9, seed, role="base") for seed in range(3)] + [diverged("SAM", s) for s in range(3)])
    assert lost == "nothing can be said: every method diverged."


def test_each_problem_has_its_sentence():
    one, two = summarise(comparison(3)), summarise([record("SGD", 0.9, 0, role="base", data="mnist")])
    text = conclusion([one, two], "test_accuracy")
    assert text.startswith("On digits, digits-mlp: SAM rho=0.1 is worth its cost")
    assert text.endswith(" On mnist, digits-mlp: only the base was run.")


def test_a_method_that_declares_too_small_a_cost():
    """It was left out of the comparison at equal cost without a word."""
    made = pair(0.90, 0.90) + runs("SAM", 0.93, 1.1, cost=3.0)
    assert not any("declares" in one for one in warnings(summarise(made), "test_accuracy"))
    for one in made:
        if one["label"] == "SAM":
            one["method"]["cost"] = 1.0
    (said_so,) = (one for one in warnings(summarise(made), "test_accuracy") if "declares" in one)
    assert said_so.startswith("SAM declares cost = 1 but took 3 gradients a step, so no base of its cost was trained")


def test_warnings_are_words():
    rows = summarise(pair(0.90, 0.93) + runs("SAM", 0.95, 1.1, cost=2.0))
    short, small = warnings(rows, "test_accuracy")
    assert short.startswith(
        "Training is too short to compare: SGD, 2x longer is still better than the base, +2.98 points"
    )
    assert small == "Only 360 test examples: one example is 0.28 points."
    assert warnings(summarise(pair(0.90, 0.93), "test_loss"), "test_loss") == []  # all the same
    falling = warnings(summarise(runs("SGD", 0.9, role="base")), "test_accuracy")  # 2/3 after epoch 3, 2/4 at the end
    assert falling[0].endswith("SGD's test loss still falls in the last quarter (0.667 to 0.5).")
    lost = warnings(summarise([record("SGD", 0.9, 0, role="base"), diverged("SAM", 0)]), "test_accuracy")
    assert "1 of 2 runs diverged. Means are over the other runs; the reasons are below the table." in lost
