"""Batches of data: on the device, the same in every pass, and how many samples they have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Data:
    """An iterable of batches on the device. Every pass yields the same ones; small data is kept on the device."""

    def __init__(self, data: Any, *, paired: bool, samples: int | None, cache_bytes: int, like: list[Tensor]):
        if isinstance(data, torch.utils.data.Dataset) and not isinstance(data, torch.utils.data.IterableDataset):
            raise TypeError("data is a Dataset, which yields single samples: wrap it in a DataLoader")
        one_batch = isinstance(data, Mapping) or (
            isinstance(data, (tuple, list) if paired else tuple)
            and bool(data)
            and all(isinstance(t, Tensor) for t in data)
        )
        if not one_batch and not isinstance(data, Iterable):
            raise TypeError(f"data must be a pair of tensors or an iterable of batches, not {type(data).__name__}")
        self._source = [data] if one_batch else data
        self._paired, self._samples, self._budget = paired, samples, cache_bytes
        self._device, self._dtype = like[0].device, like[0].dtype
        self._kept: list[Any] | None = None

    @property
    def kept(self) -> bool:
        """Whether all batches are kept on the device."""
        return self._kept is not None

    def generators(self) -> list[torch.Generator]:
        """The loader's own generators. A pass over the data must not advance them."""
        batches = getattr(self._source, "batch_sampler", None)
        owners = (self._source, getattr(self._source, "sampler", None), batches, getattr(batches, "sampler", None))
        found = {id(g): g for o in owners if isinstance(g := getattr(o, "generator", None), torch.Generator)}
        return list(found.values())

    def __iter__(self) -> Iterator[Any]:
        if self._kept is None and isinstance(self._source, Iterator):
            self._kept = list(self._read())  # an iterator can be read only once, and a pass may end early
        yield from self._read() if self._kept is None else self._kept

    def _read(self) -> Iterator[Any]:
        kept: list[Any] | None = []
        used = seen = 0
        for batch in self._source:
            if self._samples is not None:
                if seen >= self._samples:
                    break
                batch = _first(batch, self._samples - seen)
                seen += length(batch)
            if self._paired and not (isinstance(batch, (tuple, list)) and len(batch) == 2):
                raise TypeError(
                    f"batches must be (input, target) pairs, got {type(batch).__name__}; "
                    "for anything else pass forward=lambda model, batch: ..."
                )
            batch = _to_device(batch, self._device, self._dtype)
            used += _bytes(batch)
            if kept is not None and used <= self._budget:
                kept.append(batch)
            elif kept is not None:
                kept = None
                if isinstance(self._source, Iterator):
                    raise TypeError("data can be read only once and is too large to keep: pass a list or a DataLoader")
            yield batch
        if kept is not None:
            self._kept = kept


def ignored_target(loss_fn: Any) -> int | None:
    """The target that a loss leaves out of its mean, or None. A loss that is not torch's may be a cross-entropy: −100.

    >>> F = nn.functional
    >>> ignored_target(functools.partial(F.cross_entropy, ignore_index=0)), ignored_target(F.l1_loss)
    (0, None)
    """
    inner = without_partials(loss_fn)
    named = type(inner) if isinstance(inner, nn.Module) else inner
    of_torch = getattr(named, "__module__", "") in ("torch.nn.functional", "torch.nn.modules.loss")
    indexed = getattr(named, "__name__", "") in ("cross_entropy", "nll_loss")
    return setting(loss_fn, "ignore_index", None if of_torch and not indexed else -100)


def setting(loss_fn: Any, name: str, default: Any) -> Any:
    """A setting of a loss: an attribute of a module, or a keyword argument bound by `functools.partial`."""
    while isinstance(loss_fn, functools.partial):
        if name in loss_fn.keywords:
            return loss_fn.keywords[name]
        loss_fn = loss_fn.func
    return getattr(loss_fn, name, default)


def without_partials(loss_fn: Any) -> Any:
    """The loss that `functools.partial` was applied to."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    return loss_fn


def count(target: Any, ignored: int | None, class_weights: Tensor | None) -> float | Tensor:
    """How many targets a mean loss is a mean of, without ignored ones; with class weights, the sum of the weights."""
    if not isinstance(target, Tensor):
        return length(target)
    if target.is_floating_point() or target.dtype == torch.bool or target.is_complex():
        return target.numel()
    kept = target.flatten() if ignored is None else target[target != ignored]
    return kept.numel() if class_weights is None else class_weights.to(kept.device)[kept].sum()


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (tuple, list, Mapping)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


def _mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(part, function) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(part, function) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_mapped(part, function) for part in batch)
    return batch


def length(batch: Any) -> int:
    """How many samples are in a batch: the rows of its first tensor that has any, as a step number may come before."""
    tensors = list(_tensors(batch))
    for tensor in tensors:
        if tensor.dim():
            return tensor.shape[0]
    if tensors:
        return 1
    raise TypeError(f"cannot tell how many samples are in a {type(batch).__name__}: pass weight=lambda batch: ...")


def _first(batch: Any, most: int) -> Any:
    rows = length(batch)
    return _mapped(batch, lambda t: t[:most] if t.dim() and t.shape[0] == rows else t)


def _to_device(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The batch on the parameters' device, with floating-point tensors in the parameters' dtype."""
    return _mapped(batch, lambda t: t.to(device, dtype if t.is_floating_point() else None, non_blocking=True))


def _bytes(batch: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(batch))
