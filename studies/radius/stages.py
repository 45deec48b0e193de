"""Which trainings a stage consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import scaled_stages
from regimes import REGIMES, Regime
from train import Job

CIFAR = (REGIMES["cifar-clean"], REGIMES["cifar-40"])
MLP3 = (REGIMES["mlp3-clean"], REGIMES["mlp3-40"])
RADII = tuple({"rho": rho} for rho in (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0))  # 0 is the base
DIGITS = tuple(
    tuple(REGIMES[f"digits-{label}-{base}"] for label in labels)
    for base in ("sgd", "adam")
    for labels in (("clean", "40", "60"), ("tenth",))
)


def _over(groups: tuple[tuple[Regime, ...], ...], seeds: range, candidates: list[tuple[Any, ...]]) -> list[Job]:
    """Every candidate (method, settings, fixed, hold, draw) in every group of regimes, longest first."""
    jobs = []
    for regimes in sorted(groups, key=len, reverse=True):
        for method, settings, fixed, hold, draw, *scheme in candidates:
            share = 4 if regimes[0].first == 143 else 1  # the tenth of digits holds out a quarter of that
            some = hold if hold in (None, -1) else hold // share
            jobs.append(Job(regimes, method, settings, tuple(seeds), fixed, some, draw and draw // share, *scheme))
    return jobs


def _rates(*rates: float, **more: float) -> tuple[dict[str, float], ...]:
    return tuple({"rate": rate, **more} for rate in rates)


SLOPES: list[tuple[Any, ...]] = [
    ("slope", _rates(0.02, start=0.0), {"form": form, "by": "adam"}, None, None)
    for form in ("cos", "dot", "projection")
] + [
    ("slope", _rates(0.1, 0.3), {"form": "cos", "by": "size"}, None, None),
    ("slope", _rates(0.1, 0.3), {"form": "dot", "by": "size"}, None, None),
    ("slope", _rates(0.1, 0.3), {"form": "cos", "by": "sure"}, None, None),
    ("slope", _rates(0.1, 0.3), {"form": "cos", "by": "size", "memory_of_g": 0.9}, None, None),
    ("slope", _rates(0.1, 0.3), {"form": "cos", "by": "size"}, 128, 64),
    ("slope", _rates(0.1, 0.3), {"form": "cos", "by": "size"}, -1, None),
]
PAIRS: list[tuple[Any, ...]] = [
    ("pair", _rates(0.1, 0.3), {"form": form, "by": by}, None, None)
    for form, by in (("cos", "size"), ("cos", "sure"), ("dot", "size"), ("projection", "size"), ("lookahead", "size"))
]
GAPS: list[tuple[Any, ...]] = [
    ("gap", _rates(0.1, 0.3), {}, None, None),
    ("gap", ({"rate": 0.1, "times": 0.5}, {"rate": 0.1, "times": 2.0}), {}, None, None),
    ("gap", ({"rate": 0.1, "margin": 0.5}, {"rate": 0.1, "margin": 1.0}), {}, None, None),
    ("gap", _rates(0.1, 0.3), {"by": "losses"}, None, None),
    ("gap", _rates(0.1, 0.3), {}, 128, 64),
    ("gap", _rates(0.1, 0.3), {}, 256, 64),
    ("gap", ({"rate": 0.1, "times": 0.5}, {"rate": 0.1, "times": 1.0}, {"rate": 0.1, "times": 2.0}), {}, -1, None),
]
TRIALS: list[tuple[Any, ...]] = [
    ("trial", _rates(0.1, 0.3), {"ratio": 4.0, "period": 10}, None, None),
    ("trial", _rates(0.1, 0.3), {"ratio": 4.0, "period": 10, "by": "sure"}, None, None),
    ("trial", _rates(0.1, 0.3), {"ratio": 4.0, "period": 20}, None, None),
    ("trial", _rates(0.1, 0.3), {"ratio": 2.0, "period": 10}, None, None),
    ("trial", _rates(0.1, 0.3), {"ratio": 4.0, "period": 10}, -1, None),
]
SAMS: list[tuple[Any, ...]] = [("sam", RADII, {}, None, None)]


SMALL = {"start": 1e-3}  # a radius that starts where it changes nothing
_TIMES = tuple({"rate": 0.2, "times": times, **SMALL} for times in (1.0, 2.0, 4.0))
ZERO_PRICE: list[tuple[Any, ...]] = [
    ("gap", _TIMES, {}, 128, 64, "rotate-1"),
    ("gap", _TIMES, {}, 128, 64, "rotate-4"),
    ("gap", _TIMES[:2], {}, 128, 64, "double"),
    ("gap", tuple({"rate": 0.2, "times": -t, **SMALL} for t in (1.0, 2.0, 4.0, 8.0)), {}, 64, None, "previous"),
]
SECOND: list[tuple[Any, ...]] = [
    *ZERO_PRICE,
    ("gap", _rates(0.1, 0.2, 0.4, **SMALL), {}, None, None),
    ("gap", _rates(0.2, 0.4, **SMALL), {}, -1, None),
    ("gap", _rates(0.2, **SMALL), {}, 256, 64, "shrink"),
    ("gap", _rates(0.2, **SMALL), {}, 512, 64, "shrink"),
    ("gap", _rates(0.2, margin=0.5, **SMALL), {}, 256, 64, "shrink"),
    ("slope", _rates(0.02, start=0.0), {"form": "cos", "by": "adam"}, 256, 64, "shrink"),
    ("slope", _rates(0.02, start=0.0), {"form": "cos", "by": "adam"}, 128, 64, "rotate-4"),
    ("slope", _rates(0.02, 0.01, start=0.0), {"form": "cos", "by": "adam"}, -1, None),
]


_COS = {"form": "cos", "by": "adam"}
_MARGINS = tuple({"rate": 0.2, "margin": margin, **SMALL} for margin in (0.0, 0.5))
THIRD: list[tuple[Any, ...]] = [
    ("slope", _rates(0.01, 0.02, start=0.0), _COS, 128, 64, "double"),
    ("slope", _rates(0.01, 0.02, start=0.0), _COS, 128, 64, "log-3"),
    ("gap", _MARGINS, {}, 128, 64, "log-3"),
    ("gap", _MARGINS, {"decay": 0.97}, 128, 64, "log-3"),
    ("gap", _MARGINS, {}, 128, 64, "double"),
    ("slope", _rates(0.01, 0.02, start=0.0), _COS, 64, None, "log-3"),
    ("gap", _MARGINS, {"decay": 0.97}, 64, None, "log-3"),
    ("slope", _rates(0.01, start=0.0), _COS, 64, None),
]


GATE = {"gate": True}
FOURTH: list[tuple[Any, ...]] = [
    ("gap", _TIMES, GATE, 128, 64, "double"),
    ("gap", _TIMES, {}, 128, 64, "double"),
    ("gap", _TIMES, GATE, -1, None),
    ("gap", _TIMES, GATE, 64, None),
    ("gap", _TIMES, GATE, 64, None, "double"),
    ("gap", tuple({**t, "margin": 0.5} for t in _TIMES), {}, 128, 64, "double"),
    ("slope", _rates(0.02, 0.04, start=0.0), _COS, 128, 64, "double"),
    ("slope", _rates(0.02, 0.04, start=0.0), _COS, 64, None, "double"),
]


# What goes into the table, chosen after the stages above: the gap twice over, and its nearest rival.
FROZEN: list[tuple[Any, ...]] = [
    ("gap", _TIMES[1:2], {}, 128, 64, "double"),
    ("slope", _rates(0.02, start=0.0), _COS, 128, 64, "double"),
    ("gap", _TIMES[1:2], GATE, 128, 64, "double"),
]


def _cut(regimes: tuple[Regime, ...], *marks: int) -> tuple[Regime, ...]:
    return tuple(replace(regime, marks=marks) for regime in regimes)


def _confirm(regimes: tuple[Regime, ...], seeds: tuple[int, ...], radii: tuple[float, ...], longest: int) -> list[Job]:
    """Base and its moving average for up to `longest` passes, SAM, MSAM and the frozen gap (c = 2), on fresh seeds."""
    sam = tuple({"rho": rho} for rho in radii)
    return [
        Job(_cut(regimes, 10, 20), "sam", sam, seeds),
        Job(_cut(regimes, 20, 40, longest), "plain", ({},), seeds, average=0.999),
        Job(_cut(regimes, 10, 20), "gap", _TIMES[1:2], seeds, {}, 500, 100),
        Job(_cut(regimes, 20, 40), "msam", tuple({"rho": rho} for rho in (0.3, 1.0, 3.0)), seeds),
    ]


def _toy() -> list[Job]:
    groups = tuple(tuple(replace(r, marks=(1, 2)) for r in group) for group in DIGITS)
    return _over(groups, range(2), SAMS + FROZEN)


STAGES: dict[str, Callable[[], list[Job]]] = {
    "toy": _toy,
    "digits": lambda: _over(DIGITS, range(12), SAMS + GAPS + TRIALS + SLOPES + PAIRS),
    "mnist": lambda: _over(
        ((REGIMES["mnist-40"], REGIMES["mnist-clean"]),),
        range(4),
        [
            *SAMS,
            GAPS[0],
            ("gap", _rates(0.1, 0.3), {}, 500, 100),
            TRIALS[0],
            ("trial", _rates(0.1, 0.3), {"ratio": 4.0, "period": 10}, 500, 100),
            SLOPES[0],
            SLOPES[1],
            SLOPES[3],
            ("slope", _rates(0.1, 0.3), {"form": "cos", "by": "size"}, 500, 100),
            PAIRS[0],
            PAIRS[4],
            (
                "gap",
                ({"rate": 0.1, "times": 0.5}, {"rate": 0.1, "times": 1.0}, {"rate": 0.1, "times": 2.0}),
                {},
                -1,
                500,
            ),
            ("slope", _rates(0.1, 0.3), {"form": "cos", "by": "size"}, -1, 500),
        ],
    ),
    "digits2": lambda: _over(DIGITS, range(12), SECOND),
    "mnist2": lambda: _over(
        ((REGIMES["mnist-40"], REGIMES["mnist-clean"]),),
        range(4),
        [
            ("gap", _TIMES, {}, 500, 100, "rotate-4"),
            ZERO_PRICE[3],
            ("gap", _rates(0.2, **SMALL), {}, 500, 100),
            ("gap", _rates(0.2, **SMALL), {}, 1000, 100, "shrink"),
            ("slope", _rates(0.02, start=0.0), {"form": "cos", "by": "adam"}, 1000, 100, "shrink"),
        ],
    ),
    "digits-table": lambda: _over(DIGITS, range(100, 124), SAMS + FROZEN),
    "mnist-table": lambda: _over(
        ((REGIMES["mnist-40"], REGIMES["mnist-clean"]),),
        range(100, 105),
        [
            ("sam", RADII[:1] + RADII[3:], {}, None, None),
            *((method, settings, fixed, 500, 100, scheme) for method, settings, fixed, *_, scheme in FROZEN),
        ],
    ),
    "digits3": lambda: _over(DIGITS, range(12), THIRD),
    "cifar": lambda: _over((CIFAR,), range(100, 104), [("sam", RADII[:1] + RADII[2:], {}, None, None)]),
    "cifar-own": lambda: _over(
        (CIFAR,),
        range(100, 104),
        [
            ("gap", _TIMES[:2], {}, 500, 100),
            ("slope", _rates(0.01, start=0.0), _COS, 500, 100),
        ],
    ),
    "digits4": lambda: _over(DIGITS, range(12), FOURTH),
    "cifar4": lambda: _over(
        (CIFAR,),
        range(100, 104),
        [("gap", _TIMES[1:2], GATE, 500, 100, "double"), ("gap", _TIMES[1:2], {}, 500, 100, "double")],
    ),
    "cifar-fresh": lambda: _confirm(CIFAR, tuple(range(200, 206)), (0.5, 1.0, 2.0, 4.0), 80),
    "mlp3-fresh": lambda: _confirm(MLP3, tuple(range(200, 205)), (0.02, 0.05, 0.1, 0.2, 0.5, 1.0), 80),
    "capped": lambda: [
        Job(
            _cut(regimes, 10, 20),
            "gap",
            tuple({**_TIMES[1], "cap": cap} for cap in (0.5, 0.65, 0.8)),
            seeds,
            {},
            500,
            100,
        )
        for regimes, seeds in (((REGIMES["mlp3-40"],), tuple(range(200, 205))), (CIFAR[1:], tuple(range(200, 206))))
    ],
    "scaled": scaled_stages.chosen_on,
    "windows-fresh": scaled_stages.fresh,
    "windows-radii": scaled_stages.fresh_radii,
    "windows-parts": scaled_stages.parts,
    "leaps": scaled_stages.leaps,
    "leaps-fewer": scaled_stages.fewer,
    "leaps-shorter": scaled_stages.shorter,
    "leaps-parts": scaled_stages.leap_parts,
    "leaps-fresh": scaled_stages.leaps_fresh,
    "leaps-mnist": scaled_stages.leaps_mnist,
    "relay-digits": lambda: scaled_stages.relay(range(12), (0.045, 0.09), ({"backtrack": 0.0}, {"backtrack": 0.03})),
    "relay-times": lambda: scaled_stages.relay(
        range(12), (0.045,), tuple({"times": times, "backtrack": 0.03} for times in (1.0, 1.5))
    ),
    "early": lambda: scaled_stages.relay(range(12), (0.045,), ({"backtrack": 0.03},), "early"),
    "before": lambda: scaled_stages.before(range(12)),
    "half": lambda: scaled_stages.half(range(12)),
    "cifar-cosine": scaled_stages.cifar_cosine,
    "cosine-toy": lambda: [
        replace(job, regimes=tuple(replace(r, marks=(1,), first=1000) for r in job.regimes), seeds=(0,), hold=100)
        for job in STAGES["cifar-cosine"]()
    ],
    "fresh-toy": lambda: [
        replace(
            job,
            regimes=tuple(replace(r, marks=(1, 2), first=1000) for r in job.regimes),
            seeds=(0,),
            hold=job.hold and 100,
        )
        for job in STAGES["cifar-fresh"]() + STAGES["mlp3-fresh"]()
    ],
    "capped-toy": lambda: [
        replace(job, regimes=tuple(replace(r, marks=(1,), first=1000) for r in job.regimes), seeds=(0,), hold=100)
        for job in STAGES["capped"]()
    ],
    "cifar-toy": lambda: [
        replace(
            job, regimes=tuple(replace(r, marks=(1,), first=1000) for r in CIFAR), seeds=(0,), settings=job.settings[:1]
        )
        for job in STAGES["cifar-own"]()
    ],
    "mnist-toy": lambda: [
        replace(job, regimes=(replace(REGIMES["mnist-40"], marks=(1,), first=400),)) for job in STAGES["mnist"]()[:2]
    ],
}
