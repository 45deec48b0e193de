"""The conclusion of a comparison in one sentence, and warnings about its limits."""

from __future__ import annotations

from collections.abc import Sequence

from ..records import number
from ..statistics import EQUAL, FEWEST, Difference, Row, larger_is_better
from . import formatting

SMALL_TEST = 2000  # with fewer test examples there is a warning
FALLING = 0.05  # relative decrease of the test loss in the last quarter of training from which on there is a warning


def conclusion(problems: Sequence[Sequence[Row]], metric: str) -> str:
    """One sentence for one problem; with several, one for each."""
    return " ".join(sentences(problems, metric))


def sentences(problems: Sequence[Sequence[Row]], metric: str) -> list[str]:
    """The sentence of each problem."""
    if len(problems) == 1:
        return [_sentence(problems[0], metric)]
    return [f"On {rows[0].problem}: {_sentence(rows, metric)}" for rows in problems]


def _sentence(rows: Sequence[Row], metric: str) -> str:
    base = next((row for row in rows if row.role == "base"), None)
    judged = [r for r in rows if r.role == "method" and r.difference and not r.diverged and r.difference.n >= FEWEST]
    if base is None or not any(row.role == "method" for row in rows):
        return "there is nothing to compare." if base is None else "only the base was run."
    if not judged:
        if all(row.diverged for row in rows if row.role == "method"):
            return "nothing can be said: every method diverged."
        return f"nothing can be said with fewer than {FEWEST} seeds."
    # A method is worth its cost if it is better than the base itself, too, which costs no more either.
    both = [r for r in judged if r.equal_cost and r.equal_cost.verdict == "better" and r.verdict == "better"]
    worth = _best(both, metric, "equal_cost")
    better = _best([r for r in judged if r.difference and r.difference.verdict == "better"], metric)
    likely = _best([r for r in judged if r.difference and r.difference.verdict == "probably better"], metric)
    if worth:
        first, *others = worth
        equal = first.equal_cost
        assert equal is not None
        gain = f"{_gain(equal, metric)} over the best base at no more cost ({equal.against})"
        also = f"; also worth it: {', '.join(row.label for row in others)}" if others else ""
        text = f"{first.label} is worth its cost: {gain}, n = {equal.n}{also}"
    elif better:
        one = better[0].difference
        assert one is not None
        text = f"{better[0].label} is better than {base.label}: {_gain(one, metric)}, n = {one.n}"
        text += f"; {_equal_cost_clause(better[0], metric)}"
    elif likely:
        one = likely[0].difference
        assert one is not None
        needed = formatting.verdict_of(one).partition("; ")[2]
        text = f"{likely[0].label} is probably better than {base.label}: {_gain(one, metric)}; {needed}"
    elif all(r.difference and r.difference.verdict == "worse" for r in judged):
        return f"every method is worse than {base.label} (n = {base.n})."
    else:
        rest = [r for r in judged if r.difference and r.difference.verdict != "worse"]
        largest = max(rest, key=lambda r: abs(r.difference.mean.value) if r.difference else 0.0)
        which = (
            f"told apart from {base.label}; the"
            if len(rest) == len(judged)
            else (f"shown to be better than {base.label}; of those not told apart the")
        )
        text = f"no method is {which} largest difference is {largest.label}'s, "
        text += f"{_gain(largest.difference, metric)}, n = {largest.difference.n if largest.difference else 0}"
    worse = [r.label for r in judged if r.difference and r.difference.verdict == "worse"]
    return text + (f"; worse than {base.label}: {', '.join(worse)}" if worse else "") + "."


def _best(rows: list[Row], metric: str, kind: str = "difference") -> list[Row]:
    sign = 1 if larger_is_better(metric) else -1
    return sorted(rows, key=lambda row: -sign * getattr(row, kind).mean.value)


def _gain(one: Difference | None, metric: str) -> str:
    if one is None:
        return "–"
    mean = one.mean
    unit = "points " if formatting.is_share(metric) else ""
    bounds = formatting.interval(mean, metric, signed=True)
    return f"{formatting.signed_value(mean.value, metric)} {unit}{bounds}".strip()


def _equal_cost_clause(row: Row, metric: str) -> str:
    """How a method that is better than the base compares at equal cost."""
    if row.equal_cost is None:
        return "it was not compared at equal cost"
    return f"against the best base at no more cost ({row.equal_cost.against}) {_gain(row.equal_cost, metric)}: " + (
        formatting.verdict_of(row.equal_cost)
    )


def warnings(rows: Sequence[Row], metric: str) -> list[str]:
    """Warnings: too few seeds, diverged or unfinished runs, no base, a small test set, training that is too short."""
    found = []
    most = max((row.n for row in rows), default=0)
    if 0 < most < FEWEST:
        seeds = "One seed" if most == 1 else f"{most} seeds"
        intervals = "there are no intervals and " if most == 1 else ""
        found.append(f"{seeds}: {intervals}n is too small to tell methods apart. Run at least {FEWEST} seeds.")
    runs, diverged = sum(len(row.group.records) for row in rows), sum(row.diverged for row in rows)
    if diverged:
        rest = "There is nothing to compare" if diverged == runs else "Means are over the other runs"
        found.append(f"{diverged} of {runs} runs diverged. {rest}; the reasons are below the table.")
    if unfinished := sum(row.unfinished for row in rows):
        found.append(f"{unfinished} {'run is' if unfinished == 1 else 'runs are'} not finished and not included.")
    if rows and not any(row.role == "base" for row in rows):
        found.append("No base was run, so there is nothing to compare with.")
    return [*found, *_too_short(rows, metric), *_dearer_than_declared(rows), *_small_test(rows, metric)]


def _dearer_than_declared(rows: Sequence[Row]) -> list[str]:
    """Warnings about methods of which no base of their cost was trained, because they declare a smaller one."""
    found = []
    for row in rows:
        declared = [number(record["method"].get("cost")) for record in row.group.done if record.get("method")]
        compared = row.role != "method" or row.difference is None or row.equal_cost is not None
        if not compared and row.cost and declared and declared[0] and row.cost > (1 + EQUAL) * declared[0]:
            found.append(
                f"{row.label} declares cost = {declared[0]:g} but took {row.cost:.3g} gradients a step, so no base of "
                "its cost was trained: correct its cost."
            )
    return found


def _small_test(rows: Sequence[Row], metric: str) -> list[str]:
    sizes = [n for row in rows for r in row.group.done if (n := number(r.get("test_examples")))]
    if not sizes or min(sizes) >= SMALL_TEST or not formatting.is_share(metric):
        return []
    return [f"Only {min(sizes):.0f} test examples: one example is {100 / min(sizes):.2f} points."]


def _too_short(rows: Sequence[Row], metric: str) -> list[str]:
    """A warning if the base still gains from more epochs, or if its test loss still falls at the end of training."""
    longer = [r for r in rows if r.role == "equal-cost" and r.difference and r.difference.verdict == "better"]
    if longer and longer[0].difference:
        gain = _gain(longer[0].difference, metric)
        return [f"Training is too short to compare: {longer[0].label} is still better than the base, {gain}."]
    if any(row.role == "equal-cost" for row in rows):
        return []
    found = []
    for row in (row for row in rows if row.role == "base"):
        ends = [ends for record in row.group.done if (ends := _last_quarter(record.get("epochs") or []))]
        if ends and all(last < (1 - FALLING) * before for before, last in ends):
            before, last = (sum(values) / len(ends) for values in zip(*ends, strict=True))
            found.append(
                f"Training may be too short to compare: {row.label}'s test loss still falls in the last quarter "
                f"({before:.3g} to {last:.3g})."
            )
    return found


def _last_quarter(epochs: Sequence[dict[str, object]]) -> tuple[float, float] | None:
    """The test loss after three quarters of the epochs, and after the last."""
    if len(epochs) < 4:
        return None
    before, last = (number(epochs[k].get("test_loss")) for k in (3 * len(epochs) // 4 - 1, -1))
    return None if before is None or last is None else (before, last)
