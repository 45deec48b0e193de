"""A registry of functions, classes and data that a Python program has passed to steppe, by name.

A recipe is text, so it refers to them by name: "python:make_model". They live in this process, and are pickled for
worker processes (`packed` and `unpack`).

>>> name = keep("double", lambda x: 2 * x)
>>> name, kept(name)(3)
('python:double', 6)
"""

from __future__ import annotations

from typing import Any

from .errors import UserError, describe, register_lookup, require

PREFIX = "python"
_kept: dict[str, Any] = {}


def keep(name: str, thing: Any) -> str:
    """Register an object; return the name by which recipes refer to it. An object of the same name is replaced."""
    _kept[name] = thing
    return f"{PREFIX}:{name}"


def has_any() -> bool:
    """Whether anything is registered."""
    return bool(_kept)


def is_kept(name: str) -> bool:
    """Whether a name is of the form "python:NAME". The object may be that of an earlier program, and missing here."""
    return name.partition(":")[0] == PREFIX


def kept(name: str) -> Any:
    """The object with this name."""
    own = name.partition(":")[2]
    if own not in _kept:
        raise UserError(f"{name!r} was given to steppe by another Python program: run that program again")
    return _kept[own]


def packed(what: str = "jobs above 1") -> bytes | None:
    """All registered objects, pickled for another process; None if there are none."""
    if not _kept:
        return None
    pickle = require("cloudpickle", "cloudpickle", what)
    for name, thing in _kept.items():
        try:
            pickle.dumps(thing)
        except Exception as error:
            raise UserError(
                f"{name} cannot be sent to other processes ({describe(error)}): pass jobs=1 to train in this one"
            ) from None
    return pickle.dumps(_kept)


def unpack(data: bytes | None) -> None:
    """Register the objects that another process has packed."""
    if data is not None:
        _kept.update(require("cloudpickle", "cloudpickle", "a worker process").loads(data))


register_lookup(PREFIX, kept)
