"""What the documentation's build makes: pages from the registry and from records, drawings, the map of the source."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent


def inline(svg: str) -> str:
    """A drawing as a block of a Markdown page. It is part of the page, so that it takes the page's colours."""
    return f'<figure class="drawn" markdown="0" data-search-exclude>{svg}</figure>'
