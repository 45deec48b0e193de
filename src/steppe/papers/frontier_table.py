"""The results of `extra/frontier` by regime: what each method gains over the best base at its cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..lab.records import with_average
from ..lab.statistics import BASE_ROLES, EQUAL, FEWEST, Difference, Group, Mean, judged, larger_is_better, mean_of
from ..lab.statistics.groups import average
from ..lab.statistics.rivals import Rival, against_rivals, hardest, rivals_of
from .choosing import CHOOSING
from .definitions.frontier import AVERAGED, FRONTIER, LENGTHS, REGIMES, Regime
from .experiment import Experiment
from .store import Results, as_record

NEAR = 1.125  # a method that costs up to this many times a length of the base is compared with that length


@dataclass(frozen=True)
class Row:
    """A base or a method in a regime."""

    cell: str  # its name within the regime
    group: Group
    cost: float | None  # gradients, relative to the base at length 1
    length: int | None = None  # of a method: the longest training of the base that it is compared with
    gain: Difference | None = None  # over the rival that is hardest to beat

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.group.label

    @property
    def is_base(self) -> bool:
        """Whether it is the base in one of its forms."""
        return self.group.role in BASE_ROLES


@dataclass(frozen=True)
class Best:
    """The best form of the base at no more than a cost: trained for less, stopped early, averaged, or with Nesterov."""

    length: int  # the cost, relative to the base at length 1
    label: str
    mean: Mean


@dataclass(frozen=True)
class Table:
    """All rows of a regime that were run, bases first, and the base's best at each length that it was trained for."""

    regime: Regime
    rows: tuple[Row, ...]
    best_bases: tuple[Best, ...] = ()

    def row(self, cell: str) -> Row | None:
        """The row of a cell, if it was run."""
        return next((row for row in self.rows if row.cell == cell), None)

    @property
    def methods(self) -> list[Row]:
        """The rows of methods."""
        return [row for row in self.rows if not row.is_base]

    @property
    def best_base(self) -> Best | None:
        """The best of the base at any length."""
        return self.best_bases[-1] if self.best_bases else None


def tables(results: Results, experiment: Experiment = FRONTIER) -> list[Table]:
    """The tables of all regimes of which anything was run."""
    found = [table_of(regime, results, experiment) for regime in REGIMES]
    return [table for table in found if table.rows]


def table_of(regime: Regime, results: Results, experiment: Experiment = FRONTIER) -> Table:
    """The rows of a regime. All gains in it have simultaneous intervals."""
    groups = dict(_groups(regime, results, experiment))
    base = groups.get("base-1")
    unit = average(base, "gradients") if base else None
    variants = [group for group in groups.values() if group.role in BASE_ROLES]
    larger, rows, found = larger_is_better(regime.metric), [], []
    for cell, group in groups.items():
        mine = average(group, "gradients")
        cost = mine / unit if mine and unit else None
        length = None if cost is None or group in variants else length_for(cost)
        rows.append(Row(cell, group, cost, length))
        rivals = against_rivals(group, variants, regime.metric, cost=length * unit) if length and unit else []
        found.append(rivals)
    best = _best_bases(groups, unit, regime.metric) if unit else ()
    return Table(regime, tuple(_with_gains(rows, found, larger)), tuple(best))


def _best_bases(groups: dict[str, Group], unit: float, metric: str) -> Iterator[Best]:
    """The form of the base with the best mean at no more than each length; a form with diverged runs does not count."""
    variants = [group for group in groups.values() if group.role in BASE_ROLES and not group.diverged]
    sign = 1 if larger_is_better(metric) else -1

    def value(rival: Rival) -> float:
        return sign * mean_of(list(rival.values.values())).value

    for length in LENGTHS:
        rivals = [rival for group in variants for rival in rivals_of(group, metric, length * unit * (1 + EQUAL))]
        if f"base-{length}" in groups and rivals:
            best = max(rivals, key=value)
            yield Best(length, best.label, mean_of(list(best.values.values())))


def length_for(cost: float) -> int:
    """The shortest length of the base that costs about as much as a method.

    >>> [length_for(cost) for cost in (1.0, 1.1, 2.1, 3.0, 6.0)]
    [1, 1, 2, 4, 8]
    """
    return next((length for length in LENGTHS if cost <= length * NEAR), LENGTHS[-1])


def _groups(regime: Regime, results: Results, experiment: Experiment) -> Iterator[tuple[str, Group]]:
    """The runs of each cell that has any, and the averaged nets where weights were averaged."""
    for cell in experiment.cells:
        if not cell.name.startswith(f"{regime.name}/") or cell.role == CHOOSING:
            continue
        group = results.of(experiment, cell)
        pairs = [with_average(as_record(line, label=cell.label, role=cell.role)) for line in group.records]
        name = cell.name.removeprefix(f"{regime.name}/")
        trained, averaged = [pair[0] for pair in pairs], [pair[1] for pair in pairs if pair[1:]]
        named = name.removesuffix(AVERAGED)
        for shown, some in ((name, trained if named == name else []), (f"{named}-ema", averaged)):
            if some:
                yield shown, Group(some[0]["label"], some[0]["role"], some[0]["recipe"], some)


def _with_gains(rows: list[Row], rivals: list[list[Difference]], larger: bool) -> Iterator[Row]:
    """The rows with the difference to the rival that is hardest to beat; all methods of a regime are one family."""
    family = sum(any(one.n >= FEWEST for one in some) for some in rivals)
    among = [len(some) for some in rivals for _ in some]
    done = iter(judged([one for some in rivals for one in some], larger, among=among, family=family))
    for row, some in zip(rows, rivals, strict=True):
        yield replace(row, gain=hardest([next(done) for _ in some], larger))
