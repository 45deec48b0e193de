"""mkdocs calls these functions while it builds: they add what the build makes to what is in the repository.

A page asks for what is made by a comment: `<!-- name -->` with a name of `MADE`, or `<!-- name: which -->` with one of
`NAMED`. The pages of the methods have no file in the repository.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from making import (
    alternatives,
    arxiv,
    benchmarks,
    commands,
    comparison,
    figures,
    first_picture,
    frontier,
    map,
    methods,
    notebooks,
    radius,
    radius_page,
    regimes,
    scale_costs,
    support_table,
    unbroken,
    verdicts,
    where_it_helps,
)
from mkdocs.structure.files import File, Files

NAMED: dict[str, Callable[[str], str]] = {
    "figure": figures.curvature,
    "notebook": notebooks.markdown,
    "paper": figures.paper,
    "support": support_table.markdown,
}
MADE: dict[str, Callable[[], str]] = {
    "benchmarks": benchmarks.markdown,
    "commands": commands.markdown,
    "first": first_picture.markdown,
    "frontier": frontier.markdown,
    "regimes": regimes.markdown,
    "verdicts": verdicts.markdown,
    "alternatives": alternatives.markdown,
    "api": methods.api,
    "looks": methods.looks,
    "sources": methods.sources,
    "methods": methods.table,
    "map": map.markdown,
    "radii": radius.markdown,
    "scalecosts": scale_costs.markdown,
    "selfradius": radius_page.table,
    "radiuscurves": radius_page.picture,
    "radiusgoal": radius_page.goal,
    "helps": where_it_helps.section,
}
_MARK = re.compile(r"^<!-- (?P<name>[a-z]+)(: (?P<which>[^ ]+))? -->$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Add the methods to the navigation: they replace the entry "Each method: registry"."""
    for entry in config.nav:
        for items in entry.values():
            for item in items if isinstance(items, list) else []:
                if isinstance(item, dict) and item.get("Each method") == "registry":
                    item["Each method"] = methods.navigation()
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that have no file."""
    made = {**methods.pages(), comparison.REPORT: comparison.report()}
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Take a script of ours in place of one that would come from the network; it makes search work from a folder."""
    return _with_our_search(output, "../" * page.url.count("/"))


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Likewise on the page for addresses that do not exist."""
    return _with_our_search(output_content, "/") if template_name == "404.html" else output_content


def _with_our_search(html: str, up: str) -> str:
    ours = f'<script src="{up}assets/offline-search.js"></script>'
    return re.sub(r'<script src="https://[^"]*iframe-worker[^"]*"></script>', ours, html)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put what is made where a page asks for it."""

    def made(found: re.Match[str]) -> str:
        return NAMED[found["name"]](found["which"]) if found["which"] else MADE[found["name"]]()

    return unbroken.unbroken(arxiv.linked(_MARK.sub(made, markdown)))
