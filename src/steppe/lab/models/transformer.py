"""Vision transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...support.errors import UserError
from .residual import Residual, Shape


class Attention(nn.Module):
    """Multi-head self-attention from basic operations: fused kernels lack the second derivative for curvature."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.inwards = nn.Linear(width, 3 * width)
        self.outwards = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens, N x T x width, to the same shape."""
        query, key, value = self.inwards(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(-1)
        return self.outwards((weights @ value).transpose(1, 2).flatten(2))


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
        blocks = []
        for _ in range(depth):
            mlp = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
            blocks += [Residual([nn.LayerNorm(width, eps=1e-6), Attention(width, heads)])]
            blocks += [Residual([nn.LayerNorm(width, eps=1e-6), *mlp])]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.positions
        return self.head(self.norm(self.blocks(tokens))[:, 0])


def vit_small(input_shape: Shape, classes: int, patch: int | None = None) -> nn.Module:
    """ViT-Small: 12 blocks, 384 wide, 6 heads; patches of 4 on small images, of 16 on large ones."""
    return VisionTransformer(input_shape, classes, patch or (4 if input_shape[1] <= 64 else 16), 384, 12, 6)
