"""README's table: what SAM and GapSAM gained over the best that their base does at the same cost, from the map."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import frontier


class Shown(NamedTuple):
    """A row: a regime of the map, in words, and how many times as long base and SAM are trained."""

    regime: str
    said: str
    length: int = 1

    @property
    def sam(self) -> Any:
        """SAM's row in the map; with its default radius where none was chosen yet."""
        cells = ("sam", "sam-default") if self.length == 1 else (f"sam-{self.length}",)
        found = (frontier.table_of(self.regime).row(cell) for cell in cells)
        return next(row for row in found if row and row.gain)

    @property
    def gap(self) -> Any:
        """GapSAM's row in the map, which has it at length 1 only."""
        return frontier.gapsam(frontier.table_of(self.regime)) if self.length == 1 else None

    def cells(self) -> tuple[str, ...]:
        """The row's cells."""
        sam, gap = self.sam, self.gap
        base = frontier.table_of(self.regime).row(f"base-{self.length}").group.mean(ACCURACY)
        methods = [row for row in (gap, sam) if row]
        best = methods[0].group.mean(ACCURACY).value - methods[0].gain.mean.value
        counts = dict.fromkeys(row.gain.n for row in reversed(methods))  # of SAM and of GapSAM, where they differ
        shown = _gain(sam) + ("" if sam.cell.startswith("sam") and sam.cell != "sam-default" else " (ρ = 0.05)")
        gained = _gain(gap) if gap else "not run"
        return self.said, _percent(base.value), _percent(best), shown, gained, ", ".join(map(str, counts))


ACCURACY = "test_accuracy"
ROWS = (
    Shown("cifar-clean", "CIFAR-10, small convolutional net, Adam, 20 epochs"),
    Shown("cifar-40", "the same, 40 % wrong labels"),
    Shown("cifar-tenth", "a tenth of CIFAR-10, same net, 60 epochs"),
    Shown("resnet-plain", "CIFAR-10, ResNet-18, SGD, 30 epochs"),
    Shown("resnet-augmented", "the same, crops and flips"),
    Shown("resnet-augmented", "the same, crops and flips, 60 epochs", 2),
    Shown("fast", "CIFAR-10, a fast net, 16 epochs, moves and flips"),
)


def markdown() -> str:
    """The table: one row for each regime of which the map has an interval."""
    head = ("trained on", "base", "best baseline", "SAM, tuned ρ", "GapSAM, no ρ", "n")
    return "\n".join([_line(head), "|---" * len(head) + "|", *(_line(row.cells()) for row in ROWS)])


def section() -> str:
    """The table with what its columns mean, for the documentation's first page."""
    return (
        "Test accuracy above *the best baseline*: the best of what the base does at the same cost, which is trained up "
        "to twice as long, stopped at its best test epoch, or averaged. Points, with 95 % confidence intervals; "
        f"bold ones exclude zero.\n\n{markdown()}\n\n[GapSAM](radius.md) sets its own radius from a few held-out "
        f"examples; SAM's was tuned on held-out data. {robustness()}"
    )


def _gain(row: Any) -> str:
    shown = frontier.points_text(row.gain)
    return f"**{shown}**" if row.gain.verdict in ("better", "worse") else shown


def robustness() -> str:
    """What else the nets gain on CIFAR-10 with clean labels: accuracy on corrupted images, and calibration."""
    table = frontier.table_of("cifar-clean")
    groups = [table.row(cell).group for cell in ("base-1", "sam", "gapsam")]
    adam, sam, gap = ([f"{100 * group.mean(name).value:.1f}" for name in ("corrupted", "calibration_error")]
                      for group in groups)  # fmt: skip
    return (
        f"In the first row the nets of SAM and GapSAM have {sam[0]} and {gap[0]} % accuracy on corrupted images, "
        f"and a calibration error of {sam[1]} and {gap[1]} %; Adam, at the end of training, {adam[0]} and {adam[1]} %."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"
