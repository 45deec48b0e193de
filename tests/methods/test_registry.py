"""One file is one method: names, reserved names, and a new file in the folder of methods."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

import steppe
from steppe import Method, Number
from steppe.method import number_fields
from steppe.methods import registry

RESERVED = ["at", "cost", "name", "phase", "looks", "memory", "needs", "copies", "variants", "paper", "aliases"]


@pytest.mark.parametrize("name", RESERVED)
def test_a_field_must_not_hide_an_attribute_of_method(name):
    with pytest.raises(TypeError, match=f"cannot be called '{name}'"):
        type("Hides", (Method,), {"__annotations__": {name: float}, name: 0.1})
    assert "hides" not in Method.registry


def test_class_attributes_may_be_typed():
    from typing import ClassVar

    cls = type("Typed", (Method,), {"__annotations__": {"cost": ClassVar[float]}, "cost": 3})
    assert cls.cost == 3


@pytest.mark.parametrize("name", ["SAM", "sam", "Sam"])
def test_a_name_that_is_taken_is_refused(name):
    with pytest.raises(ValueError, match=r"exists already \(steppe\.methods\.sam\.SAM\)"):
        type(name, (Method,), {})
    assert Method.registry["sam"] is steppe.SAM


def test_an_alias_that_is_taken_is_refused():
    cls = type("CRSAM2", (Method,), {"aliases": ("mine",)})
    assert registry.find("Mine") is cls
    with pytest.raises(ValueError, match="exists already"):
        type("Mine", (Method,), {})


def test_the_same_class_made_again_replaces_the_first():
    """As when a notebook's cell is run twice."""

    def make():
        @dataclass(frozen=True)
        class Again(Method):
            rho: Number = 0.1

        return Again

    first, second = make(), make()
    assert first is not second and registry.find("again") is second


def test_numbers_are_recognised_by_type_and_not_by_text():
    import typing

    @dataclass(frozen=True)
    class Mine(Method):
        a: Number = 0.1
        b: steppe.Number = 0.2
        Number_of_looks: int = 3
        c: float = 0.4
        d: typing.Any = None

    assert number_fields(Mine) == {"a", "b"}
    with pytest.raises(ValueError, match="a must be a finite number"):
        Mine(a="x")
    assert Mine(c="anything").c == "anything"  # pyright: ignore[reportArgumentType]


def test_which_fields_of_the_library_may_be_schedules():
    """Every field with a float as default may be a schedule, except those that change the sequence of operations."""
    fixed = {("SSAM", "sparsity")}
    for cls in registry.own_methods():
        for f in fields(cls):
            if isinstance(f.default, float) and (cls.__name__, f.name) not in fixed:
                assert f.name in number_fields(cls), (cls, f.name)


METHOD = '''
"""A user's own method."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import HERE, Context, Look, Looks, Method, Number, ascent


@dataclass(frozen=True)
class Dropped(Method):
    """Dropped in (a test; arXiv 0000.00000).

    d = g(w + ρ g/‖g‖)
    """

    rho: Number = 0.05

    paper = "arXiv 0000.00000"
    advice = "Only for a test."
    cost = 2

    def looks(self, ctx: Context) -> Looks:
        there = yield Look(self.rho * ascent((yield HERE).grad))
        return there.grad
'''

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import steppe
from steppe.lab.recipe.method_text import make_method
assert steppe.Dropped(rho=0.1) == steppe.by_name("dropped", rho=0.1) == make_method("dropped:rho=0.1")
assert "Dropped" in steppe.__all__ and "Dropped" in steppe.methods.__all__
assert any(row[0] == "Dropped" for row in steppe.methods.registry.table_rows())
print("found")
"""


def test_a_file_in_the_folder_is_a_method(tmp_path):
    """A copy of the package with one more file: the method is exported, listed, and can be named in texts."""
    package = Path(steppe.__file__).parent
    (tmp_path / "steppe").mkdir()
    for path in package.iterdir():
        if path.name != "methods":
            (tmp_path / "steppe" / path.name).symlink_to(path)
    (tmp_path / "steppe" / "methods").mkdir()
    for path in (package / "methods").glob("*.py"):
        (tmp_path / "steppe" / "methods" / path.name).write_text(path.read_text())
    (tmp_path / "steppe" / "methods" / "dropped.py").write_text(METHOD)
    # Modules are found by the path they are imported from, so the links are followed only for their text.
    program = PROGRAM.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "found", done.stderr
