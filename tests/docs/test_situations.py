"""The study of fine-tuning and of data seen once: its records, what they chose, and what is said about them."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import fmean, stdev
from typing import Any

import pytest

import steppe
from helpers.pages import ROOT, making

regimes, frontier = making("regimes"), making("frontier")
STUDY = ROOT / "studies" / "situations"
FINDINGS = " ".join((STUDY / "findings.md").read_text("utf-8").split())
VERDICTS = {"fine-tuning": "no difference seen", "once": "worse"}
ARMS = {
    "fine-tuning": {"base", "base-2", "sam", "gapsam", "scratch"},
    "once": {"base", "base-2", "base-data", "sam", "sam-default"},
}


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (STUDY / "records" / f"{name}.jsonl").read_text("utf-8").splitlines()]


def chosen(name: str, stage: str) -> float:
    found = defaultdict(list)
    for line in lines(name):
        if line["stage"] == stage:
            found[float(line["arm"].partition("=")[2])].append(line["accuracy"][-1])
    assert len({len(values) for values in found.values()}) == 1  # as many seeds for each
    return max(found, key=lambda value: fmean(found[value]))


def values(name: str, arm: str, kind: str = "accuracy") -> list[float]:
    return [run[kind][-1] for run in regimes.runs_in(name)[arm]]


def shown(numbers: list[float]) -> str:
    return f"{fmean(numbers):.1f} ± {stdev(numbers) / len(numbers) ** 0.5:.1f}"


@pytest.mark.parametrize("name", VERDICTS)
def test_every_arm_has_the_same_ten_seeds(name):
    runs = regimes.runs_in(name)
    assert set(runs) == ARMS[name]
    assert {tuple(run["seed"] for run in some) for some in runs.values()} == {tuple(range(10, 20))}
    assert {run["status"] for some in runs.values() for run in some} == {"done"}


@pytest.mark.parametrize("name", VERDICTS)
def test_learning_rate_and_radius_are_those_that_held_out_images_chose(name):
    runs = regimes.runs_in(name)
    assert {run["lr"] for some in runs.values() for run in some} == {chosen(name, "lr")}
    assert regimes.radius_in(name) == f"ρ = {chosen(name, 'radius'):g}"
    choosing = {line["seed"] for line in lines(name) if line["stage"] in ("lr", "radius")}
    assert choosing.isdisjoint(range(10, 20))


@pytest.mark.parametrize("name", VERDICTS)
def test_no_baseline_costs_more_than_sam(name):
    runs = regimes.runs_in(name)
    cost = {arm: max(run["gradients"] for run in some) for arm, some in runs.items()}
    assert all(cost[arm] <= cost["sam"] for arm in regimes.FROM_SITUATIONS[name][2])


@pytest.mark.parametrize("name", VERDICTS)
def test_the_table_has_the_row(name):
    situation, where, one, *_ = regimes.rows()[name]
    assert (one.n, one.verdict) == (10, VERDICTS[name])
    assert f"| {regimes.situation(situation)} | {where}; n = 10 | " in regimes.markdown()
    assert f"{frontier.points_text(one)} points" in FINDINGS


def test_a_base_is_stopped_early_where_its_mean_is_best():
    runs = [
        {"accuracy": [1.0, 3.0, 2.0], "averaged": [2.0, 2.0, 5.0]},
        {"accuracy": [1.0, 4.0, 6.0], "averaged": [3.0] * 3},
    ]
    assert regimes.forms_of("Adam", runs) == {
        "Adam": [2.0, 6.0], "Adam, stopped early": [3.0, 4.0],
        "Adam, EMA 0.99": [5.0, 3.0], "Adam, EMA 0.99, stopped early": [2.0, 3.0],
    }  # fmt: skip


def test_the_findings_say_what_the_records_say():
    tune, once = ({arm: shown(values(name, arm)) for arm in ARMS[name]} for name in ("fine-tuning", "once"))
    assert f"| Adam | 1 | {tune['base']} | {once['base']} |" in FINDINGS
    assert f"twice as often | 2 | {tune['base-2']} | {once['base-2']} |" in FINDINGS
    assert f"twice as many images | 2 | | {once['base-data']} |" in FINDINGS
    assert f"chosen radius | 2 | {tune['sam']} | {once['sam']} |" in FINDINGS
    assert f"| 2 | the same | {once['sam-default']} |" in FINDINGS and regimes.radius_in("fine-tuning") == "ρ = 0.05"
    assert f"| GapSAM | 2.1 | {tune['gapsam']} | |" in FINDINGS and steppe.SAM().rho == 0.05
    assert f"random weights | 1 | {tune['scratch']} | |" in FINDINGS
    averaged = [shown(values(name, "base", "averaged")) for name in ("fine-tuning", "once")]
    assert "| its average | 1 | {} | {} |".format(*averaged) in FINDINGS
    for arm, cost in (("base", 1), ("base-2", 2)):
        stopped = regimes.forms_of("", regimes.runs_in("fine-tuning")[arm])[", EMA 0.99, stopped early"]
        assert f"stopped early | {cost} | {shown(stopped)} | |" in FINDINGS


def test_the_findings_have_the_other_differences():
    gap = regimes.from_situations("fine-tuning", regimes.FROM_SITUATIONS["fine-tuning"][2], "gapsam")
    alike = regimes.hardest_rival(values("once", "sam"), {"Adam": values("once", "base")})
    assert f"GapSAM is {frontier.points_text(gap)} from it" in FINDINGS
    assert f"{frontier.points_text(alike)} points from Adam on the same images" in FINDINGS
