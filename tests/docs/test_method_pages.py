"""The pages about methods are made from the registry."""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace

import pytest

from helpers.pages import making
from steppe.method import number_fields
from steppe.methods.registry import own_methods, settings_of, table_rows, with_defaults

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


@pytest.mark.parametrize("cls", own_methods(), ids=lambda cls: cls.__name__)
def test_every_setting_has_a_meaning_and_its_true_range(cls):
    """The table has each field's description from the method's file, and a stated range is the one that is checked."""
    text, method = methods.page(cls), with_defaults(cls)
    assert "Args:" not in text
    for setting in settings_of(cls):
        assert len(setting.meaning.split()) >= 3 and setting.meaning.endswith("."), setting.name
        row = f"{setting.meaning} | {setting.unit} |".replace("|w|", "\\|w\\|")
        assert setting.unit and row in text, setting.name
        value = getattr(method, setting.name)
        choices = isinstance(value, str)
        if not choices and setting.name not in number_fields(cls) and type(value) not in (int, float):
            continue
        refused = "no such choice" if choices else -1
        bounded = choices or any(sign in setting.unit for sign in ("≥", "> 0", "0 to 1"))
        with pytest.raises(ValueError, match=setting.name) if bounded else contextlib.nullcontext():
            replace(method, **{setting.name: refused})


def test_a_page_says_which_settings_may_be_schedules():
    by_name = {cls.__name__: cls for cls in own_methods()}
    assert "may be given for `rho`, `gamma`." in methods.page(by_name["WSAM"])
    assert "may be given for" not in methods.page(by_name["Every"]), "its k must be known before the step begins"


def test_table_navigation_and_api_name_every_method():
    names = [row[0] for row in table_rows()]
    assert [f"[{name}](methods/{name.lower()}.md)" in methods.table() for name in names] == [True] * len(names)
    assert methods.navigation() == [{name: f"methods/{name.lower()}.md"} for name in names]
    assert sorted(methods.pages()) == sorted(f"methods/{name.lower()}.md" for name in names)
    assert [f".{name}\n" in methods.api() for name in names] == [True] * len(names)
