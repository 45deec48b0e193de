"""S4: Smoothness-Adaptive Sharpness-Aware Minimization (Naganuma, Kim et al., 2024)."""

from __future__ import annotations

import math
from typing import Any

from ..claims import NOTHING, Finding, Trend
from ..experiment import Cell, Experiment, trained
from ..final_measurements import Shifted
from ..store import Results

TITLE = "S4 · Smoothness-Adaptive SAM (SA-SAM)"
LRS, DECAYS = (1e-4, 1e-3, 1e-2, 1e-1), (0.0, 1e-8, 1e-6, 1e-4)
OPTIMIZERS = {
    "sa-sam": ("SA-SAM", "sasam:delta=0.02", "sgd", 0.0),
    "sam": ("SAM", "sam:rho={rho}", "sgd", 0.0),
    "sa-sgd": ("SA-SGD", "sasgd:delta=0.02", "sgd", 0.0),
    "msgd": ("momentum SGD", "plain", "sgd", 0.9),
    "adam": ("Adam", "plain", "adam", 0.0),
}
MODELS = ("vgg-19", "vit-small")


def _grid(model: str) -> tuple[Cell, ...]:
    cells = []
    for name, (label, text, base, momentum) in OPTIMIZERS.items():
        for lr in LRS:
            for decay in DECAYS:
                fields: dict[str, Any] = {
                    "data": "cifar-10", "model": model, "method": text.format(rho=round(math.sqrt(lr), 6)),
                    "base": base, "lr": lr, "momentum": momentum, "weight_decay": decay, "batch": 128, "epochs": 50,
                    "precision": "tf32",
                }  # fmt: skip
                cells.append(trained(f"{name}/lr-{lr:g}/wd-{decay:g}", f"{label}, lr {lr:g}, wd {decay:g}", **fields))
    return tuple(cells)


_NOTES = (
    "Batch, epochs, augmentation and precision are not given: 128, 50, none, TF32. SAM's ρ is the square root of the "
    "learning rate, as in the paper; SAM, SA-SAM and SA-SGD are on SGD without momentum.",
    "CIFAR-10-C is made from the test images unless its files are present: compare methods with each other only. "
    "Curvature is measured on 1000 test images, clean and corrupted.",
)


def _experiment(name: str, model: str, title: str, shows: str) -> Experiment:
    return Experiment(
        name, title, shows, _grid(model), seeds=1, measuring=Shifted(), choices=_NOTES, shorter=10, share=0.2,
        measuring_small=Shifted(samples=170, images=1000),
    )  # fmt: skip


EXPERIMENTS = (
    _experiment("s4/vgg-19", "vgg-19", "Figures 1, 2 and 4: VGG-19 over learning rate and weight decay",
                "Heat maps of accuracy, Tr(H) and λ_max, on CIFAR-10 and CIFAR-10-C: SA-SAM has the best accuracy out "
                "of distribution and the lowest curvature."),
    _experiment("s4/vit-small", "vit-small", "Figures 2, 3 and 5: ViT-Small over learning rate and weight decay",
                "The same heat maps: SA-SAM's accuracy hardly depends on the initial learning rate."),
)  # fmt: skip
CLAIMS: list[Any] = []  # the paper prints no table


def values(
    experiment: Experiment, results: Results, metric: str
) -> tuple[str, dict[str, dict[tuple[float, float], float]]]:
    """A number of every finished cell, by optimizer and then by learning rate and weight decay."""
    scale = results.scale_of(experiment)
    found: dict[str, dict[tuple[float, float], float]] = {}
    for name in OPTIMIZERS:
        for lr in LRS:
            for decay in DECAYS:
                group = results.of(experiment, f"{name}/lr-{lr:g}/wd-{decay:g}", scale or "full")
                if (mean := group.mean(metric)) is not None:
                    found.setdefault(name, {})[lr, decay] = mean.value
    return scale, found


def _best(metric: str, best: Any) -> Any:
    """Each optimizer at its best setting by accuracy on clean images, as the paper chooses it."""

    def check(experiment: Experiment, results: Results) -> Finding:
        scale, shown = values(experiment, results, metric)
        _, clean = values(experiment, results, "test_accuracy")
        if set(shown) != set(OPTIMIZERS):
            return NOTHING
        chosen = {name: shown[name][max(shown[name], key=lambda at: clean[name][at])] for name in shown}
        details = ", ".join(f"{name} {value:.3g}" for name, value in chosen.items()) + "; one seed, no interval"
        return Finding(chosen["sa-sam"] == best(chosen.values()), details, 1, scale)

    return check


def _steady(experiment: Experiment, results: Results) -> Finding:
    scale, shown = values(experiment, results, "shifted_accuracy")
    if set(shown) != set(OPTIMIZERS):
        return NOTHING
    spread = {}
    for name, at in shown.items():
        means = [sum(v for (lr, _), v in at.items() if lr == one) / sum(lr == one for lr, _ in at)
                 for one in {lr for lr, _ in at}]  # fmt: skip
        spread[name] = max(means) - min(means)
    details = "between learning rates " + ", ".join(f"{name} {100 * value:.1f}" for name, value in spread.items())
    # A method that learns little also varies little, so the best accuracies are given too.
    best = ", ".join(f"{name} {100 * max(at.values()):.1f}" for name, at in shown.items())
    adaptive = max(spread["sa-sam"], spread["sa-sgd"])
    rest = min(spread[name] for name in ("sam", "msgd", "adam"))
    return Finding(adaptive < rest, f"{details} points; at best {best} %; one seed, no interval", 1, scale)


TRENDS = tuple(
    trend
    for name in ("s4/vgg-19", "s4/vit-small")
    for trend in (
        Trend("best-shifted", name, "SA-SAM has the best accuracy out of distribution", _best("shifted_accuracy", max)),
        Trend("lowest-trace", name, "SA-SAM has the lowest Tr(H) out of distribution", _best("shifted_trace", min)),
        Trend("steady", name, "SA-SAM and SA-SGD vary least with the initial learning rate", _steady),
    )
)
