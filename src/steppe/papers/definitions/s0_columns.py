"""S0's Table 1: its columns, its rows and its cells."""

from __future__ import annotations

from typing import Any

from ..experiment import SETS, Cell, trained

ADAM: dict[str, Any] = {"base": "adam", "lr": 1e-3, "batch": 100, "auxiliary": "previous"}

COLUMNS: dict[str, dict[str, Any]] = {
    "mnist/mlp-3": {"data": f"{SETS}:mnist", "model": "mlp-3", "model_settings": {"hidden": 256}, "epochs": 10},
    "mnist/cnn-3": {"data": f"{SETS}:mnist", "model": "cnn-3", "epochs": 10},
}
for _data, _place in (("cifar10", ""), ("svhn", ""), ("fashion", "svhn")):
    for _model in ("mlp-3", "cnn-5", "cnn-14"):
        COLUMNS[f"{_data}/{_model}"] = {"data": f"{SETS}:{_data}", "model": _model, "epochs": 20}
        if _model == "mlp-3":
            COLUMNS[f"{_data}/{_model}"]["model_settings"] = {"hidden": 1024}
        if _model == "cnn-14":
            COLUMNS[f"{_data}/{_model}"] |= {"precision": "fp16-fixed", "compile": True}
        elif _model == "cnn-5" and _data != "cifar10":
            COLUMNS[f"{_data}/{_model}"]["precision"] = "tf32"
        if _place:
            COLUMNS[f"{_data}/{_model}"]["stands_for"] = f"{_place}/{_model}"
COLUMNS["imagenet/resnet-50"] = {
    "data": "imagenet", "model": "resnet-50", "model_settings": {"activation": "softplus"}, "batch": 32, "epochs": 20,
}  # fmt: skip
ROWS = {
    "sgd": ("SGD (Adam)", "plain"),
    "sam-0.001": ("SAM 0.001", "sam:rho=0.001,normalize=false"),
    "sam-0.01": ("SAM 0.01", "sam:rho=0.01,normalize=false"),
    "sam-0.1": ("SAM 0.1", "sam:rho=0.1,normalize=false"),
    "crsam": ("CR-SAM", "crsam:rho=0.1,gamma=0.1,beta=0.01"),
    "gam": ("GAM", "gam:T={T},eps=0.001,discrepancy=dot"),
}
_IMAGENET_ROWS = ("sgd", "sam-0.1", "gam")


def table1_cells() -> tuple[Cell, ...]:
    """Every row in every column."""
    cells = []
    for column, settings in COLUMNS.items():
        for row, (label, method) in ROWS.items():
            if column.startswith("imagenet") and row not in _IMAGENET_ROWS:
                continue
            fields = {**ADAM, **settings, "method": method.format(T=3 if column.startswith("mnist") else 2)}
            if row == "gam" and fields.get("precision") == "fp16-fixed":
                fields["precision"] = "tf32"  # gradients of its looks far from w overflow float16
            cells.append(trained(f"{column}/{row}", label, **fields))
    return tuple(cells)
