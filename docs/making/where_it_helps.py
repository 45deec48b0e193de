"""README's table: what SAM and GapSAM gained over the best that their base does at the same cost, from the map."""

from __future__ import annotations

from typing import Any

from . import frontier

ROWS = {
    "cifar-clean": "CIFAR-10, small convolutional net, Adam, 20 epochs",
    "cifar-40": "the same, 40 % wrong labels",
    "cifar-tenth": "a tenth of CIFAR-10, same net, 60 epochs",
    "resnet-plain": "CIFAR-10, ResNet-18, SGD, 30 epochs",
    "resnet-augmented": "the same, crops and flips",
    "fast": "CIFAR-10, a fast net, 16 epochs, moves and flips",
}  # by regime of the map


def markdown() -> str:
    """The table: one row for each regime of which the map has an interval."""
    head = ("trained on", "base", "best baseline", "SAM, tuned ρ", "GapSAM, no ρ", "n")
    lines = [_line(head), "|---" * len(head) + "|"]
    for name, said in ROWS.items():
        table = frontier.table_of(name)
        base, gap = table.row("base-1").group.mean("test_accuracy"), frontier.gapsam(table)
        best = gap.group.mean("test_accuracy").value - gap.gain.mean.value
        counts = dict.fromkeys((_sam_row(table).gain.n, gap.gain.n))  # of SAM and of GapSAM, where they differ
        shown = (
            f"{100 * base.value:.1f} %",
            f"{100 * best:.1f} %",
            _sam(table),
            _gain(gap),
            ", ".join(map(str, counts)),
        )
        lines.append(_line((said, *shown)))
    return "\n".join(lines)


def section() -> str:
    """The table with what its columns mean, for the documentation's first page."""
    return (
        "Test accuracy above *the best baseline*: the best that the base does at the same cost, trained up to twice as "
        "long, stopped at its best test epoch, averaged. Points, with 95 % confidence intervals; bold ones exclude "
        f"zero.\n\n{markdown()}\n\n[GapSAM](radius.md) sets its own radius from a few held-out examples; SAM's was "
        f"tuned on held-out data. {robustness()}"
    )


def _sam(table: Any) -> str:
    """SAM's gain; with its default radius where none was chosen yet."""
    row = _sam_row(table)
    return _gain(row) + ("" if row.cell == "sam" else " (ρ = 0.05)")


def _sam_row(table: Any) -> Any:
    row = table.row("sam")
    return row if row and row.gain else table.row("sam-default")


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


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"
