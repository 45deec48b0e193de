"""Methods by name, and the table of them.

Every subclass of `Method` registers itself when it is defined. `load_all` imports every file of this folder, so that a
new file is a new method.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import re
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from ..method import Method

PACKAGE = __name__.rpartition(".")[0]
HEADER = ("method", "paper", "looks", "copies", "settings", "advice")


def load_all(paths: list[str]) -> dict[str, type[Method]]:
    """Import every module of this package; return the methods they define, by class name."""
    for module in pkgutil.iter_modules(paths):
        importlib.import_module(f"{PACKAGE}.{module.name}")
    return {cls.__name__: cls for cls in own_methods()}


def own_methods() -> list[type[Method]]:
    """The methods of this package, sorted by name."""
    own = [cls for cls in Method.registry.values() if cls.__module__.startswith(f"{PACKAGE}.")]
    return sorted(own, key=lambda cls: cls.__name__)


def method_names() -> list[str]:
    """The names of all methods, as `wrap` and `by_name` take them."""
    return sorted(Method.registry)


def find(name: str) -> type[Method]:
    """The method class with this name or alias."""
    wanted = name.lower()
    aliases = {alias: known for known, cls in Method.registry.items() for alias in cls.aliases}
    cls = Method.registry.get(wanted) or Method.registry.get(aliases.get(wanted, ""))
    if cls is None:
        close = difflib.get_close_matches(wanted, method_names(), n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no method is called {name!r}; {hint}known: {', '.join(method_names())}")
    return cls


def by_name(name: str, **settings: Any) -> Method:
    """A method with these settings, by its name.

    >>> by_name("sam", rho=0.2)
    SAM(rho=0.2, normalize=True)
    """
    cls = find(name)
    try:
        return cls(**settings)
    except TypeError as error:
        raise TypeError(f"{cls.__name__}: {str(error).split('() ')[-1]}") from None


def with_defaults(cls: type[Method]) -> Method:
    """The method with its default settings, or, if a setting has no default, the first of its `variants`."""
    try:
        return cls()
    except TypeError:
        return cls.variants()[0]


def defaults_text(cls: type[Method]) -> str:
    """The settings of a method with their defaults, as a user would type them."""

    def show(value: Any) -> str:
        return getattr(value, "__name__", None) or ("adam(1e-3)" if "Adam" in repr(value) else str(value))

    return ", ".join(f.name if f.default is MISSING else f"{f.name}={show(f.default)}" for f in fields(cls))


class Setting(NamedTuple):
    """One field of a method, as its docstring explains it."""

    name: str
    unit: str  # its unit and range
    meaning: str


def settings_of(cls: type[Method]) -> list[Setting]:
    """The fields of a method as its docstring, or that of a base class, explains them under "Args:".

    >>> settings_of(find("gnp"))[1]
    Setting(name='alpha', unit='share, ≥ 0', meaning='Weight of the second gradient, λ/r; the first has the rest.')
    """
    found: dict[str, Setting] = {}
    for base in reversed(cls.__mro__):
        arguments = inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")[2]
        for name, unit, meaning in re.findall(r"^ {4}(\w+) \(([^)]*)\): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE):
            found[name] = Setting(name, unit, " ".join(meaning.split()))
    return [found.get(f.name, Setting(f.name, "", "")) for f in fields(cls)]


def table_rows() -> list[tuple[str, ...]]:
    """A table with one row for each method of this package; `HEADER` names the columns."""
    described = [(cls, with_defaults(cls)) for cls in own_methods()]
    return [(c.__name__, c.paper, f"{m.cost:.4g}", str(m.copies), defaults_text(c), c.advice) for c, m in described]
