"""What SAM gains where: the rows of the page that helps to choose, from the map where it has them.

The others are from the records of a comparison and of a study. Each row compares SAM, with a radius that was chosen on
held-out data or on other seeds, with every base at no more than its cost that was run: trained up to twice as long,
stopped early, averaged. The one that is hardest to beat is shown.
"""

from __future__ import annotations

import json
from functools import cache
from statistics import mean, stdev
from typing import Any

from . import ROOT, first_picture, frontier

STUDY = ROOT / "studies" / "radius" / "records"
NOT_YET = "not measured yet"
FROM_MAP = {
    "digits-0.6": ("I have noisy labels", "digits-60"),
    "digits-0": ("My labels are clean", "digits-clean"),
    "cifar-40": ("I have noisy labels", "cifar-40"),
    "cifar-clean": ("I train for many epochs: the net fits all it sees", "cifar-clean"),
    "cifar-tenth": ("I have little data", "cifar-tenth"),
    "resnet": ("My labels are clean", "resnet-augmented"),
    "vit": ("My labels are clean", "vit"),
    "fast": ("My labels are clean", "fast"),
}  # by the name of a row: the situation and the regime


@cache
def study(name: str) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Test accuracies in percent by regime and candidate, then by length, in the order of the seeds."""
    lines = (json.loads(line) for line in (STUDY / f"{name}.jsonl").read_text("utf-8").splitlines())
    return {(one["regime"], one["candidate"]): one["accuracy"] for one in lines}


def hardest_rival(mine: list[float], rivals: dict[str, list[float]]) -> Any:
    """SAM less the rival that is hardest to beat, in shares, with an interval for this row alone."""
    from steppe.lab.statistics import difference_of, judged
    from steppe.lab.statistics.rivals import hardest

    def shares(values: list[float]) -> dict[Any, float]:
        return {seed: value / 100 for seed, value in enumerate(values)}

    found = [difference_of(shares(mine), shares(values), label) for label, values in rivals.items()]
    known = [one for one in found if one is not None]
    return hardest(judged(known, among=[len(known)] * len(known), family=1), larger=True)


@cache
def rows() -> dict[str, tuple[str, str, Any]]:
    """For each regime by a short name: the situation, what was run, and the difference."""
    made: dict[str, tuple[str, str, Any]] = {}
    for noise, name in first_picture.PANELS.items():
        said = "I have noisy labels" if noise else "My labels are clean"
        made[f"digits-{noise:g}"] = (
            said, f"digits, {name}, SGD, 40 epochs, ρ = 0.1", first_picture.rows(noise)["SAM rho=0.1"].equal_cost,
        )  # fmt: skip
    lengths = {
        "20": "20 epochs",
        "40": "40 epochs",
        "20 averaged": "20 epochs, averaged",
        "40 averaged": "40, averaged",
    }
    for kind, name in (("40", "40 % wrong labels"), ("clean", "clean labels")):
        plain = study("cifar-fresh")[f"cifar-{kind}", "plain"]
        rivals = {f"Adam, {said}": plain[length] for length, said in lengths.items()}
        mine = study("cifar-fresh")[f"cifar-{kind}", "sam rho=1"]["20"]
        said = "I have noisy labels" if kind == "40" else "I train for many epochs: the net fits all it sees"
        made[f"cifar-{kind}"] = (
            said, f"CIFAR-10, {name}, a small convolutional net, Adam, 20 epochs, ρ = 1", hardest_rival(mine, rivals),
        )  # fmt: skip
    tenth = study("digits-table")
    mine = tenth["digits-tenth-sgd", "sam rho=0.1"]["20"]
    plain = tenth["digits-tenth-sgd", "sam rho=0"]
    rivals = {f"SGD, {length} epochs": plain[length] for length in ("20", "40")}
    made["tenth"] = (
        "I have little data",
        "143 digits, clean labels, SGD, 20 epochs, ρ = 0.1",
        hardest_rival(mine, rivals),
    )
    for key, (situation, name) in FROM_MAP.items():
        if (found := from_map(name)) is not None:
            made[key] = (situation, *found)
    return made


def from_map(name: str) -> tuple[str, Any] | None:
    """What the map has for SAM in a regime, once it has an interval."""
    table = frontier.table_of(name)
    sam = table and table.row("sam")
    if not sam or sam.gain is None or sam.gain.mean.low is None:
        return None
    return f"{table.regime.title}, {sam.label.partition(', ')[2]}", sam.gain


def on_cifar() -> str:
    """README's sentence about CIFAR-10: means, with standard errors, of SAM, GapSAM and Adam's best rival."""
    clean, noisy = (_three(kind) for kind in ("clean", "40"))
    return (
        f"On CIFAR-10, with a small convolutional net and Adam, SAM with ρ = 1 has {clean[0]} %, "
        f"[GapSAM](docs/radius.md), which sets its own radius, {clean[1]} % (n = 6), and the moving average of Adam's "
        f"weights, stopped at its best epoch on the test set, {clean[2]}. With 40 % wrong labels: {noisy[0]}, "
        f"{noisy[1]} and {noisy[2]}."
    )


def _three(kind: str) -> tuple[str, str, str]:
    found = {candidate: one for (regime, candidate), one in study("cifar-fresh").items() if regime == f"cifar-{kind}"}
    (gap,) = (one["20"] for candidate, one in found.items() if candidate.startswith("gap"))
    sam, stopped = found["sam rho=1"]["20"], stopped_early(kind)
    shown = [f"{mean(v):.1f} ± {stdev(v) / len(v) ** 0.5:.1f}" for v in (sam, gap)]
    return shown[0], shown[1], f"{mean(stopped):.1f} % (n = {len(stopped)})"


def stopped_early(kind: str) -> list[float]:
    """Test accuracies of the average of Adam's weights at its best epoch, by seed: chosen on the test set."""
    runs = json.loads((STUDY.parent / "early_stopping.json").read_text("utf-8"))["runs"]
    return [max(run["averaged"]) for run in runs if bool(run["label_noise"]) is (kind != "clean")]


def markdown() -> str:
    """The table, in the order of the situations; what was not measured says so."""
    lines = [
        "| situation | measured on | SAM less the best base at no more cost, points | that base | n |",
        "|---" * 5 + "|",
    ]
    for situation, where, one in sorted(rows().values(), key=lambda row: ORDER.index(row[0])):
        word = "" if one.verdict in ("better", "worse") else f" ({one.verdict})"
        gain = frontier.points_text(one)
        shown = f"**{gain}**" if not word else gain + word
        lines.append(f"| {situation} | {where} | {shown} | {one.against} | {one.n} |")
    known = {situation for situation, _, _ in rows().values()}
    lines += [f"| {situation} | {NOT_YET} | | | |" for situation in ORDER if situation not in known]
    note = (
        "95 % intervals; bold ones leave out zero. The radius of each row was chosen on held-out data or other seeds. "
        "[The map](frontier.md) has the other methods and regimes."
    )
    return "\n".join([*lines, "", note if from_map("cifar-40") else f"{note} {_not_stopped()}"])


def _not_stopped() -> str:
    """What stopping early does on CIFAR-10, as long as the rows do not say it."""
    clean, noisy = _three("clean"), _three("40")
    return (
        "In the rows with Adam the bases were not stopped early. The average of its weights, stopped at its best epoch "
        f"on the test set, has {noisy[2]} with wrong labels and {clean[2]} with clean ones, where SAM has {noisy[0]} "
        f"and {clean[0]} %, and GapSAM {noisy[1]} and {clean[1]} %: **with wrong labels stop early first**; SAM's gain "
        "is mostly that."
    )


ORDER = (
    "I have noisy labels",
    "I train for many epochs: the net fits all it sees",
    "I have little data",
    "My labels are clean",
    "I have a big data set that is seen once",
    "I fine-tune",
)
