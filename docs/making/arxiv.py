"""Numbers of arXiv as links."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<![\[\w/`])arXiv[: ](\d{4}\.\d{4,5})(?![\w`\]])")


def linked(markdown: str) -> str:
    """The page with a link for each arXiv number that is not in code or in a link.

    >>> linked("see arXiv 2010.01412 and `arXiv 2010.01412`")
    'see [arXiv 2010.01412](https://arxiv.org/abs/2010.01412) and `arXiv 2010.01412`'
    """
    lines, in_code = [], False
    for line in markdown.split("\n"):
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        code = in_code or fence or line.startswith("    ")
        lines.append(line if code else _NUMBER.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", line))
    return "\n".join(lines)
