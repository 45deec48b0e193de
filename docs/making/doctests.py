"""A griffe extension: docstrings show their doctests as code.

In Markdown a line that starts with >>> is a quotation. Here every run of such lines, with what they print, gets a
fence around it before the docstring is read.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?:^[ ]*>>> .*\n?(?:^(?![ ]*$).*\n?)*(?:\n(?=[ ]*>>> ))?)+", re.MULTILINE)


def fenced(text: str) -> str:
    """The text with a fence around each doctest."""

    def fence(found: re.Match[str]) -> str:
        indent = re.match(" *", found[0])[0]  # pyright: ignore[reportOptionalSubscript]
        body = found[0].rstrip("\n")
        rest = found[0][len(body) :]
        return f"{indent}```pycon\n{body}\n{indent}```{rest}"

    return _DOCTEST.sub(fence, text)


class Doctests(griffe.Extension):
    """Puts the fences in."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
