"""Choosing and checking a device."""

from __future__ import annotations

import torch

from .errors import UserError


def best_device() -> str:
    """The fastest kind of device on this machine."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def require_device(name: str) -> torch.device:
    """The device of this name; a one-line error if it cannot be used."""
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None
