"""Every `steppe` command that the documentation shows exists, with the options that it is shown with."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from steppe.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown(text: str) -> list[str]:
    """The commands in blocks and in the text; a line that ends with a backslash is continued."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`(steppe [^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [line for line in [*lines, *inline] if line.startswith("steppe ")]


def mistake(command: str) -> str:
    """What is wrong with a command, or nothing."""
    words = [word for word in shlex.split(command, comments=True)[1:] if word != "..."]
    here: Any = get_command(app)
    while hasattr(here, "commands") and words and not words[0].startswith("-") and not words[0].isupper():
        name = words.pop(0)
        if name not in here.commands:
            return f"no command {name}"
        here = here.commands[name]
    known = {option for one in here.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    wrong = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    return f"no option {wrong[0]}" if wrong else ""


def test_commands_are_found_and_wrong_ones_are_noticed():
    text = "`steppe methods sam`\n\n```bash\nsteppe compare \\\n    --seeds 3   # more\npip install steppe\n```\n"
    first, second = shown(text)
    assert first.split() == ["steppe", "compare", "--seeds", "3", "#", "more"] and second == "steppe methods sam"
    assert mistake("steppe compare --seeds 3") == "" and mistake("steppe paper show s0/table1") == ""
    assert mistake("steppe compere") == "no command compere"
    assert mistake("steppe compare --seed=3") == "no option --seed=3"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_shown_command_exists(page):
    commands = shown(page.read_text("utf-8"))
    assert {command: said for command in commands if (said := mistake(command))} == {}
    if page.name == "index.md" and page.parent.name == "docs":
        assert len(commands) >= 6, "what I want, what I type"
