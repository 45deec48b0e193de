"""Writes docs/methods.md and a page for each method from the registry: run it after changing a method.

python docs/make_methods.py
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from pathlib import Path

from steppe.cli.app import markdown_table
from steppe.method import Method
from steppe.methods.registry import own_methods as known_methods
from steppe.methods.registry import with_defaults

DOCS = Path(__file__).parent


def page(cls: type[Method]) -> str:
    """One method's page."""
    method = with_defaults(cls)
    title, _, rest = (inspect.getdoc(cls) or "").partition("\n")
    lines = [f"# {cls.__name__}", "", title, rest, ""]
    lines += ["## When to use it", "", cls.advice, ""] if cls.advice else []
    lines += ["## Settings", "", "| setting | default |", "|---|---|"]
    lines += [f"| `{f.name}` | {_shown(f)} |" for f in fields(cls)]
    lines += ["", f"In papers: {cls.ranges}"] if cls.ranges else []
    lines += [
        "",
        "## Cost",
        "",
        f"{method.cost:g} looks a step with these settings (one look is one forward and backward",
    ]
    lines += [f"pass), and {method.copies} extra copies of the model's parameters at the peak."]
    if method.needs:
        lines += ["", "It needs " + ", ".join(NEEDS[need] for need in sorted(method.needs)) + "."]
    pairs = cls.reduces_to()
    if pairs:
        lines += ["", "## What it reduces to", "", "Held to the last bit by the tests:", ""]
        lines += [f"- `{_brief(special, cls)}` is `{_brief(general, type(general))}`" for special, general in pairs]
    return "\n".join(lines) + "\n"


NEEDS = {
    "auxiliary": "a second batch (`step(closure, auxiliary=...)`)",
    "hvp": 'Hessian-vector products (by difference, or exact with `hvp="exact"`)',
    "loss": "the loss of every look (with `passes()`: `look.report(loss)`)",
    "lr": "to set the learning rate itself (no scheduler)",
    "sample": "single examples (`step(closure, sample=...)`)",
}


def _shown(field) -> str:
    if field.default is MISSING:
        return "required"
    name = getattr(field.default, "__name__", None)
    return f"`{name}`" if name else "`Adam, lr=1e-3`" if "Adam" in repr(field.default) else f"`{field.default!r}`"


def _brief(method: Method, cls: type[Method]) -> str:
    """Only what differs from the defaults."""
    given = [(f, getattr(method, f.name)) for f in fields(cls)]
    shown = [f"{f.name}={getattr(v, '__name__', None) or repr(v)}" for f, v in given if v != f.default]
    return f"{cls.__name__}({', '.join(shown)})"


def pages() -> dict[Path, str]:
    """Every generated file and its text."""
    index = [
        "# Methods",
        "",
        "One optimizer drives them all: `steppe.SharpnessAware(base, steppe.SAM(), model=model)`.",
    ]
    index += [
        "",
        "*looks*: gradient evaluations a step.",
        "*copies*: extra copies of the parameters at the peak, on a model that is all weights.",
        "",
    ]
    table = markdown_table()
    made = {}
    for cls in known_methods():
        name = cls.__name__
        table = table.replace(f"\n| {name} |", f"\n| [{name}](methods/{name.lower()}.md) |")
        made[DOCS / "methods" / f"{name.lower()}.md"] = page(cls)
    made[DOCS / "methods.md"] = "\n".join(index) + "\n" + table + "\n"
    return made


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
