"""CIFAR-10-C, generated: common corruptions of small colour images in five severities.

After Hendrycks and Dietterich (2019), with their constants for 32x32 images, for whole batches. 17 of their 19 are
here: frost needs photographs, and spatter needs an edge detector and a distance transform. Noise and fog use other
random numbers than the published files, and blurs do not reproduce the rounding of a particular library. So use them to
compare methods with each other, not to compare an accuracy with a published table.

All random numbers come from a generator on the CPU: a seed gives the same images on every device, up to rounding.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...support.errors import UserError, require, unknown
from .dataset import DataSet, Split
from .image_filters import along, blur, diamond_square, motion, shuffled, warped, zoomed

SEVERITIES = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Draws:
    """Random numbers drawn on the CPU, returned on the images' device."""

    generator: torch.Generator
    device: torch.device

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator).to(self.device)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Uniform numbers."""
        return (low + (high - low) * torch.rand(shape, generator=self.generator)).to(self.device)

    def poisson(self, rate: Tensor) -> Tensor:
        """Poisson counts with these means."""
        return torch.poisson(rate.cpu(), generator=self.generator).to(self.device)


def corrupt(images: Tensor, name: str, severity: int, seed: int = 0) -> Tensor:
    """The images (bytes, N x 3 x H x W) with this corruption; the same seed gives the same result."""
    if name not in CORRUPTIONS:
        raise unknown("corruption", name, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise UserError(f"severity goes from 1 to 5, not {severity!r}")
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3:
        raise UserError(f"corruptions need colour images as bytes, N x 3 x H x W, not {tuple(images.shape)}")
    number = list(CORRUPTIONS).index(name)
    draws = Draws(torch.Generator().manual_seed((seed * 100 + number) * 10 + severity), images.device)
    changed = CORRUPTIONS[name](images.float() / 255, severity - 1, draws)
    return (changed.clamp(0, 1) * 255).round().to(torch.uint8)


def corrupted(data: DataSet, name: str, severity: int, seed: int = 0) -> DataSet:
    """The data set with its test images corrupted."""
    if not isinstance(data.test, Split):
        raise UserError(f"{data.name} is too large to be corrupted: it is not held in memory")
    test = replace(data.test, inputs=corrupt(data.test.inputs, name, severity, seed))
    return replace(data, name=f"{data.name}-c (regenerated): {name} {severity}", test=test)


def all_corrupted(data: DataSet, names: tuple[str, ...] = (), severities: tuple[int, ...] = SEVERITIES) -> DataSet:
    """The data set tested on these corruptions (default: all) at these severities, in sequence."""
    parts = [corrupted(data, name, severity).test for name in names or CORRUPTIONS for severity in severities]
    inputs = torch.cat([part.inputs for part in parts])  # type: ignore[attr-defined]
    test = Split(inputs, torch.cat([part.targets for part in parts]))
    what = f": {', '.join(names)}" if names else ""
    level = f" {severities[0]}" if len(severities) == 1 else ""
    return replace(data, name=f"{data.name}-c (regenerated){what}{level}", test=test)


def _gaussian_noise(x: Tensor, s: int, draws: Draws) -> Tensor:
    return x + (0.04, 0.06, 0.08, 0.09, 0.10)[s] * draws.normal(*x.shape)


def _shot_noise(x: Tensor, s: int, draws: Draws) -> Tensor:
    photons = (500, 250, 100, 75, 50)[s]
    return draws.poisson(x * photons) / photons


def _impulse_noise(x: Tensor, s: int, draws: Draws) -> Tensor:
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[s]
    chance = draws.uniform(0, 1, *x.shape)
    return torch.where(chance < share / 2, 0.0, torch.where(chance >= 1 - share / 2, 1.0, x))


def _speckle_noise(x: Tensor, s: int, draws: Draws) -> Tensor:
    return x + x * (0.06, 0.1, 0.12, 0.16, 0.2)[s] * draws.normal(*x.shape)


def _gaussian_blur(x: Tensor, s: int, draws: Draws) -> Tensor:
    return blur(x, (0.4, 0.6, 0.7, 0.8, 1)[s])


def _glass_blur(x: Tensor, s: int, draws: Draws) -> Tensor:
    sigma, distance, times = ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))[s]
    x = blur(x, sigma)
    for _ in range(times):
        steps = draws.uniform(-distance, distance, 2, len(x), *x.shape[-2:]).floor().long()  # -distance..distance-1
        x = shuffled(x, steps, distance)
    return blur(x, sigma)


def _defocus_blur(x: Tensor, s: int, draws: Draws) -> Tensor:
    radius, alias = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[s]
    place = torch.arange(-2.0, 3)
    disk = (place.square().unsqueeze(1) + place.square() <= radius**2).float()
    line = torch.exp(-torch.arange(-1.0, 2).square() / (2 * alias**2))
    soft = torch.outer(line, line) / line.sum() ** 2
    kernel = F.conv2d((disk / disk.sum())[None, None], soft[None, None], padding=1).to(x)
    channels = F.pad(x, (2, 2, 2, 2), mode="reflect").flatten(0, 1).unsqueeze(1)
    return F.conv2d(channels, kernel).view_as(x)


def _motion_blur(x: Tensor, s: int, draws: Draws) -> Tensor:
    radius, sigma = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[s]
    return motion(x, radius, sigma, draws.uniform(-45, 45, len(x)))


def _zoom_blur(x: Tensor, s: int, draws: Draws) -> Tensor:
    # 7, 12, 16, 21 or 26 zooms: rounding decides whether the end is one of them, as in the published images
    zooms = np.arange(1, (1.06, 1.11, 1.16, 1.21, 1.26)[s], 0.01).tolist()
    return (x + sum(zoomed(x, zoom) for zoom in zooms)) / (len(zooms) + 1)


def _fog(x: Tensor, s: int, draws: Draws) -> Tensor:
    strength, decay = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))[s]
    height, width = x.shape[-2:]
    size = 2 ** math.ceil(math.log2(max(height, width)))
    cloud = diamond_square(len(x), size, decay, lambda *shape: draws.uniform(-1, 1, *shape))
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + strength * cloud[:, None, :height, :width]) * brightest / (brightest + strength)


def _snow(x: Tensor, s: int, draws: Draws) -> Tensor:
    mean, spread, zoom, least, radius, sigma, keep = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[s]
    flakes = zoomed(mean + spread * draws.normal(len(x), 1, *x.shape[-2:]), zoom)
    flakes = torch.where(flakes < least, 0.0, flakes).clamp(0, 1)
    falling = motion(flakes, radius, sigma, draws.uniform(-135, -45, len(x)))
    grey = (0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]).unsqueeze(1)
    pale = keep * x + (1 - keep) * torch.maximum(x, 1.5 * grey + 0.5)
    return pale + falling + falling.flip((-2, -1))


def _contrast(x: Tensor, s: int, draws: Draws) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + (0.75, 0.5, 0.4, 0.3, 0.15)[s] * (x - mean)


def _brightness(x: Tensor, s: int, draws: Draws) -> Tensor:
    """In hue, saturation, value: a higher value scales all channels by the same factor."""
    value = x.amax(1, keepdim=True)
    raised = (value + (0.05, 0.1, 0.15, 0.2, 0.3)[s]).clamp(max=1)
    return torch.where(value > 0, x * (raised / value.clamp(min=1e-6)), raised)


def _saturate(x: Tensor, s: int, draws: Draws) -> Tensor:
    """In hue, saturation, value: each channel's distance from the largest scales with the saturation."""
    times, plus = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))[s]
    value, least = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    saturation = (value - least) / value.clamp(min=1e-6)
    wanted = (saturation * times + plus).clamp(0, 1)
    changed = value - (value - x) * (wanted / saturation.clamp(min=1e-6))
    # grey has no hue: it is treated as red, so `plus` makes it slightly red
    red = torch.cat([value, *[value * (1 - wanted)] * 2], 1)
    return torch.where(saturation > 0, changed, red)


def _jpeg(x: Tensor, s: int, draws: Draws) -> Tensor:
    Image = require("PIL.Image", "pillow", "jpeg compression")
    quality = (80, 65, 58, 50, 40)[s]
    pixels = (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    out = np.empty_like(pixels)
    for i, image in enumerate(pixels):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        out[i] = np.asarray(Image.open(file))
    return torch.from_numpy(out).permute(0, 3, 1, 2).to(x.device).float() / 255


def _pixelate(x: Tensor, s: int, draws: Draws) -> Tensor:
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[s]
    small = along(x, lambda size: _box(size, int(size * share)))
    height, width = x.shape[-2:]
    small = (small * 255).round() / 255
    return _box(small.shape[-2], height).to(x) @ small @ _box(small.shape[-1], width).to(x).T


def _box(size: int, following: int) -> Tensor:
    """The matrix of box resampling: each new pixel is the mean of the old pixels whose centres it covers."""
    scale = size / following
    reach = max(scale, 1) / 2
    matrix = torch.zeros(following, size)
    for i in range(following):
        centre = (i + 0.5) * scale
        first, end = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), size)
        matrix[i, first:end] = 1 / (end - first)
    return matrix


def _elastic(x: Tensor, s: int, draws: Draws) -> Tensor:
    levels = ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
    reach, sigma, jitter = levels[s]
    count, size = len(x), min(x.shape[-2:])
    half, part = size // 2, size // 3
    corners = torch.tensor([[1.0, 1], [1, -1], [-1, -1]], device=x.device) * part + half
    moved = corners + draws.uniform(-jitter * size, jitter * size, count, 3, 2)
    ones = torch.ones(count, 3, 1, device=x.device)
    back = torch.linalg.solve(torch.cat([moved, ones], 2), corners.expand(count, 3, 2))  # from new positions to old
    across = torch.arange(x.shape[-1], device=x.device).float().expand(count, x.shape[-2], -1)
    down = torch.arange(x.shape[-2], device=x.device).float().unsqueeze(1).expand(count, -1, x.shape[-1])
    place = torch.stack([across, down, torch.ones_like(down)], -1) @ back.unsqueeze(1)
    x = warped(x, place[..., 1], place[..., 0], mirror_at_centre=True)
    if reach == 0:
        return x
    field = reach * size * blur(draws.uniform(-1, 1, count, 2, *x.shape[-2:]), sigma * size, cut=3, mirror=True)
    return warped(x, down + field[:, 0], across + field[:, 1], mirror_at_centre=False)


CORRUPTIONS: dict[str, Callable[[Tensor, int, Draws], Tensor]] = {
    "gaussian-noise": _gaussian_noise,
    "shot-noise": _shot_noise,
    "impulse-noise": _impulse_noise,
    "speckle-noise": _speckle_noise,
    "gaussian-blur": _gaussian_blur,
    "glass-blur": _glass_blur,
    "defocus-blur": _defocus_blur,
    "motion-blur": _motion_blur,
    "zoom-blur": _zoom_blur,
    "fog": _fog,
    "snow": _snow,
    "contrast": _contrast,
    "brightness": _brightness,
    "saturate": _saturate,
    "jpeg": _jpeg,
    "pixelate": _pixelate,
    "elastic": _elastic,
}
