"""S1: Surrogate Gap Minimization Improves Sharpness-Aware Training (GSAM; Zhuang et al., ICLR 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...lab.data.imagenet_sets import OF_ALL
from ...lab.recipe.method_text import make_method
from ...lab.statistics import mean_of
from .. import ridge
from ..claims import NOTHING, Claim, Contest, Finding, Trend, claims_table, contests, falls_along
from ..experiment import SETS, Cell, Experiment, trained
from ..final_measurements import AtOwnRadius
from ..imagenet_evaluation import OtherSets
from ..pretrained import pretrained_model
from ..store import Results

TITLE = "S1 · Surrogate Gap Minimization (GSAM)"

# Table 4: model, ρ_max, ρ_min, α. Learning rates fall to a hundredth; here, to zero.
_MODELS: dict[str, tuple[str, dict[str, Any], float, float, float]] = {
    "resnet-50": ("resnet-50", {}, 0.04, 0.02, 0.01),
    "resnet-101": ("timm:resnet101", {}, 0.04, 0.02, 0.01),
    "resnet-152": ("timm:resnet152", {}, 0.04, 0.02, 0.005),
    "vit-s-32": ("timm:vit_small_patch32_224", {}, 0.6, 0.0, 0.4),
    "vit-s-16": ("timm:vit_small_patch16_224", {}, 0.6, 0.0, 1.0),
    "vit-b-32": ("timm:vit_base_patch32_224", {}, 0.6, 0.1, 0.6),
    "vit-b-16": ("timm:vit_base_patch16_224", {}, 0.6, 0.2, 0.4),
    "mixer-s-32": ("timm:mixer_s32_224", {}, 0.5, 0.0, 0.2),
    "mixer-s-16": ("timm:mixer_s16_224", {}, 0.5, 0.0, 0.6),
    "mixer-s-8": ("timm:mixer_s16_224", {"patch_size": 8}, 0.5, 0.1, 0.1),
    "mixer-b-32": ("timm:mixer_b32_224", {}, 0.7, 0.2, 0.05),
    "mixer-b-16": ("timm:mixer_b16_224", {}, 0.5, 0.2, 0.01),
}
_RESNET: dict[str, Any] = {
    "data": "imagenet", "base": "sgd", "lr": 1.6, "momentum": 0.9, "weight_decay": 1e-3, "batch": 4096, "epochs": 90,
    "warmup": 5000, "schedule": "linear", "clip": 1.0,
}  # fmt: skip
_VIT: dict[str, Any] = {
    "data": "imagenet", "base": "adamw", "lr": 3e-3, "weight_decay": 0.3, "batch": 4096, "epochs": 300,
    "warmup": 10000, "schedule": "linear", "clip": 1.0,
}  # fmt: skip


def _large(name: str, label: str, model: str, method: str, **settings: Any) -> Cell:
    built, model_settings, *_ = _MODELS[model]
    common = _RESNET if model.startswith("resnet") else _VIT
    return trained(
        name, label, **{**common, "model": built, "model_settings": model_settings, "method": method, **settings}
    )


def _gsam(model: str, *, ascent: str = "") -> str:
    _, _, high, low, alpha = _MODELS[model]
    return f"gsam:rho={high}..{low},alpha={alpha}{ascent}"


def _table1() -> tuple[Cell, ...]:
    cells = []
    for model, (_, _, high, *_) in _MODELS.items():
        cells += [
            _large(f"{model}/vanilla", "vanilla", model, "plain"),
            _large(f"{model}/sam", "SAM", model, f"sam:rho={high}"),
            _large(f"{model}/gsam", "GSAM", model, _gsam(model)),
        ]
    return tuple(cells)


_B32 = "vit-b-32"
_ALPHAS, _RHOS = (0.0, 0.05, 0.1, 0.15, 0.2), (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
_AUGMENTS = {
    "light": {},
    "medium": {"augmentation": "randaugment", "mixup": 0.2},
    "strong": {"augmentation": "randaugment", "mixup": 0.5},
}
_METHODS = (("vanilla", "vanilla", "plain"), ("sam", "SAM", "sam:rho=0.6"), ("gsam", "GSAM", _gsam(_B32)))
_FIG6 = (
    *(_large(f"augmentation/{a}/{n}", f"{text}, {a}", _B32, m, **_AUGMENTS[a])
      for a in _AUGMENTS for n, text, m in _METHODS),
    *(_large(f"base/{b}/{n}", f"{text}, {b}", _B32, m, base=b)
      for b in ("adamw", "adabelief") for n, text, m in _METHODS),
    _large("objective/fp-h", "min(f_p, h)", _B32, _gsam(_B32)),
    _large("objective/f-h", "min(f, h)", _B32, _gsam(_B32, ascent=",objective=f-h")),
)  # fmt: skip
_FIG5 = (
    _large("vanilla", "vanilla", "mixer-s-32", "plain"),
    _large("entropy", "Entropy-SGD", "mixer-s-32", "entropysgd"),
    _large("sam", "SAM", "mixer-s-32", "sam:rho=0.5"),
    _large("sam-ascent", "SAM + ascent", "mixer-s-32", _gsam("mixer-s-32")),
    _large("asam", "ASAM", "mixer-s-32", "asam:rho=5.0"),
    _large("asam-ascent", "ASAM + ascent", "mixer-s-32", "gsam:rho=5.0..0.0,alpha=0.2,ascent=adaptive"),
)


def _table6(make: Any, high: float, low: float, alpha: float) -> tuple[Cell, ...]:
    return (
        make("vanilla", "vanilla", "plain"),
        make("constant", "constant ρ (SAM)", f"sam:rho={high}"),
        make("constant-ascent", "constant ρ + ascent", f"gsam:rho={high},alpha={alpha}"),
        make("decayed", "decayed ρ", f"gsam:rho={high}..{low},alpha=0.0"),
        make("decayed-ascent", "decayed ρ + ascent (GSAM)", f"gsam:rho={high}..{low},alpha={alpha}"),
    )


# Stand-ins at CIFAR scale

_SMALL: dict[str, Any] = {
    "data": f"{SETS}:cifar10", "model": "cnn-5", "base": "sgd", "lr": 0.05, "momentum": 0.9, "batch": 100,
    "epochs": 20, "schedule": "cosine",
}  # fmt: skip


def _small(name: str, label: str, method: str, **settings: Any) -> Cell:
    return trained(name, label, **{**_SMALL, "method": method, **settings})


CIFAR_GRID = {0.05: (0.0, 0.2, 0.4), 0.1: (*_ALPHAS, 0.4), 0.2: (0.0, 0.2, 0.4)}
_FIG4_CIFAR = tuple(
    _small(f"rho-{rho}/alpha-{a}", f"ρ = {rho}, α = {a}", f"gsam:rho={rho},alpha={a}")
    for rho, alphas in CIFAR_GRID.items()
    for a in alphas
)


# Figure 3: a ridge between sharp minima, which leads to a flat one

_ON_RIDGES = {"sgd": ("SGD", "plain"), "sam": ("SAM", "sam:rho=0.48"), "gsam": ("GSAM", "gsam:rho=0.48,alpha=0.91")}
_STEPS = 800
_RIDGES = 300


def trajectory(cell: str, scale: str, seed: int) -> dict[str, Any]:
    """The path of an optimizer from one start, and the share of starts from which it reaches the flat minimum."""
    begin, steps = ridge.starts(), 5 if scale == "smoke" else _STEPS
    points = ridge.paths(ridge.PAPER, make_method(_ON_RIDGES[cell][1]), begin, steps)
    path = points[:, 3 * ridge.STARTS // 4]
    found = {"end": path[-1].tolist(), "place": ridge.describe(ridge.PAPER, path[-1])}
    share = float(ridge.PAPER.reached(points[-1]).float().mean())
    return {"path": path[:: 1 if scale == "smoke" else 4].tolist(), "starts": len(begin), "reached": share, **found}


def on_many_ridges(cell: str, scale: str, seed: int) -> dict[str, Any]:
    """For each of many surfaces, the share of starts from which an optimizer reaches the flat minimum."""
    number, steps = (3, 5) if scale == "smoke" else (_RIDGES, _STEPS)
    many = ridge.random_ridges(number).repeated(ridge.STARTS)
    begin = ridge.starts().repeat(number, 1)
    end = ridge.paths(many, make_method(_ON_RIDGES[cell][1]), begin, steps)[-1]
    shares = many.reached(end).view(number, -1).float().mean(1)
    return {"surfaces": number, "reached": float(shares.mean()), "by_surface": [round(x, 3) for x in shares.tolist()]}


_TRANSFER = {"cifar10": ("cifar-10", 4), "cifar100": ("cifar-100", 4), "flowers": (f"{SETS}:flowers", 60),
             "pets": (f"{SETS}:pets", 35)}  # fmt: skip
_TABLE3 = tuple(
    trained(
        f"{model}/{data}/{method}", label, data=source, base="sgd", lr=0.01, momentum=0.9, batch=512, epochs=epochs,
        warmup=500 if "cifar" in data else 100, schedule="linear", clip=1.0, model=pretrained_model(),
        model_settings={"name": _MODELS[model][0].removeprefix("timm:"), "weights": f"s1-{model}-{method}"},
    )  # the methods differ in the weights; the fine-tuning itself is plain SGD
    for model in ("vit-b-16", "vit-s-16")
    for data, (source, epochs) in _TRANSFER.items()
    for method, label in (("vanilla", "vanilla"), ("sam", "SAM"), ("gsam", "GSAM"))
)  # fmt: skip
_NOTES = (
    "Batch 4096 is not in the text. Table 4 has weight decay 0.3 for ResNets, Appendix B.1 searches 0.001 to 0.1: "
    "with torch's SGD, which adds it to the gradient, 0.3 at learning rate 1.6 would halve the weights every step, so "
    "0.001 is used.",
    "SAM's ρ is not given by model: GSAM's ρ_max is used.",
)
_TESTED = (
    "Nets are tested on ImageNet, and on those of ImageNet-Real, -v2, -R and -C that are present. The paper does not "
    "say how: here ImageNet-C's number is the mean accuracy over 15 corruptions and 5 severities. ImageNet-R's is for "
    "answers among all 1000 classes: the paper's numbers are as low as others report for that. Its authors' number, "
    "for answers among its 200 classes, is given too.",
)
_ALONE = ("Only the ImageNet column of this table is measured.",)
_CIFAR_NOTES = ("Stand-in: CNN-5 on CIFAR-10, 20 epochs of SGD, not ViT-B/32 on ImageNet.",)
_VIEW = (*_CIFAR_NOTES, "Drawn from s1/fig4-cifar's runs.")
_NEEDS = "ImageNet and timm"
_OTHERS = "ImageNet-Real, -v2, -R and -C beside ImageNet"

EXPERIMENTS = (
    Experiment("s1/table1", "Table 1: ImageNet, twelve models", "GSAM above SAM above vanilla for every model.",
               _table1(), measuring=OtherSets(), choices=(*_NOTES, *_TESTED),
               needs=f"{_NEEDS}, and for the other four columns {_OTHERS}"),
    Experiment("s1/table2", "Table 2: min(f_p + λh) against GSAM", "ViT-B/32 on ImageNet: 75.4 against 76.8.",
               (_large("weighted", "min(f_p + λh)", _B32, _gsam(_B32, ascent=",objective=weighted")),
                _large("gsam", "GSAM", _B32, _gsam(_B32))), choices=(*_NOTES, *_ALONE), needs=_NEEDS),
    Experiment("s1/table3", "Table 3: fine-tuning", "ViT-B/16 and S/16 on CIFAR-10, CIFAR-100, Flowers, Pets.", _TABLE3,
               needs="the weights of s1/table1 (steppe train --keep-weights), timm, and the data sets",
               choices=("Learning rate 0.01, of the four searched. Epochs stand for 10k and 500 steps.",)),
    Experiment("s1/table5", "Table 5: vanilla training twice as long", "ViT-B/32: 71.4 at 300 epochs, 72.0 at 600.",
               (_large("vanilla-300", "vanilla", _B32, "plain"),
                _large("vanilla-600", "vanilla, 600 epochs", _B32, "plain", epochs=600, role="equal-cost"),
                _large("gsam-300", "GSAM", _B32, _gsam(_B32))), choices=(*_NOTES, *_ALONE), needs=_NEEDS),
    Experiment("s1/table6", "Table 6: constant or decayed ρ, with or without ascent",
               "ViT-B/32: the ascent helps with either ρ.",
               _table6(lambda n, text, m: _large(n, text, _B32, m), 0.6, 0.1, 0.6), choices=_NOTES, needs=_NEEDS),
    Experiment("s1/fig3", "Figure 3: trajectories beside a ridge with sharp minima",
               "SGD and SAM stop at sharp minima, GSAM follows the ridge to the flat one.",
               tuple(Cell(name, None, label) for name, (label, _) in _ON_RIDGES.items()),
               compute=trajectory, stands_in=True, choices=(
                   "The paper describes its surface in words: a loss that is smoother along a ridge than in the sharp "
                   "minima beside it. This one is ours. It is the best for GSAM of 1500 such surfaces, each with a "
                   "radius of 0.1 to 0.6 and an α of 0.2 to 1.5: it shows that the effect exists, not how common it "
                   "is. For that see s1/ridges.",
                   "Before, on a surface without a ridge (two sharp wells on the way to a wide one), GSAM reached the "
                   "flat minimum with none of about ten settings.",
               )),
    Experiment("s1/ridges", "Figure 3 on many surfaces (not in the paper)",
               "One surface.",
               tuple(Cell(name, None, label) for name, (label, _) in _ON_RIDGES.items()),
               compute=on_many_ridges, stands_in=True, choices=(
                   f"{_RIDGES} random surfaces with a ridge, {ridge.STARTS} starts on each, the radius and α of "
                   "s1/fig3.",
               )),
    Experiment("s1/fig4", "Figure 4: λ_max from the gap and by power iteration, over ρ and α",
               "ViT-B/32: both fall as α and ρ grow, and look alike.",
               tuple(_large(f"rho-{r}/alpha-{a}", f"ρ = {r}, α = {a}", _B32, f"gsam:rho={r},alpha={a}")
                     for r in _RHOS for a in _ALPHAS if a in (0.05, 0.15, 0.2)),
               measuring=AtOwnRadius(), choices=_NOTES, needs=_NEEDS),
    Experiment("s1/fig5", "Figure 5: Entropy-SGD, ASAM, and the ascent on both",
               "Mixer-S/32: the ascent helps SAM and ASAM.", _FIG5, choices=_NOTES, needs=_NEEDS),
    Experiment("s1/fig6", "Figure 6: augmentation, base optimizer, min(f, h)",
               "GSAM above SAM above vanilla under light, medium and strong augmentation, with AdamW and AdaBelief.",
               _FIG6, needs=_NEEDS,
               choices=(*_NOTES, "Mixup 0.2 is a probability in the paper and Beta's α here; RandAugment has one "
                        "strength here, so 'strong' mixes more.")),
    Experiment("s1/fig4-cifar", "Figure 4 at CIFAR scale",
               "λ_max and 2h/ρ² both fall as α and ρ grow.", _FIG4_CIFAR, seeds=5, measuring=AtOwnRadius(),
               choices=_CIFAR_NOTES, stands_in=True, shorter=5),
    Experiment("s1/fig8-cifar", "Figure 8 at CIFAR scale: cos θ between ∇f and ∇f_p", "Above 0.9 throughout.",
               _FIG4_CIFAR, seeds=5, measuring=AtOwnRadius(), choices=_VIEW, stands_in=True, shorter=5),
    Experiment("s1/fig9-cifar", "Figure 9 at CIFAR scale: the surrogate gap over training, by α", "Lower for larger α.",
               _FIG4_CIFAR, seeds=5, measuring=AtOwnRadius(), choices=_VIEW, stands_in=True, shorter=5),
    Experiment("s1/table6-cifar", "Table 6 at CIFAR scale", "The ascent helps with constant and with decayed ρ.",
               _table6(_small, 0.1, 0.02, 0.2), seeds=5, choices=_CIFAR_NOTES, stands_in=True, shorter=5),
)  # fmt: skip

_SETS = (
    "test_accuracy",
    "imagenet_real_accuracy",
    "imagenet_v2_accuracy",
    OF_ALL,  # ImageNet-R
    "imagenet_c_accuracy",
)
_TABLE1 = {  # vanilla, SAM, GSAM: ImageNet, Real, v2, R, C
    "resnet-50": "76.0 82.4 63.6 22.2 44.6 76.9 83.3 64.4 23.8 46.5 77.2 83.9 64.6 23.6 47.6",
    "resnet-101": "77.8 83.9 65.3 24.4 48.5 78.6 84.8 66.7 25.9 51.3 78.9 85.2 67.3 26.3 51.8",
    "resnet-152": "78.5 84.2 66.3 25.3 50.0 79.3 84.9 67.3 25.7 52.2 80.0 85.9 68.6 27.3 54.1",
    "vit-s-32": "68.4 75.2 54.3 19.0 43.3 70.5 77.5 56.9 21.4 46.2 73.8 80.4 60.4 22.5 48.2",
    "vit-s-16": "74.4 80.4 61.7 20.0 46.5 78.1 84.1 65.6 24.7 53.0 79.5 85.3 67.3 25.3 53.3",
    "vit-b-32": "71.4 77.5 57.5 23.4 44.0 73.6 80.3 60.0 24.0 50.7 76.8 82.7 63.0 25.1 51.7",
    "vit-b-16": "74.6 79.8 61.3 20.1 46.6 79.9 85.2 67.5 26.4 56.5 81.0 86.5 69.2 27.1 55.7",
    "mixer-s-32": "63.9 70.3 49.5 16.9 35.2 66.7 73.8 52.4 18.6 39.3 68.6 75.8 55.0 22.6 44.6",
    "mixer-s-16": "68.8 75.1 54.8 15.9 35.6 72.9 79.8 58.9 20.1 42.0 75.0 81.7 61.9 23.7 48.5",
    "mixer-s-8": "70.2 76.2 56.1 15.4 34.6 75.9 82.5 62.3 20.5 42.4 76.8 83.4 64.0 24.6 47.8",
    "mixer-b-32": "62.5 68.1 47.6 14.6 33.8 72.4 79.0 58.0 22.8 46.2 73.6 80.2 59.9 27.9 52.1",
    "mixer-b-16": "66.4 72.1 50.8 14.5 33.8 77.4 83.5 63.9 24.7 48.8 77.8 84.0 64.9 28.3 54.4",
}


def _claims() -> list[Claim]:
    found = []
    for model, text in _TABLE1.items():
        numbers = [float(number) for number in text.split()]
        for m, method in enumerate(("vanilla", "sam", "gsam")):
            for s, metric in enumerate(_SETS):
                found.append(Claim("s1/table1", f"{model}/{method}", round(numbers[5 * m + s] / 100, 7), metric=metric))
    rows = {"vanilla": "98.1 87.6 88.5 91.9 97.6 85.7 86.4 90.4", "sam": "98.6 89.1 91.8 93.1 98.2 87.6 91.5 92.9",
            "gsam": "98.8 89.7 91.2 94.4 98.4 88.1 90.3 93.5"}  # fmt: skip
    columns = [f"{model}/{data}" for model in ("vit-b-16", "vit-s-16") for data in _TRANSFER]
    found += claims_table("s1/table3", columns, rows, percent=True)
    found += _one("s1/table2", {"weighted": 75.4, "gsam": 76.8})
    found += _one("s1/table5", {"vanilla-300": 71.4, "vanilla-600": 72.0, "gsam-300": 76.8})
    ablation = {"vanilla": 72.0, "constant": 75.8, "constant-ascent": 76.2, "decayed": 75.8, "decayed-ascent": 76.8}
    return found + _one("s1/table6", ablation)


def _one(experiment: str, values: dict[str, float]) -> list[Claim]:
    return [Claim(experiment, cell, round(value / 100, 7)) for cell, value in values.items()]


CLAIMS = _claims()


# Trends


def _along_alpha(rho: float) -> Sequence[str]:
    return [f"rho-{rho}/alpha-{a}" for a in CIFAR_GRID[rho]]


def _alike(experiment: Experiment, results: Results) -> Finding:
    """Both estimates of λ_max rank the cells alike: Spearman's correlation of the means is above 0.5."""
    from scipy.stats import spearmanr

    means, n, scale = [], [], results.scale_of(experiment)
    for cell in experiment.cells:
        group = results.of(experiment, cell, scale or "full")
        top, gap = group.mean("top"), group.mean("from_gap")
        if top is not None and gap is not None:
            means.append((top.value, gap.value))
            n.append(top.n)
    if len(means) < 4:
        return NOTHING
    ranked: Any = spearmanr([m[0] for m in means], [m[1] for m in means])
    correlation = float(ranked.statistic)
    return Finding(correlation > 0.5, f"rank correlation {correlation:.2f} over {len(means)} cells", min(n), scale)


def _cosine(experiment: Experiment, results: Results) -> Finding:
    lows, scale = [], results.scale_of(experiment)
    for cell in experiment.cells:
        for record in results.of(experiment, cell, scale or "full").done:
            if "cos" in record.get("metrics", {}):
                lows.append(min(record["metrics"]["cos"]))
    if not lows:
        return NOTHING
    text = f"lowest mean of an epoch {min(lows):.3f}, on average over runs {mean_of(lows).value:.3f}"
    return Finding(min(lows) > 0.9, text, len(lows), scale)


def _values(experiment: Experiment, results: Results) -> dict[str, Any]:
    """What was computed for each cell; empty unless all cells were."""
    found = {cell.name: results.best(experiment, cell)[1].records for cell in experiment.cells}
    return {name: records[0]["values"] for name, records in found.items()} if all(found.values()) else {}


def _reached(experiment: Experiment, results: Results) -> Finding:
    ends = _values(experiment, results)
    if not ends:
        return NOTHING
    text = ". ".join(
        f"{experiment.cell(name).label} ends at {end['place']}; from {end['reached']:.0%} of {end['starts']} starts it "
        "reaches the flat minimum"
        for name, end in ends.items()
    )
    other = max(ends["sgd"]["reached"], ends["sam"]["reached"])
    return Finding(ends["gsam"]["reached"] > other, text, 1)


def _reached_more_often(experiment: Experiment, results: Results) -> Finding:
    ends = _values(experiment, results)
    if not ends:
        return NOTHING
    pairs = list(zip(ends["gsam"]["by_surface"], ends["sam"]["by_surface"], strict=True))
    more, fewer = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    means = ", ".join(f"{experiment.cell(name).label} {end['reached']:.1%}" for name, end in ends.items())
    text = f"GSAM from more starts on {more} of {len(pairs)} surfaces, from fewer on {fewer}; all starts: {means}"
    return Finding(more > fewer, text, len(pairs))


TRENDS = (
    Trend("flat-minimum", "s1/fig3", "GSAM reaches the flat minimum where SGD and SAM stop at sharp ones", _reached),
    Trend("ridges", "s1/ridges", "GSAM reaches the flat minimum from more starts than SAM does", _reached_more_often),
    Trend("top-falls", "s1/fig4-cifar", "λ_max falls as α grows (ρ = 0.1)", falls_along(_along_alpha(0.1), "top")),
    Trend("gap-falls", "s1/fig9-cifar", "The surrogate gap falls as α grows (ρ = 0.1)",
          falls_along(_along_alpha(0.1), "own_gap")),
    Trend("gap-as-proxy", "s1/fig4-cifar", "2h/ρ² and λ_max show the same trend", _alike),
    Trend("small-angle", "s1/fig8-cifar", "cos θ stays above 0.9", _cosine),
    Trend("ascent-helps", "s1/table6-cifar", "The ascent helps, with constant and with decayed ρ",
          contests([Contest("constant-ascent", "constant", "constant ρ"),
                    Contest("decayed-ascent", "decayed", "decayed ρ")])),
)  # fmt: skip
