"""The page of the map: one table of all regimes, and for each regime its chart and its rows, from the kept results."""

from __future__ import annotations

from functools import cache
from typing import Any

from . import ROOT, figures, first_picture, forest

NOT_YET = "not run yet"
TOO_FEW = "too few seeds to judge yet"


@cache
def tables() -> list[Any]:
    """The regimes of which anything was run."""
    from steppe.papers import frontier_table

    return frontier_table.tables(figures.paper_results())


def table_of(name: str) -> Any:
    """A regime's table by its name, if anything of it was run."""
    return next((table for table in tables() if table.regime.name == name), None)


def gapsam(table: Any) -> Any:
    """GapSAM as it is used: with less than ten thousand examples they are held out in turns. None if it was not run."""
    return table.row("gapsam-turns") or table.row("gapsam")


def markdown() -> str:
    """The whole page below its introduction."""
    words = f'<details markdown="1"><summary>In words</summary>\n\n{sentences()}\n\n</details>'
    return "\n\n".join([picture(), overview(), words, afterwards(), *map(_regime, tables()), _missing()])


def picture() -> str:
    """What SAM and GapSAM gain in each regime that is judged by accuracy."""
    made_from = [ROOT / "docs" / "making" / "forest.py", repr(_gains())]
    return figures.kept("frontier-gains", made_from, draw_gains)


def draw_gains() -> Any:
    """The figure."""
    labels, sam, gap = zip(*_gains(), strict=True)
    series = {"SAM, tuned ρ": sam, "GapSAM, no ρ to tune": gap}
    about = "test accuracy minus that of the best baseline at equal cost, points; 95 % intervals"
    return forest.draw(labels, series, about, (-4.0, 5.0))


def _gains() -> list[tuple[str, forest.Point | None, forest.Point | None]]:
    """Regimes with the gains of SAM (with its default radius where none was chosen) and of GapSAM."""
    found = []
    for table in filter(in_points, tables()):
        sam = table.row("sam")
        rows = (sam if sam and sam.gain else table.row("sam-default"), gapsam(table))
        if any(points := [_point(row) for row in rows]):
            found.append((table.regime.title, *points))
    return found


def _point(row: Any) -> forest.Point | None:
    if row is None or row.gain is None or row.gain.mean.low is None:
        return None
    mean = row.gain.mean
    return forest.Point(*(100 * value for value in (mean.value, mean.low, mean.high)))


def sentences() -> str:
    """For each regime in words: what is better or worse than the best baseline at its cost, by an interval."""
    lines = []
    for table in tables():
        judged = [row for row in table.methods if row.gain is not None and row.gain.mean.low is not None]
        said = []
        for word in ("better", "worse"):
            found = [row for row in judged if row.gain.verdict == word and not row.group.diverged]
            if found:
                names = ", ".join(f"{row.label} ({_gain(table, row).strip('*')})" for row in found)
                said.append(f"{word}: {names}")
        rest = len(judged) - sum(row.gain.verdict in ("better", "worse") for row in judged)
        said += [f"no difference detected: {rest} of {len(judged)} methods"] if rest else []
        if table.methods:
            lines.append(f"- **{table.regime.title}**: {'; '.join(said) or TOO_FEW}.")
    note = "ASAM, GSAM, F-SAM, CR-SAM and LookSAM run at a radius that was chosen for SAM, not for them."
    return "\n".join([*lines, "", note])


def overview() -> str:
    """One row for each regime."""
    head = ("regime", "base", "best baseline, up to 8×", "SAM, tuned ρ", "GapSAM", "best other method")
    lines = [_row(head), "|---" * len(head) + "|"]
    for table in tables():
        base, best = table.row("base-1"), table.best_base
        others = [
            r for r in table.methods if r.cell != "sam" and not r.cell.startswith("gapsam") and r.gain is not None
        ]
        top = max(others, key=lambda row: _sign(table) * row.gain.mean.value, default=None)
        count = f"; n = {base.group.mean(table.regime.metric).n}" if base else ""
        cells = (
            table.regime.title + count, _value(table, base),
            f"{_shown(table, best.mean)} ({best.label})" if best else "",
            _gain(table, table.row("sam"), with_name=True), _gain(table, gapsam(table)),
            _gain(table, top, with_name=True),
        )  # fmt: skip
        lines.append(_row(cells))
    return "\n".join(lines)


def afterwards() -> str:
    """How robust the trained nets are: the base, the base trained longer, SAM and three others."""
    shown = ("base-1", "base-4", "sam", "gapsam", "gapsam-turns", "asam", "gsam")
    head = (
        "regime", "trained with", "test accuracy", "with 4-bit weights", "lost by rounding", "on corrupted images",
        "calibration error",
    )  # fmt: skip
    lines = ["## Are flat nets more robust?", "", robustness(), "", _row(head), "|---" * len(head) + "|"]
    before = ""
    for table in tables():
        for row in (table.row(cell) for cell in shown if in_points(table)):
            if row is not None and row.group.mean("rounded") is not None:
                bits, images, error = (
                    _percent(row.group.mean(n)) for n in ("rounded", "corrupted", "calibration_error")
                )
                found = (_value(table, row), bits, _percent(_lost(row.group)), images, error)
                title, before = "" if table.regime.title == before else table.regime.title, table.regime.title
                lines.append(_row((title, row.label, *found)))
    note = (
        "All numbers in %, mean ± standard error. 4-bit weights: every matrix and kernel is rounded to 15 values, with "
        "one scale for each output. Corrupted images: the mean accuracy over 17 corruptions at severity 3; on digits, "
        "over four kinds of noise at severity 5. Calibration error: the mean difference between confidence and "
        "accuracy, in 15 bins."
    )
    return "\n".join([*lines, "", note])


def robustness() -> str:
    """In how many regimes SAM's nets are more or less robust than those of the base, by intervals of paired runs."""
    from steppe.lab.statistics import mean_of

    measures: dict[str, Any] = {
        "is more accurate on corrupted images in {} (less in {})": lambda group: group.finished("corrupted"),
        "loses less accuracy by rounding in {} (more in {})": lambda group: _negative(_losses(group)),
        "is better calibrated in {} (worse in {})": lambda group: _negative(group.finished("calibration_error")),
    }
    pairs = [(table.row("sam"), table.row("base-1")) for table in tables() if in_points(table)]
    known = [(sam.group, base.group) for sam, base in pairs if sam and base]
    said = []
    for words, values in measures.items():
        gains = []
        for sam, base in known:
            mine, theirs = values(sam), values(base)
            gains.append(mean_of([mine[seed] - theirs[seed] for seed in mine if seed in theirs]))
        more, less = (sum(_sure(one, sign) for one in gains) for sign in (1, -1))
        said.append(words.format(more, less))
    return (
        f"Of {len(known)} regimes, a net trained by SAM with a tuned radius {', '.join(said[:-1])} and {said[-1]} than "
        "one trained by its base. Only differences count whose 95 % interval, over paired seeds and not corrected for "
        "several comparisons, excludes zero."
    )


def _sure(mean: Any, sign: int) -> bool:
    return mean.low is not None and min(sign * mean.low, sign * mean.high) > 0


def _negative(values: dict[Any, float]) -> dict[Any, float]:
    return {seed: -value for seed, value in values.items()}


def _losses(group: Any) -> dict[Any, float]:
    """The accuracy that rounding costs, by seed."""
    before, after = group.finished("test_accuracy"), group.finished("rounded")
    return {seed: before[seed] - after[seed] for seed in before if seed in after}


def _lost(group: Any) -> Any:
    """The accuracy that rounding costs, run by run."""
    from steppe.lab.statistics import mean_of

    return mean_of(list(_losses(group).values()))


def _regime(table: Any) -> str:
    """The chart of a regime, and all its rows folded away."""
    head = ("", "cost", "time", "n", "diverged", _said(table), "minus the best baseline", "that baseline", "verdict")
    lines = [_row(head), "|---" * len(head) + "|"]
    for row in sorted(table.rows, key=lambda row: not row.is_base):
        mean, gain = row.group.mean(table.regime.metric), row.gain
        lines.append(_row((
            row.label, "" if row.cost is None else f"{row.cost:.3g}×", _time(table, row), str(mean.n if mean else 0),
            str(len(row.group.diverged) or ""), _value(table, row), _gain(table, row),
            gain.against if gain else "", gain.verdict if gain else "",
        )))  # fmt: skip
    parts = [f"## {table.regime.title}", _drawn(table), '<details markdown="1"><summary>All numbers</summary>']
    return "\n\n".join([*parts, "\n".join(lines), "</details>"])


def _time(table: Any, row: Any) -> str:
    """Seconds of training relative to the base's, if all these runs had a GPU; a CPU that others use says nothing."""
    base = table.row("base-1")
    runs = [*row.group.records, *(base.group.records if base else [])]
    mine, theirs = row.group.mean("seconds"), base and base.group.mean("seconds")
    if not mine or not theirs or not all(run["environment"]["device"].startswith("cuda") for run in runs):
        return ""
    return f"{mine.value / theirs.value:.3g}×"


def _drawn(table: Any) -> str:
    from steppe.papers.frontier_figure import charts

    source = ROOT / "src" / "steppe" / "papers"
    files = [source / f"{name}.py" for name in ("frontier_figure", "frontier_table", "plotting")]
    shown = repr([(row.label, row.cost, row.group.mean(table.regime.metric)) for row in table.rows])
    return figures.kept(f"frontier-{table.regime.name}", [*files, shown], lambda: charts([table]))


def _missing() -> str:
    """The regimes of which nothing was run."""
    from steppe.papers.definitions.frontier import REGIMES

    names = {table.regime.name for table in tables()}
    rest = [f"- {regime.title}: `{regime.name}`" for regime in REGIMES if regime.name not in names]
    return "\n".join([f"## {NOT_YET.capitalize()}", "", *rest]) if rest else ""


def in_points(table: Any) -> bool:
    """Whether a regime is judged by accuracy, in points; else by perplexity, where lower is better."""
    return table.regime.metric == "test_accuracy"


def _sign(table: Any) -> int:
    return 1 if in_points(table) else -1


def _said(table: Any) -> str:
    return "test accuracy, %" if in_points(table) else "test perplexity"


def accuracy(table: Any, row: Any) -> str:
    """The mean of a row with its standard error."""
    return _value(table, row)


def _value(table: Any, row: Any) -> str:
    return _shown(table, row.group.mean(table.regime.metric) if row else None)


def _shown(table: Any, mean: Any) -> str:
    if in_points(table):
        return _percent(mean)
    return "" if mean is None else f"{mean.value:.3f}" + ("" if mean.error is None else f" ± {mean.error:.3f}")


def _percent(mean: Any) -> str:
    if mean is None:
        return ""
    return f"{100 * mean.value:.1f}" + ("" if mean.error is None else f" ± {100 * mean.error:.1f}")


def _gain(table: Any, row: Any, with_name: bool = False) -> str:
    """The gain over the best baseline at a method's cost, bold if its interval excludes zero."""
    if row is None or row.gain is None:
        return ""
    one = row.gain
    if one.mean.low is None:
        return f"n = {one.n}: too few"
    shown = gain_text(one, in_points(table))
    shown = f"**{shown}**" if one.verdict in ("better", "worse") else shown
    return f"{shown} ({row.label})" if with_name else shown


def gain_text(one: Any, points: bool = True) -> str:
    """A difference with its interval, in points or in perplexity, where it is told that lower is better."""
    if points:
        return points_text(one)
    middle, low, high = (f"{v:+.2f}".replace("-", "−") for v in (one.mean.value, one.mean.low, one.mean.high))
    return f"{middle} [{low}, {high}] in perplexity, lower is better"


def points_text(one: Any) -> str:
    """A difference in points with its interval; narrow intervals with two decimals."""
    if one.mean.high - one.mean.low >= 0.01:
        return first_picture.text(one)
    middle, low, high = (f"{100 * v:+.2f}".replace("-", "−") for v in (one.mean.value, one.mean.low, one.mean.high))
    return f"{middle} [{low}, {high}]"


def _row(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"
