"""The page about a radius that sets itself: its table and its picture, from the records of the radius study.

All regimes in the records are read, so that the page grows with them. Seeds from 100 on were run with the defaults
frozen (studies/radius/protocol.md); the earlier ones chose them and are left out.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from . import ROOT, figures, forest

RECORDS = ROOT / "studies" / "radius" / "records"
FIRST_SEED = 100
SHIPPED = {"rate=0.2", "times=2", "start=0.001"}  # what GapSAM does; other words say what is held out
CEILING = "cap=0.8"  # its ceiling, which came after most of the runs
IN_TURNS = {"times=2", "leap=2.0", "quarter=0.125", "half=0.25"}  # the same where examples are held out in turns
GRID = ("0.02", "0.05", "0.1", "0.2", "0.5", "1")
DATA = {
    "digits": "digits, MLP", "mnist": "MNIST, CNN-3", "fashionmlp": "Fashion-MNIST, MLP-3",
    "fashion": "Fashion-MNIST, ViT", "cifar": "CIFAR-10, CNN-5", "mlp3": "CIFAR-10, MLP-3",
}  # fmt: skip
KINDS = {"clean": "clean", "tenth": "a tenth of the data", "fifth": "a fifth of the data"}
BASES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}


@dataclass
class Row:
    """One regime, trained for some epochs, with one set of seeds. Accuracies in %, in the order of the seeds."""

    regime: str
    epochs: int
    seeds: tuple[int, ...]
    base: list[float] = field(default_factory=list)
    averaged: list[float] = field(default_factory=list)
    sam: dict[str, list[float]] = field(default_factory=dict)
    gap: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)  # a ceiling
    ceiling: bool = False

    @property
    def best(self) -> str | None:
        """The best of the fixed radii that the protocol names, by the mean on the test set; one alone is no choice."""
        known = [rho for rho in GRID if rho in self.sam]
        return max(known, key=lambda rho: mean(self.sam[rho])) if len(known) > 1 else None

    def judged(self, own: list[float]) -> tuple[bool | None, bool | None]:
        """Whether a form of GapSAM is near the best radius, and not below the base; None where that was not run."""
        near = safe = None
        if self.best is not None:
            best = self.sam[self.best]
            near = mean(own) - mean(best) >= -max(0.3, _error(own, best))
        if self.base:
            safe = mean(own) - mean(self.base) >= -max(0.3, 2 * _error(own, self.base))
        return near, safe


@functools.cache
def records() -> list[dict[str, Any]]:
    """All records of trainings with the defaults frozen."""
    lines = [line for path in sorted(RECORDS.glob("*.jsonl")) for line in path.read_text("utf-8").splitlines()]
    return [record for record in map(json.loads, lines) if min(record["seeds"]) >= FIRST_SEED]


def shipped(candidate: str) -> bool:
    """Whether a candidate is GapSAM with its defaults, with real held-out examples."""
    kind, *words = candidate.split()
    others = {word for word in words if word.partition("=")[0] not in ("hold", "draw", "scheme")}
    return kind == "gap" and others - {CEILING} == SHIPPED and "hold=-1" not in words


def in_turns(candidate: str) -> bool:
    """Whether a candidate is GapSAM with its defaults, with examples held out in turns."""
    kind, *words = candidate.split()
    return kind == "window" and {w for w in words if w.partition("=")[0] not in _HELD_OUT} == IN_TURNS


_HELD_OUT = ("hold", "draw", "scheme", "pass_steps")


@functools.cache
def rows() -> list[Row]:
    """All regimes in which GapSAM was trained; of one that was run again, the last seeds."""
    found: dict[tuple[str, int, tuple[int, ...]], Row] = {}
    for record in records():
        for mark, accuracies in record["accuracy"].items():
            epochs, _, averaged = mark.partition(" ")
            key = record["regime"], int(epochs), tuple(record["seeds"])
            row = found.setdefault(key, Row(*key))
            values = [value if value == value else 10.0 for value in accuracies]  # a lost training guesses
            kind, *words = record["candidate"].split()
            if averaged:
                row.averaged = values
            elif record["candidate"] in ("plain", "sam rho=0"):
                row.base = values
            elif kind == "sam":
                row.sam[words[0].partition("=")[2]] = values
            elif in_turns(record["candidate"]):
                row.turns = values
            elif shipped(record["candidate"]) and CEILING in words:
                row.gap, row.ceiling = values, True
            elif shipped(record["candidate"]):
                row.gap, row.without = row.gap or values, values
    last = {(row.regime, row.epochs): row for row in sorted(found.values(), key=lambda row: row.seeds) if row.gap}
    return sorted(last.values(), key=lambda row: (_place(row.regime), row.epochs))


def _place(regime: str) -> tuple[int, bool, str, str]:
    """Data sets in the order of DATA, SGD before Adam, clean labels first."""
    data, kind, base = name_of(regime)
    places = [*DATA.values(), data]
    return places.index(data), base != "SGD", "" if kind == "clean" else kind, regime


def name_of(regime: str) -> tuple[str, str, str]:
    """Data with the net, labels, and base optimizer, in words."""
    data, *rest = regime.split("-")
    base = next((BASES[part] for part in rest if part in BASES), "Adam")
    kinds = [KINDS.get(part, f"{part} % wrong labels") for part in rest if part not in BASES]
    return DATA.get(data, data), ", ".join(kinds) or "clean", base


def table() -> str:
    """A row for each regime, folded away, and how often the goal is reached."""
    head = ["regime", "n", "base, %", "its average (EMA), %", "best SAM, % (ρ)"]
    head += ["GapSAM, in turns, %", "GapSAM, the same held out, %"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows():
        best = "–" if row.best is None else f"{cell(row.sam[row.best])} ({row.best})"
        base, averaged = (cell(values) if values else "–" for values in (row.base, row.averaged))
        own = [_judged_cell(row, row.turns), _judged_cell(row, row.gap, r"\*" if row.ceiling and row.without else "")]
        said = [title(row), str(len(row.gap)), base, averaged, best, *own]
        lines.append("| " + " | ".join(said) + " |")
    folded = ['<details markdown="1"><summary>All numbers</summary>', "", *lines, "", _BELOW, "", "</details>"]
    return "\n".join([counts(), "", *folded])


_BELOW = (
    "Mean ± standard error. Bold: above the best of the fixed radii. \\*: its ceiling was chosen on these seeds. "
    "–: not run."
)


def title(row: Row) -> str:
    """A regime in words."""
    data, labels, base = name_of(row.regime)
    return f"{data}, {base}, {labels}, {row.epochs} epochs"


def goal() -> str:
    """GapSAM and the base less the best of the fixed radii, in all regimes where these were run."""
    files = [*sorted(RECORDS.glob("*.jsonl")), figures.HERE.with_name("radius_page.py"), _FOREST]
    return figures.kept("radius-goal", files, draw_goal)


_FOREST = figures.HERE.with_name("forest.py")


def draw_goal() -> Any:
    """The figure."""
    shown = [row for row in rows() if row.best is not None]
    series = {
        "GapSAM, in turns": [_less_the_best(row, row.turns) for row in shown],
        "GapSAM, the same held out": [_less_the_best(row, row.gap) for row in shown],
        "base": [_less_the_best(row, row.base) for row in shown],
    }
    about = "test accuracy minus that of SAM with the best of six radii, points; ± one combined standard error"
    return forest.draw([title(row) for row in shown], series, about, (-6.5, 4.5), tolerance=0.3)


def _less_the_best(row: Row, own: list[float]) -> forest.Point | None:
    if not own or row.best is None:
        return None
    best = row.sam[row.best]
    middle, error = mean(own) - mean(best), _error(own, best)
    return forest.Point(middle, middle - error, middle + error)


def _judged_cell(row: Row, own: list[float], star: str = "") -> str:
    """A form of GapSAM in a row: bold if it is above the best radius; with a word if it misses the goal."""
    if not own:
        return "–"
    near, safe = row.judged(own)
    text = cell(own) + star
    text = f"**{text}**" if row.best and mean(own) > mean(row.sam[row.best]) else text
    return text + (" (below the base)" if safe is False else " (below the best)" if near is False else "")


def reached(form: str, among: str = "") -> tuple[int, int, int, int]:
    """In how many rows a form ("gap" or "turns") is near the best radius, and not below the base, and of how many."""
    judged = [row.judged(getattr(row, form)) for row in rows() if getattr(row, form) and among in row.regime]
    near, safe = ([bool(one[i]) for one in judged if one[i] is not None] for i in (0, 1))
    return sum(near), len(near), sum(safe), len(safe)


def counts() -> str:
    """In how many of the rows GapSAM is what the goal asks for."""
    forms = {"the same examples held out": "gap", "examples held out in turns": "turns"}
    said = [
        "with {} in {} of {} rows, and not below its base in {} of {}".format(words, *reached(form))
        for words, form in forms.items()
    ]
    return f"GapSAM is within the tolerance of the best radius {'; '.join(said)}."


def cell(values: list[float]) -> str:
    """Mean and standard error."""
    return f"{mean(values):.1f} ± {stdev(values) / len(values) ** 0.5:.1f}"


def _error(one: list[float], other: list[float]) -> float:
    """The standard error of a difference of two means."""
    return sum(stdev(values) ** 2 / len(values) for values in (one, other)) ** 0.5


def curves() -> dict[str, dict[str, list[float]]]:
    """ρ over training, a mean over seeds, by panel and labels; of several stages the one with the last seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    by_place = sorted(
        records(),
        key=lambda r: (_place(r["regime"]), in_turns(r["candidate"]), r["seeds"], CEILING in r["candidate"]),
    )
    for record in by_place:
        if record.get("rho") and (shipped(record["candidate"]) or in_turns(record["candidate"])):
            data, kind, base = name_of(record["regime"])
            epochs = max(int(mark.split()[0]) for mark in record["accuracy"])
            found.setdefault(f"{data}, {base}, {epochs} epochs", {})[kind] = record["rho"]
    return found


def picture() -> str:
    """The curves, one panel for each data set, net and base."""
    return figures.kept("radius", [*sorted(RECORDS.glob("*.jsonl")), figures.HERE.with_name("radius_page.py")], draw)


def draw() -> Any:
    """The figure."""
    from matplotlib.figure import Figure

    panels = curves()
    columns = min(3, len(panels))
    high = -(-len(panels) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * high), layout="constrained")
    axes = figure.subplots(high, columns, squeeze=False, sharey=True).flatten()
    colours = {"clean": "#00897b", "40 % wrong labels": "#f4713c", "60 % wrong labels": "#c2185b"}
    for axis, (title, lines) in zip(axes, panels.items(), strict=False):
        for kind, rho in lines.items():
            share = [(place + 1) / len(rho) for place in range(len(rho))]
            axis.plot(share, rho, label=kind, color=colours.get(kind, "#5c6bc0"))
        axis.set_yscale("log")
        axis.set_title(title, fontsize=9)
        axis.legend(fontsize=7, frameon=False)
        axis.tick_params(labelsize=8)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.supxlabel("share of training", fontsize=9)
    figure.supylabel("ρ", fontsize=9)
    return figure
