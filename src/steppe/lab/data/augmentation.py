"""Augmentation of whole batches on their device.

Every random choice is made per image, from the generator that is passed in. Nothing synchronises with the device, so a
batch can be augmented inside a captured graph (the generator must be on the device and registered with
`graph.register_generator_state`). A policy is a text such as "basic+cutout" or "basic+randaugment=2/9".

    none                  nothing
    crop=4                pad with 4 black pixels, then crop at random
    flip                  flip left and right with probability 1/2
    alternating-flip      flip each image in every other epoch; a random half of them in the first
    translate=2           move by up to 2 pixels, a random number each way; the border is filled by reflection
    basic                 crop=4, then flip
    cutout=16             a square hole of 16 pixels with a random centre; cutout=16/50: in 50 % of the images
    randaugment=2/9       RandAugment: 2 random operations of strength 9 (of 30)
    autoaugment           AutoAugment's CIFAR-10 policy

Holes are filled with the mean colour of the data (black without `data`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...support.errors import UserError, unknown
from .dataset import DataSet
from .image_operations import AUTOAUGMENT, RANDAUGMENT, apply, magnitudes, rows


@dataclass(frozen=True)
class _Draw:
    """Random numbers for the steps of a policy, and the colour that fills holes."""

    generator: torch.Generator
    device: torch.device
    fill: Tensor
    peak: float
    flipped: Tensor | None = None  # for each image, whether alternating-flip flips it in this epoch; None: at random

    def uniform(self, *shape: int) -> Tensor:
        """Uniform in [0, 1), on the batch's device."""
        drawn = torch.rand(shape, generator=self.generator, device=self.generator.device)
        return drawn.to(self.device, non_blocking=True)

    def signs(self, count: int) -> Tensor:
        """Random signs, ±1."""
        return 1 - 2 * (self.uniform(count) < 0.5).float()

    @property
    def fill_bytes(self) -> Tensor:
        """The colour of holes on the scale 0..255."""
        return to_bytes(self.fill, self.peak)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Uniform in 0..high-1."""
        return (self.uniform(*shape) * high).long().clamp(max=high - 1)


def augment(
    inputs: Tensor,
    policy: str,
    generator: torch.Generator,
    data: DataSet | None = None,
    flipped: Tensor | None = None,
) -> Tensor:
    """The augmented batch (N x C x H x W; bytes, or floats from 0 to 1), of the same type. Call it before `prepare`.

    `flipped` says which images alternating-flip flips; without it they are chosen at random.
    """
    steps = parse(policy)
    if not steps:
        return inputs
    if inputs.dim() != 4:
        raise UserError(f"augmentation {policy!r} needs images, N x C x H x W, not {tuple(inputs.shape)}")
    peak = (data.peak if data else 255.0) if inputs.dtype == torch.uint8 else 1.0
    mean = data.mean if data and data.mean else (0.0,)
    draw = _Draw(generator, inputs.device, _fill(mean, peak, inputs.dtype, inputs.device), peak, flipped)
    for step, settings in steps:
        inputs = step(inputs, draw, *settings)
    return inputs


def mixup(
    inputs: Tensor, targets: Tensor, alpha: float, generator: torch.Generator, classes: int
) -> tuple[Tensor, Tensor]:
    """Each image mixed with a random other image; its weight is drawn from Beta(alpha, alpha).

    Returns floating-point inputs of the same scale, and targets as probabilities (N x classes), which
    `torch.nn.functional.cross_entropy` accepts.
    """
    if alpha <= 0:
        raise UserError(f"mixup's alpha must be above 0, not {alpha:g}")
    count = len(inputs)
    strength = torch.full((2, count), alpha, dtype=torch.float64, device=generator.device)
    gamma = torch._standard_gamma(strength, generator=generator)  # the public Beta takes no generator
    share = (gamma[0] / gamma.sum(0)).to(inputs.device, non_blocking=True)
    partner = torch.rand(count, generator=generator, device=generator.device).argsort()
    partner = partner.to(inputs.device, non_blocking=True)
    floats = inputs if inputs.is_floating_point() else inputs.float()
    weight = share.to(floats.dtype).view(-1, *[1] * (inputs.dim() - 1))
    mixed = weight * floats + (1 - weight) * floats[partner]
    hot = (targets.unsqueeze(1) == torch.arange(classes, device=targets.device)).to(floats.dtype)
    weight = share.to(floats.dtype).unsqueeze(1)
    return mixed, weight * hot + (1 - weight) * hot[partner]


def _crop(x: Tensor, draw: _Draw, margin: float) -> Tensor:
    size = int(margin)
    count, _, height, width = x.shape
    padded = torch.nn.functional.pad(x, (size,) * 4)
    corner = draw.integers(2 * size + 1, 2, count, 1)
    down = corner[0] + torch.arange(height, device=x.device)
    across = corner[1] + torch.arange(width, device=x.device)
    return rows(padded, down.unsqueeze(2), across.unsqueeze(1))


def _translate(x: Tensor, draw: _Draw, most: float) -> Tensor:
    size = int(most)
    if size >= min(x.shape[-2:]):
        raise UserError(f"augmentation translate={size}: images of {x.shape[-2]}x{x.shape[-1]} are too small for it")
    moves = draw.integers(2 * size + 1, 2, len(x), 1) - size
    down, across = (_reflected(move, length) for move, length in zip(moves, x.shape[-2:], strict=True))
    return rows(x, down.unsqueeze(2), across.unsqueeze(1))


def _reflected(move: Tensor, length: int) -> Tensor:
    """Where each moved pixel comes from. Beyond a border the image is mirrored, without repeating the border."""
    place = (move + torch.arange(length, device=move.device)).abs()
    return torch.where(place < length, place, 2 * (length - 1) - place)


def _flip(x: Tensor, draw: _Draw) -> Tensor:
    return torch.where(draw.uniform(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)


def _alternating_flip(x: Tensor, draw: _Draw) -> Tensor:
    if draw.flipped is None:
        return _flip(x, draw)
    return torch.where(draw.flipped.view(-1, 1, 1, 1), x.flip(-1), x)


def _basic(x: Tensor, draw: _Draw) -> Tensor:
    return _flip(_crop(x, draw, 4), draw)


def _cutout(x: Tensor, draw: _Draw, side: float, percent: float) -> Tensor:
    count, _, height, width = x.shape

    def inside(size: int) -> Tensor:
        # As in the original: the centre is a pixel, and the square may extend beyond the border.
        start = draw.integers(size, count, 1) - int(side) // 2
        place = torch.arange(size, device=x.device)
        return (place >= start) & (place < start + int(side))

    hole = inside(height).view(-1, 1, height, 1) & inside(width).view(-1, 1, 1, width)
    if percent < 100:
        hole = hole & (100 * draw.uniform(count, 1, 1, 1) < percent)
    return torch.where(hole, draw.fill, x)


def _randaugment(x: Tensor, draw: _Draw, number: float, strength: float) -> Tensor:
    table = magnitudes(31, x.shape[-2], x.shape[-1], x.device)[int(strength)]
    image = to_bytes(x, draw.peak)
    for _ in range(int(number)):
        operation = draw.integers(RANDAUGMENT, len(x))
        image = apply(image, operation, table[operation], draw.signs(len(x)), draw.fill_bytes)
    return from_bytes(image, x, draw.peak)


def _autoaugment(x: Tensor, draw: _Draw) -> Tensor:
    table = magnitudes(10, x.shape[-2], x.shape[-1], x.device)
    chosen = _policies(x.device)[draw.integers(len(AUTOAUGMENT), len(x))]
    image = to_bytes(x, draw.peak)
    for turn in (0, 1):
        operation, probability, strength = chosen[:, turn].unbind(1)
        does = draw.uniform(len(x)) < probability
        operation = torch.where(does, operation, 0).long()
        image = apply(image, operation, table[strength.long(), operation], draw.signs(len(x)), draw.fill_bytes)
    return from_bytes(image, x, draw.peak)


_STEPS: dict[str, tuple[Callable[..., Tensor], tuple[float, ...]]] = {  # with their default settings
    "crop": (_crop, (4,)),
    "flip": (_flip, ()),
    "alternating-flip": (_alternating_flip, ()),
    "translate": (_translate, (2,)),
    "basic": (_basic, ()),
    "cutout": (_cutout, (16, 100)),
    "randaugment": (_randaugment, (2, 9)),
    "autoaugment": (_autoaugment, ()),
}
_LARGEST = {"randaugment": (100, 30), "cutout": (1000, 100)}  # more operations than 100 are a typing mistake


@lru_cache(maxsize=64)
def parse(policy: str) -> tuple[tuple[Callable[..., Tensor], tuple[float, ...]], ...]:
    """The steps of a policy with their settings; raises `UserError` for an invalid policy."""
    steps = []
    for part in policy.split("+"):
        name, given, text = part.strip().partition("=")
        if name in ("none", ""):
            continue
        if name not in _STEPS:
            raise unknown("augmentation", name, ["none", *_STEPS])
        step, settings = _STEPS[name]
        if given:
            limits = _LARGEST.get(name, (1000,) * len(settings))
            settings = _settings(part, text, settings, limits)
        steps.append((step, settings))
    return tuple(steps)


def _settings(part: str, text: str, default: tuple[float, ...], limits: tuple[float, ...]) -> tuple[float, ...]:
    try:
        values = tuple(float(int(value)) for value in text.split("/"))
        values += default[len(values) :]
    except ValueError:
        values = ()
    if len(values) != len(default) or any(not 0 <= v <= most for v, most in zip(values, limits, strict=True)):
        name, example = part.partition("=")[0], "/".join(f"{value:g}" for value in default)
        wanted = f"expected whole numbers like {name}={example}" if default else "it takes no settings"
        raise UserError(f"augmentation {part!r}: {wanted}")
    return values


def policy_names() -> list[str]:
    """The names of all steps of which a policy may consist."""
    return ["none", *_STEPS]


def to_bytes(x: Tensor, peak: float) -> Tensor:
    """Values from 0 to peak as 0..255."""
    return x if x.dtype == torch.uint8 and peak == 255 else (x.float() * (255 / peak)).round().to(torch.uint8)


def from_bytes(image: Tensor, like: Tensor, peak: float) -> Tensor:
    """The reverse of `to_bytes`, in the type of `like`."""
    if like.dtype == torch.uint8:
        return image if peak == 255 else (image.float() * (peak / 255)).round().to(torch.uint8)
    return image.to(like.dtype) * (peak / 255)


# Cached, because making a tensor from Python numbers synchronises with the device.
@lru_cache(maxsize=64)
def _fill(mean: tuple[float, ...], peak: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    values = [round(m * peak) if dtype == torch.uint8 else m * peak for m in mean]
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)


@lru_cache(maxsize=8)
def _policies(device: torch.device) -> Tensor:
    return torch.tensor(AUTOAUGMENT, device=device)
