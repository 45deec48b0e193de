"""Notebooks in the percent format, run while the site is built: text, code, and what the code shows."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

from . import ROOT

FOLDER = ROOT / "docs" / "notebooks"


def cells(text: str) -> list[tuple[str, str]]:
    """The cells of a notebook: "markdown" or "code", and its lines."""
    found = []
    for part in f"\n{text}".split("\n# %%")[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            found.append(("markdown", "\n".join(lines)))
        elif body.strip():
            found.append(("code", body.strip()))
    return found


def run(name: str) -> list[tuple[str, str, str]]:
    """Each cell of a notebook, and what it shows. The folder that it runs in is deleted."""
    module = types.ModuleType(f"notebook_{name}")
    found = []
    with _elsewhere(module):
        for kind, text in cells((FOLDER / f"{name}.py").read_text("utf-8")):
            found.append((kind, text, _shown(text, vars(module)) if kind == "code" else ""))
    return found


def markdown(name: str) -> str:
    """A notebook as a page."""
    parts = []
    for kind, text, shown in run(name):
        code = text.replace("  # noqa: E402", "")
        parts.append(text if kind == "markdown" else f"```python\n{code}\n```")
        if shown:
            parts.append(f"```text\n{shown}\n```")
    return "\n\n".join(parts)


def _shown(code: str, names: dict[str, Any]) -> str:
    """What a cell prints, and the value of its last line."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        exec(compile(tree, "notebook", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "notebook", "eval"), names)
            if value is not None:
                print(repr(value))
    return text.getvalue().rstrip()


@contextlib.contextmanager
def _elsewhere(module: types.ModuleType) -> Iterator[None]:
    """In a folder of its own, as a module that dataclasses find; methods that it defines are forgotten."""
    from steppe import Method

    here, known = os.getcwd(), dict(Method.registry)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.modules[module.__name__] = module
        try:
            yield
        finally:
            os.chdir(here)
            del sys.modules[module.__name__]
            Method.registry.clear()
            Method.registry.update(known)
