"""What to do in which situation, and what SAM gained there: the first table of the page that helps to choose.

Rows come from the map where it has the regime, else from the records of a study. Each compares SAM,
with a radius that was chosen on held-out data or on other seeds, with every baseline at no more than its cost that was
run: the base trained up to twice as long, stopped early, averaged. The strongest one is shown.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from . import ROOT, frontier

STUDY = ROOT / "studies" / "radius" / "records"
SITUATIONS = ROOT / "studies" / "situations" / "records"
NOT_YET = "not measured"
NOISY, FITS, SMALL = "My labels are noisy", "I train until the net fits all training data", "My data set is small"
CLEAN, TUNE = "My labels are clean, and training hardly overfits", "I fine-tune a pretrained model"
ONCE = "Each example is seen once or twice, as in pretraining"
ADVICE = {
    NOISY: "Stop early and average the weights first: both cost no gradients. Then try GapSAM, SAM or ASAM.",
    FITS: "Try GapSAM, or SAM with a tuned radius.",
    SMALL: "With thousands of examples: try GapSAM, or SAM with a tuned radius. With a few hundred: train longer.",
    CLEAN: "Keep the base: no gain, or a small loss.",
    ONCE: "Keep the base. See more examples instead, or train longer on the same ones.",
    TUNE: "Keep the base, with a tuned learning rate: no difference was seen.",
}  # by situation, in the order of the table
FROM_MAP = {
    "digits-0.6": (NOISY, "digits-60"),
    "digits-0": (CLEAN, "digits-clean"),
    "cifar-40": (NOISY, "cifar-40"),
    "cifar-clean": (FITS, "cifar-clean"),
    "cifar-tenth": (SMALL, "cifar-tenth"),
    "resnet-plain": (FITS, "resnet-plain"),
    "resnet": (CLEAN, "resnet-augmented"),
    "resnet-60": (CLEAN, "resnet-augmented", 2),
    "vit": (CLEAN, "vit"),
    "fast": (CLEAN, "fast"),
    "language": (ONCE, "language"),
}  # by the name of a row: the situation, the regime, and how many times as long base and SAM are trained
FROM_STUDY = {
    "vit-40": (NOISY, "6 000 images of Fashion-MNIST, 40 % wrong labels, small ViT", "vit", "fashion-40-adamw"),
    "mlp-40": (NOISY, "6 000 images of Fashion-MNIST, 40 % wrong labels, MLP-3", "mlp", "fashionmlp-40-adam"),
    "vit-clean": (SMALL, "6 000 images of Fashion-MNIST, small ViT", "vit", "fashion-clean-adamw"),
    "mlp-clean": (SMALL, "6 000 images of Fashion-MNIST, MLP-3", "mlp", "fashionmlp-clean-adam"),
}  # by the name of a row: the situation, what was run, and the stage and the regime of the radius study
ENDS = {"vit": ("AdamW", "30"), "mlp": ("Adam", "60")}  # the base of a stage, and its epochs
FROM_SITUATIONS = {
    "once": (
        ONCE,
        "20 000 images of CIFAR-10, CNN-5, Adam, one epoch",
        {"base": "Adam", "base-2": "Adam, the same images twice", "base-data": "Adam, twice as many images"},
    ),
    "fine-tuning": (
        TUNE,
        "CNN-5 trained on five classes of CIFAR-10, then 1 000 images of the others, Adam, 10 epochs",
        {"base": "Adam", "base-2": "Adam, 2x longer"},
    ),
}  # by the name of a row: the situation, what was run, and the forms of the base


class Measured(NamedTuple):
    """A row: the situation, what was run, the gains of SAM and GapSAM over the best baseline, and their unit."""

    situation: str
    where: str
    gain: Any
    points: bool = True
    gap: Any = None  # GapSAM's gain, where it was run


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
def rows() -> dict[str, Measured]:
    """What was measured, by a short name."""
    made: dict[str, Measured] = {}
    tenth = study("digits-table")
    mine = tenth["digits-tenth-sgd", "sam rho=0.1"]["20"]
    plain = tenth["digits-tenth-sgd", "sam rho=0"]
    rivals = {f"SGD, {length} epochs": plain[length] for length in ("20", "40")}
    made["tenth"] = Measured(
        SMALL,
        "143 digits, clean labels, SGD, 20 epochs, ρ = 0.1",
        hardest_rival(mine, rivals),
    )
    for key, (situation, where, bases) in FROM_SITUATIONS.items():
        gap = from_situations(key, bases, "gapsam") if "gapsam" in runs_in(key) else None
        made[key] = Measured(situation, f"{where}, {radius_in(key)}", from_situations(key, bases), gap=gap)
    for key, (situation, where, stage, regime) in FROM_STUDY.items():
        gain, gap = (from_study(stage, regime, candidate) for candidate in ("sam rho=0.05", GAPSAM))
        base, epochs = ENDS[stage]
        made[key] = Measured(situation, f"{where}, {base}, {epochs} epochs, default ρ", gain, gap=gap)
    for key, place in FROM_MAP.items():
        if (found := from_map(*place)) is not None:
            made[key] = found
    return made


GAPSAM = "window times=2 leap=2.0 quarter=0.125 half=0.25 hold=300 scheme=double"


def from_study(stage: str, regime: str, candidate: str) -> Any:
    """A candidate of a stage of the radius study less the form of the base that is hardest to beat."""
    found, rivals, (base, epochs) = study(stage), {}, ENDS[stage]
    for name, label in (("plain", base), ("longer", f"{base}, 2x longer")):
        early = found.get((regime, "early"), {})  # the first epochs of the same trainings, tested more often
        curves = {**found[regime, name], **early}
        for average in (False, True):
            shown = {mark: values for mark, values in curves.items() if mark.endswith("averaged") == average}
            kind = label + ", EMA 0.99" * average
            last = max(shown, key=lambda mark: int(mark.split()[0]))
            rivals[kind], rivals[f"{kind}, stopped early"] = shown[last], max(shown.values(), key=sum)
    return hardest_rival(found[regime, candidate][epochs], rivals)


@cache
def runs_in(name: str) -> dict[str, list[dict[str, Any]]]:
    """The runs of the study of situations that were tested on the test set, by arm, in the order of the seeds."""
    lines = map(json.loads, (SITUATIONS / f"{name}.jsonl").read_text("utf-8").splitlines())
    found: dict[str, list[dict[str, Any]]] = {}
    for line in sorted((one for one in lines if one["stage"] == "final"), key=lambda one: one["seed"]):
        found.setdefault(line["arm"], []).append(line)
    return found


def radius_in(name: str) -> str:
    """The radius of SAM in a situation, which is the same for all seeds."""
    from steppe.lab.recipe.method_text import make_method, settings_of

    (method,) = {run["method"] for run in runs_in(name)["sam"]}
    return f"ρ = {settings_of(make_method(method))['rho']:g}"


def from_situations(name: str, bases: dict[str, str], arm: str = "sam") -> Any:
    """A method in a situation less the form of the base that is hardest to beat."""
    runs = runs_in(name)
    rivals = {form: values for base, label in bases.items() for form, values in forms_of(label, runs[base]).items()}
    return hardest_rival([run["accuracy"][-1] for run in runs[arm]], rivals)


def forms_of(label: str, runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """A base, its average, and both stopped early: after the epoch whose mean is best on the test set."""
    made = {}
    for kind, name in (("accuracy", label), ("averaged", f"{label}, EMA 0.99")):
        *early, last = zip(*(run[kind] for run in runs), strict=True)
        made[name] = list(last)
        if early:
            made[f"{name}, stopped early"] = list(max(early, key=sum))
    return made


def from_map(situation: str, name: str, length: int = 1) -> Measured | None:
    """What the map has for SAM in a regime, once it has an interval: at a chosen radius, else at the default one."""
    table, cells = frontier.table_of(name), ("sam", "sam-default") if length == 1 else (f"sam-{length}",)
    for row in map(table.row, cells) if table else ():
        if row is not None and row.gain is not None and row.gain.mean.low is not None:
            epochs = table.regime.recipe.epochs
            title = table.regime.title.replace(f" {epochs} epochs", f" {epochs * length} epochs")
            where = f"{title}, {row.label.split(', ')[1]}"
            gap = frontier.gapsam(table) if length == 1 else None
            gain = replace(row.gain, against=in_epochs(row.gain.against, epochs)) if length > 1 else row.gain
            return Measured(situation, where, gain, frontier.in_points(table), gap and gap.gain)
    return None


def in_epochs(base: str, unit: int) -> str:
    """The name of a base with its epochs, where it says how many times as long as `unit` epochs it was trained.

    >>> in_epochs("SGD, 4x longer, EMA 0.99", 30), in_epochs("SGD, stopped early", 30)
    ('SGD, 120 epochs, EMA 0.99', 'SGD, 30 epochs, stopped early')
    """
    name, _, rest = base.partition(", ")
    found = re.match(r"(\d+)x longer", rest)
    epochs = f"{unit * int(found[1]) if found else unit} epochs"
    return ", ".join(filter(None, (name, epochs, rest[found.end() + 2 :] if found else rest)))


def markdown() -> str:
    """The table, in the order of the situations; what was not measured says so."""
    head = ("situation", "measured on", "SAM", "GapSAM", "best baseline")
    lines = [_line(head), "|---" * len(head) + "|"]
    order = list(ADVICE)
    before = ""
    for row in sorted(rows().values(), key=lambda row: order.index(row.situation)):
        first = "" if row.situation == before else situation(row.situation)
        gap = _gain(row.gap, row.points) if row.gap is not None else "not run"
        lines.append(
            _line((first, f"{row.where}; n = {row.gain.n}", _gain(row.gain, row.points), gap, row.gain.against))
        )
        before = row.situation
    known = {row.situation for row in rows().values()}
    lines += [_line((situation(one), NOT_YET, "", "", "")) for one in order if one not in known]
    note = (
        "SAM and GapSAM minus the best baseline: points of test accuracy, with 95 % confidence intervals. Those in "
        "bold exclude zero; the others are no evidence of a difference. SAM's radius was chosen on held-out data or on "
        "other seeds; the default, ρ = 0.05, was not. The baseline that is named is the one for SAM. "
        "[The map](frontier.md) has more methods and regimes."
    )
    return "\n".join([*lines, "", note])


def situation(name: str) -> str:
    """A situation and the advice, as the first cell of its rows."""
    return f"**{name}.** {ADVICE[name]}"


def _gain(one: Any, points: bool) -> str:
    """A gain over the best baseline; bold if its interval excludes zero."""
    shown = frontier.gain_text(one, points)
    return f"**{shown}**" if one.verdict in ("better", "worse") else shown


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
