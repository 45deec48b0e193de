"""Building HTML. Everything that does not come from `tag` is text and is escaped."""

from __future__ import annotations

from html import escape
from typing import Any


class Markup(str):
    """Text that is HTML and must not be escaped."""

    __slots__ = ()


def tag(_name: str, *children: Any, **attributes: Any) -> Markup:
    """An element. Children that are None are left out; `class_` and `aria_label` become class and aria-label.

    >>> tag("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    texts = []
    for key, value in attributes.items():
        if value is not None and value is not False:
            name = key.rstrip("_").replace("_", "-")
            texts.append(f" {name}" if value is True else f' {name}="{escape(str(value))}"')
    opened = f"<{_name}{''.join(texts)}>"
    if _name in ("meta", "br"):
        return Markup(opened)
    return Markup(f"{opened}{join(*children)}</{_name}>")


def join(*children: Any) -> Markup:
    """Elements and text, concatenated."""
    kept = (child for child in children if child is not None)
    return Markup("".join(child if isinstance(child, Markup) else escape(str(child)) for child in kept))
