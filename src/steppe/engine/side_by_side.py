"""Looks that do not depend on each other, each on weights and buffers of its own, so that they can run side by side.

A look normally moves the weights in place, and the next one waits for it. Here each look has memory of its own: while
its forward and backward are recorded, the parameters and buffers of the model *are* that memory (their `data`). The
weights themselves do not move. Who records (graphs.branches) says which stream the kernels of each look go to.

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

LARGEST = 2**25  # parameters: a larger model fills the device with one look, and copies of it are large


class Beside(Protocol):
    """Where the kernels of each look go."""

    def fork(self, count: int) -> None:
        """`count` looks begin here: what was done so far comes before all of them."""

    def branch(self, number: int) -> contextlib.AbstractContextManager[None]:
        """What is done inside belongs to look `number` and runs beside the others."""
        ...

    def join(self) -> None:
        """What comes from here on comes after all of the looks."""


def possible(looks: Sequence[Look | HVP], model: nn.Module | None, params: Sequence[Tensor]) -> bool:
    """Whether these looks can have memory of their own."""
    if model is None or len(looks) < 2 or any(isinstance(look, HVP) or look.sample is not None for look in looks):
        return False
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return False  # cuDNN wants their weights in one piece of memory
    tensors = [*params, *model.buffers()]
    plain = all(type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided for t in tensors)
    if not plain or sum(p.numel() for p in params) > LARGEST:
        return False
    return len({t.data_ptr() for t in tensors if t.numel()}) == sum(t.numel() > 0 for t in tensors)  # no shared memory


class Places:
    """Memory for each of several looks: weights at its place, and buffers as they were before the first look.

    The first look has the model's own buffers: if it is the first of the step, what it does to them stays. A look's
    memory is made when the look begins, by kernels that run beside the other looks too.
    """

    def __init__(
        self,
        looks: Sequence[Look | HVP],
        weights: Vector,
        model: nn.Module,
        first_move: bool,
        buffers: Callable[[], list[Tensor]],
    ):
        self._start, self._copied = weights, buffers
        self._params, self._buffers = weights.space.params, list(model.buffers())
        offsets = [look.offset if isinstance(look, Look) else None for look in looks]
        # Several looks may have one offset: it is evaluated here, before any of them.
        self._offsets = [None if offset is None else offset.perturbed().as_one_term() for offset in offsets]
        away = [i for i, offset in enumerate(offsets) if offset is not None]
        self.away = bool(away)  # whether one of the looks is not at the weights
        self._in_place = away[0] if away and first_move else None

    def _weights(self, number: int) -> list[Tensor] | None:
        """As looks in turn do it: the first move of a step is made in place, by a kernel that rounds differently."""
        offset, start = self._offsets[number], self._start
        if offset is None:
            return None  # the weights themselves
        if number == self._in_place:
            moved = start.clone()
            moved.add_(offset)
            return moved.tensors
        room = Vector([torch.empty_like(t, requires_grad=False) for t in start.tensors], start.space)
        room.move_(start, offset)
        return room.tensors

    @contextlib.contextmanager
    def of(self, number: int) -> Generator[None, None, None]:
        """The model's parameters and buffers are the memory of one of the looks."""
        with torch.no_grad():
            weights, buffers = self._weights(number), self._copied() if number else None
        swaps = [*zip(self._params, weights or (), strict=False), *zip(self._buffers, buffers or (), strict=False)]
        before = [tensor.data for tensor, _ in swaps]
        try:
            for tensor, memory in swaps:
                tensor.data = memory
            yield
        finally:
            for (tensor, _), memory in zip(swaps, before, strict=True):
                tensor.data = memory
