"""Filters of image batches (floats, N x C x H x W) for the corruptions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .image_operations import rows


def along(x: Tensor, matrix: Callable[[int], Tensor]) -> Tensor:
    """A linear map along the columns and along the rows of each image; `matrix(size)` is the map for a size."""
    down, across = (matrix(size).to(x) for size in x.shape[-2:])
    return down @ x @ across.T


def blur(x: Tensor, sigma: float, cut: float = 4, mirror: bool = False) -> Tensor:
    """Gaussian blur with a kernel of ±`cut` sigmas. Beyond the border, its pixels repeat or the image is mirrored."""
    radius = int(cut * sigma + 0.5)
    if radius == 0:
        return x
    offset = torch.arange(-radius, radius + 1)
    line = torch.exp(-offset.double().square() / (2 * sigma**2))
    line = line / line.sum()

    def matrix(size: int) -> Tensor:
        place = torch.arange(size).unsqueeze(1) + offset
        if mirror:  # the border pixel appears twice
            place = place % (2 * size)
            place = torch.where(place < size, place, 2 * size - 1 - place)
        place = place.clamp(0, size - 1)
        return torch.zeros(size, size, dtype=line.dtype).scatter_add_(1, place, line.expand(size, -1))

    return along(x, matrix)


def zoomed(x: Tensor, factor: float) -> Tensor:
    """The middle of the image, enlarged to its full size."""

    def matrix(size: int) -> Tensor:
        inner = math.ceil(size / factor)
        larger = max(round(inner * factor), size)
        new = torch.arange(size, dtype=torch.float64) + (larger - size) // 2
        place = new * (inner - 1) / max(larger - 1, 1) + (size - inner) // 2  # first pixel on first, last on last
        return (1 - (place.unsqueeze(1) - torch.arange(size)).abs()).clamp(min=0)  # linear interpolation

    return along(x, matrix)


def motion(x: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """Motion blur of each image in its own direction: a half Gaussian of 2 radius + 1 pixels, from the pixel on."""
    steps = range(2 * radius + 1)
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in steps]
    angle = (degrees * (math.pi / 180)).view(-1, 1, 1)
    down = torch.arange(x.shape[-2], device=x.device).view(1, -1, 1)
    across = torch.arange(x.shape[-1], device=x.device).view(1, 1, -1)
    total = torch.zeros_like(x)
    for i, weight in zip(steps, weights, strict=True):
        at_down = (down + (i * angle.sin()).round().long()).clamp(0, x.shape[-2] - 1)
        at_across = (across + (i * angle.cos()).round().long()).clamp(0, x.shape[-1] - 1)
        total += weight / sum(weights) * rows(x, at_down, at_across)
    return total


def shuffled(x: Tensor, steps: Tensor, distance: int) -> Tensor:
    """Each pixel swapped with a near one, in order from the last pixel to the first, as through frosted glass.

    `steps` (2 x N x H x W) is the distance down and across to each pixel's partner.
    """
    height, width = x.shape[-2:]
    order = torch.arange(height * width, device=x.device).unsqueeze(1).repeat(1, len(x))  # pixels by images
    partner = (steps[0] * width + steps[1]).flatten(1).T.contiguous()
    for row in range(height - distance, distance, -1):
        for column in range(width - distance, distance, -1):
            here = row * width + column
            there = (partner[here] + here).unsqueeze(0)
            other = order.gather(0, there)
            order.scatter_(0, there, order[here : here + 1].clone())
            order[here] = other[0]
    return x.flatten(2).gather(2, order.T.unsqueeze(1).expand(-1, x.shape[1], -1)).view_as(x)


def warped(x: Tensor, down: Tensor, across: Tensor, mirror_at_centre: bool) -> Tensor:
    """The image interpolated bilinearly at these positions (N x H x W, in pixels), mirrored beyond the border.

    The mirror is at the centre of the border pixels or at their outer edge.
    """
    scaled = []
    for place, size in ((across, x.shape[-1]), (down, x.shape[-2])):
        scaled.append(2 * place / (size - 1) - 1 if mirror_at_centre else (2 * place + 1) / size - 1)
    grid = torch.stack(scaled, -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=mirror_at_centre)


def diamond_square(count: int, size: int, decay: float, noise: Callable[..., Tensor]) -> Tensor:
    """Clouds (count x size x size, from 0 to 1): a periodic height map, refined by halving the step.

    Each new point is the mean of its four neighbours plus noise; the noise shrinks by decay² with each halving.
    """
    first = noise(count, 1, 1)
    height = torch.zeros(count, size, size, device=first.device)
    step, amplitude = size, 100.0**2
    while step >= 2:
        half, points = step // 2, size // step
        corner = height[:, ::step, ::step]
        middle = (corner + corner.roll(-1, 1) + corner.roll(-1, 2) + corner.roll((-1, -1), (1, 2))) / 4
        middle = middle + amplitude * noise(count, points, points)
        beside = (middle + middle.roll(1, 1) + corner + corner.roll(-1, 2)) / 4
        below = (middle + middle.roll(1, 2) + corner + corner.roll(-1, 1)) / 4
        height[:, half::step, half::step] = middle
        height[:, ::step, half::step] = beside + amplitude * noise(count, points, points)
        height[:, half::step, ::step] = below + amplitude * noise(count, points, points)
        step, amplitude = half, amplitude / decay**2
    low = height.amin((1, 2), keepdim=True)
    return (height - low) / (height.amax((1, 2), keepdim=True) - low)
