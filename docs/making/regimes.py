"""What to do in which situation, and what SAM gained there: the first table of the page that helps to choose.

Rows come from the map where it has the regime, else from the records of a comparison or of a study. Each compares SAM,
with a radius that was chosen on held-out data or on other seeds, with every baseline at no more than its cost that was
run: the base trained up to twice as long, stopped early, averaged. The strongest one is shown.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from . import ROOT, first_picture, frontier

STUDY = ROOT / "studies" / "radius" / "records"
NOT_YET = "not measured"
NOISY, FITS, SMALL = "My labels are noisy", "I train until the net fits all training data", "My data set is small"
CLEAN, ONCE = "My labels are clean, and training hardly overfits", "Each example is seen once, as in pretraining"
TUNE = "I fine-tune a pretrained model"
ADVICE = {
    NOISY: "Stop early and average the weights first: both cost no gradients. Then try GapSAM, SAM or ASAM.",
    FITS: "Try SAM, with a tuned radius.",
    SMALL: "With thousands of examples: try SAM, with a tuned radius. With a few hundred: train longer instead.",
    CLEAN: "Keep the base: no gain, or a small loss.",
    ONCE: "No advice; run a comparison.",
    TUNE: "No advice; run a comparison.",
}  # by situation, in the order of the table
FROM_MAP = {
    "digits-0.6": (NOISY, "digits-60"),
    "digits-0": (CLEAN, "digits-clean"),
    "cifar-40": (NOISY, "cifar-40"),
    "cifar-clean": (FITS, "cifar-clean"),
    "cifar-tenth": (SMALL, "cifar-tenth"),
    "resnet-plain": (FITS, "resnet-plain"),
    "resnet": (CLEAN, "resnet-augmented"),
    "vit": (CLEAN, "vit"),
    "fast": (CLEAN, "fast"),
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
        said = NOISY if noise else CLEAN
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
        said = NOISY if kind == "40" else FITS
        made[f"cifar-{kind}"] = (
            said, f"CIFAR-10, {name}, a small convolutional net, Adam, 20 epochs, ρ = 1", hardest_rival(mine, rivals),
        )  # fmt: skip
    tenth = study("digits-table")
    mine = tenth["digits-tenth-sgd", "sam rho=0.1"]["20"]
    plain = tenth["digits-tenth-sgd", "sam rho=0"]
    rivals = {f"SGD, {length} epochs": plain[length] for length in ("20", "40")}
    made["tenth"] = (
        SMALL,
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


def markdown() -> str:
    """The table, in the order of the situations; what was not measured says so."""
    lines = [
        "| situation | advice | measured on | SAM minus the best baseline, points | that baseline |",
        "|---" * 5 + "|",
    ]
    order = list(ADVICE)
    before = ""
    for situation, where, one in sorted(rows().values(), key=lambda row: order.index(row[0])):
        word = "" if one.verdict in ("better", "worse") else f" ({one.verdict})"
        gain = frontier.points_text(one)
        shown = f"**{gain}**" if not word else gain + word
        said = " | " if situation == before else f"{situation} | {ADVICE[situation]}"
        lines.append(f"| {said} | {where}; n = {one.n} | {shown} | {one.against} |")
        before = situation
    known = {situation for situation, _, _ in rows().values()}
    lines += [f"| {situation} | {ADVICE[situation]} | {NOT_YET} | | |" for situation in order if situation not in known]
    note = (
        "Test accuracy, with 95 % confidence intervals; bold ones exclude zero. The radius of each row was chosen on "
        "held-out data or on other seeds. [The map](frontier.md) has more methods and regimes."
    )
    return "\n".join([*lines, "", note, "", without_a_radius()])


def without_a_radius() -> str:
    """What GapSAM, which has no radius to tune, gains over the best baseline, wherever the map has it."""
    said = []
    for table in frontier.tables():
        row = table.row("gapsam")
        if row is not None and row.gain is not None and row.gain.mean.low is not None:
            shown = frontier.points_text(row.gain)
            said.append(f"{shown if row.gain.verdict.startswith('no') else f'**{shown}**'} on {table.regime.title}")
    return f"[GapSAM](radius.md), without a radius to tune, in points above the best baseline: {'; '.join(said)}."
