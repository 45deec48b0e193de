"""Choosing and checking a device."""

from __future__ import annotations

from typing import Any

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


def default_generator(device: Any) -> torch.Generator:
    """The generator that a model draws from. Seeding only this one is 100 times faster than `torch.manual_seed`."""
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.mps._get_default_mps_generator() if device.type == "mps" else torch.default_generator
