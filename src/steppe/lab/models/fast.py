"""A net that learns CIFAR-10 in seconds: Keller Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024).

Its first layer whitens patches of the image; only its bias is trained. The other convolutions are initialised to pass
their inputs through. Constant tensors are buffers, so that every parameter is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .residual import Shape, conv

_CHUNK = 500  # images at a time, to bound memory
SCALE = 1 / 9  # factor of the outputs


class Whitening(nn.Module):
    """A 2x2 convolution whose outputs are uncorrelated and have variance 1, each followed by its negative.

    Its weights come from `fit`; before that, the outputs are the pixels of a patch. Only the bias is trained.
    """

    weight: Tensor

    def __init__(self, channels: int, size: int = 2):
        super().__init__()
        pixels = torch.eye(channels * size**2).view(-1, channels, size, size)
        self.register_buffer("weight", torch.cat([pixels, -pixels]))
        self.bias = nn.Parameter(torch.zeros(2 * len(pixels)))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return F.conv2d(x, self.weight, self.bias)

    @torch.no_grad()
    def fit(self, images: Tensor, eps: float = 5e-4) -> None:
        """Set weight and bias by the mean and the covariance of the patches of these images.

        `eps` is added to each variance: a direction in which patches hardly differ is mostly noise.
        """
        mean, covariance = patch_moments(images, self.weight.shape[-1])
        variances, directions = torch.linalg.eigh(covariance)
        rows = directions.T / (variances + eps).sqrt().unsqueeze(1)
        shift = -rows @ mean
        self.weight.copy_(torch.cat([rows, -rows]).view(self.weight.shape))
        self.bias.copy_(torch.cat([shift, -shift]))


def patch_moments(images: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of all patches of this size, each flattened; on the CPU, in float64."""
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for some in images.split(_CHUNK):
        patches = F.unfold(some.double(), size).transpose(0, 1).flatten(1)
        count += patches.shape[1]
        total = total + patches.sum(1).cpu()
        squares = squares + (patches @ patches.T).cpu()
    mean = total / count
    return mean, squares / count - mean.outer(mean)


class ShiftNorm(nn.BatchNorm2d):
    """Batch norm with a bias but without a trained factor, which is constantly 1.

    Its running statistics follow the last few batches, because training is short.
    """

    def __init__(self, width: int):
        super().__init__(width, eps=1e-12, momentum=0.4)
        del self.weight
        self.register_buffer("weight", torch.ones(width))


class Highest(nn.Module):
    """The highest value of each channel over the image.

    Not by `amax`: its gradient looks for entries that equal the maximum, and compiled code in bf16 compares entries
    before rounding with a maximum after it. It finds none and divides by zero.
    """

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return F.max_pool2d(x, list(x.shape[-2:])).flatten(1)


class Scaled(nn.Module):
    """The input times a constant."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.factor * x


def passing(width: int, following: int) -> nn.Conv2d:
    """A 3x3 convolution whose first outputs are its inputs; the others begin with torch's initialisation."""
    layer = conv(width, following)
    nn.init.dirac_(layer.weight[: min(width, following)])
    return layer


def fast_cnn(input_shape: Shape, classes: int, widths: Sequence[int] = (64, 256, 256)) -> nn.Sequential:
    """Keller Jordan's net, which learns CIFAR-10 in seconds; it has a recipe of its own.

    A whitening layer, then for each width two 3x3 convolutions with batch norm and GELU and one max pooling.
    """
    first = Whitening(input_shape[0])
    parts: list[nn.Module] = [first, nn.GELU()]
    for width, following in pairwise([len(first.bias), *widths]):
        parts += [passing(width, following), nn.MaxPool2d(2), ShiftNorm(following), nn.GELU()]
        parts += [passing(following, following), ShiftNorm(following), nn.GELU()]
    return nn.Sequential(*parts, Highest(), nn.Linear(widths[-1], classes, bias=False), Scaled(SCALE))
