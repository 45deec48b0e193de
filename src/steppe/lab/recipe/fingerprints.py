"""Hashes of functions, classes and data, which tell whether an object of a Python program has changed since a run.

A function is hashed by its code, its defaults, the variables that it closes over, and the functions and constants of
its own module that it uses: editing a helper in a notebook counts as a change.

>>> fingerprint({"lr": 0.1}) == fingerprint({"lr": 0.1}), fingerprint([3]) == fingerprint([4])
(True, False)
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sysconfig
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PLAIN = (str, int, float, complex, bool, bytes, range, slice, type(None), torch.dtype, torch.device)
_SPECIAL = ("__init__", "__call__", "__post_init__", "__getitem__", "__len__", "__iter__", "__next__")  # a class's own


class CannotTell(Exception):
    """Raised for an object whose content cannot be read."""


def fingerprint(thing: Any) -> str | None:
    """A hash of the content of an object; None if the content cannot be read."""
    found = hashlib.sha256()
    try:
        for part in _parts(thing, {}):
            found.update(len(part).to_bytes(8, "little") + part)
    except (CannotTell, RecursionError):
        return None
    return found.hexdigest()[:16]


def _parts(thing: Any, seen: dict[int, Any]) -> Iterable[bytes]:
    """The content of an object as pieces of bytes."""
    yield type(thing).__name__.encode()
    if isinstance(thing, _PLAIN):
        yield repr(thing).encode()
        return
    if id(thing) in seen:
        return
    seen[id(thing)] = thing  # keeps it alive: the id of a deleted object may be used again
    if isinstance(thing, torch.Tensor):
        yield from _of_tensor(thing)
    elif hasattr(thing, "tobytes") and hasattr(thing, "shape"):  # numpy
        yield f"{thing.dtype} {thing.shape}".encode()
        yield from _of_all(thing.ravel().tolist(), seen) if thing.dtype.hasobject else [thing.tobytes()]
    elif hasattr(thing, "to_numpy") and hasattr(thing, "shape"):  # a table of pandas
        yield from _parts(thing.to_numpy(), seen)
    elif isinstance(thing, Mapping):
        yield from _of_all([item for pair in thing.items() for item in pair], seen)
    elif isinstance(thing, (tuple, list, set, frozenset)):
        yield from _of_all(sorted(thing, key=repr) if isinstance(thing, (set, frozenset)) else thing, seen)
    elif isinstance(thing, functools.partial):
        yield from _of_all([thing.func, thing.args, thing.keywords], seen)
    elif isinstance(thing, types.MethodType):
        yield from _of_all([thing.__func__, thing.__self__], seen)
    elif isinstance(thing, types.ModuleType) or _of_a_library(thing):
        yield f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}".encode()
    elif isinstance(thing, types.FunctionType):
        yield from _of_function(thing, seen)
    elif isinstance(thing, types.CodeType):
        yield from _of_code(thing, seen)
    elif isinstance(thing, type):
        yield from _of_class(thing, seen)
    else:
        yield from _of_object(thing, seen)


def _of_all(things: Iterable[Any], seen: dict[int, Any]) -> Iterable[bytes]:
    for one in things:
        yield from _parts(one, seen)


def _of_tensor(tensor: torch.Tensor) -> Iterable[bytes]:
    plain = tensor.detach().cpu().contiguous()
    yield f"{plain.dtype} {tuple(plain.shape)}".encode()
    yield plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _of_code(code: types.CodeType, seen: dict[int, Any]) -> Iterable[bytes]:
    yield code.co_code
    yield " ".join(code.co_names).encode()
    yield from _of_all(code.co_consts, seen)


def _of_function(function: types.FunctionType, seen: dict[int, Any]) -> Iterable[bytes]:
    yield from _of_code(function.__code__, seen)
    yield from _of_all([function.__defaults__, function.__kwdefaults__], seen)
    for cell in function.__closure__ or ():
        try:
            yield from _parts(cell.cell_contents, seen)
        except ValueError:  # a variable that has no value yet
            continue
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield from _parts(function.__globals__[name], seen)


def _names(code: types.CodeType) -> set[str]:
    """The names of the variables that code uses, including those of functions inside it."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _of_class(cls: type, seen: dict[int, Any]) -> Iterable[bytes]:
    yield cls.__qualname__.encode()
    yield from _of_all(cls.__bases__, seen)
    for name, value in sorted(vars(cls).items()):
        if (name.startswith("__") and name not in _SPECIAL) or name == "_abc_impl":
            continue
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        yield name.encode()
        yield from _parts(value, seen)


def _of_object(thing: Any, seen: dict[int, Any]) -> Iterable[bytes]:
    """The content of an instance: its class and its attributes."""
    own = getattr(thing, "__dict__", None)
    if own is None:
        raise CannotTell(type(thing).__name__)
    yield from _parts(type(thing), seen)
    yield from _parts(dict(sorted(own.items())), seen)


def _of_a_library(thing: Any) -> bool:
    """Whether a function or class belongs to an installed package or to Python, which its version identifies."""
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return False
    try:
        file = inspect.getsourcefile(thing) or ""
    except TypeError:  # built into Python
        return True
    except OSError:  # defined in a notebook, or sent from another process
        return False
    own_room = str(getattr(thing, "__module__", "")).partition(".")[0] == "steppe"
    return own_room or file.startswith(_LIBRARIES)
