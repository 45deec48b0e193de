"""Properties of a trained net for which flatness may help: rounded weights, corrupted images, calibration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..curvature.parameters import normalisation
from ..lab.data import CORRUPTIONS, corrupt, prepare
from ..lab.data.dataset import DataSet, Split
from ..lab.training.final_curvature import Measuring
from ..lab.training.run import Run

BITS, BINS = 4, 15
POINTWISE = ("gaussian-noise", "shot-noise", "impulse-noise", "speckle-noise")  # for images too small for blurs


@contextmanager
def rounded(net: nn.Module, bits: int = BITS) -> Iterator[None]:
    """A context in which the weights of a net are rounded to this many bits; afterwards they are restored.

    Matrices and kernels are rounded with one scale per output: the largest weight is 2^(bits − 1) − 1 steps. Biases and
    normalisation layers are not rounded.
    """
    fixed = normalisation(net)
    weights = [p for name, p in net.named_parameters() if p.dim() >= 2 and name not in fixed]
    before = [p.detach().clone() for p in weights]
    try:
        with torch.no_grad():
            for p in weights:
                p.copy_(rounded_tensor(p, bits))
        yield
    finally:
        with torch.no_grad():
            for p, old in zip(weights, before, strict=True):
                p.copy_(old)


def rounded_tensor(weight: Tensor, bits: int = BITS) -> Tensor:
    """A weight tensor rounded to this many bits, with one scale per row.

    >>> rounded_tensor(torch.tensor([[7.0, 3.4, -0.6], [0.0, 0.0, 0.0]]))
    tensor([[ 7.,  3., -1.],
            [ 0.,  0.,  0.]])
    """
    most = 2 ** (bits - 1) - 1
    step = weight.flatten(1).abs().amax(1) / most
    step = torch.where(step > 0, step, 1.0).view(-1, *[1] * (weight.dim() - 1))
    return (weight / step).round().clamp(-most, most) * step


def calibration_error(logits: Tensor, targets: Tensor, bins: int = BINS) -> float:
    """The expected calibration error: |accuracy − mean confidence| in bins of equal width, weighted by their examples.

    A confidence on the border of two bins belongs to the lower one.
    """
    confidence, answers = logits.double().softmax(1).max(1)
    right = (answers == targets).double()
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    apart = torch.zeros(bins, dtype=torch.float64, device=logits.device).index_add_(0, place, right - confidence)
    return float(apart.abs().sum() / len(targets))


@dataclass(frozen=True)
class Robustness(Measuring):
    """The test metric with four-bit weights; for images also the accuracy on corrupted ones, and the calibration."""

    images: int = 1000  # number of test images, the first ones, that are corrupted
    gives: ClassVar[str] = "rounded"

    def __call__(self, run: Run) -> dict[str, Any] | None:
        """The measurements by name; None if the model is sharded over processes."""
        if run.ranks.kind == "fsdp2":
            return None
        with rounded(run.net):
            found: dict[str, Any] = {"rounded": {"value": run.evaluate()[run.task.name], "bits": BITS}}
        if run.recipe.task != "classification" or run.data.tokens:
            return found
        logits, targets = outputs(run, run.batches.of_test())
        found["calibration_error"] = {"value": calibration_error(logits, targets), "bins": BINS}
        if isinstance(run.data.test, Split) and run.data.test.inputs.dtype == torch.uint8:
            count = min(self.images, len(run.data.test))
            kinds, severity = kinds_for(run.data)
            right = []
            for kind in kinds:
                x = prepare(changed(run.data, kind, severity, count), run.data, run.batches.dtype)
                logits, targets = outputs(run, [(x, run.data.test.targets[:count])])
                right.append(float((logits.argmax(1) == targets).double().mean()))
            shown = {"kinds": len(kinds), "severity": severity, "images": count}
            found["corrupted"] = {"value": sum(right) / len(right), **shown}
        return found


def outputs(run: Run, batches: Any) -> tuple[Tensor, Tensor]:
    """The net's outputs for batches, and their targets."""
    run.net.eval()
    with torch.no_grad():
        pairs = [(run.net(x), y) for x, y in batches]
    logits, targets = zip(*pairs, strict=True)
    return torch.cat(logits), torch.cat(targets)


def kinds_for(data: DataSet) -> tuple[tuple[str, ...], int]:
    """The corruptions for images of this size, and their severity: blurs are defined for 32x32 pixels."""
    return (tuple(CORRUPTIONS), 3) if min(data.input_shape[-2:]) >= 32 else (POINTWISE, 5)


# A cache that all runs of a process share. It keeps the images too: while they live, nothing else has their address.
_CHANGED: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}


def changed(data: DataSet, kind: str, severity: int, count: int) -> Tensor:
    """The first test images with a corruption, in [0, 1]. Grey images are corrupted as three equal channels."""
    assert isinstance(data.test, Split)
    images = data.test.inputs[:count]
    key = (images.data_ptr(), images.device, images.shape, images.stride(), data.peak, kind, severity)
    if key not in _CHANGED:
        if len(_CHANGED) > 2 * len(CORRUPTIONS):
            _CHANGED.clear()
        grey = images.shape[1] == 1
        wide = (images.float() * (255 / data.peak)).round().to(torch.uint8)
        made = corrupt(wide.expand(-1, 3, -1, -1).contiguous() if grey else wide, kind, severity)
        _CHANGED[key] = images, (made[:, :1] if grey else made).float() / 255
    return _CHANGED[key][1]
