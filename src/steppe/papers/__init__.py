"""The papers, run again: recipes for their tables and figures, their numbers, ours, and whether they agree.

>>> experiments()["s0/table1"].cell("cifar10/cnn-5/gam").recipe.method
'gam'
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

from ..support.errors import unknown
from .claims import Claim, Trend
from .experiment import Cell, Experiment, registry

__all__ = ["Cell", "Claim", "Experiment", "Trend", "claims", "experiments", "find", "modules", "trends"]


def modules() -> dict[str, ModuleType]:
    """The papers by short name."""
    from .definitions import extra
    from .definitions import s0 as s0_gam
    from .definitions import s1 as s1_gsam
    from .definitions import s2 as s2_gnam
    from .definitions import s3 as s3_universal
    from .definitions import s4 as s4_sasam

    return {"s0": s0_gam, "s1": s1_gsam, "s2": s2_gnam, "s3": s3_universal, "s4": s4_sasam, "extra": extra}


@cache
def experiments() -> dict[str, Experiment]:
    """All tables and figures by name."""
    return registry(*(module.EXPERIMENTS for module in modules().values()))


@cache
def claims() -> tuple[Claim, ...]:
    """All numbers of the papers."""
    return tuple(claim for module in modules().values() for claim in module.CLAIMS)


@cache
def trends() -> tuple[Trend, ...]:
    """What the papers say in words."""
    return tuple(trend for module in modules().values() for trend in module.TRENDS)


def find(name: str) -> Experiment:
    """A table or figure by name."""
    known = experiments()
    if name.lower() not in known:
        raise unknown("table or figure", name, known)
    return known[name.lower()]
