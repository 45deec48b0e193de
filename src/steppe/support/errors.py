"""One-line errors that a user can fix."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any

# Functions that find what names with a given prefix refer to. own_objects.py registers one for "python:NAME".
_lookups: dict[str, Callable[[str], Any]] = {}


class UserError(Exception):
    """An error in what the user asked for. Its text is one line; `steppe` prints it and exits with 2."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for an unknown name, with the most similar known names."""
    known = sorted(known)
    near = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.5)
    listed = ", ".join(known[:30]) + (f" and {len(known) - 30} more" if len(known) > 30 else "")
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {listed}"
    return UserError(f"no {kind} {name!r}: {hint}")


def user_function(kind: str, name: str) -> Callable[..., Any]:
    """The function behind "package.module:function"."""
    module_name, _, function_name = name.partition(":")
    if module_name in _lookups:
        return _lookups[module_name](name)
    if not module_name or not function_name:
        raise UserError(f"{kind} {name!r} is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{kind} {name!r}: cannot import {module_name} ({one_line(error)})") from error
    except Exception as error:
        raise UserError(f"{kind} {name!r}: importing {module_name} failed with {describe(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{kind} {name!r}: {module_name} has no function {function_name!r}")
    return function


def register_lookup(prefix: str, find: Callable[[str], Any]) -> None:
    """Let `user_function` call `find` for names of the form "prefix:NAME"."""
    _lookups[prefix] = find


def require(module: str, package: str, what: str) -> Any:
    """The imported module; a one-line error that says which package to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{what} needs {package}: pip install {package} ({one_line(error)})") from error


def describe(error: BaseException) -> str:
    """Type and text of an error, in one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(text: object) -> str:
    """The text without line breaks."""
    return " ".join(str(text).split())
