"""The rooms of the source and what they import, read from the source. A test holds what is found to the rules."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import ROOT

SOURCE = ROOT / "src" / "steppe"

# Rooms from the lowest layer up. A module may import its own room, the rooms that its room names, and those below them.
# A module belongs to the room with the longest fitting name: "engine.shards" before "engine".
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # name -> (modules, rooms that it uses)
    "support": (("support", "engine.tensor_lists", "engine.shards"), ()),
    "vector": (("vector",), ("support",)),
    "random vectors": (("engine.random_vectors",), ("vector",)),
    "method": (("method", "schedules", "auxiliary", "averaging"), ("random vectors",)),
    "methods": (("methods",), ("method",)),
    "engine": (("engine",), ("methods",)),
    "optimizer": (("optimizer",), ("engine",)),
    "graphs": (("graphs",), ("optimizer",)),
    "integrations": (("integrations",), ("optimizer",)),
    "curvature": (("curvature",), ("engine",)),
    "steppe": (("", "testing"), ("graphs",)),
    "lab": (("lab",), ("steppe", "integrations", "curvature")),
    "papers": (("papers",), ("lab",)),
    "cli": (("cli", "__main__"), ("papers",)),
}

# What `steppe` offers without importing it: editors are told where it is.
FOR_EDITORS = {("", "lab.comparing"), ("", "lab.tuning")}


@dataclass(frozen=True)
class Import:
    """One module importing another."""

    by: str
    of: str
    line: int
    typing: bool  # only for type checkers: nothing happens when the program runs


@functools.cache
def modules() -> dict[str, Path]:
    """Every module by its name below `steppe`; the package itself is ""."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(module: str) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse(modules()[module].read_text("utf-8"))


@functools.cache
def imports() -> list[Import]:
    """Every import of one module of steppe by another, those inside of functions too."""
    return [found for module in modules() for found in imports_of(module)]


def imports_of(module: str) -> list[Import]:
    """What a module imports of steppe."""
    tops: list[tuple[ast.AST, bool]] = [(tree(module), False)]
    found = []
    while tops:
        node, typing = tops.pop()
        for child in ast.iter_child_nodes(node):
            only_typing = typing or (isinstance(node, ast.If) and child in node.body and "TYPE_CHECKING" in _test(node))
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                found += [Import(module, of, child.lineno, only_typing) for of in targets(module, child)]
            tops.append((child, only_typing))
    return sorted(found, key=lambda one: one.line)


def _test(node: ast.If) -> str:
    return ast.unparse(node.test)


def targets(module: str, node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules of steppe that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names if f"{alias.name}.".startswith("steppe.")]
        return [name.partition(".")[2] for name in names]
    if node.level:
        package = modules()[module].name == "__init__.py"
        parts = module.split(".") if module else []
        parts = parts[: len(parts) - node.level + package]
        base = ".".join([*parts, *([node.module] if node.module else [])])
    elif f"{node.module}.".startswith("steppe."):
        base = (node.module or "").partition(".")[2]
    else:
        return []
    inside = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
    return list(dict.fromkeys(name if name in modules() else base for name in inside))


def room_of(module: str) -> str:
    """The room of a module: that with the longest fitting name."""
    named = [(own, room) for room, (owns, _) in ROOMS.items() for own in owns]
    fitting = {own: room for own, room in named if own and f"{module}.".startswith(f"{own}.")}
    return fitting[max(fitting, key=len)] if fitting else "steppe"


def reachable(room: str) -> set[str]:
    """The rooms that a room may use."""
    direct = ROOMS[room][1]
    return set(direct).union(*(reachable(one) for one in direct))


def wrong_layers() -> list[Import]:
    """Imports of a room that is not below."""
    wrong = [i for i in imports() if room_of(i.of) not in {room_of(i.by), *reachable(room_of(i.by))}]
    return [i for i in wrong if not (i.typing and (i.by, i.of) in FOR_EDITORS)]


def cycles() -> list[list[str]]:
    """Modules that import each other, lazily too: one list for each circle of them."""
    uses: dict[str, set[str]] = {name: set() for name in modules()}
    for one in imports():
        if not one.typing:
            uses[one.by].add(one.of)
    found, seen = [], set()
    for name in uses:
        if name not in seen:
            together = sorted(other for other in _after(uses, name) if name in _after(uses, other))
            seen.update(together or [name])
            if together:
                found.append(together)
    return found


def _after(uses: dict[str, set[str]], start: str) -> set[str]:
    """All that is imported from a module on."""
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        for other in uses.get(ahead.pop(), set()) - reached:
            reached.add(other)
            ahead.append(other)
    return reached


# Private names


def private_uses() -> list[tuple[str, int, str]]:
    """Module, line and name of each private name that another room defines and the module's own room does not."""
    attributes: dict[str, set[str]] = {}
    for module in modules():
        attributes.setdefault(_folder(module), set()).update(_private_attributes(module))
    found = []
    for module in modules():
        own = attributes[_folder(module)]
        others = set().union(*(names for room, names in attributes.items() if room != _folder(module)))
        used = [(node.lineno, node.attr) for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute)]
        found += [(module, line, name) for line, name in used if name in others - own]
        found += [(module, line, name) for line, name in _private_imports(module)]
    return found


def _folder(module: str) -> str:
    return module.partition(".")[0]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _private_attributes(module: str) -> Iterator[str]:
    """The private attributes that a module gives to objects: in the bodies of classes, and as `self._x = …`."""
    for node in ast.walk(tree(module)):
        names = []
        if isinstance(node, ast.ClassDef):
            names += [n.name for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
            names += [n.id for part in node.body for n in _targets(part) if isinstance(n, ast.Name)]
        own = [n for n in _targets(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
        names += [n.attr for n in own if ast.unparse(n.value) in ("self", "cls")]
        yield from filter(_is_private, names)


def _targets(node: ast.AST) -> list[ast.AST]:
    """What a statement assigns to."""
    given = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [n for target in given if isinstance(target, ast.AST) for n in ast.walk(target)]


def _private_imports(module: str) -> Iterator[tuple[int, str]]:
    """Private names that a module imports from another room, or takes from a module that it imported."""
    modules_here: dict[str, str] = {}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                one = ast.ImportFrom(node.module, [alias], node.level)
                for of in targets(module, one):
                    if _folder(of) != _folder(module):
                        modules_here[alias.asname or alias.name] = of
                        if _is_private(alias.name):
                            yield node.lineno, alias.name
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and isinstance(node.value, ast.Name):
            of = modules_here.get(node.value.id, "")
            if of.rpartition(".")[2] == node.value.id:
                yield node.lineno, node.attr
