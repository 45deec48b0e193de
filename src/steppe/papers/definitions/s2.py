"""S2: Gradient Norm Aware Minimization Seeks First-Order Flatness (Zhang et al., CVPR 2023).

The paper calls its method GAM; here it is GNAM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...lab.statistics import mean_of
from ..claims import NOTHING, Claim, Contest, Finding, Trend, claims_table, contests
from ..epoch_measurements import Watch
from ..experiment import SETS, Cell, Experiment, trained
from ..final_measurements import Landscape, LocalExtrema
from ..pretrained import pretrained_model
from ..store import Results

TITLE = "S2 · Gradient Norm Aware Minimization (GNAM)"
_SGD: dict[str, Any] = {
    "base": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "batch": 128, "epochs": 200, "schedule": "cosine",
    "augmentation": "basic", "precision": "tf32",
}  # fmt: skip
_MODELS: dict[str, dict[str, Any]] = {
    "resnet-18": {},
    "resnet-101": {},
    "wrn-28-2": {},
    "wrn-28-10": {},
    "pyramidnet-110": {"lr": 0.05},
    "densenet-121": {"weight_decay": 1e-3},
    "resnext-29-32x4d": {},
    "vit-small": {"base": "adamw", "lr": 1e-3, "momentum": 0.0, "weight_decay": 0.1},
}
_AUGMENTS = {
    "basic": "basic", "cutout": "basic+cutout", "randaugment": "basic+randaugment", "autoaugment": "basic+autoaugment",
}  # fmt: skip
_DATA = {"cifar10": ("cifar-10", 0.04), "cifar100": ("cifar-100", 0.1)}


def _methods(rho: float, alpha: float) -> dict[str, tuple[str, str]]:
    return {
        "sgd": ("SGD", "plain"),
        "gnam": ("SGD + GNAM", f"gnam:rho={rho},alpha={alpha}"),
        "sam": ("SAM", f"sam:rho={rho}"),
        "sam-gnam": ("SAM + GNAM", f"gnam:rho={rho},alpha={alpha},oracle=(sam:rho={rho})"),
        "gnp": ("GNP", "gnp"),
    }


def _cell(name: str, data: str, model: str, row: str, method: str = "", /, **settings: Any) -> Cell:
    source, rho = _DATA[data]
    label, text = _methods(rho, 0.3 if model == "resnet-18" else 0.1)[row]
    fields = {**_SGD, **_MODELS.get(model, {}), "data": source, "model": model, "method": method or text, **settings}
    return trained(name, label, **fields)


def _table(models: tuple[str, ...], rows: tuple[str, ...], sets: tuple[str, ...] = tuple(_DATA)) -> tuple[Cell, ...]:
    return tuple(
        _cell(f"{data}/{model}/{name}/{row}", data, model, row, augmentation=policy)
        for data in sets
        for model in models
        for name, policy in _AUGMENTS.items()
        for row in rows
    )


FOUR = ("sgd", "gnam", "sam", "sam-gnam")
NOISES, SHARES = (0, 20, 40, 60, 80), (0.05, 0.1, 0.5, 1.0)


def _shares() -> tuple[Cell, ...]:
    cells = []
    for data, (_, rho) in _DATA.items():
        cells += [_cell(f"{data}/{row}", data, "resnet-18", row) for row in ("sgd", "sam", "sam-gnam")]
        for share in SHARES:
            text = f"every:k={1 / share:g},method=(gnam:rho={rho},alpha=0.3)" if share < 1 else ""
            cells.append(_cell(f"{data}/gnam-{share}", data, "resnet-18", "gnam", text))
            if share < 1:
                inner = f"method=(gnam:rho={rho},alpha=0.3,oracle=(sam:rho={rho})),between=(sam:rho={rho})"
                text = f"every:k={1 / share:g},{inner}"
                cells.append(_cell(f"{data}/sam-gnam-{share}", data, "resnet-18", "sam-gnam", text))
    return tuple(cells)


_IMAGENET: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "resnet-50": ("resnet-50", {}, 0.2, 0.1),
    "resnet-101": ("timm:resnet101", {}, 0.2, 0.1),
    "vit-s-32": ("timm:vit_small_patch32_224", {"base": "adamw"}, 0.3, 0.5),
    "vit-b-32": ("timm:vit_base_patch32_224", {"base": "adamw"}, 0.3, 0.5),
}
_RESNET = {**_SGD, "weight_decay": 1e-4, "batch": 256, "epochs": 90, "augmentation": "none"}
_VIT = {**_RESNET, "lr": 3e-4, "momentum": 0.0, "weight_decay": 0.3, "epochs": 300}


def _table2() -> tuple[Cell, ...]:
    cells = []
    for model, (built, settings, rho, alpha) in _IMAGENET.items():
        common = {**(_VIT if settings else _RESNET), **settings, "data": "imagenet", "model": built}
        for row in FOUR:
            label, method = _methods(rho, alpha)[row]
            cells.append(trained(f"{model}/{row}", label, **{**common, "method": method}))
    return tuple(cells)


_TRANSFER = {  # epochs that make 40k steps of batch 128
    "cars": (f"{SETS}:cars", 635), "cifar10": ("cifar-10", 102), "cifar100": ("cifar-100", 102),
    "pets": (f"{SETS}:pets", 1428), "food": (f"{SETS}:food", 68),
}  # fmt: skip
_TUNED = {"efficientnet-b0": ("efficientnet_b0", "sgd", 0.9), "swin-t": ("swin_tiny_patch4_window7_224", "adamw", 0.0)}


def _table3() -> tuple[Cell, ...]:
    cells = []
    for model, (timm, base, momentum) in _TUNED.items():
        for data, (source, epochs) in _TRANSFER.items():
            for row in FOUR:
                label, method = _methods(0.1, 0.1)[row]
                fields = {
                    "data": source, "model": pretrained_model(), "model_settings": {"name": timm}, "method": method,
                    "base": base, "momentum": momentum, "lr": 2e-3, "weight_decay": 1e-5, "batch": 128,
                    "epochs": epochs, "schedule": "cosine", "augmentation": "basic" if "cifar" in data else "none",
                }  # fmt: skip
                cells.append(trained(f"{model}/{data}/{row}", label, **fields))
    return tuple(cells)


_RHOS, _ALPHAS = (0.01, 0.05, 0.1, 0.2, 0.5), (0.05, 0.1, 0.2, 0.5, 1.0)


def _fig6() -> tuple[Cell, ...]:
    cells = []
    for what, values in (("rho", _RHOS), ("alpha", _ALPHAS)):
        for value in values:
            rho, alpha = (value, 0.1) if what == "rho" else (0.1, value)
            for row in ("gnam", "sam-gnam"):
                text = _methods(rho, alpha)[row][1]
                cells.append(_cell(f"{what}/{value}/{row}", "cifar100", "resnet-101", row, text))
    return tuple(cells)


_SMALL_NET_NOISE: dict[str, dict[str, Any]] = {
    "noise-40": {"label_noise": 0.4}, "noise-80": {"label_noise": 0.8}, "worse": {"data": "cifar-10n:worse"},
}  # fmt: skip
_BASIC = tuple(_cell(f"{data}/{row}", data, "resnet-18", row) for data in _DATA for row in FOUR)
_C10 = "CIFAR-10 beside the paper's CIFAR-100."
_RHO = "SAM has the ρ of GNAM (0.04 on CIFAR-10, 0.1 on CIFAR-100)."
_PEOPLE = ("worse", "aggre")
_SHARED = "Two programs shared the GPU, so a run took about twice the time it takes alone."
_TF32 = "Precision is not given: TF32, torch's default for convolutions."
# Figures 3 and 5 are of the same nets, trained once for both.
_MEASURED: dict[str, Any] = {
    "watch": Watch(top=50, parts=2), "watch_small": Watch(top=50, parts=1, samples=128), "measuring": Landscape(),
    "shorter": 20,
    "choices": (_C10, _TF32, "At small scale the eigenvalues are measured at the end only, on 128 examples. The GPU "
                "was shared, so the speed of these runs must not be compared."),
}  # fmt: skip

EXPERIMENTS = (
    Experiment("s2/table1", "Table 1: five models on CIFAR-10 and CIFAR-100, four augmentations",
               "GNAM above SGD, SAM + GNAM above SAM, nearly everywhere.",
               _table(("resnet-18", "resnet-101", "wrn-28-2", "wrn-28-10", "pyramidnet-110"), FOUR), seeds=3,
               choices=(_RHO, _TF32), shorter=20),
    Experiment("s2/table2", "Table 2: ImageNet", "The same order on ImageNet.", _table2(), seeds=3,
               needs="ImageNet, timm for all but ResNet-50",
               choices=("Table 9's settings. Top-5 is not measured.",)),
    Experiment("s2/table3", "Table 3: fine-tuning EfficientNet-b0 and Swin-t", "The same order on five data sets.",
               _table3(), needs="timm with its weights, and the data sets",
               choices=("ρ and α are not given: 0.1 and 0.1.",)),
    Experiment("s2/table4", "Table 4: DenseNet-121, ResNeXt-29 and ViT-S on CIFAR", "The same order.",
               _table(("densenet-121", "resnext-29-32x4d", "vit-small"), FOUR), seeds=3,
               choices=(_RHO, "The paper's ViT-S/16 is ViT-S with 4x4 patches here, for 32x32 images; AdamW 1e-3, "
                        "weight decay 0.1 of the searched values.")),
    Experiment("s2/table5", "Table 5: GNP", "GNP between SGD and GNAM, on CIFAR-100.",
               _table(("resnet-18", "resnet-101", "wrn-28-10", "pyramidnet-110"), ("sgd", "gnp", "gnam"),
                      ("cifar100",)), seeds=3),
    Experiment("s2/table6", "Table 6: label noise", "ResNet-32 on CIFAR-10, best accuracy during training: the more "
               "noise, the more GNAM gains.",
               tuple(_cell(f"noise-{n}/{row}", "cifar10", "resnet-32", row, label_noise=n / 100)
                     for n in NOISES for row in FOUR), seeds=3,
               choices=("Which ResNet-32 is not stated: He et al.'s here. α 0.1.", _TF32,
                        f"{_SHARED} This was at 80 % noise."), shorter=10),
    Experiment("s2/human-noise", "Human labels (CIFAR-10N; not in the paper)",
               "The paper has no such table: Table 6 flips labels at random. Human labels have human "
               "errors: 40 % (worse), 9 % (aggre: a vote of three).",
               tuple(_cell(f"{kind}/{row}", "cifar10", "resnet-32", row, data=f"cifar-10n:{kind}")
                     for kind in _PEOPLE for row in FOUR), seeds=3,
               needs="CIFAR-10N", choices=("As Table 6.", _SHARED), shorter=10),
    Experiment("s2/noise-cnn-5", "Label noise with a small net (CNN-5; not in the paper)",
               "The paper has no such table: Table 6 has a ResNet-32. This is Table 6 for "
               "machines without a GPU, with the CNN-5 of S0.",
               tuple(_cell(f"{kind}/{row}", "cifar10", "cnn-5", row, **noise)
                     for kind, noise in _SMALL_NET_NOISE.items() for row in FOUR), seeds=3,
               needs="CIFAR-10N", choices=("As Table 6.", "At small scale on two fifths of CIFAR-10."), shorter=20,
               share=0.4),
    Experiment("s2/table7", "Table 7 and Figure 4: GNAM on a share of the steps",
               "ResNet-18: a tenth of the steps gains as much as all, at less than 25 % extra cost.", _shares(),
               seeds=3, shorter=20,
               choices=("The paper raises α when GNAM has fewer steps, but not by how much: here it is the same.",
                        _TF32)),
    Experiment("s2/fig2", "Figure 2: local minima within ρ = 0.1", "More than one along most random directions.",
               tuple(_cell(f"{data}/sgd", data, "resnet-18", "sgd") for data in _DATA), seeds=1,
               measuring=LocalExtrema(), choices=("The net is not named: ResNet-18.",)),
    Experiment("s2/fig3", "Figure 3: top-50 eigenvalues and trace, half way and at the end",
               "ResNet-18 on CIFAR-100: SGD's grow during training; SAM + GNAM's are the smallest.", _BASIC, seeds=1,
               **_MEASURED),
    Experiment("s2/fig5", "Figure 5: landscapes", "ResNet-18 on CIFAR-100: GNAM's are flatter than SGD's and SAM's.",
               _BASIC, seeds=1, **_MEASURED),
    Experiment("s2/fig6", "Figure 6: ρ and α", "ResNet-101 on CIFAR-100: above SGD for all values.", _fig6(), seeds=1,
               choices=("The values are not in the text: they are ours.",)),
)  # fmt: skip

# Claims. The ± is not explained.
_TABLE1 = {
    "resnet-18": (
        "95.32±.13 96.17±.21 96.10±.20 96.75±.18 78.32±.32 79.53±.30 79.27±.16 80.45±.25",
        "95.99±.13 96.46±.20 96.64±.13 96.99±.23 78.73±.13 79.89±.31 79.43±.15 80.80±.14",
        "96.07±.07 96.52±.09 96.64±.17 97.06±.13 78.62±.32 79.82±.24 79.71±.15 80.97±.29",
        "96.13±.05 96.71±.07 96.75±.08 97.17±.08 78.88±.15 80.56±.21 80.58±.25 81.59±.24",
    ),
    "resnet-101": (
        "96.35±.08 96.98±.11 96.82±.16 97.20±.15 80.47±.13 82.21±.40 82.03±.12 83.13±.07",
        "96.56±.18 97.22±.05 97.07±.08 97.36±.24 80.53±.30 82.36±.24 81.60±.35 83.40±.13",
        "96.68±.25 97.33±.30 97.12±.18 97.40±.23 80.60±.28 82.40±.31 82.19±.34 83.28±.20",
        "96.78±.14 97.39±.18 97.18±.11 97.42±.1 81.83±.37 83.19±.15 82.44±.47 83.94±.23",
    ),
    "wrn-28-2": (
        "94.82±.07 95.69±.13 95.47±.08 95.85±.08 75.45±.25 77.21±.31 77.04±.18 77.69±.20",
        "95.70±.20 96.41±.18 96.22±.13 96.39±.22 76.80±.45 78.58±.24 78.04±.43 79.33±.12",
        "95.75±.16 96.35±.13 96.22±.08 96.49±.20 76.73±.27 78.66±.03 77.88±.29 78.96±.13",
        "95.44±.06 95.98±.09 96.07±.08 96.44±.09 77.35±.02 79.05±.10 78.64±.23 79.50±.21",
    ),
    "wrn-28-10": (
        "95.73±.10 96.61±.15 96.78±.80 97.29±.11 81.40±.13 83.45±.09 83.41±.04 84.31±.06",
        "96.74±.03 96.97±.05 97.35±.16 97.56±.12 81.53±.40 83.69±.08 82.38±.15 84.43±.13",
        "97.14±.04 96.83±.03 97.58±.07 97.49±.03 81.65±.18 83.84±.09 82.79±.06 84.68±.13",
        "96.93±.12 97.05±.04 97.48±.06 97.67±.08 81.99±.11 84.02±.18 83.84±.30 84.81±.21",
    ),
    "pyramidnet-110": (
        "96.19±.11 97.11±.14 97.26±.05 97.51±.09 82.74±.12 84.91±.09 85.01±.09 85.25±.06",
        "96.82±.09 97.32±.21 97.49±.06 97.91±.14 83.31±.21 85.20±.19 84.90±.03 85.46±.10",
        "97.15±.21 97.80±.22 97.60±.09 98.01±.10 84.04±.19 86.47±.14 85.33±.27 85.64±.20",
        "97.11±.01 97.85±.02 97.61±.14 97.95±.10 84.48±.03 85.92±.03 85.69±.17 86.35±.18",
    ),
}
_TABLE4 = {
    "densenet-121": (
        "91.16±.13 92.35±.14 92.19±.20 92.72±.30 69.25±.40 70.48±.27 70.44±.19 71.16±.25",
        "91.85±.17 92.93±.26 92.35±.16 93.30±.17 70.17±.31 71.47±.23 70.89±.15 71.80±.07",
        "91.59±.16 92.37±.20 92.32±.29 92.97±.27 69.65±.36 70.10±.26 70.49±.16 71.43±.17",
        "92.65±.10 94.17±.25 92.96±.19 94.05±.22 70.53±.17 72.25±.19 71.34±.20 72.90±.17",
    ),
    "resnext-29-32x4d": (
        "95.75±.31 96.46±.25 96.32±.36 96.90±.24 79.45±.29 81.67±.26 81.35±.12 82.93±.25",
        "96.20±.37 97.82±.24 96.44±.21 97.85±.27 80.56±.20 82.62±.33 82.49±.25 83.58±.09",
        "95.86±.28 97.17±.26 96.75±.35 97.79±.19 79.88±.12 81.75±.23 82.26±.15 83.02±.22",
        "96.58±.18 97.46±.15 97.38±.25 97.58±.16 80.47±.13 82.02±.19 81.52±.26 83.35±.09",
    ),
    "vit-small": (
        "95.27±.23 97.21±.14 96.85±.25 97.58±.20 79.52±.36 83.35±.28 82.77±.29 84.30±.25",
        "95.36±.22 97.53±.17 97.10±.25 97.85±.10 79.36±.21 83.59±.28 82.86±.14 84.53±.16",
        "95.59±.19 97.44±.31 97.18±.12 97.59±.11 79.96±.22 83.80±.20 83.36±.13 84.66±.23",
        "96.40±.30 97.82±.21 97.52±.25 97.97±.13 80.35±.06 84.02±.18 83.54±.19 85.20±.26",
    ),
}
_GNP = {
    "resnet-18": "78.80±.40 79.29±.15 79.21±.27 80.29±.05",
    "resnet-101": "81.17±.29 81.10±.14 81.31±.88 82.53±.25",
    "wrn-28-10": "82.30±.05 82.54±.19 82.99±.39 83.58±.32",
    "pyramidnet-110": "83.99±.27 84.46±.16 84.47±.08 84.83±.21",
}
_NOISE = {
    "sgd": "95.71 92.05 88.89 83.17 63.16", "gnam": "96.55 94.20 92.17 88.49 73.82",
    "sam": "96.25 93.85 90.85 87.37 70.65", "sam-gnam": "96.88 94.74 92.57 89.65 76.33",
}  # fmt: skip
_SPREAD: dict[str, Any] = {"percent": True, "spread": "unstated"}


def _wide(experiment: str, table: dict[str, tuple[str, ...]]) -> list[Claim]:
    """Claims from a table with the methods across and the augmentations down."""
    found = []
    for model, lines in table.items():
        for augmentation, line in zip(_AUGMENTS, lines, strict=True):
            numbers = line.split()
            for data, some in zip(_DATA, (numbers[:4], numbers[4:]), strict=True):
                rows: dict[str, str] = dict(zip(FOUR, some, strict=True))
                found += claims_table(experiment, [f"{data}/{model}/{augmentation}"], rows, **_SPREAD)
    return found


def _claims() -> list[Claim]:
    found = _wide("s2/table1", _TABLE1) + _wide("s2/table4", _TABLE4)
    for model, line in _GNP.items():
        columns = [f"cifar100/{model}/{augmentation}" for augmentation in _AUGMENTS]
        lines = [text.split() for text in _TABLE1[model]]
        rows = {"sgd": " ".join(n[4] for n in lines), "gnp": line, "gnam": " ".join(n[5] for n in lines)}
        found += claims_table("s2/table5", columns, rows, **_SPREAD)
    noisy = [f"noise-{n}" for n in NOISES]
    found += claims_table("s2/table6", noisy, _NOISE, percent=True, n=3, metric="best_test_accuracy")
    shares = {"cifar10": (95.32, 96.08, 96.15, 96.17, 96.17), "cifar100": (78.32, 79.25, 79.42, 79.50, 79.53)}
    with_sam = {"cifar10/sam": 96.10, "cifar10/sam-gnam": 96.58, "cifar100/sam": 79.27, "cifar100/sam-gnam": 80.45}
    found += [Claim("s2/table7", cell, round(value / 100, 7)) for cell, value in with_sam.items()]
    shares_with_sam = {"cifar10": (96.54, 96.62, 96.65), "cifar100": (80.08, 80.44, 80.40)}
    for data, values in shares_with_sam.items():
        names = [f"sam-gnam-{share}" for share in SHARES[:3]]
        found += [Claim("s2/table7", f"{data}/{r}", round(v / 100, 7)) for r, v in zip(names, values, strict=True)]
    for data, values in shares.items():
        names = ["sgd", *(f"gnam-{share}" for share in SHARES)]
        found += [Claim("s2/table7", f"{data}/{r}", round(v / 100, 7)) for r, v in zip(names, values, strict=True)]
    top1 = {"sgd": "76.01±.19 77.69±.08 68.26±.22 71.15±.14", "gnam": "76.59±.15 78.45±.10 69.95±.16 73.58±.06",
            "sam": "76.47±.11 78.35±.12 69.73±.05 73.10±.18",
            "sam-gnam": "76.86±.15 78.70±.12 70.15±.18 73.70±.10"}  # fmt: skip
    found += claims_table("s2/table2", list(_IMAGENET), top1, **_SPREAD)
    tuned = {"sgd": "82.14 86.26 63.75 91.03 82.54 83.50 91.32 72.88 93.49 86.38",
             "gnam": "83.50 87.37 64.85 91.80 82.69 84.90 92.06 73.78 93.87 86.89",
             "sam": "83.21 86.95 64.29 91.65 82.57 83.55 91.77 73.99 93.59 86.64",
             "sam-gnam": "83.98 87.97 65.03 91.96 83.01 85.29 92.55 74.30 94.03 87.03"}  # fmt: skip
    columns = [f"{model}/{data}" for model in _TUNED for data in _TRANSFER]
    return found + claims_table("s2/table3", columns, tuned, percent=True)


CLAIMS = _claims()


def _cheap(experiment: Experiment, results: Results) -> Finding:
    """A tenth of the steps: at least 80 % of the gain of all, for at most a quarter more time."""
    for data in _DATA:
        scale, tenth = results.best(experiment, f"{data}/gnam-0.1")
        groups = [tenth, *(results.of(experiment, f"{data}/{row}", scale or "full") for row in ("gnam-1.0", "sgd"))]
        means, times = ([group.mean(m) for group in groups] for m in ("test_accuracy", "seconds"))
        if all(means) and all(times):
            some, all_, none = (mean.value for mean in means if mean)
            extra = times[0].value / times[2].value - 1  # type: ignore[union-attr]
            gain, part = all_ - none, some - none
            no_gain = f"no gain to keep ({100 * gain:+.2f} points on all steps, {100 * part:+.2f} on a tenth)"
            kept = f"{100 * part / gain:.0f} % of the gain" if gain > 0 else no_gain
            details = f"{data}: {kept}, for {100 * extra:.0f} % more time"
            holds = gain > 0 and part >= 0.8 * gain and extra <= 0.25
            return Finding(holds, details, min(mean.n for mean in means if mean), scale)
    return NOTHING


def _flatter(what: str, value: Callable[[dict[str, Any]], float]) -> Callable[[Experiment, Results], Finding]:
    """Whether a measure of the end of training is smaller with GNAM than with its base."""

    def compare(experiment: Experiment, results: Results) -> Finding:
        lines, so, n, worst = [], [], [], "full"
        for data in _DATA:
            for better, worse in _PAIRS:
                scale, one = results.best(experiment, f"{data}/{better}")
                other = results.of(experiment, f"{data}/{worse}", scale or "full")
                if one.done and other.done:
                    a, b = (mean_of([value(record) for record in group.done]).value for group in (one, other))
                    so.append(a < b)
                    n.append(min(len(one.done), len(other.done)))
                    lines.append(f"{data}, {what} {a:.3g} with {better}, {b:.3g} with {worse}")
                    worst = scale if scale != "full" else worst
        return Finding(all(so), "; ".join(lines), min(n), worst) if so else NOTHING

    return compare


def _top(record: dict[str, Any]) -> float:
    return record["metrics"]["top_values"][-1][0]


def _rise(record: dict[str, Any]) -> float:
    """How much higher the loss is on the plane, on average, than at its centre."""
    losses = record["curvature"]["landscape"]["loss"]
    middle = len(losses) // 2
    return sum(map(sum, losses)) / len(losses) ** 2 - losses[middle][middle]


_PAIRS = (("gnam", "sgd"), ("sam-gnam", "sam"))
TRENDS = (
    Trend("gnam-helps", "s2/table1", "GNAM is above its base (SGD, SAM) with ResNet-18 and basic augmentation",
          contests([Contest(f"{d}/resnet-18/basic/{a}", f"{d}/resnet-18/basic/{b}", f"{d}, {a} − {b}")
                    for d in _DATA for a, b in _PAIRS])),
    Trend("noise", "s2/table6", "GNAM is above its base at 40 % and 80 % label noise",
          contests([Contest(f"{kind}/{a}", f"{kind}/{b}", f"{kind}, {a} − {b}")
                    for kind in ("noise-40", "noise-80") for a, b in _PAIRS], "best_test_accuracy")),
    Trend("human-noise", "s2/human-noise", "GNAM is above its base with human labels",
          contests([Contest(f"{kind}/{a}", f"{kind}/{b}", f"{kind}, {a} − {b}")
                    for kind in _PEOPLE for a, b in _PAIRS], "best_test_accuracy")),
    Trend("noise-cnn-5", "s2/noise-cnn-5", "GNAM is above its base at 40 % and 80 % label noise and with human labels, "
          "with CNN-5 too",
          contests([Contest(f"{kind}/{a}", f"{kind}/{b}", f"{kind}, {a} − {b}")
                    for kind in _SMALL_NET_NOISE for a, b in _PAIRS], "best_test_accuracy")),
    Trend("a-tenth", "s2/table7", "A tenth of the steps keeps most of the gain at less than 25 % extra cost", _cheap),
    Trend("flatter", "s2/fig3", "GNAM ends at smaller eigenvalues than its base", _flatter("λ_max", _top)),
    Trend("landscape", "s2/fig5", "Around GNAM's end the loss rises less than around its base's",
          _flatter("mean rise of the loss on the plane", _rise)),
)  # fmt: skip
