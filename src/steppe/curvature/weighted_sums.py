"""Weighted means of losses and tensors over batches and over the ranks of a process group."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class WeightedSums:
    """Σ weight·loss, Σ weight and Σ weight·tensor over batches. Ranks are summed with one all-reduce.

    Args:
        shape: Of the tensors that are summed; empty if only losses are.
        group: The process group to sum over; None for this process alone.
        divide: Whether the results are means. False where the loss is a sum over samples.
        device, dtype: Of the summed tensor.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        group: torch.distributed.ProcessGroup | None,
        divide: bool,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._group, self._divide = group, divide
        self._tensor = torch.zeros(shape, device=device, dtype=dtype) if shape else None
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._loss = torch.zeros((), device=device, dtype=wide)
        self._weight = 0.0
        self._count = 0

    def add(self, loss: Tensor, weight: float, tensor: Tensor | None = None) -> None:
        """Add one batch."""
        self._count += 1
        if weight == 0:  # all targets of the batch are ignored: its mean is 0/0
            return
        self._weight += weight
        self._loss += weight * loss.to(self._loss)
        if tensor is not None and self._tensor is not None:
            self._tensor.add_(tensor, alpha=weight)

    def _reduce(self) -> None:
        """Sum over the ranks, once."""
        if self._group is None:
            return
        numbers = torch.stack([self._loss, torch.full_like(self._loss, self._weight)])
        parts = [numbers] if self._tensor is None else [self._tensor.reshape(-1).to(numbers.dtype), numbers]
        everything = torch.cat(parts)
        torch.distributed.all_reduce(everything, group=self._group)
        self._group = None
        if self._tensor is not None:
            self._tensor = everything[:-2].reshape(self._tensor.shape).to(self._tensor.dtype)
        self._loss, self._weight = everything[-2], float(everything[-1])

    def loss(self, *, finite: bool = True) -> Tensor:
        """The mean loss (the sum, where the loss is a sum). Not finite is an error unless `finite` is False."""
        self._reduce()
        if self._weight == 0:
            why = "every target is ignored" if self._count else "there is no batch in it"
            raise ValueError(f"the data is empty: {why}; nothing can be measured")
        loss = self._loss / self._weight if self._divide else self._loss
        if finite and not math.isfinite(loss):
            raise ValueError(
                f"the loss is {loss.item()} at these weights, so it has no curvature: check for a diverged checkpoint, "
                "wrong inputs, or a radius that is too large"
            )
        return loss

    def mean(self) -> Tensor:
        """The mean tensor (the sum, where the loss is a sum)."""
        self._reduce()
        if self._tensor is None:
            raise ValueError("no tensor was summed")
        return self._tensor / self._weight if self._divide else self._tensor
