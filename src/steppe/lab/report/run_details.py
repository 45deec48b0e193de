"""The details of the runs: the common recipe, the settings that differ, the machine and the versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..records import number, seed_of
from ..statistics import Row
from . import formatting
from .html import Markup, join, tag
from .settings import display_value


def run_details(index: int, rows: Sequence[Row]) -> Markup:
    """A section with everything that is needed to judge and to repeat the comparison."""
    recipes = [row.group.recipe for row in rows]
    fields = list(dict.fromkeys(name for one in recipes for name in one))
    shared = {
        name: recipes[0].get(name) for name in fields if all(r.get(name) == recipes[0].get(name) for r in recipes)
    }
    differing = [name for name in fields if name not in shared]
    records = [record for row in rows for record in row.group.records]
    environments = distinct(record.get("environment") or {} for record in records)
    sizes = distinct(
        {name: record.get(name) for name in ("parameters", "train_examples", "test_examples")} for record in records
    )
    return tag(
        "section",
        tag("h3", "Runs", id=f"run-{index}"),
        tag("p", _counts(rows), class_="counts"),
        tag("details", tag("summary", "Recipe"), _list(shared), _differences(rows, differing)),
        tag("details", tag("summary", "Model and data"), *(_list(one) for one in sizes)),
        tag("details", tag("summary", _versions(environments)), *(_list(one) for one in environments)),
        aria_labelledby=f"run-{index}",
    )


def distinct(dictionaries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The dictionaries without repetitions, in order."""
    found: list[dict[str, Any]] = []
    for one in dictionaries:
        if dict(one) not in found:
            found.append(dict(one))
    return found


def trained_for(record: Mapping[str, Any]) -> float:
    """Seconds of training, also of a run that did not finish."""
    last = (record.get("epochs") or [{}])[-1]
    return number((record.get("final") or {}).get("seconds")) or number(last.get("seconds")) or 0.0


def _counts(rows: Sequence[Row]) -> str:
    runs = sum(len(row.group.records) for row in rows)
    seeds = {str(seed_of(record)) for row in rows for record in row.group.records}
    total = sum(trained_for(record) for row in rows for record in row.group.records)
    counts = [formatting.plural(runs, "run") + ": " + formatting.plural(len(rows), "recipe")]
    counts += [formatting.plural(len(seeds), "seed"), f"{formatting.duration(total)} of training"]
    return ", ".join(counts) + "."


def _versions(environments: Sequence[Mapping[str, Any]]) -> str:
    if len(environments) != 1:
        return f"{len(environments)} environments"
    versions = [f"steppe {environments[0].get('steppe')}"] if environments[0].get("steppe") else []
    versions += [f"commit {str(environments[0]['commit'])[:10]}"] if environments[0].get("commit") else []
    return "Environment" + (": " + ", ".join(versions) if versions else "")


def _list(values: Mapping[str, Any]) -> Markup:
    pairs = [
        join(tag("dt", str(name).replace("_", " ")), tag("dd", display_value(value))) for name, value in values.items()
    ]
    return tag("dl", *(tag("div", pair) for pair in pairs))


def _differences(rows: Sequence[Row], names: Sequence[str]) -> Markup | None:
    """The settings that differ between groups, one row per group."""
    if not names:
        return None
    head = [
        tag("th", name, scope="col", class_="text") for name in ("", *(n.replace("_", " ") for n in names), "seeds")
    ]
    body = []
    for row in rows:
        seeds = ", ".join(str(seed_of(record)) for record in row.group.records)
        cells = [*(display_value(row.group.recipe.get(name)) for name in names), seeds]
        body.append(tag("tr", tag("th", row.label, scope="row"), *(tag("td", text, class_="text") for text in cells)))
    table = tag(
        "table", tag("caption", "Differences between the recipes"), tag("thead", tag("tr", *head)), tag("tbody", *body)
    )
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label="Differences between the recipes")
