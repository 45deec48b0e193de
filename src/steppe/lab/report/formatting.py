"""Numbers and rows of the table as text: the same in the terminal, on the page and in figures."""

from __future__ import annotations

import math

from ..statistics import EQUAL, Difference, Mean, Row

NAMES = {
    "test_accuracy": "test accuracy",
    "train_accuracy": "training accuracy",
    "test_loss": "test loss",
    "train_loss": "training loss",
    "seconds": "seconds",
    "gradients": "gradient evaluations",
    "top": "largest eigenvalue",
    "trace": "trace of the Hessian",
    "sharpness": "sharpness",
}


def name_of(metric: str) -> str:
    """The name of a metric in texts."""
    return NAMES.get(metric, metric.replace("_", " "))


def is_share(metric: str) -> bool:
    """Whether a metric is a proportion, shown in percent and compared in percentage points."""
    return metric.endswith("accuracy")


def other(metric: str) -> str:
    """The second metric of a table: the test loss, or beside the test loss the accuracy."""
    return "test_accuracy" if metric == "test_loss" else "test_loss"


def unit(metric: str) -> str:
    """The unit of a column."""
    return "%" if is_share(metric) else ""


def value(number: float | None, metric: str = "") -> str:
    """A number: a proportion in percent with two decimals, any other number with four significant figures."""
    if number is None:
        return "–"
    return minus(f"{100 * number:.2f}" if is_share(metric) else f"{number:.4g}")


def mean(one: Mean | None, metric: str = "") -> str:
    """Mean ± standard error, both to the second significant figure of the error; one value without an error."""
    if one is None:
        return "–"
    if not one.error or is_share(metric) or not 1e-4 < abs(one.value) < 1e5:
        return value(one.value, metric) + ("" if one.error is None else f" ± {value(one.error, metric)}")
    decimals = max(0, 1 - math.floor(math.log10(one.error)))
    return minus(f"{one.value:.{decimals}f}") + f" ± {one.error:.{decimals}f}"


def interval(one: Mean, metric: str = "", *, signed: bool = False) -> str:
    """The 95 % interval in brackets; empty if there is none."""
    if one.low is None or one.high is None:
        return ""
    low, high = ((signed_value if signed else value)(x, metric) for x in (one.low, one.high))
    return f"[{low}, {high}]"


def signed_value(number: float, metric: str = "") -> str:
    """A number with its sign; zero has none."""
    size = value(abs(number), metric)
    return size if not size.strip("0.") else ("−" if number < 0 else "+") + size


def difference(one: Difference | None, metric: str = "") -> str:
    """A paired difference and its interval."""
    if one is None:
        return "–"
    return f"{signed_value(one.mean.value, metric)} {interval(one.mean, metric, signed=True)}".strip()


def p_value(p: float | None) -> str:
    """A p value with two significant figures; very small ones as < 0.001."""
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def times(ratio: float | None) -> str:
    """A ratio such as 2.0×."""
    if ratio is None:
        return "–"
    return f"{ratio:.1f}×" if ratio < 100 else f"{ratio:.0f}×"


def count(number: float | None) -> str:
    """A count with thin spaces between thousands: 12 340."""
    return "–" if number is None else f"{number:,.0f}".replace(",", "\u202f")


def plural(number: int, noun: str) -> str:
    """A number with its noun.

    >>> plural(1, "run"), plural(3, "run")
    ('1 run', '3 runs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float | None) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def minus(text: str) -> str:
    """The text with a typographic minus sign, which is as wide as a plus."""
    return text.replace("-", "−") if text.startswith("-") else text


def runs(row: Row) -> str:
    """The numbers of finished, diverged and unfinished runs."""
    counts = ((row.n, f"n = {row.n}"), (row.diverged, f"{row.diverged} diverged"))
    texts = [text for count, text in (*counts, (row.unfinished, f"{row.unfinished} unfinished")) if count]
    return ", ".join(texts) or "n = 0"


def verdict_of(one: Difference) -> str:
    """The verdict on a difference; with "probably", also the number of seeds that would decide it."""
    if not one.verdict.startswith("probably"):
        return one.verdict
    return f"{one.verdict}; {f'about {one.needed}' if one.needed else 'many more'} seeds would tell"


def verdict(row: Row) -> str:
    """The verdict of a row; if some runs diverged, their number and the verdict on the other runs."""
    if row.diverged and row.n:
        total = row.n + row.diverged
        rest = f"; the others: {verdict_of(row.difference)}" if row.difference else ""
        return f"{row.diverged} of {total} diverged{rest}"
    return verdict_of(row.difference) if row.difference and row.verdict == row.difference.verdict else row.verdict


def equal_cost_verdict(row: Row) -> str:
    """The verdict against the best base at no more cost; if some runs diverged, on the other runs."""
    if row.equal_cost is None:
        return "–"
    text = verdict_of(row.equal_cost)
    return f"the others: {text}" if row.diverged else text


def base_sentence(row: Row, metric: str) -> str:
    """The result of the base, as a sentence."""
    if row.mean is None:
        return f"{row.verdict}."
    unit = " %" if is_share(metric) else ""
    diverged = f", {row.diverged} diverged" if row.diverged else ""
    result = f"{mean(row.mean, metric)}{unit} {name_of(metric)} (n = {row.n}{diverged})"
    time = f", {duration(row.seconds.value)}" if row.seconds else ""
    return f"{result}, {count(row.gradients)} gradients{time}."


def sentence(row: Row, metric: str) -> str:
    """One row as a sentence: the difference, the cost, and the difference at equal cost."""
    return "".join(text for text, _ in pieces(row, metric))


def pieces(row: Row, metric: str) -> list[tuple[str, str]]:
    """The pieces of the sentence; each comes with the verdict that it states, or with an empty text."""
    if row.n == 0:
        some = f"{row.diverged} of {len(row.group.records)} runs"
        note = f" ({some})" if row.verdict == "all diverged" else f" ({some} diverged)" if row.diverged else ""
        return [(row.verdict, row.verdict), (f"{note}.", "")]
    found: list[tuple[str, str]] = []
    if row.diverged:
        found += [(f"{row.diverged} of {row.n + row.diverged} runs diverged", row.verdict), ("; the others: ", "")]
    cost = "" if row.cost is None else f", {times(row.cost)} the gradients"
    if row.difference is None:
        unit = " %" if is_share(metric) else ""
        found.append((f"{mean(row.mean, metric)}{unit} {name_of(metric)}{cost} ({row.verdict})", ""))
    else:
        preposition = "over" if row.difference.mean.value > 0 else "against"
        unit = "points" if is_share(metric) else f"in {name_of(metric)}"
        found.append((f"{_gain(row.difference, metric, unit)} {preposition} the base{cost}: ", ""))
        found += _verdict_pieces(row.difference)
    if row.equal_cost is not None:
        others = "the others: " if row.diverged else ""
        rival = f"Against the best base at no more cost, {row.equal_cost.against}, "
        found += [(f". {rival}{others}{difference(row.equal_cost, metric)}: ", ""), *_verdict_pieces(row.equal_cost)]
    elif row.role == "method" and row.cost is not None and row.cost > 1 + EQUAL:
        found.append((". Not compared at equal cost", ""))
    return [*found, (".", "")]


def _gain(one: Difference, metric: str, unit: str) -> str:
    bounds = interval(one.mean, metric, signed=True)
    return f"{signed_value(one.mean.value, metric)} {unit}{' ' + bounds if bounds else ''}"


def _verdict_pieces(one: Difference) -> list[tuple[str, str]]:
    more = ", the same in every seed" if one.mean.low is None and one.mean.error == 0 and one.n > 1 else ""
    return [(verdict_of(one), one.verdict), (f" (n = {one.n}{more})", "")]
