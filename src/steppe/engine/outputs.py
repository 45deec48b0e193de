"""The gradient of the loss with respect to the model's outputs: kept from the first look, for looks that are linear.

A look with `linear=True` is at the loss linearised in the model's outputs f: its gradient is that of ⟨∂L/∂f, f⟩, where
∂L/∂f is from the first look. The caller runs the same forward and backward as in any look. Hooks on the outputs keep
∂L/∂f in the first look, and put it in the place of the new one in a linear look.

Several backward passes may run through one output: several losses, or the gradient by the input for another purpose.
Each has its own ∂L/∂f, and in a linear look the n-th is given that of the n-th in the first look.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from itertools import combinations
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .replicas import in_a_pipeline


class _Itself(torch.autograd.Function):
    """A tensor with a node of its own in the graph, in the same memory and with the same version counter.

    It is not a view: an operation in place on a view gives it another node, and hooks on the first one never run.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """For forward-mode derivatives. Because of it torch.compile leaves this class alone: it would make a view."""
        return tangents[0]


_with_own_node: Callable[[Tensor], Tensor] = cast(Any, _Itself).apply
_share_memory: Callable[[Tensor, Tensor], bool] = cast(Any, torch._C)._is_alias_of


class OutputGradients:
    """∂L/∂f of the step's first look, for each output of each forward (one forward a micro-batch) and each backward."""

    def __init__(self, model: nn.Module | None, params: Sequence[Tensor]):
        self._model, self._params = model, params
        # In the order of the outputs, a list of one for each backward. None: the loss does not depend on it.
        self._kept: list[list[Tensor | None]] = []
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
            kept: list[Tensor | None] = []

            def keep(grad: Tensor | None) -> None:
                # The same object if possible: autograd may add in place to a gradient that nobody else refers to.
                kept.append(grad.detach() if grad is not None and grad.requires_grad else grad)

            self._kept.append(kept)
            output.register_hook(keep)

        with self._each_output(method, watch):
            yield

    @contextlib.contextmanager
    def replaced(self, method: str) -> Generator[None, None, None]:
        """The context of a linear look: the gradients that were kept take the place of its own."""
        if not any(grad is not None and grad.dim() > 0 for kept in self._kept for grad in kept):
            raise RuntimeError(
                f"{method} keeps the loss's gradient with respect to the model's outputs, and has seen none: `model` "
                "must be the module that the closure or loop calls, and return predictions, not the loss; compile it "
                "with torch.compile(model), and give the compiled one"
            )
        backwards = [0] * len(self._kept)  # so far in this look, through each output

        def replace(number: int, output: Tensor) -> None:
            if number >= len(self._kept) or not _fit(self._kept[number], output):
                raise self._differs(method)
            kept = self._kept[number]

            def kept_or_zero(grad: Tensor | None) -> Tensor | None:
                before, backwards[number] = backwards[number], backwards[number] + 1
                if before < len(kept) and kept[before] is not None:
                    return kept[before]
                return None if grad is None else torch.zeros_like(grad)

            output.register_hook(kept_or_zero)

        with self._each_output(method, replace):
            yield
        if self._seen != len(self._kept):
            raise self._differs(method)
        if any(count < len(kept) for count, kept in zip(backwards, self._kept, strict=True)):
            raise RuntimeError(
                f"{method}: all looks of a step must run backward alike, and this one has fewer backward passes "
                "through an output than the first"
            )

    @contextlib.contextmanager
    def _each_output(self, method: str, do: Callable[[int, Tensor], None]) -> Generator[None, None, None]:
        """A context in which something is done with each output of the model, which has a number."""
        self._seen = 0
        sharing: list[tuple[Tensor, int]] = []  # outputs that share memory, and their versions

        def one(output: Tensor) -> Tensor:
            if not output.requires_grad:
                return output
            # With a node of its own, its gradient has no share that reaches the output through another output.
            itself = _with_own_node(output)
            number, self._seen = self._seen, self._seen + 1
            do(number, itself)
            return itself

        def all_of(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
            pairs = [pair for pair in combinations(tensors, 2) if _share_memory(*pair)]
            sharing.extend((t.detach(), t._version) for pair in pairs for t in pair)
            return tree_map_only(Tensor, one, outputs)

        assert self._model is not None
        hook = self._model.register_forward_hook(all_of)
        try:
            yield
        finally:
            hook.remove()
        # The other one has the new values, but its node does not know of the change.
        if any(tensor._version != version for tensor, version in sharing):
            raise RuntimeError(
                f"{method}: outputs of the model that share memory must not be changed in place: change a copy"
            )

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


def _fit(kept: list[Tensor | None], output: Tensor) -> bool:
    return all(grad is None or grad.shape == output.shape for grad in kept)
