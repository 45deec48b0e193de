"""The user's own methods by name, and hashes that tell whether the user's own code has changed."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

import numpy as np
import pandas
import pytest
import torch

import steppe
from steppe.lab.recipe.fingerprints import fingerprint
from steppe.lab.recipe.method_text import canonical, label_of, make_method, split_methods, with_settings
from steppe.lab.recipe.own_code import code_of, unreadable
from steppe.lab.recipe.recipe import Recipe
from steppe.support.errors import UserError
from steppe.support.own_objects import keep

MODULE = """
from dataclasses import dataclass
import steppe

@dataclass(frozen=True)
class TwoSided(steppe.Method):
    rho: steppe.Number = 0.1
    times: int = 1

    def looks(self, ctx):
        return (yield steppe.HERE).grad

@dataclass(frozen=True)
class Bare(steppe.Method):
    rho: steppe.Number

class NotOne:
    pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine_methods", raising=False)
    known = dict(steppe.Method.registry)
    (tmp_path / "mine_methods.py").write_text(MODULE)
    yield tmp_path / "mine_methods.py"
    steppe.Method.registry.clear()
    steppe.Method.registry.update(known)
    sys.modules.pop("mine_methods", None)


def test_an_own_method_is_named_with_its_module(module):
    text = "sam,mine_methods:TwoSided,rho=0.2,times=3,mine_methods:TwoSided:times=2"
    text += ",every:k=2,method=(mine_methods:TwoSided:rho=3)"
    wanted = [
        "sam", "mine_methods:TwoSided:rho=0.2,times=3", "mine_methods:TwoSided:times=2",
        "every:k=2,method=(mine_methods:TwoSided:rho=3)",
    ]  # fmt: skip
    assert split_methods(text) == wanted and [canonical(one) for one in wanted] == wanted
    assert canonical("mine_methods:TwoSided:rho=1e-1") == "mine_methods:TwoSided"  # the default
    assert label_of("mine_methods:TwoSided:rho=0.2") == "TwoSided rho=0.2"
    assert with_settings("mine_methods:TwoSided:rho=0.2", {"rho": 0.3}) == "mine_methods:TwoSided:rho=0.3"
    own = sys.modules["mine_methods"]
    assert Recipe(method="mine_methods:TwoSided:rho=0.3").build_method() == own.TwoSided(rho=0.3)


def test_an_own_method_may_be_named_like_its_module(module, monkeypatch):
    """Once imported, the class is registered under the module's name."""
    module.with_name("twosided.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "twosided", raising=False)
    for _ in range(2):
        assert canonical("twosided:TwoSided:rho=0.3") == "twosided:TwoSided:rho=0.3"
    assert split_methods("twosided:TwoSided,rho=0.3") == ["twosided:TwoSided:rho=0.3"]
    sys.modules.pop("twosided")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine_methods:Bare", "Bare needs rho: for example mine_methods:Bare:rho=VALUE"),
        ("mine_methods:NotOne", "is not a class derived from steppe.Method"),
        ("mine_methods:Absent", "mine_methods has no function 'Absent'"),
        ("mine_methods:TwoSided:width=1", "TwoSided: no setting 'width'"),
        ("no_such_module:Method", "cannot import no_such_module"),
        ("cr-sam:rho", "CRSAM: 'rho' is not a setting; write name=value"),
    ],
)
def test_mistakes_with_own_methods_are_reported_in_one_line(module, text, message):
    with pytest.raises(UserError, match=message):
        make_method(text)


def test_an_edited_method_is_noticed(module):
    recipe = Recipe(method="every:k=2,method=(mine_methods:TwoSided)")
    before = code_of(recipe)
    module.write_text(MODULE + "# edited\n")
    assert list(before) == ["mine_methods"] and code_of(recipe) != before
    assert code_of(Recipe(base="mine_methods:make", loss="mine_methods:loss", metric="mine_methods:error:lower"))


# Things of a Python program


def helper(x):
    return x + 1


def uses_helper(x):
    return helper(x)


def test_a_function_is_hashed_by_its_behaviour(monkeypatch):
    def make(n):
        return lambda: n

    assert fingerprint(make(3)) == fingerprint(make(3)) != fingerprint(make(4))
    assert fingerprint(functools.partial(helper, 1)) != fingerprint(functools.partial(helper, 2))
    before = fingerprint(uses_helper)
    monkeypatch.setitem(uses_helper.__globals__, "helper", lambda x: x + 2)
    assert fingerprint(uses_helper) != before


def test_classes_objects_and_data_are_hashed_by_content():
    def maker(depth):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.depth = depth

        return Net

    assert fingerprint(maker(2)) == fingerprint(maker(2)) != fingerprint(maker(3))
    x = torch.arange(6.0)
    assert fingerprint(x) == fingerprint(x.clone()) != fingerprint(x.view(2, 3))
    assert fingerprint({"a": np.ones(3)}) == fingerprint({"a": np.ones(3)}) != fingerprint({"a": np.zeros(3)})
    assert fingerprint(range(3)) == fingerprint(range(3)) != fingerprint(range(4))
    table = pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    assert fingerprint(table) == fingerprint(table.copy()) != fingerprint(table.replace("x", "z"))
    assert fingerprint((1, "a", None)) == fingerprint((1, "a", None)) != fingerprint((1, "b", None))
    assert fingerprint(steppe.SAM(rho=0.1)) != fingerprint(steppe.SAM(rho=0.2))


def test_data_sets_are_what_they_read():
    def stream(factor):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter([factor])

        return torch.utils.data.DataLoader(Stream(), batch_size=2)

    assert fingerprint(stream(2)) == fingerprint(stream(2)) != fingerprint(stream(3)) and fingerprint(stream(2))


def test_unreadable_objects_are_reported_and_never_count_as_unchanged():
    class Slots:
        __slots__ = ("secret",)

        def __call__(self):
            return None

    recipe = Recipe(model=keep("slots", Slots()))
    assert unreadable(recipe) == ["python:slots"] and code_of(recipe)["python:slots"].startswith("unknown")
    with pytest.raises(UserError, match="was given to steppe by another Python program"):
        make_method("python:OfAnotherProgram")


def test_a_method_object_keeps_settings_that_text_cannot_express():
    @dataclass(frozen=True)
    class Odd(steppe.SAM):
        pass

    try:
        method = Odd(rho=lambda step, lr: lr / 2)
        text = keep("Odd", method)
        assert make_method(text) is method and canonical(text) == text
        assert Recipe(method=text).build_method() is method
    finally:
        del steppe.Method.registry["odd"]
