"""The picture and the numbers that README begins with, made from records of two comparisons on digits.

Run ``python docs/making/first_picture.py`` to draw it again. The records are those of `steppe compare --methods
sam:rho=0.1,asam:rho=1.0,gsam:rho=0.1 --seeds 10`, with and without ``--label-noise 0.6``.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

ASSETS = Path(__file__).parents[1] / "assets"
RECORDS, PICTURE = ASSETS / "digits_label_noise.json", ASSETS / "digits_label_noise.png"
BASE, PANELS = "SGD", {0.0: "clean labels", 0.6: "60 % wrong labels"}


def differences(noise: float, against: str = BASE) -> dict[str, list[float]]:
    """For each method, its test accuracy less that of another with the same seed, in points."""
    runs: dict[str, dict[int, float]] = {}
    for run in json.loads(RECORDS.read_text("utf-8"))["runs"]:
        if run["label_noise"] == noise:
            runs.setdefault(run["label"], {})[run["seed"]] = 100 * run["test_accuracy"]
    base = runs.pop(against)
    return {label: [found[seed] - base[seed] for seed in sorted(base)] for label, found in runs.items()}


def interval(values: list[float]) -> tuple[float, float, float]:
    """The mean and its 95 % t interval."""
    from steppe.support.student import t_quantile

    n, middle = len(values), mean(values)
    spread = (sum((value - middle) ** 2 for value in values) / (n - 1)) ** 0.5
    half = t_quantile(0.975, n - 1) * spread / n**0.5
    return middle, middle - half, middle + half


def text(values: list[float]) -> str:
    """A difference with its interval, as README writes it.

    >>> text([1.0, 2.0, 3.0])
    '+2.0 [−0.5, +4.5]'
    """
    middle, low, high = (f"{value:+.1f}".replace("-", "−") for value in interval(values))
    return f"{middle} [{low}, {high}]"


def draw() -> Any:
    """One panel for clean and one for wrong labels: every seed's difference, the mean and its interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 2.4), sharex=True, sharey=True)
    for axis, (noise, title) in zip(axes, PANELS.items(), strict=True):
        rows = differences(noise)
        for place, values in enumerate(rows.values()):
            middle, low, high = interval(values)
            colour = "#00796b" if low > 0 else "#c62828" if high < 0 else "#616161"
            axis.plot(values, [place] * len(values), "o", color=colour, alpha=0.3, markersize=4)
            axis.plot([low, high], [place, place], "-", color=colour, linewidth=3)
            axis.plot(middle, place, "D", color=colour, markersize=6)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_title(f"digits, {title}", fontsize=11)
        axis.set_yticks(range(len(rows)), list(rows))
        axis.margins(y=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("test accuracy less SGD's, points (each dot a seed; mean with 95 % interval, n = 10)", fontsize=10)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    draw().savefig(PICTURE, dpi=160)
    for noise, title in PANELS.items():
        for against in (BASE, f"{BASE}, 2x longer"):
            print(title, "against", against, {label: text(v) for label, v in differences(noise, against).items()})
