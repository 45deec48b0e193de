"""The pages about methods are made from the registry."""

from __future__ import annotations

from dataclasses import fields

import pytest

from helpers.pages import making
from steppe.methods.registry import own_methods, table_rows

methods = making("methods")


def test_every_paper_is_named():
    text = methods.sources()
    with_paper = [cls for cls in own_methods() if cls.paper]
    assert len(with_paper) > 20
    missing = [cls.__name__ for cls in with_paper if f"[{cls.__name__}](methods/{cls.__name__.lower()}.md)" not in text]
    numbers = {cls.paper for cls in with_paper if cls.paper.startswith("arXiv")}
    assert missing == [] and [number for number in numbers if number not in text] == []


@pytest.mark.parametrize("cls", own_methods(), ids=lambda cls: cls.__name__)
def test_a_page_says_settings_cost_and_limits(cls):
    text = methods.page(cls)
    assert text.startswith(f"# {cls.__name__}\n") and cls.advice in text and cls.ranges in text
    assert [f.name for f in fields(cls) if f"| `{f.name}` | " not in text] == []
    assert text.count("` is `") == len(cls.reduces_to())


def test_table_navigation_and_api_name_every_method():
    names = [row[0] for row in table_rows()]
    assert [f"[{name}](methods/{name.lower()}.md)" in methods.table() for name in names] == [True] * len(names)
    assert methods.navigation() == [{name: f"methods/{name.lower()}.md"} for name in names]
    assert sorted(methods.pages()) == sorted(f"methods/{name.lower()}.md" for name in names)
    assert [f".{name}\n" in methods.api() for name in names] == [True] * len(names)
