"""The source keeps to its rooms: layers, no import cycle, no private name of another room, files and functions that are
short enough to read. docs/architecture.md draws and says what is checked here.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from helpers.pages import DOCS, ROOT, making

architecture, room_map = making("architecture"), making("map")
SOURCE = ROOT / "src" / "steppe"
FOLDERS = ("src", "benchmarks", "docs", "examples", "tests")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def where(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_import_is_of_a_room_below():
    wrong = [f"{i.by}:{i.line} imports {i.of}" for i in architecture.wrong_layers()]
    assert wrong == []


def test_no_module_imports_itself_through_others():
    assert architecture.cycles() == []


def test_no_room_uses_a_private_name_of_another():
    assert [f"{module}:{line} uses {name}" for module, line, name in architecture.private_uses()] == []


def test_the_root_has_at_most_ten_files():
    files = sorted(path.name for path in SOURCE.iterdir() if path.is_file() and path.name != "py.typed")
    assert len(files) <= 10, files


def test_no_file_is_over_400_lines():
    lengths = {where(path): len(path.read_text("utf-8").splitlines()) for path in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}


def test_no_function_is_over_60_lines():
    long = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 60:
                    long[f"{where(path)}:{node.lineno} {node.name}"] = lines
    assert long == {}


# The page

HOP = re.compile(r"^(\d+)\. `([\w/]+\.py)` · `([\w.]+)`", re.MULTILINE)
PAGE = (DOCS / "architecture.md").read_text("utf-8")


def test_each_walk_has_at_most_ten_hops():
    walks = PAGE.split("\n## ")[1:]
    assert [walk.partition("\n")[0] for walk in walks] == ["A step", "A comparison", "A measurement"]
    for walk in walks:
        numbers = [int(hop[0]) for hop in HOP.findall(walk)]
        assert numbers == list(range(1, len(numbers) + 1)) and 3 <= len(numbers) <= 10
        assert len(numbers) == len(re.findall(r"^\d+\. ", walk, re.MULTILINE))


@pytest.mark.parametrize(("file", "name"), sorted({hop[1:] for hop in HOP.findall(PAGE)}))
def test_what_a_walk_names_exists(file, name):
    tops = ast.parse((SOURCE / file).read_text("utf-8")).body
    for part in name.split("."):
        found = [n for n in tops if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == part]
        assert found, f"{file} has no {name}"
        tops = found[0].body


def test_the_drawing_shows_every_room_and_only_real_imports():
    svg, arrows = room_map.svg(), room_map.arrows()
    drawn = room_map.direct(arrows)
    assert [room for room in architecture.ROOMS if f">{room}</text>" not in svg] == []
    assert svg.count("marker-end") == len(drawn) and set(drawn) <= set(arrows)
    reached = {room: {b for a, b in drawn if a == room} for room in architecture.ROOMS}
    for _ in reached:
        reached = {room: near.union(*(reached[one] for one in near)) for room, near in reached.items()}
    assert [pair for pair in arrows if pair[1] not in reached[pair[0]]] == []  # the others follow from those drawn


# What finds them, on sources of which the answer is known


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a small package in the place of steppe's source."""

    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for path in {p.parent for p in tmp_path.rglob("*.py")}:
            (path / "__init__.py").touch()
        monkeypatch.setattr(architecture, "SOURCE", tmp_path)
        for cached in (architecture.modules, architecture.tree, architecture.imports):
            cached.cache_clear()

    yield write
    for cached in (architecture.modules, architecture.tree, architecture.imports):
        cached.cache_clear()


def test_a_lazy_circle_is_found(package):
    package(lab__a="from .b import x", lab__b="def x():\n    from . import c", lab__c="import steppe.lab.a")
    assert architecture.cycles() == [["lab.a", "lab.b", "lab.c"]]


def test_imports_for_type_checkers_make_no_circle_but_keep_to_the_layers(package):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .optimizer import Optimizer\n"
    package(vector=text, optimizer="from . import vector")
    assert architecture.cycles() == []
    assert [(i.by, i.of, i.line, i.typing) for i in architecture.wrong_layers()] == [("vector", "optimizer", 3, True)]


def test_private_names_of_others_are_found(package):
    package(
        optimizer="class Optimizer:\n    def __init__(self):\n        self._memory = {}\n        self._both = 1\n",
        graphs__capture="from ..optimizer import _helper\ndef f(opt, tensor):\n    opt._memory = tensor._version\n",
        graphs__other="class Own:\n    _both = 2\ndef g(own):\n    return own._both\n",
        lab__run="from ..graphs import other\nother._secret(1)\n",
    )
    wanted = [("graphs.capture", 1, "_helper"), ("graphs.capture", 3, "_memory"), ("lab.run", 2, "_secret")]
    assert sorted(architecture.private_uses()) == wanted  # _both is its own, _version is a tensor's
