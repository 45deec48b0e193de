"""The pages about methods, from the registry: a method's file is all there is to write."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, fields, replace
from typing import Any

from steppe.method import Method, number_fields
from steppe.methods.registry import HEADER, own_methods, settings_of, table_rows, with_defaults

from . import inline, theorem
from .benchmarks import script

CHANGED = {"GAM": theorem.page_text}  # what else the text of a method's page has, from records
NEEDS = {
    "auxiliary": "an auxiliary batch, a second one besides that of the step (`step(closure, auxiliary=...)`)",
    "hvp": 'Hessian-vector products (by difference, or exact with `hvp="exact"`)',
    "held-out": "an auxiliary batch of examples that are not trained on",
    "loss": "the loss of every look (with `passes()`: `look.report(loss)`)",
    "lr": "control of the learning rate (use no scheduler)",
    "outputs": "a `model` that returns predictions, not the loss",
    "sample": "the gradients of single examples (`step(closure, sample=...)`)",
}


def pages() -> dict[str, str]:
    """A page for each method: its place in the documentation, and its text."""
    return {address(cls): page(cls) for cls in own_methods()}


def address(cls: type[Method]) -> str:
    """Where a method's page is."""
    return f"methods/{cls.__name__.lower()}.md"


def link(cls: type[Method]) -> str:
    """A link to a method's page, from a page at the top of the documentation."""
    return f"[{cls.__name__}]({address(cls)})"


def navigation() -> list[dict[str, str]]:
    """The entries of the navigation."""
    return [{cls.__name__: address(cls)} for cls in own_methods()]


def page(cls: type[Method]) -> str:
    """One method's page."""
    method = with_defaults(cls)
    text = (inspect.getdoc(cls) or "").partition("\nArgs:\n")[0]
    title, _, rest = text.partition("\n")
    changed = CHANGED.get(cls.__name__, str)
    lines = [f"# {cls.__name__}", "", title, changed(rest), ""]
    lines += ["## When to use it", "", cls.advice, ""] if cls.advice else []
    lines += settings(cls)
    lines += [
        "",
        "## Cost",
        "",
        f"{method.cost:g} looks a step with these settings (a look is one forward and one backward pass), and "
        f"{method.copies} extra {'copy' if method.copies == 1 else 'copies'} of the model's parameters at the peak.",
    ]
    if method.needs:
        lines += ["", "It needs " + ", ".join(NEEDS[need] for need in sorted(method.needs)) + "."]
    pairs = cls.reduces_to()
    if pairs:
        lines += ["", "## What it reduces to", "", "Tests check that these are equal bit for bit:", ""]
        lines += [f"- `{_brief(special, cls)}` is `{_brief(general, type(general))}`" for special, general in pairs]
    return "\n".join(lines) + "\n"


def settings(cls: type[Method]) -> list[str]:
    """Every setting with its default, its meaning, its unit and its range."""
    if not fields(cls):
        return ["## Settings", "", "None."]
    lines = ["## Settings", "", '<div class="settings" markdown>', ""]
    lines += ["| setting | default | meaning | unit, range |", "|---|---|---|---|"]
    for field, said in zip(fields(cls), settings_of(cls), strict=True):
        cells = (f"`{field.name}`", _default(field), said.meaning, said.unit)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "</div>"]
    notes = ["A distance is the norm of a change of all weights together."] if "| distance" in "\n".join(lines) else []
    if changing := [f"`{f.name}`" for f in fields(cls) if takes_schedule(cls, f.name)]:
        notes.append(f"A schedule (a function of step and learning rate) may be given for {', '.join(changing)}.")
    notes += [f"Values in papers: {cls.ranges}"] if cls.ranges else []
    return [*lines, *(line for note in notes for line in ("", note))]


def takes_schedule(cls: type[Method], name: str) -> bool:
    """Whether a setting may be a function of step and learning rate."""
    if name not in number_fields(cls):
        return False
    try:
        replace(with_defaults(cls), **{name: lambda step, lr: lr})
    except ValueError:
        return False
    return True


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "required"
    name = getattr(field.default, "__name__", None)
    return f"`{name}`" if name else "`Adam, lr=1e-3`" if "Adam" in repr(field.default) else f"`{field.default!r}`"


def _brief(method: Method, cls: type[Method]) -> str:
    """Only what differs from the defaults."""
    given = [(f, getattr(method, f.name)) for f in fields(cls)]
    shown = [f"{f.name}={getattr(v, '__name__', None) or repr(v)}" for f, v in given if v != f.default]
    return f"{cls.__name__}({', '.join(shown)})"


def table() -> str:
    """All methods, one row each."""
    linked = {cls.__name__: link(cls) for cls in own_methods()}
    rows = [HEADER, tuple("---" for _ in HEADER), *((linked[name], *rest) for name, *rest in table_rows())]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def sources() -> str:
    """Papers, and which methods are from each."""
    by_paper: dict[str, list[type[Method]]] = {}
    for cls in own_methods():
        if cls.paper:
            by_paper.setdefault(cls.paper, []).append(cls)
    lines = ["| paper | methods |", "|---|---|"]
    rows = sorted(((_citation(*pair), pair[1]) for pair in by_paper.items()), key=lambda row: row[0])
    return "\n".join([*lines, *(f"| {cited} | {', '.join(map(link, classes))} |" for cited, classes in rows)])


def _citation(paper: str, classes: list[type[Method]]) -> str:
    """The paper as the docstring that names it cites it: "Title (authors; venue; number)"."""
    first_lines = [(inspect.getdoc(cls) or "").partition("\n")[0] for cls in classes]
    cited = [found[0] for line in first_lines if (found := re.match(r".*?\([^)]*;[^)]*\)", line))]
    with_number = [text for text in cited if paper in text]
    return (with_number or cited or [paper])[0]


def api() -> str:
    """An entry for each method on the page of the API."""
    return "\n\n".join(
        f"::: {cls.__module__}.{cls.__name__}\n    options:\n      members: false" for cls in own_methods()
    )


def looks() -> str:
    """A chart of the gradient evaluations a step of every method."""
    charts = script("charts")
    alone = [cls for cls in own_methods() if all(f.default is not MISSING for f in fields(cls))]
    costs = {cls.__name__: float(cls().cost) for cls in alone}  # without those that are given a method
    bars = {name: {"gradients": cost} for name, cost in sorted(costs.items(), key=lambda pair: (pair[1], pair[0]))}
    return inline(
        charts.svg(charts.Chart("looks", "Looks a step", "gradients a step, with the default settings", bars))
    )
