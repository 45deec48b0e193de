"""The pages of the documentation and the Python in them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^```python[ ]*(?P<options>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="(needs [^"]*)"')


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Line, what it needs (the title of a block that cannot run everywhere says so) and code of each block."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in _BLOCK.finditer(text):
        needs = _TITLE.search(block["options"])
        found.append((text.count("\n", 0, block.start("code")) + 1, needs[1] if needs else "", block["code"]))
    return found


def pages_with_code() -> list[Path]:
    """Every page that has Python in it. Those about trainers are run by the tests of the integrations."""
    return [page for page in sorted(DOCS.rglob("*.md")) if blocks(page) and page.parent.name != "integrations"]


def making(name: str) -> ModuleType:
    """A module of the documentation's build."""
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    return importlib.import_module(f"making.{name}")
