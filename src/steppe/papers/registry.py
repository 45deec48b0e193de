"""All tables and figures, claims and trends of the papers, by name.

>>> recipe = experiments()["s0/table1"].cell("cifar10/cnn-5/gam").recipe
>>> recipe.method
'gam'
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

from ..support.errors import unknown
from .claims import Claim, Trend
from .definitions import extra, s0, s1, s2, s3, s4
from .experiment import Experiment, by_name

PAPERS: dict[str, ModuleType] = {"s0": s0, "s1": s1, "s2": s2, "s3": s3, "s4": s4, "extra": extra}


def paper_titles() -> list[str]:
    """The papers by their short names: "S1: Surrogate Gap Minimization ... (GSAM; Zhuang et al., ICLR 2022)"."""
    return [(paper.__doc__ or "").split("\n")[0].rstrip(".") for name, paper in PAPERS.items() if name != "extra"]


@cache
def experiments() -> dict[str, Experiment]:
    """All tables and figures by name."""
    return by_name(*(paper.EXPERIMENTS for paper in PAPERS.values()))


@cache
def claims() -> tuple[Claim, ...]:
    """All numbers of the papers."""
    return tuple(claim for paper in PAPERS.values() for claim in paper.CLAIMS)


@cache
def trends() -> tuple[Trend, ...]:
    """All statements of the papers in words."""
    return tuple(trend for paper in PAPERS.values() for trend in paper.TRENDS)


def find(name: str) -> Experiment:
    """A table or figure by name."""
    known = experiments()
    if name.lower() not in known:
        raise unknown("table or figure", name, known)
    return known[name.lower()]
