"""Records a function of tensors once as a CUDA graph and replays it: for evaluation, augmentation."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor


class Replayed:
    """A function of tensors that is replayed as one CUDA graph from its third call with inputs of a shape on.

    The function must not synchronise with the device, and must keep its state in tensors whose addresses do not change.
    Its Python code runs only in the first calls. The next call overwrites the returned tensors. On other devices than
    CUDA the function itself is called. Once `most` shapes have been recorded, inputs of other shapes run eagerly.

    If the function draws random numbers from generators of its own, pass them as `generators`: a replay draws what the
    function would, from the seed and the offset that they have then.

    >>> total = torch.zeros(())
    >>> add = Replayed(lambda x: total.add_(x.sum()))
    >>> add(torch.ones(3))
    tensor(3.)
    """

    def __init__(self, function: Callable[..., Any], most: int = 4, generators: Sequence[torch.Generator] = ()):
        self._function, self._most = function, most
        self._generators = [generator for generator in generators if generator.device.type == "cuda"]
        self._stream: Any = None
        self._calls: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        """The value of the function."""
        if not inputs or not all(t.is_cuda for t in inputs):
            return self._function(*inputs)
        kind = tuple((t.shape, t.dtype, t.device) for t in inputs)
        if kind in self._recorded:
            graph, static_inputs, value = self._recorded[kind]
            torch._foreach_copy_(static_inputs, list(inputs))
            graph.replay()
            return value
        calls = self._calls[kind] = self._calls.get(kind, 0) + 1
        if calls <= 2 or len(self._recorded) >= self._most:
            return self._function(*inputs)
        graph, static_inputs = torch.cuda.CUDAGraph(), [t.clone() for t in inputs]
        for generator in self._generators:
            graph.register_generator_state(generator)
        self._stream = self._stream or torch.cuda.Stream(inputs[0].device)  # with its own cuBLAS workspace
        with no_garbage_collection(), torch.cuda.graph(graph, stream=self._stream):
            value = self._function(*static_inputs)
        self._recorded[kind] = graph, static_inputs, value
        graph.replay()
        return value


@contextlib.contextmanager
def no_garbage_collection() -> Generator[None, None, None]:
    """A context without garbage collection, for recording: freeing an old CUDA graph would invalidate the new one."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
