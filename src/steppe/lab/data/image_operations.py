"""The image operations of AutoAugment and RandAugment, for batches in which each image has its own operation.

`apply` takes one operation and one strength per image. Each kind of operation is computed for the whole batch (one
gather for everything that moves pixels, one blend for everything that mixes with a degenerate image), and `torch.where`
keeps the result only for the images that use it. Each operation gives the same result as in Pillow.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

IDENTITY, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE, BRIGHTNESS, COLOR, CONTRAST, SHARPNESS = range(10)
POSTERIZE, SOLARIZE, AUTOCONTRAST, EQUALIZE, INVERT = range(10, 15)
RANDAUGMENT = 14  # it draws from all operations except invert, the last

# Cubuk et al. 2019, the policy found on CIFAR-10: two operations each, with probability and strength (0 to 9).
AUTOAUGMENT = (
    ((INVERT, 0.1, 0), (CONTRAST, 0.2, 6)),
    ((ROTATE, 0.7, 2), (TRANSLATE_X, 0.3, 9)),
    ((SHARPNESS, 0.8, 1), (SHARPNESS, 0.9, 3)),
    ((SHEAR_Y, 0.5, 8), (TRANSLATE_Y, 0.7, 9)),
    ((AUTOCONTRAST, 0.5, 0), (EQUALIZE, 0.9, 0)),
    ((SHEAR_Y, 0.2, 7), (POSTERIZE, 0.3, 7)),
    ((COLOR, 0.4, 3), (BRIGHTNESS, 0.6, 7)),
    ((SHARPNESS, 0.3, 9), (BRIGHTNESS, 0.7, 9)),
    ((EQUALIZE, 0.6, 0), (EQUALIZE, 0.5, 0)),
    ((CONTRAST, 0.6, 7), (SHARPNESS, 0.6, 5)),
    ((COLOR, 0.7, 7), (TRANSLATE_X, 0.5, 8)),
    ((EQUALIZE, 0.3, 0), (AUTOCONTRAST, 0.4, 0)),
    ((TRANSLATE_Y, 0.4, 3), (SHARPNESS, 0.2, 6)),
    ((BRIGHTNESS, 0.9, 6), (COLOR, 0.2, 8)),
    ((SOLARIZE, 0.5, 2), (INVERT, 0.0, 0)),
    ((EQUALIZE, 0.2, 0), (AUTOCONTRAST, 0.6, 0)),
    ((EQUALIZE, 0.2, 0), (EQUALIZE, 0.6, 0)),
    ((COLOR, 0.9, 9), (EQUALIZE, 0.6, 0)),
    ((AUTOCONTRAST, 0.8, 0), (SOLARIZE, 0.2, 8)),
    ((BRIGHTNESS, 0.1, 3), (COLOR, 0.7, 0)),
    ((SOLARIZE, 0.4, 5), (AUTOCONTRAST, 0.9, 0)),
    ((TRANSLATE_Y, 0.9, 9), (TRANSLATE_Y, 0.7, 9)),
    ((AUTOCONTRAST, 0.9, 0), (SOLARIZE, 0.8, 3)),
    ((EQUALIZE, 0.8, 0), (INVERT, 0.1, 0)),
    ((TRANSLATE_Y, 0.7, 9), (AUTOCONTRAST, 0.9, 0)),
)


@lru_cache(maxsize=64)
def magnitudes(bins: int, height: int, width: int, device: torch.device) -> Tensor:
    """The amount of each operation (column) at each strength (row): slope, pixels, degrees, change, bits, threshold."""
    table = torch.zeros(bins, 15)
    share = torch.linspace(0, 1, bins)
    table[:, SHEAR_X] = table[:, SHEAR_Y] = 0.3 * share
    table[:, TRANSLATE_X], table[:, TRANSLATE_Y] = 150 / 331 * width * share, 150 / 331 * height * share
    table[:, ROTATE] = 30 * share
    for operation in (BRIGHTNESS, COLOR, CONTRAST, SHARPNESS):
        table[:, operation] = 0.9 * share
    table[:, POSTERIZE] = 8 - (4 * share).round()
    table[:, SOLARIZE] = 255 * (1 - share)
    return table.to(device)


def apply(x: Tensor, operation: Tensor, strength: Tensor, sign: Tensor, fill: Tensor) -> Tensor:
    """Image i of the batch (bytes) after `operation[i]`; `sign` (±1) is the direction of moves and blends."""
    change = strength * sign
    x = _move(x, operation, change, fill)
    x = _blend(x, operation, change)
    x = _per_pixel(x, operation, strength)
    return _by_histogram(x, operation)


def rows(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Pixels of each image by row and column, each N x H x W or broadcast to it."""
    image = torch.arange(len(x), device=x.device).view(-1, 1, 1, 1)
    channel = torch.arange(x.shape[1], device=x.device).view(1, -1, 1, 1)
    return x[image, channel, down.unsqueeze(1), across.unsqueeze(1)]


def _is(operation: Tensor, *wanted: int) -> Tensor:
    hit = operation == wanted[0]
    for other in wanted[1:]:
        hit = hit | (operation == other)
    return hit.view(-1, 1, 1, 1)


def _move(x: Tensor, operation: Tensor, change: Tensor, fill: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    operation, change = operation.view(-1, 1, 1), change.view(-1, 1, 1)
    turns = operation == ROTATE
    angle = torch.where(turns, change, 0) * (torch.pi / 180)
    across = torch.arange(width, device=x.device).view(1, 1, -1) + 0.5 - torch.where(turns, width / 2, 0)
    down = torch.arange(height, device=x.device).view(1, -1, 1) + 0.5 - torch.where(turns, height / 2, 0)
    # the source of each pixel; for identity exactly the pixel's own centre
    slope_x = torch.where(operation == SHEAR_X, change, -angle.sin())
    slope_y = torch.where(operation == SHEAR_Y, change, angle.sin())
    from_across = angle.cos() * across + slope_x * down + torch.where(turns, width / 2, 0)
    from_down = slope_y * across + angle.cos() * down + torch.where(turns, height / 2, 0)
    from_across = (from_across + torch.where(operation == TRANSLATE_X, change.trunc(), 0)).floor().long()
    from_down = (from_down + torch.where(operation == TRANSLATE_Y, change.trunc(), 0)).floor().long()
    inside = (from_across >= 0) & (from_across < width) & (from_down >= 0) & (from_down < height)
    taken = rows(x, from_down.clamp(0, height - 1), from_across.clamp(0, width - 1))
    return torch.where(inside.unsqueeze(1), taken, fill)


def _blend(x: Tensor, operation: Tensor, change: Tensor) -> Tensor:
    pixels = x.float()
    grey = _grey(pixels)
    dull = torch.where(_is(operation, COLOR), grey, torch.zeros_like(grey))
    dull = torch.where(_is(operation, CONTRAST), (grey.mean((1, 2, 3), keepdim=True) + 0.5).floor(), dull)
    dull = torch.where(_is(operation, SHARPNESS), _smooth(pixels), dull)
    mixed = dull + (1 + change.view(-1, 1, 1, 1)) * (pixels - dull)
    mixed = mixed.clamp(0, 255).to(torch.uint8)  # truncates, as Pillow does
    return torch.where(_is(operation, BRIGHTNESS, COLOR, CONTRAST, SHARPNESS), mixed, x)


def _grey(pixels: Tensor) -> Tensor:
    if pixels.shape[1] != 3:
        return pixels.mean(1, keepdim=True).floor()
    red, green, blue = pixels.int().unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) // 65536).unsqueeze(1).float()


def _smooth(pixels: Tensor) -> Tensor:
    """The mean of the 3x3 neighbourhood with the centre counted five times; the border is unchanged."""
    total = 9 * F.avg_pool2d(pixels, 3, stride=1) + 4 * pixels[..., 1:-1, 1:-1]
    inner = (total / 13 + 0.5).floor().clamp(0, 255)
    return torch.cat(
        [
            pixels[..., :1, :],
            torch.cat([pixels[..., 1:-1, :1], inner, pixels[..., 1:-1, -1:]], -1),
            pixels[..., -1:, :],
        ],
        -2,
    )


def _per_pixel(x: Tensor, operation: Tensor, strength: Tensor) -> Tensor:
    value = strength.view(-1, 1, 1, 1)
    step = torch.pow(2.0, 8 - value).to(torch.int16)  # only used where value is a number of bits
    step = torch.where(_is(operation, POSTERIZE), step, 1)
    x = (x.to(torch.int16) // step * step).to(torch.uint8)
    inverted = _is(operation, INVERT) | (_is(operation, SOLARIZE) & (x >= value))
    return torch.where(inverted, 255 - x, x)


def _by_histogram(x: Tensor, operation: Tensor) -> Tensor:
    flat = x.flatten(2).long()
    low, high = flat.amin(2, keepdim=True), flat.amax(2, keepdim=True)
    stretched = (flat - low) * 255 // (high - low).clamp(min=1)
    stretched = torch.where(high > low, stretched, flat)

    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=x.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    step = (flat.shape[2] - counts.gather(2, high)) // 255  # as in Pillow, the brightest value is not counted
    before = counts.cumsum(2) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(0, 255)
    equalized = torch.where(step > 0, table.gather(2, flat), flat)

    x = torch.where(_is(operation, AUTOCONTRAST), stretched.to(torch.uint8).view_as(x), x)
    return torch.where(_is(operation, EQUALIZE), equalized.to(torch.uint8).view_as(x), x)
