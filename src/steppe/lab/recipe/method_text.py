"""Methods as text: ``sam:rho=0.1``, ``gsam:rho=0.1..0.02,alpha=0.3``, ``every:k=10,method=(gsam:rho=0.1)``.

A value may be a number, true, false, none, a word, numbers in brackets, or ``a..b``: a schedule that follows the
learning rate linearly, from a at the full learning rate to b at zero (as in GSAM). In a list of methods, commas
separate both methods and settings; a piece of the form ``name=value`` is a setting of the method before it. A method
of the user's own is named with its module: ``mine:TwoSided``, ``mine:TwoSided:rho=0.1``.

>>> split_methods("sam:rho=0.1,gsam,gam:T=3,period=2")
['sam:rho=0.1', 'gsam', 'gam:T=3,period=2']
>>> make_method("gam:T=3")
GAM(T=3, ...)
>>> canonical("GSAM:alpha=.3,rho=5e-2"), label_of("GSAM:alpha=.3")
('gsam:alpha=0.3', 'GSAM alpha=0.3')
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from ...method import Method, number_fields
from ...methods import find, method_names
from ...schedules import LinearInLR, linear_in_lr
from ...support.errors import UserError, one_line, unknown, user_function

_SETTING = re.compile(r"\s*([A-Za-z_]\w*)\s*=(.*)", re.DOTALL)
_RANGE = re.compile(r"([^.].*?|\.\d.*?)\.\.(.+)")
_WORDS = {"true": True, "false": False, "none": None}
_OWN = re.compile(r"([A-Za-z_][\w.]*)\s*(?:$|:)")
_own_names: dict[type[Method], str] = {}  # the user's own classes, with the names that texts use for them
_METHOD_OR_NONE = ("Method | None", "None | Method", "Optional[Method]")


def split_methods(text: str | Iterable[str]) -> list[str]:
    """The methods in a list, one text each: separated by commas, semicolons or spaces, or given one by one."""
    methods: list[str] = []
    for part in [text] if isinstance(text, str) else text:
        for piece in pieces_of(part, ",; \t\n"):
            if not _SETTING.fullmatch(piece.split(":", 1)[0] if ":" in piece.split("=", 1)[0] else piece):
                methods.append(piece)
            elif not methods:
                raise UserError(f"{piece!r} comes before any method: write for example sam:{piece}")
            else:
                joined = "" if methods[-1].endswith(":") else "," if _split_name(methods[-1])[1] else ":"
                methods[-1] += joined + piece
    for one in methods:
        _parts(one)
    return list(dict.fromkeys(canonical(one) for one in methods))


def pieces_of(text: str, separators: str) -> list[str]:
    """The text split at separators outside brackets, without empty pieces."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if depth < 0:
            break
        if letter in separators and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    if depth != 0:
        raise UserError(f"the brackets in {text!r} do not match")
    return [piece.strip() for piece in pieces if piece.strip()]


def _split_name(text: str) -> tuple[str, str]:
    """The name of a method and the text of its settings. The name of a user's own method contains a colon itself."""
    name, _, rest = (part.strip() for part in text.partition(":"))
    found = _OWN.match(rest)
    if found is None or name.lower() == "base" or _is_known(name):
        return name, rest
    return f"{name}:{found[1]}", rest[found.end() :].strip()


def _is_known(name: str) -> bool:
    """Whether a method has this name. A user's class may be named like its module: ``mine:Mine`` stays both."""
    try:
        return find(name).__module__ != name
    except ValueError:
        return False


def _class_of(name: str) -> type[Method]:
    """The class of a method by its name."""
    if ":" in name:
        cls: Any = user_function("method", name)
        if isinstance(cls, Method):  # a method object of a Python program
            return type(cls)
        if not (isinstance(cls, type) and issubclass(cls, Method)):
            raise UserError(f"method {name!r} is not a class derived from steppe.Method")
        name_class(cls, name)
        return cls
    try:
        return find("plain" if name.lower() == "base" else name)
    except ValueError:
        if re.fullmatch(r"[\d.eE+-]+", name):
            raise UserError(
                f"{name!r} is not a method; to compare several values write each: sam:rho=0.1,sam:rho=0.2"
            ) from None
        raise unknown("method", name, method_names()) from None


def _parts(text: str) -> tuple[type[Method], dict[str, str]]:
    """The class of a method, and its settings as text."""
    name, rest = _split_name(text)
    cls = _class_of(name)
    settings: dict[str, str] = {}
    known = [f.name for f in fields(cls)]
    for piece in pieces_of(rest, ","):
        found = _SETTING.fullmatch(piece)
        if found is None:
            raise UserError(f"{cls.__name__}: {piece!r} is not a setting; write name=value")
        key, value = found.groups()
        if key not in known:
            if not known:
                raise UserError(f"{cls.__name__} has no settings, got {key}")
            raise UserError(f"{cls.__name__}: {one_line(unknown('setting', key, known))}")
        if key in settings:
            raise UserError(f"{cls.__name__}: {key} is given twice")
        settings[key] = value.strip()
    return cls, settings


def make_method(text: str, lr: float = 1.0) -> Method:
    """The method that a text describes; `lr` is the full learning rate, at which ``a..b`` has the value a."""
    cls, given = _parts(text)
    if (ready := finished_method(text)) is not None:
        if given:
            raise UserError(f"{text}: {cls.__name__} is a method object with its settings and takes no others")
        return ready
    numbers = number_fields(cls)
    types = {f.name: "Number" if f.name in numbers else _type_name(f.type) for f in fields(cls)}
    settings = {key: _value(cls.__name__, key, value, types[key], lr) for key, value in given.items()}
    missing = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    if absent := [name for name in missing if name not in settings]:
        examples = [f"{name}={'(sam:rho=0.1)' if types[name] == 'Method' else 'VALUE'}" for name in absent]
        example = f"{_name_of_class(cls)}:{','.join(examples)}"
        raise UserError(f"{cls.__name__} needs {' and '.join(absent)}: for example {example}")
    try:
        return cls(**settings)
    except (TypeError, ValueError) as error:
        raise UserError(one_line(error)) from None


def finished_method(text: str) -> Method | None:
    """The method object, if the text names one that a Python program has passed; None for a class."""
    name, _ = _split_name(text)
    found = user_function("method", name) if ":" in name else None
    return found if isinstance(found, Method) else None


def _type_name(annotation: Any) -> str:
    """A field's type as text, without module names. With postponed annotations it is a text already."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"\b\w+\.", "", text)


def _value(owner: str, key: str, text: str, kind: str, lr: float) -> Any:
    """The value of a setting from its text. If the type of its field is simple, the value must have that type."""
    if "Callable" in kind:
        raise UserError(f"{owner}: {key} is a function and cannot be set by text")
    bracketed = text[:1] in ("(", "[") and text[-1:] in (")", "]")
    if kind == "Method" or (kind in _METHOD_OR_NONE and text.lower() != "none"):
        return make_method(text[1:-1] if bracketed else text, lr)
    value: Any
    if bracketed:
        value = bracketed_value(text)
    elif kind == "Number" and (found := _RANGE.fullmatch(text)):
        ends = [plain_value(end) for end in found.groups()]
        if not all(isinstance(end, (int, float)) for end in ends) or ends[1] > ends[0] or ends[1] < 0:
            raise UserError(f"{owner}: {key}={text} must go from a larger number to a smaller one, as in 0.1..0.02")
        return linear_in_lr(float(ends[0]), float(ends[1]), lr_max=lr)
    else:
        value = plain_value(text)
    wrong = {
        "bool": not isinstance(value, bool),
        "int": isinstance(value, bool) or not isinstance(value, int),
        "float": isinstance(value, bool) or not isinstance(value, (int, float)),
        "Number": isinstance(value, bool) or not isinstance(value, (int, float)),
    }
    words = {"bool": "true or false", "int": "a whole number", "float": "a number", "Number": "a number"}
    if wrong.get(kind, False):
        raise UserError(f"{owner}: {key} must be {words[kind]}, not {text!r}")
    return value


def bracketed_value(text: str) -> Any:
    """The value of a text; values in brackets become a tuple."""
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        return tuple(plain_value(piece) for piece in pieces_of(text[1:-1], ",; "))
    return plain_value(text)


def plain_value(text: str) -> Any:
    """The value of a text: true, false, none, a whole number, a number, or else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            pass
    return text


def settings_of(method: Method) -> dict[str, Any]:
    """All settings of a method as JSON values."""
    return {f.name: _as_json(getattr(method, f.name)) for f in fields(method)}


def _as_json(value: Any) -> Any:
    if isinstance(value, Method):
        return canonical_of(value)
    if isinstance(value, LinearInLR):
        return f"{value.rho_max:g}..{value.rho_min:g}"
    if isinstance(value, (tuple, list)):
        return [_as_json(item) for item in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else _name_of(value)


def _name_of(value: Any) -> str:
    """The name of a function or object, without its address in memory."""
    return getattr(value, "__name__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _differing(method: Method) -> list[str]:
    """The settings that differ from the defaults, as text."""
    texts = []
    for f in fields(method):
        value = getattr(method, f.name)
        if value != f.default:
            text = _as_json(value)
            if isinstance(text, list):
                text = f"({','.join(map(str, text))})"
            elif isinstance(value, Method):
                text = f"({text})"
            texts.append(f"{f.name}={str(text).lower() if isinstance(text, bool) or text is None else text}")
    return texts


def canonical_of(method: Method) -> str:
    """The canonical text of a method: its name and the settings that differ from the defaults."""
    settings = _differing(method)
    return _name_of_class(type(method)) + (":" + ",".join(settings) if settings else "")


def _name_of_class(cls: type[Method]) -> str:
    """The name of a method's class in a text; that of a user's own class has its module."""
    return _own_names.get(cls) or cls.__name__.lower()


def name_class(cls: type[Method], name: str) -> None:
    """Set the name by which texts refer to a user's class, and by which `user_function` finds it."""
    _own_names[cls] = name


def own_classes(method: Method) -> dict[str, type[Method]]:
    """The user's own classes among a method and the methods inside it, by the names that texts use for them."""
    inside = [value for f in fields(method) if isinstance(value := getattr(method, f.name), Method)]
    found: dict[str, Any] = {_own_names[type(method)]: type(method)} if type(method) in _own_names else {}
    for one in inside:
        found |= own_classes(one)
    return found


def canonical(text: str) -> str:
    """The canonical text of a method that is written in any form."""
    return text.strip() if finished_method(text) is not None else canonical_of(make_method(text))


def with_settings(text: str, settings: dict[str, Any]) -> str:
    """The method with some settings replaced.

    >>> with_settings("sam:rho=0.1", {"rho": 0.2})
    'sam:rho=0.2'
    """
    cls, given = _parts(text)
    given |= {key: str(value) for key, value in settings.items()}
    return canonical(f"{_name_of_class(cls)}:" + ",".join(f"{key}={value}" for key, value in given.items()))


def label_of(text: str) -> str:
    """A method's name in tables."""
    method = make_method(text)
    return " ".join([method.name, *_differing(method)])
