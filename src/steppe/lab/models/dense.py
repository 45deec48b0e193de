"""DenseNet-121 and VGG-19 in their forms for 32x32 images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .residual import Shape, assemble, conv, norm


class Appended(nn.Module):
    """The concatenated channels of the body's output and of the input."""

    def __init__(self, *body: nn.Module):
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return torch.cat([self.body(x), x], 1)


def densenet_121(input_shape: Shape, classes: int, growth: int = 32) -> nn.Module:
    """DenseNet-121 (bottleneck, compression 0.5) with a 3x3 stem, for 32x32 images."""
    now = 2 * growth
    parts: list[nn.Module] = [conv(input_shape[0], now)]
    for stage, count in enumerate((6, 12, 24, 16)):
        if stage:
            parts += [norm(now), nn.ReLU(), conv(now, now // 2, 1), nn.AvgPool2d(2)]
            now //= 2
        for _ in range(count):
            inside = 4 * growth
            parts.append(
                Appended(norm(now), nn.ReLU(), conv(now, inside, 1), norm(inside), nn.ReLU(), conv(inside, growth))
            )
            now += growth
    return assemble([*parts, norm(now), nn.ReLU()], now, classes)


def vgg_19(input_shape: Shape, classes: int) -> nn.Module:
    """VGG-19 with batch norm and one linear layer, for 32x32 images."""
    now = input_shape[0]
    parts: list[nn.Module] = []
    for width, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            parts += [nn.Conv2d(now, width, 3, padding=1), norm(width), nn.ReLU()]
            now = width
        parts.append(nn.MaxPool2d(2))
    return assemble(parts, now, classes)
