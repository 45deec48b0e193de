"""How benchmarks appear in the documentation: bar charts, drawn as SVG, and tables of their numbers.

A script of this folder has a section there if it defines `PAGE`. The documentation's build finds it, reads the records
that the script has written, and draws the charts that `PAGE.charts` makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Record = dict[str, Any]
Bars = dict[str, dict[str, float]]  # group -> series -> value


@dataclass(frozen=True)
class Chart:
    """One bar chart and the table under it."""

    name: str  # anchor of the heading, for links
    title: str
    axis: str  # label of the axis
    bars: Bars
    one: str = ""  # meaning of a line at 1; without it there is no line
    logarithmic: bool = False

    @property
    def series(self) -> list[str]:
        """The names of the bars, in the order in which they first appear."""
        return list(dict.fromkeys(who for group in self.bars.values() for who in group))

    @property
    def axis_label(self) -> str:
        """The axis, with the meaning of 1."""
        return f"{self.axis} (1: {self.one})" if self.one else self.axis


Charts = Callable[[Record, str], Iterator[Chart]]  # (record, name of its file) -> charts


@dataclass(frozen=True)
class Page:
    """How the documentation shows the records of one script."""

    title: str
    about: str
    charts: Charts
    place: int = 100  # sections are sorted by this number
    text: Callable[[Record], list[str]] | None = None  # Markdown lines below the charts of a record
    summary: Charts | None = None  # charts for the top of the page


def three_digits(value: float) -> str:
    """A number with three significant digits, including zeros; all digits before the point are kept."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def device_of(record: Record) -> str:
    """The name of the device on which a record was measured."""
    return str(record["environment"]["device"])


def count(n: int) -> str:
    """A number of parameters in short form, such as 11.2M."""
    return f"{n / 1e6:.1f}M" if n >= 1e6 else f"{n / 1e3:.0f}k"


def numbers(chart: Chart) -> list[str]:
    """The chart as a Markdown table."""
    series = chart.series
    lines = [f"| {chart.axis} | {' | '.join(series)} |", "|---|" + "---|" * len(series)]
    for group, values in chart.bars.items():
        cells = (three_digits(values[who]) if who in values else "" for who in series)
        lines.append(f"| {group} | {' | '.join(cells)} |")
    return lines


# Drawing. Colours come from the page: text has currentColor, bars have the CSS variables --bar-1 to --bar-6.

WIDTH, BAR, LETTER = 560, 18, 6.6  # LETTER: average width of a character
COLOURS = ("#00796b", "#f4713c", "#8d99a6", "#5c6bc0", "#c2185b", "#a1887f")  # for pages without these variables
KNOWN = ("steppe", "pytorch-optimizer", "two-step loop")  # series that have the same colour in all charts


def svg(chart: Chart) -> str:
    """The chart as an SVG element: horizontal bars with their values, readable on a phone."""
    several = len(chart.series) > 1  # the name of a group is above its bars if there are several, else beside the bar
    left = 0.0 if several else min(WIDTH / 2, LETTER * max(map(len, chart.bars)) + 10)
    scale, fill = _Scale.of(chart, left), _fills(chart)
    parts, y = _legend(fill) if several else ([], 6.0)
    top = y
    for group, bars in chart.bars.items():
        if several:
            parts.append(_text(0, y + 14, group, "font-weight='600'"))
            y += 20
        else:
            parts.append(_text(left - 8, y + 13, group, "text-anchor='end'"))
        for who in (who for who in fill if who in bars):
            end = scale.at(bars[who])
            parts.append(f"<rect x='{left:.1f}' y='{y + 1:.1f}' width='{end - left:.1f}' height='15' {fill[who]}/>")
            parts.append(_text(end + 5, y + 13, three_digits(bars[who])))
            y += BAR
        y += 10 if several else 2
    lines = _axis(scale, top - 4, y)
    one = [_line(scale.at(1.0), top - 4, y, "stroke-opacity='0.7' stroke-dasharray='4 3'")] if chart.one else []
    alt = escape(f"Bar chart. {chart.title}: {chart.axis}", quote=True)
    return (
        f"<svg class='chart' xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {y + 42:.0f}' role='img' "
        f"aria-label='{alt}' font-size='12' fill='currentColor'>"
        f"{''.join([*lines, *parts, *one])}{_text(left, y + 34, chart.axis_label)}</svg>"
    )


def _fills(chart: Chart) -> dict[str, str]:
    """The SVG attribute that fills the bars of each series."""
    places = {who: (KNOWN.index(who) if who in KNOWN else i) % len(COLOURS) for i, who in enumerate(chart.series)}
    return {who: f"style='fill:var(--bar-{i + 1},{COLOURS[i]})'" for who, i in places.items()}


def _legend(fills: dict[str, str]) -> tuple[list[str], float]:
    """The SVG elements of the legend, in as many lines as it needs, and the y coordinate where the bars begin."""
    parts, x, y = [], 0.0, 4.0
    for who, fill in fills.items():
        width = 34 + LETTER * len(who)
        if x and x + width > WIDTH:
            x, y = 0.0, y + BAR
        parts += [f"<rect x='{x:.1f}' y='{y:.1f}' width='12' height='12' {fill}/>", _text(x + 18, y + 10, who)]
        x += width
    return parts, y + 26


@dataclass(frozen=True)
class _Scale:
    """The scale from values to x coordinates."""

    low: float
    high: float
    left: float
    right: float
    logarithmic: bool

    @classmethod
    def of(cls, chart: Chart, left: float) -> _Scale:
        values = [value for bars in chart.bars.values() for value in bars.values()]
        low = 10.0 ** math.floor(math.log10(min(values) / 2)) if chart.logarithmic else 0.0
        right = WIDTH - 50  # leaves room for the largest value beside its bar
        return cls(low, max(values), left, right, chart.logarithmic)

    def at(self, value: float) -> float:
        low, high, v = self.low, self.high, value
        if self.logarithmic:
            low, high, v = (math.log10(number) for number in (low, high, v))
        return self.left + (self.right - self.left) * max(v - low, 0.0) / (high - low)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            powers = range(round(math.log10(self.low)), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**power for power in powers]
        step = 10.0 ** math.floor(math.log10(self.high / 2))
        step = next(s for s in (step, 2 * step, 5 * step, 10 * step) if self.high / s <= 5)
        return [i * step for i in range(int(self.high / step * (1 + 1e-9)) + 1)]


def _axis(scale: _Scale, top: float, bottom: float) -> list[str]:
    parts = []
    for tick in scale.ticks():
        x = scale.at(tick)
        parts.append(_line(x, top, bottom, "stroke-opacity='0.15'"))
        parts.append(_text(x, bottom + 15, f"{tick:g}", "text-anchor='middle'" if x > 8 else ""))
    return parts


def _line(x: float, top: float, bottom: float, attributes: str) -> str:
    return f"<path d='M{x:.1f} {top:.1f}V{bottom:.1f}' stroke='currentColor' {attributes}/>"


def _text(x: float, y: float, words: str, attributes: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {attributes}>{escape(words)}</text>"


# Readers that several scripts share


def medians(results: Sequence[Mapping[str, Any]], value: Callable[[Any], float], label: Callable[[Any], str]) -> Bars:
    """Bars by contender. Of steppe's two forms only "passes" is shown, as "steppe"."""
    bars: Bars = {}
    for r in results:
        if r["contender"] != "steppe, closure":
            who = "steppe" if r["contender"].startswith("steppe") else r["contender"]
            bars.setdefault(label(r), {})[who] = value(r)
    return bars
