"""A function of tensors, recorded once as a CUDA graph and replayed: evaluation, augmentation."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator, Hashable
from typing import Any

import torch
from torch import Tensor


class Replayed:
    """Calls a function of tensors: on a CUDA device, from its third call with inputs of a kind on, as one launch.

    The function must not wait for the device, and must keep what it changes in tensors whose memory does not move. Its
    Python runs only in the first calls. The next call overwrites what it returns. On other devices it is the function
    itself. Once `most` shapes have been recorded, inputs of other shapes run eagerly.

    >>> total = torch.zeros(())
    >>> add = Replayed(lambda x: total.add_(x.sum()))
    >>> add(torch.ones(3))
    tensor(3.)
    """

    def __init__(self, function: Callable[..., Any], most: int = 4):
        self._function, self._most = function, most
        self._stream: Any = None
        self._calls: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        """The function's value."""
        if not inputs or not all(t.is_cuda for t in inputs):
            return self._function(*inputs)
        kind = tuple((t.shape, t.dtype, t.device) for t in inputs)
        if kind in self._recorded:
            graph, places, value = self._recorded[kind]
            torch._foreach_copy_(places, list(inputs))
            graph.replay()
            return value
        calls = self._calls[kind] = self._calls.get(kind, 0) + 1
        if calls <= 2 or len(self._recorded) >= self._most:
            return self._function(*inputs)
        graph, places = torch.cuda.CUDAGraph(), [t.clone() for t in inputs]
        self._stream = self._stream or torch.cuda.Stream(inputs[0].device)  # and so a cuBLAS workspace of its own
        with no_garbage_collection(), torch.cuda.graph(graph, stream=self._stream):
            value = self._function(*places)
        self._recorded[kind] = graph, places, value
        graph.replay()
        return value


@contextlib.contextmanager
def no_garbage_collection() -> Generator[None, None, None]:
    """No garbage collection while a graph is recorded: freeing an old graph would invalidate the recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
