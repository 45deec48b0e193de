"""Several nets of one kind as one module, for training many seeds at once on a GPU.

The weights of a member are a row of one matrix, so that a base optimizer and a method take few kernels, however many
members and layers there are. A linear layer is one batched matrix product; so is a convolution, on patches of its
input. Images are members x batch x height x width x channels. Sums over a batch are products with ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# Numbers in the patches of one example, in all convolutions. Above, a convolution of its own is faster: patches take
# more memory than the image, nine times for a 3x3 kernel at stride 1.
MOST_PATCHES = 2**17
_POINTWISE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.Softplus: F.softplus, nn.ReLU: F.relu, nn.Identity: lambda x: x,
}  # fmt: skip


class StackedNet(nn.Module):
    """What several nets compute, each on its own batch: members x batch x ... to members x batch x classes."""

    def __init__(self, nets: Sequence[nn.Module]):
        super().__init__()
        layers = list(_layers(nets[0]))
        if (obstacle := _obstacle(layers)) is not None:
            raise ValueError(f"nets with {obstacle} cannot be stacked")
        rows = [torch.cat([p.detach().reshape(-1) for p in net.parameters()]) for net in nets]
        self.weights = nn.Parameter(torch.stack(rows))
        self.layers = nn.ModuleList([_stacked(layer, len(nets)) for layer in layers]).to(self.weights)
        self._shapes = [p.shape for p in nets[0].parameters()]
        self._sizes = [prod(shape) for shape in self._shapes]
        self._read_statistics(nets)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of all members."""
        members, columns = len(self.weights), self.weights.split(self._sizes, 1)
        params = iter([part.view(members, *shape) for part, shape in zip(columns, self._shapes, strict=True)])
        x = x.permute(0, 1, 3, 4, 2) if x.dim() == 5 else x
        for layer in self.layers:
            count: Any = layer.tensors
            x = layer(x, *(next(params) for _ in range(count)))
        return x

    def shared(self, x: Tensor) -> Tensor:
        """One batch, as the same input for every member, without a copy."""
        return x.expand(len(self.weights), *x.shape)

    def write_to(self, nets: Sequence[nn.Module]) -> None:
        """Write the weights and statistics of the members into nets of their own."""
        for member, net in enumerate(nets):
            with torch.no_grad():
                for p, part in zip(net.parameters(), self.weights[member].split(self._sizes), strict=True):
                    p.copy_(part.view(p.shape))
                for stacked, alone in zip(self._norms(), _norms(net), strict=True):
                    for name, value in alone.named_buffers():
                        value.copy_(getattr(stacked, name)[member] if value.dim() else getattr(stacked, name))

    def _read_statistics(self, nets: Sequence[nn.Module]) -> None:
        for number, stacked in enumerate(self._norms()):
            own = [_norms(net)[number] for net in nets]
            for name in ("running_mean", "running_var"):
                getattr(stacked, name).copy_(torch.stack([getattr(norm, name) for norm in own]))

    def _norms(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, _BatchNorm)]


def stackable(net: nn.Module, input_shape: Sequence[int]) -> bool:
    """Whether nets like this one can be stacked, and are then faster than one by one."""
    layers = list(_layers(net))
    return _obstacle(layers) is None and _patches(layers, input_shape) <= MOST_PATCHES


def _layers(net: nn.Module) -> Iterator[nn.Module]:
    """The layers of a net that is a sequence of them; the net itself if it is not."""
    if type(net) is not nn.Sequential:
        yield net
        return
    for part in net:
        yield from _layers(part)


def _obstacle(layers: Sequence[nn.Module]) -> str | None:
    """The first layer that has no stacked form."""
    for layer in layers:
        known = type(layer) in (*_POINTWISE, nn.Flatten, nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d)
        pools = isinstance(layer, nn.AdaptiveAvgPool2d) and layer.output_size in (1, (1, 1))
        plain = not isinstance(layer, nn.Conv2d) or (
            layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
            and isinstance(layer.padding, tuple)
        )  # fmt: skip
        usual = not isinstance(layer, _BatchNorm) or (layer.affine and layer.track_running_stats)
        softplus = not isinstance(layer, nn.Softplus) or (layer.beta, layer.threshold) == (1.0, 20.0)
        flat = not isinstance(layer, nn.Flatten) or (layer.start_dim, layer.end_dim) == (1, -1)
        biased = not isinstance(layer, (nn.Linear, nn.Conv2d)) or layer.bias is not None
        if not ((known or pools) and plain and usual and softplus and flat and biased):
            return repr(layer)
    return None


def _patches(layers: Sequence[nn.Module], input_shape: Sequence[int]) -> int:
    """How many numbers the patches of one example have, in all convolutions."""
    total, size = 0, tuple(input_shape[1:])
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            size = _out(layer, *size)
            total += prod(size) * layer.in_channels * prod(layer.kernel_size)
    return total


def _out(layer: Any, height: int, width: int) -> tuple[int, int]:
    (kh, kw), (sh, sw), (ph, pw) = layer.kernel_size, layer.stride, layer.padding
    return (height + 2 * ph - kh) // sh + 1, (width + 2 * pw - kw) // sw + 1


def _norms(net: nn.Module) -> list[_BatchNorm]:
    return [module for module in _layers(net) if isinstance(module, _BatchNorm)]


def _stacked(layer: nn.Module, members: int) -> nn.Module:
    """The stacked form of a layer. `tensors` says how many parameters it takes."""
    if isinstance(layer, nn.Linear):
        return _Linear()
    if isinstance(layer, nn.Conv2d):
        return _Convolution(layer)
    if isinstance(layer, _BatchNorm):
        return _Norm(layer, members)
    if isinstance(layer, nn.Flatten):
        return _Pointwise(lambda x: (x.permute(0, 1, 4, 2, 3) if x.dim() == 5 else x).flatten(2))
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        return _Pointwise(lambda x: x.mean((2, 3)))
    return _Pointwise(_POINTWISE[type(layer)])


class _Pointwise(nn.Module):
    """A layer without parameters."""

    tensors = 0

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


class _Linear(nn.Module):
    tensors = 2

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


class _Convolution(nn.Module):
    tensors = 2

    def __init__(self, layer: nn.Conv2d):
        super().__init__()
        self._layer = [layer]  # in a list: its weights are none of this module's

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        layer, (members, batch, height, width, _) = self._layer[0], x.shape
        kernel = weight.permute(0, 3, 4, 2, 1).reshape(members, -1, weight.shape[1])
        out = torch.baddbmm(bias.unsqueeze(1), _Patches.apply(x, layer), kernel)
        return out.view(members, batch, *_out(layer, height, width), -1)


class _Patches(torch.autograd.Function):
    """The patches that a convolution multiplies: M x B x H x W x C to M x (B h w) x (kh kw C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        members, batch, height, width, channels = ctx.shape = x.shape
        (kh, kw), (sh, sw), (ph, pw) = layer.kernel_size, layer.stride, layer.padding
        ctx.layer, (high, wide) = layer, _out(layer, height, width)
        padded = F.pad(x, (0, 0, pw, pw, ph, ph))
        m, b, h, w, c = padded.stride()
        view = padded.as_strided((members, batch, high, wide, kh, kw, channels), (m, b, h * sh, w * sw, h, w, c))
        return view.reshape(members, batch * high * wide, kh * kw * channels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Adds up, for each pixel, the patches that it is in."""
        members, batch, height, width, channels = ctx.shape
        (kh, kw), (sh, sw), (ph, pw) = ctx.layer.kernel_size, ctx.layer.stride, ctx.layer.padding
        high, wide = _out(ctx.layer, height, width)
        parts = grad.view(members, batch, high, wide, kh, kw, channels)
        total = grad.new_zeros(members, batch, height + 2 * ph, width + 2 * pw, channels)
        for i in range(kh):
            for j in range(kw):
                total[:, :, i : i + high * sh : sh, j : j + wide * sw : sw] += parts[:, :, :, :, i, j]
        return total[:, :, ph : ph + height, pw : pw + width].contiguous(), None


class _Norm(_BatchNorm):
    """Batch norm of every member. A `_BatchNorm`, so that the statistics of an average can be estimated again."""

    tensors = 2

    def __init__(self, layer: _BatchNorm, members: int):
        super().__init__(layer.num_features, layer.eps, layer.momentum, affine=False)
        self.register_buffer("running_mean", torch.zeros(members, layer.num_features))
        self.register_buffer("running_var", torch.ones(members, layer.num_features))

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        flat = x.reshape(len(x), -1, x.shape[-1])
        mean, var, tracked = self.running_mean, self.running_var, self.num_batches_tracked
        assert mean is not None and var is not None and tracked is not None
        if not self.training:
            scale = weight * (var + self.eps).rsqrt()
            return torch.addcmul((bias - mean * scale).unsqueeze(1), flat, scale.unsqueeze(1)).view(x.shape)
        out, batch_mean, batch_var = _Normalised.apply(flat, weight, bias, self.eps)
        with torch.no_grad():
            tracked.add_(1)
            count, share = flat.shape[1], 1 / tracked if self.momentum is None else self.momentum
            mean.add_((batch_mean - mean) * share)
            var.add_((batch_var * (count / (count - 1)) - var) * share)
        return out.view(x.shape)


class _Normalised(torch.autograd.Function):
    """M x N x C, normalised over N, times a weight and plus a bias; and the mean and variance over N."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        ones = x.new_full((1, 1, 1), 1 / x.shape[1]).expand(len(x), 1, x.shape[1])
        mean = torch.bmm(ones, x)
        centred = x - mean
        var = torch.bmm(ones, centred * centred)
        inverse = (var + eps).rsqrt()
        ctx.save_for_backward(centred, weight, inverse)
        ctx.mark_non_differentiable(mean, var)
        out = torch.addcmul(bias.unsqueeze(1), centred, weight.unsqueeze(1) * inverse)
        return out, mean.squeeze(1), var.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        centred, weight, inverse = ctx.saved_tensors
        count = grad.shape[1]
        ones = grad.new_ones((1, 1, 1)).expand(len(grad), 1, count)
        of_bias = torch.bmm(ones, grad)
        of_weight = torch.bmm(ones, grad * centred) * inverse
        back = torch.addcmul(of_bias / -count, centred, of_weight * inverse / -count).add_(grad)
        return back.mul_(weight.unsqueeze(1) * inverse), of_weight.squeeze(1), of_bias.squeeze(1), None
