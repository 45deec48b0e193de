"""The site builds without a warning, is complete, and loads nothing from other hosts."""

from __future__ import annotations

import ast
import importlib
import re
import types
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.main import get_command

import steppe
import steppe.curvature
from helpers.pages import DOCS, ROOT, making
from steppe.cli.app import app
from steppe.method import Method

SOURCE = ROOT / "src" / "steppe"


def exported(module: str) -> list[str]:
    """The names a module exports, each with where it really is."""
    names = importlib.import_module(module)
    return [f"{module}.{name}" for name in names.__all__]


def defined(path: Path) -> list[str]:
    """The public classes and functions of a file. It is only read: its package may be missing."""
    module = ".".join(("steppe", *path.relative_to(SOURCE).with_suffix("").parts))
    kinds = (ast.ClassDef, ast.FunctionDef)
    tops = [node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, kinds)]
    return [f"{module}.{name}" for name in tops if not name.startswith("_")]


def public_names() -> list[str]:
    """What a user may import."""
    modules = ["steppe", "steppe.curvature", "steppe.lab.data", "steppe.lab.models", "steppe.lab.report"]
    if hasattr(importlib.import_module("steppe.lab"), "__all__"):
        modules.append("steppe.lab")
    integrations = [path for path in sorted((SOURCE / "integrations").glob("*.py")) if path.stem != "__init__"]
    return [name for m in modules for name in exported(m)] + [name for path in integrations for name in defined(path)]


@pytest.fixture(scope="module")
def documented(site):
    """Every name on the API pages: what other projects would link to."""
    listed = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    return {line.split(" ")[0] for line in listed.splitlines()}


def test_every_public_name_is_on_an_api_page(documented):
    missing = [name for name in map(where_shown, public_names()) if name not in documented]
    assert not missing, f"no API page shows {missing}: add `::: {missing[0]}` to a page in docs/api"


def where_shown(name: str) -> str:
    """The name to write on an API page: where a module is called like what is in it, the name alone is the module."""
    module, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(module), last) if not module.startswith("steppe.integrations") else None
    if isinstance(found, type) and issubclass(found, Method) and found is not Method:
        return f"{found.__module__}.{last}"  # the page is made from the registry, which knows the file
    is_module = (ROOT / "src" / Path(*name.split("."))).with_suffix(".py").exists()
    shared = is_module and not isinstance(getattr(importlib.import_module(module), last), types.ModuleType)
    return f"{name}.{last}" if shared else name


def test_public_names_are_found():
    names = public_names()
    assert {"steppe.SharpnessAware", "steppe.curvature.Hessian", "steppe.integrations.timm.register"} <= set(names)
    assert "steppe.integrations.accelerate.Backward" in names and len(names) > 100
    assert where_shown("steppe.wrap") == "steppe.wrap" and where_shown("steppe.SAM") == "steppe.methods.sam.SAM"
    assert where_shown("steppe.curvature.trace") == "steppe.curvature.trace.trace"


def test_every_name_on_an_api_page_has_a_docstring():
    """A docstring, or a sentence on the page itself."""
    bare = []
    for page in sorted((DOCS / "api").glob("*.md")):
        entries = re.split(r"^::: ", page.read_text("utf-8"), flags=re.MULTILINE)[1:]
        for entry in entries:
            name, _, rest = entry.partition("\n")
            words = [line for line in rest.splitlines() if line and not line.startswith((" ", "#"))]
            if not words and not has_docstring(name):
                bare.append(name)
    assert not bare


def has_docstring(name: str) -> bool:
    """By reading the source: modules of optional packages cannot be imported everywhere."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        path = ROOT / "src" / Path(*parts[:cut])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                tree = ast.parse(file.read_text("utf-8"))
                if cut == len(parts):
                    return ast.get_docstring(tree) is not None
                for node in tree.body:
                    if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == parts[cut]:
                        return ast.get_docstring(node) is not None
                module = importlib.import_module(".".join(parts[:cut]))
                found = getattr(module, parts[cut], None)  # imported from elsewhere in the package
                where = getattr(found, "__module__", "") or ""
                return where.startswith("steppe") and bool(getattr(found, "__doc__", None))
    return False


def test_names_without_docstring_are_found():
    assert has_docstring("steppe.SAM") and has_docstring("steppe.integrations.lightning.SharpnessAwareCallback")
    assert not has_docstring("steppe.HVP.vector") or not has_docstring("steppe.Number")
    assert not has_docstring("steppe.curvature.absent")


# What the pages refer to


class Page(HTMLParser):
    """The links, anchors and loaded files of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        """Take note."""
        given = dict(attrs)
        self.anchors.update(value for key in ("id", "name") if (value := given.get(key)))
        href, src = given.get("href"), given.get("src")
        if tag == "a" and href:
            self.links.append(href)
        if tag in ("script", "img", "iframe", "source") and src:
            self.loaded.append(src)
        if tag == "link" and href and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loaded.append(href)


@pytest.fixture(scope="module")
def pages(site):
    """Every page but the report of the comparison, which has its own tests."""
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "report.html"}


def test_no_broken_internal_links(site, pages):
    broken, checked = [], 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links start at the root of the site, wherever that is
            continue
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            checked += 1
            if target.is_dir():
                target = target / "index.html"
            anchored = not parts.fragment or target.suffix != ".html" or target not in pages
            if not target.exists() or not (anchored or unquote(parts.fragment) in pages[target].anchors):
                broken.append((path.name, link))
    assert not broken
    assert checked > 1000


def test_nothing_is_loaded_from_elsewhere(site, pages):
    loaded = [(path.name, file) for path, page in pages.items() for file in page.loaded]
    assert [pair for pair in loaded if urlsplit(pair[1]).netloc] == []
    styles = [*site.rglob("*.css")]
    assert styles
    for style in styles:
        assert not re.search(r"url\(\s*[\"']?(https?:)?//", style.read_text("utf-8")), style


def test_every_page_is_in_the_navigation(site, pages):
    start = pages[site / "index.html"]
    linked = {(site / urlsplit(link).path).resolve() for link in start.links if not urlsplit(link).netloc}
    assert sorted(path.name for path in set(pages) - linked if path.name != "404.html") == []


def test_doctests_of_docstrings_are_code(site):
    pages = [path.read_text("utf-8") for path in sorted((site / "api").glob("*.html"))]
    assert '<span class="gp">&gt;&gt;&gt; </span>' in "".join(pages)
    assert [html for html in pages if "<blockquote>" in html] == []


def test_a_fence_goes_around_every_doctest():
    module = making("doctests")
    text = "Words.\n\n>>> x = 1\n>>> x\n1\n\n>>> x + 1\n2\n\nMore words.\n\n    >>> indented\n    yes"
    assert module.fenced(text) == (
        "Words.\n\n```pycon\n>>> x = 1\n>>> x\n1\n\n>>> x + 1\n2\n```\n\nMore words.\n\n"
        "    ```pycon\n    >>> indented\n    yes\n    ```"
    )
    assert module.fenced("a > b and >> c") == "a > b and >> c"


def test_scripts_for_making_pages_are_not_published(site):
    assert [path.name for path in site.rglob("*.py")] == []


def test_every_command_is_on_the_page_of_commands(site):
    html = (site / "commands.html").read_text("utf-8")
    commands = making("commands").commands_of(get_command(app))
    assert {"compare", "measure", "methods", "doctor"} <= set(commands)
    for name, command in commands.items():
        assert f'id="steppe-{name.replace(" ", "-")}"' in html
        options = [option for p in command.params if p.name != "help" for option in p.opts if option.startswith("--")]
        assert [option for option in options if f"<code>{option}</code>" not in html] == []


def test_the_changelog_is_the_projects(site):
    assert "Unreleased" in (site / "changelog.html").read_text("utf-8")


def test_all_exports_exist():
    for module in (steppe, steppe.curvature):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
