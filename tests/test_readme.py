"""The README's Python runs, top to bottom, as a reader would type it."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 4
    namespace: dict = {"__name__": __name__}  # dataclasses look their module up
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["opt"].metrics["looks"] == 3
