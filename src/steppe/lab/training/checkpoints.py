"""Reading a run's checkpoint, and writing its final weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...support.errors import one_line
from ...support.files import whole_file
from ..recipe.recipe import filled
from ..records import Record, RecordWarning


def read_checkpoint(path: Path, record: Record, device: torch.device) -> dict[str, Any] | None:
    """The checkpoint of a run; None if there is none, or if it has another recipe, other settings or other code."""
    if not path.exists():
        return None
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        then = saved["record"]
        same = (filled(then["recipe"]), then["method"]) == (record["recipe"], record["method"])
        code = then.get("own_code")
    except Exception as error:
        warnings.warn(f"{path} cannot be read, starting from scratch: {one_line(error)}", RecordWarning, stacklevel=2)
        return None
    if same and code not in (None, record.get("own_code")):
        changed = f"{', '.join(code)} has changed since {path} was written"
        warnings.warn(f"{changed}: starting from scratch", RecordWarning, stacklevel=2)
        return None
    return saved if same else None


def write_weights(weights: Mapping[str, Any], folder: Path, key: str) -> Path:
    """Write a model's weights as safetensors; with torch.save if safetensors is missing or weights share memory."""
    try:
        from safetensors.torch import save_file

        path = folder / f"{key}.safetensors"
        with whole_file(path) as beside:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, beside)
    except (ImportError, RuntimeError):
        path = folder / f"{key}.pt"
        with whole_file(path) as beside:
            torch.save(dict(weights), beside)
    return path
