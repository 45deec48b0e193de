"""The papers' small networks.

Those of Generalization Aware Minimization (GAM) use softplus, with batch norm before each layer that has weights,
including the first; the paper does not state the padding, which is 1 here. The six-layer network of the paper on the
universal class of sharpness measures uses ReLU without batch norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(
    input_shape: Sequence[int],
    classes: int,
    hidden: int,
    layers: int,
    batch_norm: bool = True,
    activation: type[nn.Module] = nn.Softplus,
) -> nn.Sequential:
    """`layers` linear layers, all but the last `hidden` wide."""
    widths = [math.prod(input_shape), *[hidden] * (layers - 1), classes]
    parts: list[nn.Module] = [nn.Flatten()]
    for i, (width, following) in enumerate(pairwise(widths)):
        parts += [activation()] if i else []
        parts += [nn.BatchNorm1d(width)] if batch_norm else []
        parts.append(nn.Linear(width, following))
    return nn.Sequential(*parts)


def cnn(input_shape: Sequence[int], classes: int, channels: Sequence[int], strides: Sequence[int]) -> nn.Sequential:
    """3x3 convolutions, global average pooling, one linear layer."""
    widths = [input_shape[0], *channels]
    parts: list[nn.Module] = []
    for width, following, stride in zip(widths, channels, strides, strict=False):
        parts += [nn.BatchNorm2d(width), nn.Conv2d(width, following, 3, stride, padding=1), nn.Softplus()]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, *pool, nn.BatchNorm1d(widths[-1]), nn.Linear(widths[-1], classes))


def digits_mlp(input_shape: Sequence[int], classes: int, hidden: int = 64) -> nn.Sequential:
    """Two softplus layers: a net for 8x8 digits that trains in seconds on a CPU.

    Without batch norm: some pixels are almost always zero, and dividing by their variance would dominate the curvature.
    """
    return mlp(input_shape, classes, hidden, layers=2, batch_norm=False)


def mlp_3(input_shape: Sequence[int], classes: int, hidden: int | None = None) -> nn.Sequential:
    """GAM's MLP-3: 256 wide on grey images (MNIST), 1024 on colour (CIFAR-10, SVHN)."""
    return mlp(input_shape, classes, hidden or (256 if input_shape[0] == 1 else 1024), layers=3)


def mlp_6(input_shape: Sequence[int], classes: int, hidden: int = 128) -> nn.Sequential:
    """The universal class's 6-layer ReLU net for MNIST: five hidden layers of 128 and the output."""
    return mlp(input_shape, classes, hidden, layers=6, batch_norm=False, activation=nn.ReLU)


def cnn_3(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """GAM's CNN-3: two stride-2 convolutions of 32 and 64, softplus; for MNIST."""
    return cnn(input_shape, classes, (32, 64), (2, 2))


def cnn_5(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """GAM's CNN-5: four stride-2 convolutions of 32 to 256, softplus."""
    return cnn(input_shape, classes, (32, 64, 128, 256), (2, 2, 2, 2))


def cnn_14(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """GAM's CNN-14: thirteen convolutions of 16 to 128, softplus, stride 2 in the sixth and tenth."""
    channels = (16, *[32] * 4, *[64] * 4, *[128] * 4)
    return cnn(input_shape, classes, channels, [2 if i in (6, 10) else 1 for i in range(1, 14)])
