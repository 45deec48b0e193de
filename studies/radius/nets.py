"""steppe's small nets (Linear, Conv2d, BatchNorm, Softplus), run for many members at once.

Images are kept as members x batch x height x width x channels; a convolution is one batched matrix product on
patches. Members' weights are rows of a matrix in the order of `model.parameters()`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Patches(torch.autograd.Function):
    """3x3 patches at a stride, padding 1: M x B x H x W x C to M x (B h w) x 9C. Its gradient adds them back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int) -> Tensor:
        """The patches."""
        members, batch, height, width, channels = ctx.shape = x.shape
        ctx.stride, high, wide = stride, (height - 1) // stride + 1, (width - 1) // stride + 1
        ctx.out = high, wide
        padded = F.pad(x, (0, 0, 1, 1, 1, 1))
        m, b, h, w, c = padded.stride()
        view = padded.as_strided((members, batch, high, wide, 3, 3, channels), (m, b, h * stride, w * stride, h, w, c))
        return view.reshape(members, batch * high * wide, 9 * channels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The sum over the patches a pixel is in."""
        members, batch, height, width, channels = ctx.shape
        (high, wide), stride = ctx.out, ctx.stride
        parts = grad.view(members, batch, high, wide, 3, 3, channels)
        total = grad.new_zeros(members, batch, height + 2, width + 2, channels)
        for i in range(3):
            for j in range(3):
                rows, columns = slice(i, i + high * stride, stride), slice(j, j + wide * stride, stride)
                total[:, :, rows, columns][:, :, :high, :wide] += parts[:, :, :, :, i, j]
        return total[:, :, 1:-1, 1:-1].contiguous(), None


class Net:
    """What a `nn.Sequential` computes, for a population."""

    def __init__(self, model: nn.Sequential):
        self.parts = list(model)
        self.shapes = [p.shape for p in model.parameters()]
        self.sizes = [p.numel() for p in model.parameters()]
        widths = [part.num_features for part in self.parts if isinstance(part, _NORMS)]
        self.widths = widths

    def fresh_statistics(self, weights: Tensor) -> list[Tensor]:
        """BatchNorm's running means and variances."""
        return [
            weights.new_zeros(2, len(weights), width) + weights.new_tensor([0.0, 1.0])[:, None, None]
            for width in self.widths
        ]

    def __call__(
        self, weights: Tensor, x: Tensor, statistics: list[Tensor] | None = None, update: bool = False
    ) -> Tensor:
        """Logits, members x batch x classes. With statistics and no update: as in evaluation."""
        members = len(weights)
        params = iter([t.view(members, *s) for t, s in zip(weights.split(self.sizes, 1), self.shapes, strict=True)])
        norms = iter(statistics or [None] * len(self.widths))
        for part in self.parts:
            if isinstance(part, nn.Flatten):
                x = x.flatten(2)
            elif isinstance(part, nn.Softplus):
                x = F.softplus(x)
            elif isinstance(part, nn.AdaptiveAvgPool2d):
                x = x.mean((2, 3))
            elif isinstance(part, nn.Linear):
                weight, bias = next(params), next(params)
                x = torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))
            elif isinstance(part, nn.Conv2d):
                x = _convolved(x, next(params), next(params), part.stride[0])
            elif isinstance(part, _NORMS):
                x = _normed(x, next(params), next(params), next(norms), update)
            else:
                raise TypeError(f"no population form of {part}")
        return x


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    members, batch, height, width, _ = x.shape
    kernel = weight.permute(0, 3, 4, 2, 1).reshape(members, -1, weight.shape[1])
    out = torch.baddbmm(bias[:, None], Patches.apply(x, stride), kernel)
    return out.view(members, batch, (height - 1) // stride + 1, (width - 1) // stride + 1, -1)


def _normed(x: Tensor, weight: Tensor, bias: Tensor, running: Tensor | None, update: bool) -> Tensor:
    flat = x.reshape(len(x), -1, x.shape[-1])
    if running is not None and not update:
        mean, var = running
        scale = weight * (var + 1e-5).rsqrt()
        return torch.addcmul((bias - mean * scale)[:, None], flat, scale[:, None]).view(x.shape)
    out, mean, var = Normed.apply(flat, weight, bias)
    if running is not None:
        count = flat.shape[1]
        running.lerp_(torch.stack([mean, var * (count / (count - 1))]).detach(), 0.1)
    return out.view(x.shape)


class Normed(torch.autograd.Function):
    """Batch norm over the middle axis of M x N x C, with few passes over memory: sums are matrix products with ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The normed input, and the batch's mean and variance."""
        ones = x.new_full((1, 1, 1), 1 / x.shape[1]).expand(len(x), 1, x.shape[1])
        mean = torch.bmm(ones, x)
        centred = x - mean
        var = torch.bmm(ones, centred * centred)
        inverse = (var + 1e-5).rsqrt()
        ctx.save_for_backward(centred, weight, inverse)
        ctx.mark_non_differentiable(mean, var)
        out = torch.addcmul(bias[:, None], centred, weight[:, None] * inverse)
        return out, mean.squeeze(1), var.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Of input, weight and bias."""
        centred, weight, inverse = ctx.saved_tensors
        count = grad.shape[1]
        ones = grad.new_ones((1, 1, 1)).expand(len(grad), 1, count)
        of_bias = torch.bmm(ones, grad)
        of_weight = torch.bmm(ones, grad * centred) * inverse
        scale = weight[:, None] * inverse
        back = torch.addcmul(of_bias / -count, centred, of_weight * inverse / -count).add_(grad).mul_(scale)
        return back, of_weight.squeeze(1), of_bias.squeeze(1)
