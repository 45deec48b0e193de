"""The page of benchmarks: each script of benchmarks/ that has a `PAGE`, with its records."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import ROOT, inline

FOLDER = ROOT / "benchmarks"
RESULTS = FOLDER / "results"
Page = Chart = Any  # of benchmarks/charts.py


def script(name: str) -> Any:
    """A module of the folder of benchmarks."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def pages(folder: Path = FOLDER) -> dict[str, Page]:
    """The scripts that have a page, by name, in their order on it. The others are not imported."""
    names = [p.stem for p in folder.glob("*.py") if re.search(r"^PAGE = ", p.read_text("utf-8"), re.MULTILINE)]
    found = {name: script(name).PAGE for name in names}
    return dict(sorted(found.items(), key=lambda pair: (pair[1].place, pair[0])))


def script_of(path: Path) -> str:
    """Which script wrote a record."""
    return path.stem.split("-")[0]


def read(path: Path) -> dict[str, Any]:
    """A record."""
    return json.loads(path.read_text("utf-8"))


def markdown(records: Iterable[Path] | None = None) -> str:
    """The text of the page below its introduction: first the summaries, then a section for each script."""
    records = sorted(RESULTS.glob("*.json")) if records is None else list(records)
    known = pages()
    lines: list[str] = []
    for name, page in known.items():
        for path in records:
            if page.summary and script_of(path) == name:
                for chart in page.summary(read(path), path.stem):
                    lines += [*block(chart, "##"), about(path), ""]
    for name, page in known.items():
        mine = [path for path in records if script_of(path) == name]
        if mine:
            lines += [f"## {page.title}", "", page.about, ""]
        for path in mine:
            lines += section(page, path)
    others = [path.name for path in records if script_of(path) not in known]
    if others:
        lines += ["## Other records", "", *(f"- `{name}`" for name in others), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def section(page: Page, path: Path) -> list[str]:
    """The charts of one record."""
    record = read(path)
    lines = ['<div class="grid" markdown>', ""]
    for chart in page.charts(record, path.stem):
        lines += ["<div markdown>", "", *block(chart), "</div>", ""]
    lines += ["</div>", ""]
    if page.text:
        lines += [*page.text(record), ""]
    return [*lines, about(path), ""]


def block(chart: Chart, heading: str = "###") -> list[str]:
    """A chart below its heading, and its numbers."""
    charts = script("charts")
    lines = [f"{heading} {chart.title}" + " {: #" + chart.name + " }", "", inline(charts.svg(chart)), ""]
    return [*lines, '??? note "The numbers"', "", *(f"    {line}" for line in charts.numbers(chart)), ""]


def about(path: Path) -> str:
    """Where, when and with what a record was made."""
    made = read(path)["environment"]
    commit = f", commit {made['commit'][:8]}" if made.get("commit") else ""
    return (
        f"Record: `{path.name}`. {made['device']}, torch {made['torch']}, Python {made['python']}, "
        f"{made['threads']} threads, {made['date'][:10]}{commit}."
    )


def captured_sentence() -> str:
    """README's sentence about speed: the ranges over the nets of the record of captured steps."""
    record = json.loads((RESULTS / "captured-cuda.json").read_text("utf-8"))

    def span(what: str, over: str) -> str:
        found = [one["ratio"]["median"] for one in record["claims"] if (one["what"], one["over"]) == (what, over)]
        assert len(found) == 4
        return f"{min(found):.1f} to {max(found):.1f}"

    base, peer = span("SAM, captured", "base, captured"), span("best peer's SAM, eager", "SAM, captured")
    return (
        f"On one {record['environment']['device']} a captured SAM step takes {base} times as long as its base. The "
        f"fastest SAM step of the other libraries takes {peer} times as long as ours (four nets, MLP-3 to ResNet-18)."
    )
