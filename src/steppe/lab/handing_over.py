"""Names for the functions, classes, methods and data that a Python program passes, because a recipe is text.

>>> import steppe
>>> method_text(steppe.ASAM(rho=1.0)), own_name("model", "digits-mlp")
('asam:rho=1.0', 'digits-mlp')
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..method import Method
from ..methods.registry import own_methods
from ..support.errors import UserError
from ..support.own_objects import keep
from .recipe.fingerprints import fingerprint
from .recipe.method_text import canonical_of, make_method, name_class, split_methods


def method_texts(methods: str | Method | type[Method] | Iterable[Any]) -> list[str]:
    """Methods as texts, from texts with settings, method objects or classes."""
    several = [methods] if isinstance(methods, (str, Method, type)) else list(methods)
    found: list[str] = []
    for one in several:
        found += split_methods(one) if isinstance(one, str) else [method_text(one)]
    return list(dict.fromkeys(found))


def method_text(method: Any) -> str:
    """A method as text. If text cannot describe it (your own schedule), the text is a name for the object itself."""
    if isinstance(method, type) and issubclass(method, Method):
        try:
            method = method()
        except TypeError as error:
            raise UserError(
                f"{method.__name__} has settings without a default ({error}): pass a method object with values"
            ) from None
    if not isinstance(method, Method):
        raise UserError(f"a method is a name such as 'sam:rho=0.1' or steppe.SAM(rho=0.1), not {method!r:.60}")
    _name_own_classes(method)
    text = canonical_of(method)
    try:
        same = make_method(text) == method
    except UserError:
        same = False
    return text if same else keep(f"{method.name}_{(fingerprint(method) or 'unknown')[:6]}", method)


def _name_own_classes(method: Method) -> None:
    if type(method) not in own_methods():
        name_class(type(method), keep(type(method).__name__, type(method)))
    for f in fields(method):
        if isinstance(inner := getattr(method, f.name), Method):
            _name_own_classes(inner)


def own_name(kind: str, thing: Any) -> str:
    """The name of a model, base, loss or metric: a text is a name already, a function gets one."""
    if isinstance(thing, str):
        return thing
    if isinstance(thing, nn.Module) and kind == "model":
        return keep(type(thing).__name__, functools.partial(copy.deepcopy, thing))  # every run starts from its weights
    if isinstance(thing, Optimizer):
        raise UserError(
            f"{kind} is one optimizer, but every run needs its own: give its class, or a function of (params, lr)"
        )
    if not callable(thing):
        raise UserError(f"{kind} must be a name or a function, not a {type(thing).__name__}")
    return keep(_name_of(thing, kind), thing)


def data_name_of(data: Any) -> str:
    """The name of data, given as a name, as a function that returns it, or as the data itself."""
    if isinstance(data, str):
        return data
    if callable(data) and not hasattr(data, "__getitem__"):
        return keep(_name_of(data, "data"), data)
    return keep(f"data-{(fingerprint(data) or 'unread')[:6]}", data)  # other data gets another name, and so other runs


def _name_of(thing: Any, kind: str) -> str:
    name = getattr(thing, "__name__", None) or getattr(getattr(thing, "func", None), "__name__", None) or kind
    return kind if name == "<lambda>" else name
