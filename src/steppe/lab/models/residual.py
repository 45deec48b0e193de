"""Residual networks: ResNet, ResNeXt, Wide ResNet, PyramidNet, in their forms for small images.

All consist of a stem, stages of blocks, a mean over the image, and a linear layer. A block adds the outputs of its body
and its shortcut. Each stage except the first begins by halving the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ...support.errors import unknown

Shape = Sequence[int]
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "softplus": nn.Softplus}


class Residual(nn.Module):
    """after(body(x) + shortcut(x))."""

    def __init__(self, body: Sequence[nn.Module], shortcut: nn.Module | None = None, after: nn.Module | None = None):
        super().__init__()
        self.body = nn.Sequential(*body)
        self.shortcut = shortcut or nn.Identity()
        self.after = after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.after(self.body(x) + self.shortcut(x))


class Padded(nn.Module):
    """A shortcut without weights: fewer pixels (every second one, or means of 2x2) and additional channels of zeros."""

    def __init__(self, width: int, following: int, stride: int, mean: bool = False):
        super().__init__()
        self.more, self.stride, self.mean = following - width, stride, mean

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True) if self.mean else x[..., :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.more))


def conv(width: int, following: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size at stride 1; without a bias, because batch norm has one."""
    return nn.Conv2d(width, following, size, stride, padding=size // 2, groups=groups, bias=False)


def norm(width: int) -> nn.BatchNorm2d:
    """Batch norm."""
    return nn.BatchNorm2d(width)


def assemble(parts: Sequence[nn.Module], width: int, classes: int) -> nn.Sequential:
    """The parts, a mean over the image, and a linear layer. Convolutions have He's normal initialisation."""
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def strides(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stage and stride of each block."""
    for stage, count in enumerate(counts):
        for i in range(count):
            yield stage, 2 if stage > 0 and i == 0 else 1


def resnet(
    input_shape: Shape,
    classes: int,
    counts: Sequence[int],
    start: int,
    expansion: int = 1,
    groups: int = 1,
    padded: bool = False,
    large: bool = False,
    activation: str = "relu",
    outer: int | None = None,
) -> nn.Sequential:
    """ResNet and ResNeXt: `counts` blocks per stage; `start` channels in the first stage, doubled with each stage.

    `expansion` 1 means blocks of two 3x3 convolutions; a larger value means bottleneck blocks (1x1, 3x3, 1x1) whose
    output has that many times the channels. `padded`: shortcuts without weights. `large`: the stem for large images,
    7x7 and pooling.
    """
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    act = ACTIVATIONS[activation]
    now = outer or start
    stem = [conv(input_shape[0], now, 7, 2), norm(now), act(), nn.MaxPool2d(3, 2, padding=1)]
    parts: list[nn.Module] = stem if large else [conv(input_shape[0], now), norm(now), act()]
    for stage, stride in strides(counts):
        inside = start * 2**stage
        outside = inside * expansion
        if expansion == 1:
            body = [conv(now, inside, 3, stride), norm(inside), act(), conv(inside, inside), norm(inside)]
        else:
            body = [
                conv(now, inside, 1),
                norm(inside),
                act(),
                conv(inside, inside, 3, stride, groups),
                norm(inside),
                act(),
            ]
            body += [conv(inside, outside, 1), norm(outside)]
        shortcut = None
        if stride > 1 or now != outside:
            projection = nn.Sequential(conv(now, outside, 1, stride), norm(outside))
            shortcut = Padded(now, outside, stride) if padded else projection
        parts.append(Residual(body, shortcut, act()))
        now = outside
    return assemble(parts, now, classes)


def resnet_18(input_shape: Shape, classes: int, activation: str = "relu") -> nn.Module:
    """ResNet-18 with a 3x3 stem, for 32x32 images."""
    return resnet(input_shape, classes, (2, 2, 2, 2), 64, activation=activation)


def resnet_32(input_shape: Shape, classes: int, activation: str = "relu") -> nn.Module:
    """He et al.'s ResNet-32 for CIFAR: three stages of five blocks, 16 to 64 channels, padded shortcuts.

    GNAM uses a ResNet32 for label noise without saying which; its 95.7 % without noise is above this model's 92.5 %.
    """
    return resnet(input_shape, classes, (5, 5, 5), 16, padded=True, activation=activation)


def resnet_50(input_shape: Shape, classes: int, activation: str = "relu") -> nn.Module:
    """ResNet-50 for large images (7x7 stem); GAM's has activation=softplus."""
    return resnet(input_shape, classes, (3, 4, 6, 3), 64, expansion=4, large=True, activation=activation)


def resnet_101(input_shape: Shape, classes: int, activation: str = "relu") -> nn.Module:
    """ResNet-101 with a 3x3 stem, for 32x32 images."""
    return resnet(input_shape, classes, (3, 4, 23, 3), 64, expansion=4, activation=activation)


def resnext_29(input_shape: Shape, classes: int) -> nn.Module:
    """ResNeXt-29 32x4d for CIFAR: three stages of three blocks, 32 groups of 4 channels in the first."""
    return resnet(input_shape, classes, (3, 3, 3), 128, expansion=2, groups=32, outer=64)


def wide_resnet(input_shape: Shape, classes: int, depth: int = 28, widen: int = 10) -> nn.Module:
    """Wide ResNet: batch norm and ReLU come before each convolution."""
    now = 16
    parts: list[nn.Module] = [conv(input_shape[0], now)]
    for stage, stride in strides([(depth - 4) // 6] * 3):
        width = 16 * widen * 2**stage
        body = [conv(now, width, 3, stride), norm(width), nn.ReLU(), conv(width, width)]
        first = [norm(now), nn.ReLU()]
        if now == width and stride == 1:
            parts.append(Residual([*first, *body]))
        else:  # where the shape changes, the shortcut also gets the normalised input
            parts += [*first, Residual(body, conv(now, width, 1, stride))]
        now = width
    return assemble([*parts, norm(now), nn.ReLU()], now, classes)


def wrn_16_8(input_shape: Shape, classes: int) -> nn.Module:
    """Wide ResNet, depth 16, width 8."""
    return wide_resnet(input_shape, classes, 16, 8)


def wrn_28_2(input_shape: Shape, classes: int) -> nn.Module:
    """Wide ResNet, depth 28, width 2."""
    return wide_resnet(input_shape, classes, 28, 2)


def wrn_28_10(input_shape: Shape, classes: int) -> nn.Module:
    """Wide ResNet, depth 28, width 10."""
    return wide_resnet(input_shape, classes, 28, 10)


def pyramidnet_110(input_shape: Shape, classes: int, alpha: int = 270) -> nn.Module:
    """PyramidNet-110 of basic blocks: the width grows evenly from 16 to 16 + alpha (270 is the 28.3M-weight net)."""
    count = (110 - 2) // 6
    now, exact = 16, 16.0
    parts: list[nn.Module] = [conv(input_shape[0], now), norm(now)]
    for _, stride in strides([count] * 3):
        exact += alpha / (3 * count)
        width = round(exact)
        body = [norm(now), conv(now, width, 3, stride), norm(width), nn.ReLU(), conv(width, width), norm(width)]
        parts.append(Residual(body, Padded(now, width, stride, mean=True)))
        now = width
    return assemble([*parts, norm(now), nn.ReLU()], now, classes)


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "resnet-18": resnet_18,
    "resnet-32": resnet_32,
    "resnet-50": resnet_50,
    "resnet-101": resnet_101,
    "resnext-29-32x4d": resnext_29,
    "wrn-16-8": wrn_16_8,
    "wrn-28-2": wrn_28_2,
    "wrn-28-10": wrn_28_10,
    "pyramidnet-110": pyramidnet_110,
}
