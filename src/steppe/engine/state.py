"""What a method remembers between steps, and how it gets into a checkpoint and back.

Vectors are kept one tensor per parameter and saved inside the base optimizer's state of that parameter, where
every kind of checkpoint (plain, distributed, resharded) finds them; other tensors are saved with the first
parameter, as Adam saves its step count. Nothing of it enters the base's own state: Adam, for example, takes any
entry there as a sign that its state has been made.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ..method import Memory, Method
from ..vector import Space, Vector
from .shards import local, wrap_like

_VECTOR, _OTHER = "steppe.", "steppe_shared."  # prefixes in state_dict


class MethodState:
    """A method's memory."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned  # whether values keep their addresses: recorded steps read them there
        self._prepared: tuple[Method, Space] | None = None  # whose memory was made last
        self._vectors: dict[Tensor, dict[str, Tensor]] = {}  # parameter -> name -> local tensor
        self._others: dict[str, Tensor] = {}

    def pin(self) -> None:
        """From now on values keep their addresses. They are copied first: metrics may share their memory."""
        if not self.pinned:
            self._others = {name: value.clone() for name, value in self._others.items()}
        self.pinned = True

    def prepare(self, method: Method, space: Space) -> None:
        """Make what is missing of a method's memory."""
        if self._prepared is not None and self._prepared[0] is method and self._prepared[1] is space:
            return
        self._prepared = method, space
        for p in space.params:
            self._vectors.setdefault(p, {})
        for name, value in method.memory(space).items():
            if isinstance(value, Vector):
                for p, t in zip(space.params, value.tensors, strict=True):
                    self._vectors[p].setdefault(name, t)
            elif name not in self._others or self._others[name].shape != value.shape:  # of a method with other settings
                self._others[name] = value.clone()  # loading writes into them: no two may share memory
            else:  # a checkpoint was read onto another device, or the model has moved
                self._others[name] = self._others[name].to(value.device)

    def recall(self, space: Space) -> Memory:
        """Everything that is remembered, on the devices of the parameters."""
        memory: Memory = dict(self._others)
        names = [self._vectors[p].keys() for p in space.params]
        for name in [name for name in names[0] if all(name in known for known in names)]:  # others are another method's
            memory[name] = Vector([self._vectors[p][name].to(local(p).device) for p in space.params], space)
        return memory

    def keep(self, params: list[Tensor], values: Memory) -> None:
        """Replace what is remembered."""
        new: list[tuple[dict[str, Tensor], str, Tensor]] = []
        for name, value in values.items():
            if isinstance(value, Vector):
                new += [(self._vectors[p], name, t) for p, t in zip(params, value.tensors, strict=True)]
            else:
                new.append((self._others, name, value.detach()))
        # A view, such as a gradient of FSDP2, would keep the memory of all that it is a part of.
        new = [(place, name, t if t._base is None else t.clone()) for place, name, t in new]
        if self.pinned:  # a value may share memory with what another name remembers, which is about to be overwritten
            old = {place[name].data_ptr() for place, name, _ in new if name in place}
            new = [(place, name, t.clone() if t.data_ptr() in old else t) for place, name, t in new]
        stays = [(place[name], t) for place, name, t in new if self.pinned and name in place]
        if stays:
            torch._foreach_copy_([place for place, _ in stays], [t for _, t in stays])
        for place, name, t in new:
            if not (self.pinned and name in place):
                place[name] = t

    def joined(self, state: Any) -> Any:
        """The base optimizer's state, with this memory inside: what distributed checkpoints look at."""
        return _Joined(state, self) if any(self._vectors.values()) or self._others else state

    def of(self, p: Tensor) -> dict[str, Tensor]:
        """What is remembered with one parameter, as it is saved."""
        kept = {_VECTOR + name: value for name, value in self._vectors.get(p, {}).items()}
        kept = {name: wrap_like(value, p) for name, value in kept.items()}
        if p is next(iter(self._vectors), None):
            kept |= {_OTHER + name: value for name, value in self._others.items()}
        return kept

    def save(self, state_dict: dict[str, Any], params: Iterable[Tensor]) -> dict[str, Any]:
        """The base optimizer's state_dict, with this memory inside."""
        # Copies, because these are the base's own. Some bases keep more than a dictionary for each parameter (MADGRAD).
        theirs: dict[Any, Any] = state_dict["state"]
        state = {key: copy.copy(entry) for key, entry in theirs.items()}
        ids, params = _ids(state_dict), list(params)
        for key, p in zip(ids, params, strict=True):
            for name, value in self._vectors.get(p, {}).items():
                value = wrap_like(value, p)
                state.setdefault(key, {})[_VECTOR + name] = value
        first = next((key for key, p in zip(ids, params, strict=True) if p.requires_grad), ids[0])
        for name, value in self._others.items():  # not with a frozen parameter: distributed checkpoints drop its state
            state.setdefault(first, {})[_OTHER + name] = value
        for key, p in zip(ids, params, strict=True):
            if self._others and p.requires_grad:
                state.setdefault(key, {})  # they want an entry for every other one, or none at all
        return {**state_dict, "state": state}

    def load(self, state_dict: dict[str, Any], params: Iterable[Tensor]) -> dict[str, Any]:
        """Take this memory out of a state_dict; return the rest, which is the base optimizer's."""
        rest: dict[Any, Any] = dict(state_dict["state"])
        for key, p in zip(_ids(state_dict), params, strict=False):  # a mismatch is the base's to report
            entry = rest.pop(key, {})
            theirs = {name: v for name, v in entry.items() if not name.startswith((_VECTOR, _OTHER))}
            if theirs:
                rest[key] = theirs
            for name, value in entry.items():  # in the saved precision: torch would cast to the parameter's
                if name.startswith(_VECTOR):
                    value = local(value).detach().clone().to(local(p).device)
                    self._vectors.setdefault(p, {})[name.removeprefix(_VECTOR)] = value
                elif name.startswith(_OTHER):
                    self._others[name.removeprefix(_OTHER)] = value.detach().clone()
        return {**state_dict, "state": rest}


class _Joined(MutableMapping[Tensor, Any]):
    """Reads as the base's state with a method's memory inside; what is written goes to the base."""

    def __init__(self, state: Any, store: MethodState):
        self._state, self._store = state, store

    def __getitem__(self, p: Tensor) -> Any:
        own = self._store.of(p)
        return ChainMap(self._state[p], own) if own else self._state[p]

    def __contains__(self, p: object) -> bool:
        return p in self._state or (isinstance(p, Tensor) and bool(self._store.of(p)))

    def __setitem__(self, p: Tensor, entry: Any) -> None:
        self._state[p] = {k: v for k, v in entry.items() if not str(k).startswith((_VECTOR, _OTHER))}

    def __delitem__(self, p: Tensor) -> None:
        del self._state[p]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _ids(state_dict: dict[str, Any]) -> list[Any]:
    return [key for group in state_dict["param_groups"] for key in group["params"]]
