"""The gradient of the loss with respect to the model's outputs: kept from the first look, for looks that are linear.

A look with `linear=True` is at the loss linearised in the model's outputs f: its gradient is that of ⟨∂L/∂f, f⟩, where
∂L/∂f is from the first look. The caller runs the same forward and backward as in any look. Hooks on the outputs keep
∂L/∂f in the first look, and put it in the place of the new one in a linear look.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .replicas import in_a_pipeline


class OutputGradients:
    """∂L/∂f of the step's first look, one tensor for each output of each forward (one forward a micro-batch)."""

    def __init__(self, model: nn.Module | None, params: Sequence[Tensor]):
        self._model, self._params = model, params
        self._kept: list[Tensor | None] = []  # in the order of the outputs; None: the loss does not depend on it
        self._seen = 0  # outputs so far in this look
        self._in_pipeline: bool | None = None  # not known yet: finding out takes long

    def forget(self) -> None:
        """Free the memory, at the end of a step."""
        self._kept = []

    @contextlib.contextmanager
    def kept(self, method: str) -> Generator[None, None, None]:
        """The context of the first look: keep the gradients."""
        self._require_whole_model(method)
        self.forget()

        def watch(number: int, output: Tensor) -> None:
            def keep(grad: Tensor) -> None:
                self._kept[number] = grad.detach()

            self._kept.append(None)
            output.register_hook(keep)

        with self._each_output(watch):
            yield

    @contextlib.contextmanager
    def replaced(self, method: str) -> Generator[None, None, None]:
        """The context of a linear look: the gradients that were kept take the place of its own."""
        if not any(grad is not None and grad.dim() > 0 for grad in self._kept):
            raise RuntimeError(
                f"{method} keeps the loss's gradient with respect to the model's outputs, and has seen none: `model` "
                "must be the module that the closure or loop calls, and return predictions, not the loss; compile it "
                "with torch.compile(model), and give the compiled one"
            )

        def replace(number: int, output: Tensor) -> None:
            if number >= len(self._kept) or not _fits(self._kept[number], output):
                raise self._differs(method)
            kept = self._kept[number]

            def kept_or_zero(grad: Tensor) -> Tensor:
                return torch.zeros_like(grad) if kept is None else kept

            output.register_hook(kept_or_zero)

        with self._each_output(replace):
            yield
        if self._seen != len(self._kept):
            raise self._differs(method)

    @contextlib.contextmanager
    def _each_output(self, do: Callable[[int, Tensor], None]) -> Generator[None, None, None]:
        """A context in which something is done with each output of the model, which has a number."""
        self._seen = 0

        def one(output: Tensor) -> Tensor:
            if not output.requires_grad:
                return output
            # A view of it: its gradient has no share that reaches the output through another output.
            output, number = output.view_as(output), self._seen
            self._seen += 1
            do(number, output)
            return output

        def all_of(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            return tree_map_only(Tensor, one, outputs)

        assert self._model is not None
        hook = self._model.register_forward_hook(all_of)
        try:
            yield
        finally:
            hook.remove()

    def _require_whole_model(self, method: str) -> None:
        if self._model is None:
            raise RuntimeError(f"{method} needs the model's outputs: give SharpnessAware model=")
        if self._model._compiled_call_impl is not None:
            raise RuntimeError(
                f"{method} needs the model's outputs, which model.compile() hides: use torch.compile(model) instead"
            )
        if self._in_pipeline is None:
            self._in_pipeline = in_a_pipeline(self._params)
        if self._in_pipeline:
            raise RuntimeError(f"{method} needs the outputs of the whole model, and a pipeline stage has only its own")

    def _differs(self, method: str) -> RuntimeError:
        return RuntimeError(
            f"{method}: all looks of a step must call the model alike, and this one has other outputs than the first"
        )


def _fits(kept: Tensor | None, output: Tensor) -> bool:
    return kept is None or kept.shape == output.shape
