"""Which device to compute on."""

from __future__ import annotations

import torch

from .errors import UserError


def best_device() -> str:
    """The fastest kind of device on this machine."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def require_device(name: str) -> torch.device:
    """The device of this name, or an error in one line that says why it cannot be used."""
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None
