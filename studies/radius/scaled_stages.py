"""The second round: a rate with a unit, votes, and gaps without the sample's hardness. On one CPU core, so few runs."""

from __future__ import annotations

from typing import Any

from regimes import REGIMES, Regime
from train import Job

GROUPS = tuple(
    tuple(REGIMES[f"digits-{label}-{base}"] for label in labels)
    for labels in (("clean", "40", "60"), ("tenth",))
    for base in ("sgd", "adam")
)
FEW = range(12)
SECANT = {"statistic": "secant", "period": 5}


def held(regimes: tuple[Regime, ...]) -> int:
    """9 % of the examples: 129 of digits, 13 of its tenth; 500 of MNIST's 5 000."""
    examples = regimes[0].first or 1437
    return 500 if examples == 5000 else max(8, round(0.09 * examples))


def scaled(
    regimes: tuple[Regime, ...],
    settings: tuple[dict[str, float], ...],
    fixed: dict[str, Any],
    draw: int | None,
    seeds: range = FEW,
    scheme: str = "double",
) -> Job:
    """The cosine's direction with a rate in units of the weights."""
    K = held(regimes)
    return Job(regimes, "scaled", settings, tuple(seeds), fixed, K, draw and min(draw, K), scheme)


def windows(
    regimes: tuple[Regime, ...],
    settings: tuple[dict[str, float], ...],
    draw: int | None = None,
    seeds: range = FEW,
    more: dict[str, Any] | None = None,
    hold: int | None = None,
    scheme: str = "double",
) -> Job:
    """The gap without the hardness of the sample; `hold` in place of 9 % of the examples."""
    hold = hold or held(regimes)
    steps = ((regimes[0].first or 1437) - hold) // regimes[0].batch
    return Job(regimes, "window", settings, tuple(seeds), {"pass_steps": steps, **(more or {})}, hold, draw, scheme)


def chosen_on() -> list[Job]:
    """What was tried on seeds 0 to 11; `rate` 0 shows what holding out costs."""
    sgd, adam, tenth_sgd, tenth_adam = GROUPS
    mnist = (REGIMES["mnist-40"],)
    unit = {"rate": 0.1, "unit": 0.02}
    secant = tuple({"rate": rate, "unit": 0.02, "least": 0.05} for rate in (0.05, 0.1))
    small = (unit, {"rate": 0.2, "unit": 0.01}, {"rate": 0.2, "unit": 0.02})
    cosine = {"form": "cos", "by": "adam"}
    before = ({"rate": 0.02, "start": 0.0},)
    return [
        *(Job(g, "slope", before, tuple(FEW), cosine, held(g), held(g), "double") for g in (tenth_sgd, tenth_adam)),
        *(scaled(group, small, {}, 64) for group in (tenth_sgd, tenth_adam)),
        scaled(adam, small[1:2], {}, 64),
        *(scaled(group, (unit,), {}, None) for group in (sgd, adam)),
        scaled(adam, (unit,), {}, None, scheme="fixed"),
        *(scaled(group, secant, SECANT, 64) for group in (sgd, adam)),
        *(windows(group, tuple({"times": times} for times in (1.0, 2.0))) for group in GROUPS),
        *(windows(group, ({"rate": 0.0},)) for group in GROUPS),
        scaled(mnist, secant[1:], SECANT, 100, range(2)),
        windows(mnist, ({"times": 2.0},), 250, range(2)),
        *(windows(group, ({"times": 3.0, "rate": 0.1},)) for group in GROUPS[:2]),
        *(windows(group, tuple({"times": times, "rate": 0.1} for times in (2.0, 3.0))) for group in GROUPS[2:]),
    ]


def fresh() -> list[Job]:
    """Frozen: the gap in windows, the base, and the gap as it was."""
    seeds = range(300, 324)
    frozen = ({"times": 2.0},)
    as_it_was = {"offset": False, "quarter": 0.0, "half": 0.0}
    return [
        *(windows(group, frozen, seeds=seeds) for group in GROUPS),
        *(Job(group, "plain", ({},), tuple(seeds)) for group in GROUPS),
        *(windows(group, frozen, seeds=seeds, more=as_it_was) for group in GROUPS),
    ]


def fresh_radii() -> list[Job]:
    """Fixed radii on the same seeds: those that were best, in most of these cells, on seeds 100 to 123."""
    radii = ((0.1, 0.2, 0.5), (0.02, 0.2))
    return [
        Job(group, "sam", ({"rho": rho},), tuple(range(300, 324)))
        for group, some in zip(GROUPS[:2], radii, strict=True)
        for rho in some
    ]


def parts() -> list[Job]:
    """Which part of the gap in windows does it: without the offset; with it, but free to fall in the first half."""
    adam = GROUPS[1][1:]
    changes = ({"offset": False}, {"half": 0.0})
    return [windows(adam, ({"times": 2.0},), seeds=range(300, 324), more=change) for change in changes]


def leaps() -> list[Job]:
    """Sixth round: does ρ grow too slowly? The vote upwards may be larger; and the windows' first parts shorter."""
    leap = tuple({"times": 2.0, "leap": leap} for leap in (2.0, 4.0, 7.0))
    shorter = {"quarter": 0.125, "half": 0.25}
    as_it_was = {"offset": False, "quarter": 0.0, "half": 0.0}
    return [
        *(windows(group, leap) for group in GROUPS),
        *(windows(group, ({"times": 2.0, "leap": 1.0}, *leap[1:2]), more=shorter) for group in GROUPS),
        *(windows(group, ({"times": 2.0, "leap": 1.0}, *leap[1:2]), more=as_it_was) for group in GROUPS),
    ]


def fewer() -> list[Job]:
    """Sixth round, second part: what the first part points to, with fewer examples held out."""
    both = tuple({"times": 2.0, "leap": leap} for leap in (2.0, 4.0))
    shorter, short = {"quarter": 0.125, "half": 0.25}, {"quarter": 0.0625, "half": 0.125}
    return [
        *(windows(group, both, more=shorter, hold=hold) for hold in (64, 32) for group in GROUPS[:2]),
        *(windows(group, both, more=shorter, hold=hold) for hold in (7,) for group in GROUPS[2:]),
        *(windows(group, both[:1], more=shorter) for group in GROUPS),
        *(windows(group, both, more=short) for group in GROUPS),
    ]


def shorter() -> list[Job]:
    """Sixth round, third part: windows that wait even less, with fewer held out; and the same examples always."""
    leap = ({"times": 2.0, "leap": 2.0},)
    three = tuple({"times": 2.0, "leap": leap} for leap in (1.0, 2.0, 4.0))
    short, none = {"quarter": 0.0625, "half": 0.125}, {"offset": False, "quarter": 0.0, "half": 0.0}
    return [
        *(windows(group, leap, more=short, hold=hold) for hold in (64, 32) for group in GROUPS[:2]),
        *(windows(group, leap, more=short, hold=7) for group in GROUPS[2:]),
        *(windows(group, three, more=none, hold=64, scheme="fixed") for group in GROUPS[:2]),
        *(windows(group, three, more=none, hold=7, scheme="fixed") for group in GROUPS[2:]),
    ]


def leap_parts() -> list[Job]:
    """Sixth round, last part: what of this does it, with 4.5 % held out."""
    leap, same = ({"times": 2.0, "leap": 2.0},), ({"times": 2.0, "leap": 1.0},)
    shorter = {"quarter": 0.125, "half": 0.25}
    changes = ((same, {}), (leap, {"half": 0.125}), (leap, {"offset": False}), (({"rate": 0.0},), {}))
    return [
        windows(group, settings, more={**shorter, **change}, hold=64 if group in GROUPS[:2] else 7)
        for settings, change in changes
        for group in GROUPS
    ]


def leaps_fresh() -> list[Job]:
    """Sixth round, frozen, fresh seeds: the gap in turns, GapSAM as it was, base and six radii."""
    seeds = range(500, 524)
    frozen = {"leap": 2.0, "quarter": 0.125, "half": 0.25}
    as_it_was = ({"times": 2.0, "rate": 0.2, "start": 1e-3, "cap": 0.8},)
    radii = tuple({"rho": rho} for rho in (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0))
    holds = [(group, 64 if group in GROUPS[:2] else 7) for group in GROUPS]
    return [
        *(windows(group, ({"times": 2.0},), seeds=seeds, more=frozen, hold=hold) for group, hold in holds),
        *(Job(group, "sam", (rho,), tuple(seeds)) for group in GROUPS for rho in radii),
        *(Job(group, "gap", as_it_was, tuple(seeds), {}, hold) for group, hold in holds),
    ]


def leaps_mnist() -> list[Job]:
    """Sixth round, the same frozen form on MNIST, on seeds whose base, radii and gap are kept."""
    frozen = {"leap": 2.0, "quarter": 0.125, "half": 0.25}
    regimes = (REGIMES["mnist-40"],)
    fixed = {"pass_steps": (5000 - 225) // 100, **frozen}
    return [Job(regimes, "window", ({"times": 2.0},), (100, 101, 102), fixed, 225, None, "double")]


def cifar_cosine() -> list[Job]:
    """The cosine in units of the weights on CIFAR-10, on seeds whose base, radii and gap are kept."""
    cifar = (REGIMES["cifar-clean"], REGIMES["cifar-40"])
    unit = {"unit": 0.02}
    candidates: list[tuple[tuple[dict[str, float], ...], dict[str, Any]]] = [
        (tuple({"rate": rate, **unit} for rate in (0.1, 0.2)), {}),
        (({"rate": 0.1, **unit},), {"mix": "bound"}),
        (({"rate": 0.1, "least": 0.05, **unit},), SECANT),
    ]
    seeds = tuple(range(200, 204))
    return [Job(cifar, "scaled", settings, seeds, fixed, 500, 100) for settings, fixed in candidates]


def relay(
    seeds: range, shares: tuple[float, ...], settings: tuple[dict[str, float], ...], form: str = "relay"
) -> list[Job]:
    """The tenth round: groups that relieve each other, with a share of the examples in both together."""
    jobs = []
    for share in shares:
        for group in GROUPS:
            examples = group[0].first or 1437
            hold = max(4, 2 * round(share * examples / 2))
            fixed = {"pass_steps": (examples - hold) // group[0].batch}
            jobs.append(Job(group, form, settings, tuple(seeds), fixed, hold, None, form))
    return jobs


def half(seeds: range) -> list[Job]:
    """The tenth round, second part: the gap in turns whose ρ does not fall in the first half of a turn."""
    later = {"leap": 2.0, "quarter": 0.125, "half": 0.5}
    holds = [(group, 64 if group in GROUPS[:2] else 7) for group in GROUPS]
    return [windows(group, ({"times": 2.0},), seeds=seeds, more=later, hold=hold) for group, hold in holds]


def before(seeds: range) -> list[Job]:
    """The tenth round, last part: the offset is measured in the pass before a turn."""
    jobs = []
    for group, hold in [(group, 64 if group in GROUPS[:2] else 7) for group in GROUPS]:
        fixed = {"pass_steps": ((group[0].first or 1437) - hold) // group[0].batch, "leap": 2.0}
        settings = tuple({"times": times} for times in (1.0, 1.5, 2.0))
        jobs.append(Job(group, "before", settings, tuple(seeds), fixed, hold, None, "before"))
    return jobs
