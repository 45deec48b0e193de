"""A method's memory between steps, and how it is saved in a checkpoint and loaded again.

Vectors are kept as one tensor per parameter. In a state_dict they are part of the base optimizer's state of that
parameter, where every kind of checkpoint (plain, distributed, resharded) finds them. Other tensors are saved with the
first parameter, as Adam saves its step count. Nothing is written into the base's own state: Adam, for example, takes
any entry there as a sign that its state has been initialised.
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

_VECTOR, _SHARED = "steppe.", "steppe_shared."  # prefixes of keys in a state_dict


class MethodState:
    """A method's memory."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned  # whether values keep their addresses, from which recorded steps read them
        self._prepared: tuple[Method, Space] | None = None  # for which `prepare` was called last
        self._vectors: dict[Tensor, dict[str, Tensor]] = {}  # parameter -> name -> local tensor
        self._shared: dict[str, Tensor] = {}  # tensors that belong to no single parameter

    def pin(self) -> None:
        """Let values keep their addresses from now on. They are copied first: metrics may share their memory."""
        if not self.pinned:
            self._shared = {name: value.clone() for name, value in self._shared.items()}
        self.pinned = True

    def prepare(self, method: Method, space: Space) -> None:
        """Create the entries of a method's memory that are missing."""
        if self._prepared is not None and self._prepared[0] is method and self._prepared[1] is space:
            return
        self._prepared = method, space
        for p in space.params:
            self._vectors.setdefault(p, {})
        for name, value in method.memory(space).items():
            if isinstance(value, Vector):
                for p, t in zip(space.params, value.tensors, strict=True):
                    self._vectors[p].setdefault(name, t)
            elif name not in self._shared or self._shared[name].shape != value.shape:  # a method with other settings
                self._shared[name] = value.clone()  # steps write into it: no two values may share memory
            else:  # a checkpoint was loaded onto another device, or the model was moved
                self._shared[name] = self._shared[name].to(value.device)

    def recall(self, space: Space) -> Memory:
        """The whole memory, on the devices of the parameters."""
        memory: Memory = dict(self._shared)
        names = [self._vectors[p].keys() for p in space.params]
        for name in names[0]:
            if all(name in known for known in names):  # otherwise it is left from another method
                memory[name] = Vector([self._vectors[p][name].to(local(p).device) for p in space.params], space)
        return memory

    def keep(self, params: list[Tensor], values: Memory) -> None:
        """Store new values."""
        new: list[tuple[dict[str, Tensor], str, Tensor]] = []
        for name, value in values.items():
            if isinstance(value, Vector):
                new += [(self._vectors[p], name, t) for p, t in zip(params, value.tensors, strict=True)]
            else:
                new.append((self._shared, name, value.detach()))
        # A view, such as a gradient of FSDP2, would keep the whole memory of its base alive.
        new = [(entries, name, t if t._base is None else t.clone()) for entries, name, t in new]
        if self.pinned:  # a value may share memory with an old value that is about to be overwritten
            old = {entries[name].data_ptr() for entries, name, _ in new if name in entries}
            new = [(entries, name, t.clone() if t.data_ptr() in old else t) for entries, name, t in new]
        in_place = [(entries[name], t) for entries, name, t in new if self.pinned and name in entries]
        if in_place:
            torch._foreach_copy_([target for target, _ in in_place], [t for _, t in in_place])
        for entries, name, t in new:
            if not (self.pinned and name in entries):
                entries[name] = t

    def merged_with(self, state: Any) -> Any:
        """The base optimizer's state together with this memory, as distributed checkpoints read it."""
        return _MergedState(state, self) if any(self._vectors.values()) or self._shared else state

    def saved_with(self, p: Tensor) -> dict[str, Tensor]:
        """The entries that are saved with one parameter, under their keys in a state_dict."""
        entries = {_VECTOR + name: wrap_like(value, p) for name, value in self._vectors.get(p, {}).items()}
        if p is next(iter(self._vectors), None):
            entries |= {_SHARED + name: value for name, value in self._shared.items()}
        return entries

    def save(self, state_dict: dict[str, Any], params: Iterable[Tensor]) -> dict[str, Any]:
        """The base optimizer's state_dict, with this memory added to it."""
        # Copies: the entries are the base's own. `copy`: some bases (MADGRAD) keep other objects than dictionaries.
        theirs: dict[Any, Any] = state_dict["state"]
        state = {key: copy.copy(entry) for key, entry in theirs.items()}
        ids, params = _param_ids(state_dict), list(params)
        for key, p in zip(ids, params, strict=True):
            for name, value in self._vectors.get(p, {}).items():
                state.setdefault(key, {})[_VECTOR + name] = wrap_like(value, p)
        # Not with a frozen parameter, whose state distributed checkpoints drop:
        first = next((key for key, p in zip(ids, params, strict=True) if p.requires_grad), ids[0])
        for name, value in self._shared.items():
            state.setdefault(first, {})[_SHARED + name] = value
        for key, p in zip(ids, params, strict=True):
            if self._shared and p.requires_grad:
                state.setdefault(key, {})  # distributed checkpoints need state for all trainable parameters, or none
        return {**state_dict, "state": state}

    def load(self, state_dict: dict[str, Any], params: Iterable[Tensor]) -> dict[str, Any]:
        """Load this memory from a state_dict; return the rest of it, which is the base optimizer's."""
        rest: dict[Any, Any] = dict(state_dict["state"])
        for key, p in zip(_param_ids(state_dict), params, strict=False):  # the base will raise for a mismatch
            entry = rest.pop(key, {})
            theirs = {name: v for name, v in entry.items() if not name.startswith((_VECTOR, _SHARED))}
            if theirs:
                rest[key] = theirs
            for name, value in entry.items():  # in the saved dtype: torch would cast it to the parameter's
                if name.startswith(_VECTOR):
                    value = local(value).detach().clone().to(local(p).device)
                    self._vectors.setdefault(p, {})[name.removeprefix(_VECTOR)] = value
                elif name.startswith(_SHARED):
                    self._shared[name.removeprefix(_SHARED)] = value.detach().clone()
        return {**state_dict, "state": rest}


class _MergedState(MutableMapping[Tensor, Any]):
    """The base's state and a method's memory as one mapping. Writes go to the base's state."""

    def __init__(self, state: Any, memory: MethodState):
        self._state, self._memory = state, memory

    def __getitem__(self, p: Tensor) -> Any:
        own = self._memory.saved_with(p)
        return ChainMap(self._state[p], own) if own else self._state[p]

    def __contains__(self, p: object) -> bool:
        return p in self._state or (isinstance(p, Tensor) and bool(self._memory.saved_with(p)))

    def __setitem__(self, p: Tensor, entry: Any) -> None:
        self._state[p] = {k: v for k, v in entry.items() if not str(k).startswith((_VECTOR, _SHARED))}

    def __delitem__(self, p: Tensor) -> None:
        del self._state[p]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _param_ids(state_dict: dict[str, Any]) -> list[Any]:
    return [key for group in state_dict["param_groups"] for key in group["params"]]
