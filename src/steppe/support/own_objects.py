"""Functions, classes and data that a Python program has handed over, by name.

A recipe is text, so it refers to them by name: "python:make_model". They are of this process; worker processes are
sent them (`packed` and `unpack`).

>>> name = keep("double", lambda x: 2 * x)
>>> name, kept(name)(3)
('python:double', 6)
"""

from __future__ import annotations

from typing import Any

from .errors import UserError, describe, look_elsewhere, require

PREFIX = "python"
_kept: dict[str, Any] = {}


def keep(name: str, thing: Any) -> str:
    """Keep a thing; return the name that a recipe refers to it by. A thing of the same name is replaced."""
    _kept[name] = thing
    return f"{PREFIX}:{name}"


def has_any() -> bool:
    """Whether anything is kept."""
    return bool(_kept)


def is_kept(name: str) -> bool:
    """Whether this is the name of a kept thing; it may be one of an earlier program, which is here no more."""
    return name.partition(":")[0] == PREFIX


def kept(name: str) -> Any:
    """The thing of a name."""
    own = name.partition(":")[2]
    if own not in _kept:
        raise UserError(f"{name!r} was given to steppe by another Python program: run that program again")
    return _kept[own]


def packed(what: str = "jobs above 1") -> bytes | None:
    """All kept things as bytes for another process; None if there are none."""
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
    """Keep what another process has packed."""
    if data is not None:
        _kept.update(require("cloudpickle", "cloudpickle", "a worker process").loads(data))


look_elsewhere(PREFIX, kept)
