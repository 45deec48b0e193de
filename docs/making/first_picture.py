"""The picture and the sentences that README and the documentation begin with, from the records of `steppe compare`.

python docs/making/first_picture.py RUNS     keeps the records of a folder in which `steppe compare` was run, and draws
python docs/making/first_picture.py          draws again

The same records make the report on the page about comparing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ASSETS = Path(__file__).parents[1] / "assets"
RECORDS = ASSETS / "first_comparison.json"  # a list of records
PICTURES = {"light": ASSETS / "first_comparison.png", "dark": ASSETS / "first_comparison_dark.png"}
PANELS = {0.6: "60 % wrong labels", 0.0: "clean labels"}
INK = {"light": ("#1c1e22", "#00694b", "#a8340a", "#6b7078"), "dark": ("#e9e7e2", "#4fd0a0", "#ff9468", "#a7acb5")}


@cache
def rows(noise: float, metric: str = "test_accuracy") -> dict[str, Any]:
    """The rows of the table of one panel, by label."""
    from steppe.lab.statistics import summarise

    records = [r for r in json.loads(RECORDS.read_text("utf-8")) if r["recipe"]["label_noise"] == noise]
    return {row.label: row for row in summarise(records, metric)}


def text(difference: Any) -> str:
    """A difference in points with its simultaneous interval, as README writes it."""
    values = (difference.mean.value, difference.mean.low, difference.mean.high)
    middle, low, high = (f"{100 * value:+.1f}".replace("-", "−") for value in values)
    return f"{middle.replace('+0.0', '0.0').replace('−0.0', '0.0')} [{low}, {high}]"


def sentence() -> str:
    """What the comparison says, with its intervals; it fails if the verdicts are no longer those of the words."""
    asam, sam = (rows(0.6)[name] for name in ("ASAM", "SAM rho=0.1"))
    clean = [row.difference for row in rows(0.0).values() if row.role == "method"]
    assert asam.equal_cost.verdict == "better" and sam.equal_cost.verdict.startswith("probably better")
    assert asam.difference.verdict == sam.difference.verdict == "better"
    assert {one.verdict for one in clean} == {"no difference seen"}
    largest = max(abs(end) for one in clean for end in (one.mean.low, one.mean.high))
    return (
        f"With 60 % wrong labels ASAM is {text(asam.difference)} points above SGD, and {text(asam.equal_cost)} above "
        f"the best that SGD does at the same cost ({baselines()}). SAM is {text(sam.difference)} above SGD; its lead "
        f"over that best form of SGD, {text(sam.equal_cost)}, is not certain. With clean labels no method differs: "
        f"every interval is within ±{100 * largest:.1f} points."
    )


def short() -> str:
    """README's sentence below the picture."""
    assert sentence()  # the verdicts are those of the words
    asam = rows(0.6)["ASAM"]
    return (
        f"With 60 % wrong labels ASAM is {text(asam.difference)} points above SGD, and {text(asam.equal_cost)} above "
        "the best baseline (dashed). With clean labels no method differs from SGD."
    )


def baselines() -> str:
    """The forms of the base that methods are compared with, as the records have them."""
    labels = " ".join(label.lower() for label, row in rows(0.6).items() if row.role != "method")
    forms = {"ema": "averaged", "nesterov": "with Nesterov momentum", "weight decay": "with weight decay"}
    found = ["trained up to twice as long", "stopped early", *(said for name, said in forms.items() if name in labels)]
    return f"{', '.join(found[:-1])} or {found[-1]}"


def conditions() -> str:
    """Under which conditions."""
    row = rows(0.6)["SAM rho=0.1"]
    losses = [rows(noise, "test_loss")["SAM rho=0.1"].difference.verdict for noise in PANELS]
    assert losses == ["worse", "better"]
    examples = row.group.done[0]["test_examples"]
    return (
        f"Digits, a small net, n = {row.n} seeds, simultaneous 95 % confidence intervals; one of the {examples} test "
        f"images is {100 / examples:.2f} points. SAM's test loss is higher than SGD's with wrong labels and lower with "
        "clean ones."
    )


def best_base(noise: float) -> float:
    """How far the best form of SGD at ASAM's cost is above SGD, in shares."""
    asam = rows(noise)["ASAM"]
    return asam.difference.mean.value - asam.equal_cost.mean.value


def draw(theme: str = "light") -> Figure:
    """One panel for wrong and one for clean labels: every seed's difference, the mean and its interval."""
    from matplotlib.figure import Figure

    ink, good, bad, grey = INK[theme]
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    order = [row for row in rows(0.6).values() if row.role != "base" and "1.1x" not in row.label]
    order.sort(key=lambda row: (row.role == "method", row.mean.value))  # both panels share it, and its labels
    for axis, (noise, title) in zip(axes, PANELS.items(), strict=True):
        for place, label in enumerate(row.label for row in order):
            one = rows(noise)[label].difference
            colour = {"better": good, "worse": bad}.get(one.verdict, grey)
            seeds = [100 * value for value in one.by_seed.values()]
            axis.plot(seeds, [place] * len(seeds), "o", color=colour, alpha=0.35, markersize=4, markeredgewidth=0)
            if one.mean.low is not None:  # None: the same difference for every seed
                axis.plot([100 * one.mean.low, 100 * one.mean.high], [place, place], "-", color=colour, linewidth=3)
            axis.plot(100 * one.mean.value, place, "D", color=colour, markersize=6)
        axis.axvline(0, color=ink, linewidth=0.8)
        axis.axvline(100 * best_base(noise), color=ink, linewidth=0.8, linestyle="--")
        axis.set_title(f"digits, {title}", fontsize=11, color=ink)
        axis.set_yticks(range(len(order)), [_label(row) for row in order])
        axis.margins(y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(grey)
        axis.tick_params(colors=ink)
        axis.patch.set_alpha(0)
    n = next(iter(rows(0.6).values())).n
    axis_label = (
        f"test accuracy minus SGD's, in points. Dots: seeds; bars: mean and 95 % interval (n = {n}); ×: cost\n"
        "dashed: the best form of SGD at no more than twice its cost, stopped at its best tenth of training"
    )
    figure.supxlabel(axis_label, fontsize=10, color=ink)
    figure.patch.set_alpha(0)
    return figure


def _label(row: Any) -> str:
    name = row.label.partition(" rho=")[0].replace(", 2x longer", ", longer").replace("EMA over 10 %", "averaged")
    if row.role == "method":
        name += f", ρ = {row.group.done[0]['method']['settings']['rho']}"
    return f"{name}, {row.cost:.1f}×"


def markdown() -> str:
    """The picture in the page's colours, and below it what it says."""
    from .figures import kept

    drawn = kept("first", [Path(__file__), RECORDS], lambda: draw("light"))
    return f"{drawn}\n\n**{sentence()}** {conditions()}"


def compact(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without what the pages do not show: tenths of training, no times, curvature without spectra."""
    epochs, curvature = record["epochs"], record["curvature"] or {}
    tenths = sorted({round(k * len(epochs) / 10) for k in range(1, 11)} - {0})
    numbers = ("epoch", "train_loss", "test_loss", "test_accuracy", "gradients")
    short = [{name: _rounded(epochs[k - 1][name]) for name in numbers} for k in tenths]
    for kept, k in zip(short, tenths, strict=True):
        if averaged := epochs[k - 1].get("averaged"):
            kept["averaged"] = _all_rounded(averaged)
    values = {name: {k: _rounded(v) for k, v in found.items() if k in ("value", "rho")}
              for name, found in curvature.items() if isinstance(found, dict) and "value" in found}  # fmt: skip
    final = {name: _rounded(value) for name, value in record["final"].items() if name != "seconds"}  # a busy machine's
    found = {**record, "epochs": short, "curvature": values, "final": final}
    return {**found, "averaged": _all_rounded(record["averaged"])} if "averaged" in record else found


def _all_rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _rounded(value) for name, value in values.items()}


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    if len(sys.argv) > 1:
        from steppe.lab.records import read_records

        lines = [json.dumps(compact(record)) for record in read_records(sys.argv[1:])]
        RECORDS.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
    for theme, path in PICTURES.items():
        draw(theme).savefig(path, dpi=160, metadata={"Software": None})
    print(sentence(), conditions())
