"""Two setups in which many methods were compared on CIFAR-10 by others: WRN-16-8 and ResNet-18, 200 epochs.

WRN-16-8: the example of github.com/davda54/sam, whose table everybody quotes, and the row that
github.com/juntang-zhuang/GSAM adds to it. ResNet-18: the settings of F-SAM's public code. SGD for 400 epochs, which
costs as much as SAM, is ours, and so is SAM in the last eighth of training (Zhou et al., ICLR 2025).
"""

from __future__ import annotations

from typing import Any

from ..claims import Claim, Contest, Trend, contests
from ..experiment import Cell, Experiment, trained

_WRN: dict[str, Any] = {
    "data": "cifar-10", "model": "wrn-16-8", "base": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4,
    "batch": 128, "epochs": 200, "schedule": "multistep:0.2/0.3,0.6,0.8", "augmentation": "basic+cutout=16/50",
    # 0.1 over the nine other classes, as there; PyTorch spreads it over all ten.
    "label_smoothing": 1 / 9, "precision": "bf16", "compile": True,
}  # fmt: skip
_RESNET: dict[str, Any] = {
    "data": "cifar-10", "model": "resnet-18", "base": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3,
    "batch": 128, "epochs": 200, "schedule": "cosine", "augmentation": "basic+cutout=16/50", "precision": "bf16",
    "compile": True,
}  # fmt: skip


def _cells(recipe: dict[str, Any], rho: float, **methods: tuple[str, str, dict[str, Any]]) -> tuple[Cell, ...]:
    """The base at both lengths, SAM, SAM in the last eighth, and further methods: label, text, other settings."""
    sam = f"sam:rho={rho}"
    rows: dict[str, tuple[str, str, dict[str, Any]]] = {
        "sgd": ("SGD", "plain", {}),
        "sgd-400": ("SGD, 400 epochs", "plain", {"epochs": 400, "role": "equal-cost"}),
        "sam": (f"SAM, ρ = {rho}", sam, {}),
        **methods,
        "late-sam": ("SAM in the last eighth", f"late:start=0.875,method=({sam})", {}),
    }
    return tuple(trained(name, label, **{**recipe, "method": text, **own}) for name, (label, text, own) in rows.items())


_ADAPTIVE = "rho=2.0,eta=0.0"  # as there: the norm over all weights, biases included
EXPERIMENTS = (
    Experiment(
        "extra/wrn-16-8", "WRN-16-8 on CIFAR-10, 200 epochs: the table of two public repositories",
        "GSAM's and ASAM's test error is below SAM's, and SAM's below SGD's.",
        _cells(
            _WRN, 0.05, asam=("ASAM, ρ = 2", f"asam:{_ADAPTIVE}", {}),
            gsam=("GSAM, adaptive, ρ = 2", f"gsam:alpha=0.4,ascent=adaptive,{_ADAPTIVE}", {"schedule": "cosine"}),
        ), seeds=2, shorter=20,
        choices=("As in their examples; in bf16, and with our initialisation. GSAM's learning rate follows a cosine, "
                 "as there; the others' is multiplied by 0.2 after 30, 60 and 80 % of training.",
                 "Their numbers are from one training each."),
    ),
    Experiment(
        "extra/resnet-18", "ResNet-18 on CIFAR-10, 200 epochs, with the settings of F-SAM's public code",
        "F-SAM is above SAM, and SAM above SGD.",
        _cells(
            _RESNET, 0.1, asam=("ASAM, ρ = 1", "asam:rho=1.0", {}),
            fsam=("F-SAM, ρ = 0.1", "fsam:rho=0.1,lam=0.95", {}),
        ), seeds=3, shorter=20,
        choices=("Batch 128, learning rate 0.05, weight decay 0.001, cosine, cutout on half of the images, as in that "
                 "code; in bf16. It has no radius for ASAM: ten times SAM's here.",),
    ),
)  # fmt: skip
_ERRORS = {"sgd": 3.20, "sam": 2.86, "asam": 2.55, "gsam": 2.45}  # test error in %
CLAIMS = [Claim("extra/wrn-16-8", cell, round(1 - error / 100, 7), n=1) for cell, error in _ERRORS.items()]


def _asked(name: str, experiment: str, text: str, *pairs: tuple[str, str]) -> Trend:
    return Trend(
        name, experiment, text, contests([Contest(*pair) for pair in pairs], way="in this direction"), ours=True
    )


TRENDS = tuple(
    _asked(f"{name}-{what}", f"extra/{name}", text, *pairs)
    for name, newer in (("wrn-16-8", ("asam", "gsam")), ("resnet-18", ("fsam",)))
    for what, text, pairs in (
        ("sam", "SAM is above SGD.", (("sam", "sgd"),)),
        ("newer", "The newer methods are above SAM.", tuple((other, "sam") for other in newer)),
        ("cost", "SAM is above SGD at equal cost: 400 epochs of SGD.", (("sam", "sgd-400"),)),
        ("late", "SAM in the last eighth of training is above SGD.", (("late-sam", "sgd"),)),
    )
)
