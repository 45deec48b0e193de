"""Models to fine-tune: timm's, with published weights or those of an earlier run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..lab.models import build as build_model
from ..support.errors import UserError


def pretrained_model() -> str:
    """The name under which the lab finds `build`."""
    return f"{__name__}:build"


def build(input_shape: Sequence[int], classes: int, name: str, weights: str = "pretrained") -> nn.Module:
    """A model of timm with a new last layer, for 224x224 images; smaller images are enlarged.

    `weights` is "pretrained" for timm's own, or names a file in $STEPPE_WEIGHTS that a run saved (`--keep-weights`).
    """
    own = {"pretrained": True} if weights == "pretrained" else {}
    model = build_model(f"timm:{name}", (input_shape[0], 224, 224), classes, **own)
    if weights != "pretrained":
        mine = model.state_dict()
        kept = {k: v for k, v in _read(weights).items() if k in mine and v.shape == mine[k].shape}
        model.load_state_dict(kept, strict=False)
    return model if tuple(input_shape[1:]) == (224, 224) else nn.Sequential(nn.Upsample(224, mode="bilinear"), model)


def _read(name: str) -> dict[str, Any]:
    folder = Path(os.environ.get("STEPPE_WEIGHTS", "weights"))
    for path in (folder / f"{name}.safetensors", folder / f"{name}.pt"):
        if path.exists():
            if path.suffix == ".pt":
                return torch.load(path, weights_only=True, map_location="cpu")
            from safetensors.torch import load_file

            return load_file(path)
    raise UserError(
        f"no weights {name} in {folder}: train them with --keep-weights, and set STEPPE_WEIGHTS to their folder"
    )
