"""The numerical precision of a run."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ...graphs.fixed_scale import FixedScale

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16-fixed": torch.float16}


def set_precision(precision: str, device: torch.device) -> None:
    """Allow or forbid TF32, which only CUDA has. The setting holds for the whole process."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def parameter_dtype(precision: str) -> torch.dtype:
    """The type of weights and inputs."""
    return torch.float64 if precision == "float64" else torch.float32


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context for a forward pass."""
    dtype = _AUTOCAST.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """The loss scaler that fp16 needs: dynamic or fixed."""
    kinds = {"fp16": torch.amp.GradScaler, "fp16-fixed": FixedScale}
    return kinds[precision](device.type) if precision in kinds else None
