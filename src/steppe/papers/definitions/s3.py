"""S3: A Universal Class of Sharpness-Aware Minimization Algorithms (Tahmasebi et al., ICML 2024)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from ...lab.statistics import mean_of
from ..claims import NOTHING, Contest, Finding, Trend, claims_table, contests
from ..epoch_measurements import Watch
from ..experiment import Cell, Experiment, trained
from ..store import Results

TITLE = "S3 · A universal class of sharpness-aware algorithms"
_SGD: dict[str, Any] = {
    "model": "resnet-18", "base": "sgd", "lr": 0.1, "momentum": 0.9, "batch": 128, "epochs": 50,
    "schedule": "step:0.25/10", "precision": "bf16",
}  # fmt: skip
_DATA: dict[str, dict[str, Any]] = {  # and SAM's ρ, ASAM's ρ and η, SSAM's ρ
    "cifar10": {"data": "cifar-10", "weight_decay": 5e-4, "augmentation": "basic", "rho": (0.05, 0.5, 0.01, 0.1)},
    "cifar100": {"data": "cifar-100", "weight_decay": 1e-3, "augmentation": "basic", "rho": (0.1, 1.0, 0.1, 0.2)},
    "svhn": {"data": "svhn", "weight_decay": 5e-4, "rho": (0.05, 0.5, 0.01, 0.1)},
}
ROWS = ("frob", "det", "trace", "sam", "asam", "ssam", "sgd")


def _methods(sam: float, asam: float, eta: float, ssam: float) -> dict[str, tuple[str, str]]:
    return {
        "frob": ("Frob-SAM", "frobsam:rho=0.01,n=2,lam=0.001"),
        "det": ("Det-SAM", "detsam:rho=1.0,half_width=0.01,n=1,lam=0.1"),
        "trace": ("Trace-SAM", "tracesam:rho=0.01,n=1,lam=1.0"),
        "sam": ("SAM", f"sam:rho={sam}"),
        "asam": ("ASAM", f"asam:rho={asam},eta={eta}"),
        "ssam": ("SSAM", f"ssam:rho={ssam},sparsity=0.5,samples=16"),
        "sgd": ("SGD", "plain"),
    }


def _table2() -> tuple[Cell, ...]:
    cells = []
    for data, settings in _DATA.items():
        fields = {**_SGD, **{k: v for k, v in settings.items() if k != "rho"}}
        for share, name in ((1.0, data), (0.1, f"{data}-s")):
            for row in ROWS:
                label, method = _methods(*settings["rho"])[row]
                cells.append(trained(f"{name}/{row}", label, **{**fields, "share": share, "method": method}))
    return tuple(cells)


LAMBDAS = (0.001, 0.01, 0.1, 1.0)
_MNIST: dict[str, Any] = {"data": "mnist", "model": "mlp-6", "base": "adam", "lr": 1e-3, "batch": 128, "epochs": 20}
_FIG1 = {
    "sgd": ("Adam", "plain"),
    "sam": ("SAM", "sam:rho=0.05"),
    "asam": ("ASAM", "asam"),
    "trace": ("Trace-SAM", "tracesam:rho=0.01,n=1,lam=1.0"),
    "frob": ("Frob-SAM, λ = 0.1", "frobsam:rho=0.01,n=2,lam=0.1"),
}


def _fig1() -> tuple[Cell, ...]:
    cells = []
    for noise, name in ((0.0, "clean"), (0.2, "noisy")):
        common = {**_MNIST, "label_noise": noise}
        for row, (label, method) in _FIG1.items():
            cells.append(trained(f"{name}/{row}", label, **{**common, "method": method}))
        for lam in LAMBDAS:
            method = f"frobsam:rho=0.01,n=2,lam={lam}"
            cells.append(trained(f"{name}/lambda-{lam}", f"Frob-SAM, λ = {lam}", **{**common, "method": method}))
    return tuple(cells)


EXPERIMENTS = (
    Experiment(
        "s3/table2", "Table 2: ResNet-18, full data and the first tenth",
        "On all data the methods are similar; on a tenth (-S) Frob-, Det- and Trace-SAM are far above SAM and SSAM.",
        _table2(), seeds=1, shorter=5,
        choices=("ρ, λ and n of Frob- and Det-SAM were searched in the paper, which does not say what was chosen: "
                 "ρ 0.01, λ 0.001, n 2 and λ 0.1, n 1, from the middle of the grids. Trace-SAM's λ is not given: 1.",
                 "Passes run in bfloat16 (autocast), weights are kept in float32."),
    ),
    Experiment(
        "s3/fig1", "Figure 1: the squared Frobenius norm of the Hessian over training, on MNIST",
        "Frob-SAM's is smaller than the others' and falls monotonically; larger λ, smaller norm.",
        _fig1(), seeds=1, watch=Watch(frobenius=True), shorter=4,
        choices=("Batch 128 and Frob-SAM's ρ are not given. The published code flips 20 % of the labels, the text does "
                 "not say so: both, clean and noisy.",),
    ),
)  # fmt: skip

CLAIMS = claims_table(
    "s3/table2", ("cifar10", "cifar10-s", "cifar100", "cifar100-s", "svhn", "svhn-s"),
    {
        "frob": "93.83 61.82 75.90 29.91 96.35 88.42",
        "det": "93.94 63.92 75.87 29.60 96.19 88.32",
        "trace": "93.94 61.67 75.96 28.81 96.35 88.15",
        "sam": "93.74 51.96 75.64 24.97 96.48 62.53",
        "asam": "94.33 62.00 75.76 23.46 96.22 85.35",
        "ssam": "93.70 50.45 75.65 22.68 96.35 20.28",
        "sgd": "93.80 53.33 75.86 29.23 96.17 89.35",
    },
    percent=True, n=1,
)  # fmt: skip


def _norms(experiment: Experiment, results: Results, cell: str, scale: str = "") -> tuple[str, list[list[float]]]:
    """‖H‖² after each epoch, by run."""
    if scale:
        group = results.of(experiment, cell, scale)
    else:
        scale, group = results.best(experiment, cell)
    found = [r["metrics"]["frobenius"] for r in group.done if "frobenius" in r.get("metrics", {})]
    return scale, [[entry["value"] for entry in run] for run in found]


def _smallest(experiment: Experiment, results: Results) -> Finding:
    scale, frob = _norms(experiment, results, "clean/frob")
    others = (
        {row: _norms(experiment, results, f"clean/{row}", scale)[1] for row in _FIG1 if row != "frob"} if frob else {}
    )
    if not frob or not all(others.values()):
        return NOTHING
    ends = {row: mean_of([run[-1] for run in runs]).value for row, runs in {"frob": frob, **others}.items()}
    falls = all(b <= a for run in frob for a, b in pairwise(run))
    details = "at the end " + ", ".join(f"{row} {value:.3g}" for row, value in ends.items())
    details += "; Frob-SAM's " + ("falls after every epoch" if falls else "does not fall after every epoch")
    return Finding(falls and ends["frob"] == min(ends.values()), details, len(frob), scale)


def _stronger(experiment: Experiment, results: Results) -> Finding:
    scale, _ = _norms(experiment, results, f"clean/lambda-{LAMBDAS[0]}")
    runs = [_norms(experiment, results, f"clean/lambda-{lam}", scale or "full")[1] for lam in LAMBDAS]
    if not all(runs):
        return NOTHING
    ends = [mean_of([run[-1] for run in some]).value for some in runs]
    falls = all(b < a for a, b in pairwise(ends))
    details = ", ".join(f"λ = {lam}: {end:.3g}" for lam, end in zip(LAMBDAS, ends, strict=True))
    return Finding(falls, details, min(map(len, runs)), scale)


TRENDS = (
    Trend("scarce-data", "s3/table2", "On a tenth of CIFAR-10, Frob- and Det-SAM are above SAM and SGD",
          contests([Contest(f"cifar10-s/{a}", f"cifar10-s/{b}", f"{a} − {b}")
                    for a in ("frob", "det") for b in ("sam", "sgd")])),
    Trend("smallest-norm", "s3/fig1", "Frob-SAM's norm is the smallest and falls monotonically", _smallest),
    Trend("stronger-lambda", "s3/fig1", "The larger λ, the smaller the norm", _stronger),
)  # fmt: skip
