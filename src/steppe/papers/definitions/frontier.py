"""The map: in which regimes do methods gain over the best that their base reaches at the same cost?

A regime is a data set, a net and a base. The base is trained 1, 2, 4 and 8 times as long; the same trainings also
evaluate an average of its weights. The radius is chosen on held-out training data: the cells `REGIME/choose/…` train on
the rest, and once their results are kept, the cells at that radius are part of the definition. So a regime takes three
commands:

    steppe paper run extra/frontier --cells digits-clean
    steppe paper collect runs/extra-frontier extra/frontier
    steppe paper run extra/frontier --cells digits-clean        # now with the chosen radius

Nothing is chosen on the test data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...lab.recipe.base_names import base_label
from ...lab.recipe.method_text import canonical
from ...lab.recipe.recipe import Recipe, suggested
from ..choosing import CHOOSING, choosing_cells, chosen_radii
from ..experiment import Cell, Experiment
from ..robustness import Robustness
from ..store import kept_lines

NAME = "extra/frontier"
LENGTHS = (1, 2, 4, 8)
AVERAGED = "-averaged"  # ends the name of a cell of which only the averaged net is shown
RADII = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Regime:
    """A problem and its base; `recipe` is the base at length 1."""

    name: str
    title: str
    recipe: Recipe
    seeds: int
    hold_out: float = 0.1  # of the training data, to choose the radius
    choosing: int = 1  # seeds of each radius on held-out data; more where few are held out

    @property
    def base(self) -> str:
        """The base's name in tables."""
        return base_label(self.recipe.base)

    @property
    def metric(self) -> str:
        """What the nets are compared by."""
        return "test_perplexity" if self.recipe.task == "language" else "test_accuracy"


def _digits(noise: float) -> Regime:
    recipe = Recipe(
        data="digits", model="digits-mlp", base="sgd", lr=0.1, momentum=0.9, batch=64, epochs=40, schedule="cosine",
        label_noise=noise, average="ema:0.99",
    )  # fmt: skip
    labels = f"{100 * noise:g} % wrong labels" if noise else "clean labels"
    name = f"digits-{100 * noise:g}" if noise else "digits-clean"
    return Regime(name, f"digits, {labels}, small net, SGD, 40 epochs", recipe, 10, 0.2, 3)


def _cnn(name: str, label: str, **fields: Any) -> Regime:
    recipe = Recipe.of({
        "data": "cifar-10", "model": "cnn-5", "base": "adam", "lr": 1e-3, "batch": 100, "epochs": 20,
        "precision": "tf32", "average": "ema:0.999", **fields,
    })  # fmt: skip
    return Regime(name, f"CIFAR-10, {label}, CNN-5, Adam, {recipe.epochs} epochs", recipe, 10, choosing=2)


def _resnet(name: str, label: str, augmentation: str, seeds: int) -> Regime:
    recipe = Recipe(
        data="cifar-10", model="resnet-18", base="sgd", lr=0.1, momentum=0.9, weight_decay=5e-4, batch=128, epochs=30,
        schedule="cosine", augmentation=augmentation, precision="bf16", average="ema:0.999",
    )  # fmt: skip
    return Regime(name, f"CIFAR-10, {label}, ResNet-18, SGD, 30 epochs", recipe, seeds)


_VIT = Recipe(  # compiled: its many small kernels fused take 0.6 of the time
    data="cifar-10", model="vit-tiny", base="adamw", lr=5e-4, weight_decay=0.05, batch=128, epochs=30,
    schedule="cosine", warmup=1000, augmentation="basic", precision="bf16", average="ema:0.999", compile=True,
)  # fmt: skip
_GPT = Recipe(
    data="text", task="language", model="gpt-tiny", base="adamw", lr=1e-3, weight_decay=0.1, batch=64, epochs=2,
    schedule="cosine", warmup=200, clip=1.0, precision="bf16", average="ema:0.999",
)  # fmt: skip
# Without an average: the learning rate ends at zero, so the average of the last steps is the last weights.
_FAST = Recipe.of({"data": "cifar-10", "model": "fast-cnn", **suggested("cifar-10", "fast-cnn")})
REGIMES = (
    *(_digits(noise) for noise in (0.0, 0.2, 0.4, 0.6)),
    _cnn("cifar-clean", "clean labels"),
    _cnn("cifar-40", "40 % wrong labels", label_noise=0.4),
    _cnn("cifar-tenth", "a tenth of the data", share=0.1, epochs=60, average="ema:0.99"),
    _resnet("resnet-augmented", "crops and flips", "basic", 3),
    _resnet("resnet-plain", "no augmentation", "none", 6),
    Regime("vit", "CIFAR-10, crops and flips, ViT-tiny, AdamW, 30 epochs", _VIT, 3),
    Regime("language", "text, a small GPT, AdamW, 2 epochs", _GPT, 3),
    Regime("fast", f"CIFAR-10, moves and flips, fast-cnn, SGD, {_FAST.epochs} epochs", _FAST, 100),
)


def fixed_cells(regime: Regime) -> Iterator[Cell]:
    """The cells that do not depend on the chosen radius.

    These are the base in all lengths, its rivals, methods with their default settings, and the runs that choose.
    """
    own, base = regime.recipe, regime.base
    for length in LENGTHS:
        label, role = (base, "base") if length == 1 else (f"{base}, {length}x longer", "equal-cost")
        yield _cell(regime, f"base-{length}", label, role, longer(own, length))
    for length in LENGTHS[:2] if own.base == "sgd" and not own.nesterov else ():
        label = f"{base}, Nesterov" + ("" if length == 1 else f", {length}x longer")
        yield _cell(
            regime, f"nesterov-{length}", label, "rival", replace(longer(own, length), nesterov=True, average="")
        )
    for name, label, method, settings in (
        ("sam-default", "SAM, default ρ", "sam", {}),
        ("msam", "MSAM", "msam", {}),
        ("gam", "GAM, as printed", "gam", {"auxiliary": "previous"}),
        (
            "gam-theorem", "GAM, as its theorem says",
            "gam:T=1,reference=weights,discrepancy=cosine,directions=unit,period=10", {"auxiliary": "held-out"},
        ),
        ("gapsam", "GapSAM", "gapsam", {"auxiliary": "held-out"}),
        (
            "gapsam-backtrack", "GapSAM, backtrack = 0.03", "gapsam:backtrack=0.03",
            {"auxiliary": "held-out", "average": own.average},
        ),
        (
            "gapsam-turns", "GapSAM, held out in turns", "gapsam",
            {"auxiliary": "in-turns", "average": own.average},
        ),
    ):  # fmt: skip
        yield _cell(regime, name, label, "method", _with_method(own, method, **settings))
    if own.task == "language":  # what its paper recommends it for
        for rho in RADII[:2]:
            label = f"Functional-SAM, ρ = {rho}"
            yield _cell(regime, f"functionalsam-{rho}", label, "method", _with_method(own, f"functionalsam:rho={rho}"))
    yield from choosing_cells(regime.name, replace(own, average=""), RADII, regime.hold_out, regime.choosing)


def chosen_cells(regime: Regime, rho: float) -> Iterator[Cell]:
    """The cells at the radius that held-out data chose for SAM; ASAM's is ten times that, as is usual."""
    own = regime.recipe
    for length in LENGTHS[:-1]:  # at most as long as the base
        name, more = ("sam", "") if length == 1 else (f"sam-{length}", f", {length}x longer")
        recipe = _with_method(longer(own, length), f"sam:rho={rho}")
        yield _cell(regime, name, f"SAM, ρ = {rho}{more}", "method", recipe)
    if own.average:
        recipe = _with_method(own, f"sam:rho={rho}", average=own.average)
        yield _cell(regime, f"sam{AVERAGED}", f"SAM, ρ = {rho}", "method", recipe)
    for name, label, method in (
        ("asam", f"ASAM, ρ = {10 * rho:g}", f"asam:rho={10 * rho:g}"),
        ("gsam", f"GSAM, ρ = {rho}", f"gsam:rho={rho}"),
        ("late-sam", f"SAM in the last eighth, ρ = {rho}", f"late:start=0.875,method=(sam:rho={rho})"),
        ("fsam", f"F-SAM, ρ = {rho}", f"fsam:rho={rho}"),
        ("crsam", f"CR-SAM, ρ = {rho}", f"crsam:rho={rho}"),
        ("looksam", f"LookSAM, ρ = {rho}", f"looksam:rho={rho}"),
        *(_more_methods(rho) if own.data == "digits" else ()),
    ):
        yield _cell(regime, name, label, "method", _with_method(own, method))


def _more_methods(rho: float) -> Iterator[tuple[str, str, str]]:
    """Name, label and text of the other methods that the documentation recommends; where runs take a second."""
    yield "every-5", f"SAM on every fifth step, ρ = {rho}", f"every:k=5,method=(sam:rho={rho})"
    yield "gnp", f"GNP, r = {rho}", f"gnp:r={rho}"
    yield "wsam", f"WSAM, ρ = {rho}", f"wsam:rho={rho}"
    yield "gnam-fast", f"GNAM, fast, ρ = {rho}", f"gnamfast:rho={rho}"
    yield "tracesam", f"Trace-SAM, ρ = {rho}", f"tracesam:rho={rho}"


def longer(recipe: Recipe, factor: int) -> Recipe:
    """The recipe with its epochs multiplied by a factor. The warm-up stays: its length in steps is part of the base."""
    return replace(recipe, epochs=recipe.epochs * factor)


def _with_method(recipe: Recipe, method: str, **fields: Any) -> Recipe:
    """The recipe with a method; without averaged weights, unless `fields` ask for them."""
    return replace(recipe, **{"method": canonical(method), "average": "", **fields})


def _cell(regime: Regime, name: str, label: str, role: str, recipe: Recipe) -> Cell:
    return Cell(f"{regime.name}/{name}", recipe, label, role, seeds=regime.seeds)


# The choice


def chosen_by(lines: Any) -> dict[str, float]:
    """The radius that held-out data chose, by regime."""
    return chosen_radii(lines, RADII, {regime.name: regime.choosing for regime in REGIMES})


def frontier(chosen: Mapping[str, float]) -> Experiment:
    """The experiment, including the cells at the chosen radius for regimes in which one was chosen."""
    cells: list[Cell] = []
    for regime in REGIMES:
        cells += fixed_cells(regime)
        if regime.name in chosen:
            cells += chosen_cells(regime, chosen[regime.name])
    return Experiment(
        NAME, "Methods and bases at 1, 2, 4 and 8 times the cost, regime by regime",
        "Where a method gains over the best that its base reaches at the same cost.", tuple(cells), seeds=10,
        measuring=Robustness(), follows=lambda lines: frontier(chosen_by(lines)), shorter=10, stops=10,
        needs="CIFAR-10, and text for the language model",
        choices=("SAM's radius is chosen on held-out training data; its cells appear when these runs are collected. "
                 "ASAM takes ten times that radius, the others the same; MSAM, GAM and GapSAM have their defaults.",
                 "GNP, WSAM, GNAM, Trace-SAM and SAM on every fifth step are run on digits only."),
    )  # fmt: skip


CHOSEN = chosen_by(kept_lines(NAME.replace("/", "-"), containing=f'"role": "{CHOOSING}"'))
FRONTIER = frontier(CHOSEN)
