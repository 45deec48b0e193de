"""Transformers for images and for text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...support.errors import UserError
from .residual import Residual, Shape


class Attention(nn.Module):
    """Multi-head self-attention. With `causal`, a token sees itself and the tokens before it.

    The fused kernels of PyTorch have no second derivative. Where one is needed (`steppe.curvature`, Hessian-vector
    products of a method), steppe selects the kernel that has it.
    """

    def __init__(self, width: int, heads: int, causal: bool = False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inwards = nn.Linear(width, 3 * width)
        self.outwards = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens, N x T x width, to the same shape."""
        query, key, value = self.inwards(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.outwards(seen.transpose(1, 2).flatten(2))


def _blocks(width: int, depth: int, heads: int, causal: bool = False) -> nn.Sequential:
    """Pre-norm blocks of attention and a two-layer net."""
    blocks = []
    for _ in range(depth):
        mlp = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        blocks += [Residual([nn.LayerNorm(width, eps=1e-6), Attention(width, heads, causal)])]
        blocks += [Residual([nn.LayerNorm(width, eps=1e-6), *mlp])]
    return nn.Sequential(*blocks)


def _initialise(net: nn.Module, *others: Tensor) -> None:
    """Initialise with small random weights, and with biases of zero."""
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.trunc_normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    for tensor in others:
        nn.init.trunc_normal_(tensor, std=0.02)


class VisionTransformer(nn.Module):
    """Patches, a class token, learned positions, pre-norm blocks, a linear layer on the class token."""

    def __init__(self, input_shape: Shape, classes: int, patch: int, width: int, depth: int, heads: int):
        super().__init__()
        channels, height, across = input_shape
        if height % patch or across % patch:
            raise UserError(f"images of {height}x{across} cannot be cut into patches of {patch}x{patch}")
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (height // patch) * (across // patch), width))
        self.blocks = _blocks(width, depth, heads)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        _initialise(self, self.token, self.positions)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.positions
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class Decoder(nn.Module):
    """A language model: tokens, learned positions, causal pre-norm blocks, a linear layer on every token."""

    def __init__(self, input_shape: Shape, tokens: int, width: int, depth: int, heads: int):
        super().__init__()
        if len(input_shape) != 1:
            raise UserError(f"a language model reads rows of tokens, not inputs of shape {tuple(input_shape)}")
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(torch.zeros(1, input_shape[0], width))
        self.blocks = _blocks(width, depth, heads, causal=True)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, tokens)
        _initialise(self, self.positions)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens, N x T, to logits of the next ones, N x T x tokens."""
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions[:, : x.shape[1]])))


def vit_small(input_shape: Shape, classes: int, patch: int | None = None) -> nn.Module:
    """ViT-Small: 12 blocks, 384 wide, 6 heads; patches of 4 on small images, of 16 on large ones."""
    return VisionTransformer(input_shape, classes, patch or _patch(input_shape), 384, 12, 6)


def vit_tiny(
    input_shape: Shape, classes: int, patch: int | None = None, width: int = 192, depth: int = 12, heads: int = 3
) -> nn.Module:
    """ViT-Tiny: 12 blocks, 192 wide, 3 heads; patches of 4 on small images, of 16 on large ones."""
    return VisionTransformer(input_shape, classes, patch or _patch(input_shape), width, depth, heads)


def _patch(input_shape: Shape) -> int:
    return 4 if input_shape[1] <= 64 else 16


def gpt_tiny(input_shape: Shape, classes: int, width: int = 256, depth: int = 6, heads: int = 4) -> nn.Module:
    """A small GPT for text: 6 blocks, 256 wide, 4 heads; 4.9 million weights on bytes."""
    return Decoder(input_shape, classes, width, depth, heads)
