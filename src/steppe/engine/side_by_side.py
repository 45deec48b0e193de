"""Independent looks on copies of weights and buffers, so that they can run side by side as branches of a CUDA graph.

A look normally moves the weights in place, and the next look waits for it. Here each look has its own copy: while its
forward and backward are recorded, the `data` of the model's parameters and buffers is that copy. The weights themselves
do not move. The recorder (graphs.branches) puts the kernels of each look on a stream.

The results are those of one look after another, to the bit: the same kernels on the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ..method import HVP, Look
from ..vector import Vector

LARGEST = 2**25  # parameters: one look of a larger model keeps the device busy, and copies take much memory


class LookBranches(Protocol):
    """Puts the kernels of independent looks on parallel branches."""

    def fork(self, count: int) -> None:
        """Start `count` branches. They run after everything that was recorded before."""

    def branch(self, number: int) -> contextlib.AbstractContextManager[None]:
        """A context whose kernels belong to the branch of look `number`."""
        ...

    def join(self) -> None:
        """End the branches. What is recorded afterwards runs after all of them."""


def possible(looks: Sequence[Look | HVP], model: nn.Module | None, params: Sequence[Tensor]) -> bool:
    """Whether these looks can run on copies of weights and buffers."""
    if model is None or len(looks) < 2:
        return False
    if any(isinstance(look, HVP) or look.sample is not None or look.linear for look in looks):
        return False
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return False  # cuDNN needs their weights in one contiguous piece of memory
    tensors = [*params, *model.buffers()]
    plain = all(type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided for t in tensors)
    if not plain or sum(p.numel() for p in params) > LARGEST:
        return False
    return len({t.data_ptr() for t in tensors if t.numel()}) == sum(t.numel() > 0 for t in tensors)  # no shared memory


class LookCopies:
    """Copies for several looks: the weights at each look, and the buffers as they were before the step's first look.

    The first of these looks uses the model's own buffers: if it is the first look of the step, its changes to them are
    kept. The copies of a look are made when the look begins, by kernels of its own branch.
    """

    def __init__(
        self,
        looks: Sequence[Look | HVP],
        weights: Vector,
        model: nn.Module,
        first_move: bool,
        buffers: Callable[[], list[Tensor]],
    ):
        self._start, self._copy_buffers = weights, buffers
        self._params, self._buffers = weights.space.params, list(model.buffers())
        offsets = [look.offset if isinstance(look, Look) else None for look in looks]
        # Several looks may share an offset: it is evaluated here, before all branches.
        self._offsets = [None if offset is None else offset.perturbed().as_one_term() for offset in offsets]
        away = [i for i, offset in enumerate(offsets) if offset is not None]
        self.any_away = bool(away)  # whether one of the looks is not at w
        self._in_place = away[0] if away and first_move else None

    def _weights_of(self, number: int) -> list[Tensor] | None:
        """The weights of a look; None for w itself.

        The arithmetic is that of looks one after another: the first move of a step is made in place, by a kernel that
        rounds differently.
        """
        offset, start = self._offsets[number], self._start
        if offset is None:
            return None
        if number == self._in_place:
            moved = start.clone()
            moved.add_(offset)
            return moved.tensors
        room = Vector([torch.empty_like(t, requires_grad=False) for t in start.tensors], start.space)
        room.move_(start, offset)
        return room.tensors

    @contextlib.contextmanager
    def swapped_in(self, number: int) -> Generator[None, None, None]:
        """A context in which the model's parameters and buffers are the copies of one of the looks."""
        with torch.no_grad():
            weights, buffers = self._weights_of(number), self._copy_buffers() if number else None
        swaps = [*zip(self._params, weights or (), strict=False), *zip(self._buffers, buffers or (), strict=False)]
        before = [tensor.data for tensor, _ in swaps]
        try:
            for tensor, memory in swaps:
                tensor.data = memory
            yield
        finally:
            for (tensor, _), memory in zip(swaps, before, strict=True):
                tensor.data = memory
