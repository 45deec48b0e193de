"""Numbers in tables that are not broken between two lines: a mean with its error, an interval, a setting."""

from __future__ import annotations

import re

_CODE = re.compile(r"(`[^`]*`)")
_TOGETHER = re.compile(
    r"(?<=[\d.]) ± (?=\d)|(?<=\bρ) = (?=[\d.])|(?<=\bn) = (?=\d)|(?<=\d), (?=[+−-]?[\d.]+\])|(?<=\d) (?=%)"
)


def unbroken(markdown: str) -> str:
    """The page with spaces that do not break inside the numbers of its tables. Code stays as it is.

    >>> unbroken("| +0.1 [−1.1, +2.0] | `a ± b` |").replace("\u00a0", "~")
    '| +0.1 [−1.1,~+2.0] | `a ± b` |'
    """
    lines, fenced = [], False
    for line in markdown.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        lines.append(_row(line) if line.lstrip().startswith("|") and not fenced else line)
    return "\n".join(lines)


def _row(line: str) -> str:
    parts = _CODE.split(line)
    return "".join(part if part.startswith("`") else _TOGETHER.sub(_kept, part) for part in parts)


def _kept(found: re.Match[str]) -> str:
    return found[0].replace(" ", "\u00a0")
