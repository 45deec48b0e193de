"""Saves and restores what a trainer counts and logs in its own attributes, so that extra looks do not count twice.

Numbers, strings, lists, dictionaries, sets, deques and small tensors are saved, containers with their contents. Other
objects are left alone: a pass may create a cache or open a logger, which may stay.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple)
_CONTAINERS = (list, set, deque, dict, defaultdict, OrderedDict, Counter)  # exactly these, no subclasses
_SMALL = 4096  # entries of a tensor that is saved by value


class Bookkeeping:
    """The saved plain attributes of some objects.

    Args:
        holders: the trainer, and other objects in which it counts and logs.
        leave_out: names of attributes that no pass changes and that may be large, such as datasets.
    """

    def __init__(self, *holders: Any, leave_out: Collection[str] = ()):
        self._leave_out = leave_out
        self._attributes = [(holder, self._plain(holder)) for holder in holders]
        self._containers: list[tuple[Any, list[Any]]] = []
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self._known: set[int] = set()
        for _, attributes in self._attributes:
            for value in attributes.values():
                self._save(value)

    def restore(self) -> None:
        """Restore the attributes. Containers remain the same objects."""
        for holder, saved in self._attributes:
            for name in self._plain(holder).keys() - saved.keys():
                del vars(holder)[name]
            for name, value in saved.items():
                if name not in vars(holder) or _is_plain(vars(holder)[name]):  # else a pass has set another object
                    vars(holder)[name] = value
        for container, saved in self._containers:
            _restore_items(container, saved)
        with torch.no_grad():
            for tensor, version, value in self._tensors:
                if tensor._version != version:
                    tensor.copy_(value)

    def _plain(self, holder: Any) -> dict[str, Any]:
        return {n: value for n, value in vars(holder).items() if n not in self._leave_out and _is_plain(value)}

    def _save(self, value: Any) -> None:
        if id(value) in self._known:
            return
        if isinstance(value, Tensor):
            self._known.add(id(value))
            if not value.requires_grad and value.layout is torch.strided and value.numel() <= _SMALL:
                self._tensors.append((value, value._version, value.clone()))
        elif type(value) in _CONTAINERS:
            self._known.add(id(value))
            items = _items(value)
            self._containers.append((value, items))
            for item in items:
                self._save(item)
        elif isinstance(value, tuple):
            for item in value:
                self._save(item)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, Tensor)) or type(value) in _CONTAINERS


def _items(container: Any) -> list[Any]:
    """The items of a container; pairs of key and value for a dictionary."""
    return list(container.items() if isinstance(container, dict) else container)


def _restore_items(container: Any, saved: list[Any]) -> None:
    """Restore the items of a container, if they have changed."""
    if _same(_items(container), saved):
        return  # not touched: the trainer may be iterating over the container
    container.clear()
    if isinstance(container, dict):
        dict.update(container, saved)  # Counter.update would add up
    else:
        (container.update if isinstance(container, set) else container.extend)(saved)


def _same(now: list[Any], saved: list[Any]) -> bool:
    """Whether two lists of items, or of pairs, contain the same objects."""
    if len(now) != len(saved):
        return False
    return all(
        a is b or (type(a) is type(b) is tuple and len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True)))
        for a, b in zip(now, saved, strict=True)
    )
