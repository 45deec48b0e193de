"""The README's Python runs, top to bottom, as a reader would type it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from helpers.pages import making

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def test_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 4
    namespace: dict = {"__name__": __name__}  # dataclasses look their module up
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["opt"].metrics["looks"] == 3


def test_the_first_sentences_say_what_the_records_say():
    first = making("first_picture")
    said = " ".join(README.read_text(encoding="utf-8").split())
    assert first.short() in said
    assert making("where_it_helps").robustness() in said
    assert making("where_it_helps").markdown() in README.read_text(encoding="utf-8")
    assert making("benchmarks").captured_sentence() in said
    assert all(row.n == 10 for noise in first.PANELS for row in first.rows(noise).values())


def test_the_readme_counts_the_methods():
    """All of the registry but the base itself and those that apply another method on some steps."""
    from steppe.methods.registry import own_methods

    count = len([cls for cls in own_methods() if cls.__name__ not in ("Plain", "Every", "Late", "Random")])
    said = re.findall(r"(\d+) related methods|The (\d+) methods|(\d+), and three wrappers", README.read_text("utf-8"))
    assert ["".join(one) for one in said] == [str(count - 1), str(count), str(count)]
    assert f"one of {count - 1} related methods" in (ROOT / "docs" / "index.md").read_text("utf-8")


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_first_records_are_those_of_compare_without_options():
    from steppe.lab.preparing import recipe_for
    from steppe.lab.runner.comparison import DEFAULT_METHODS, FIRST_NOISE, FIRST_SEEDS, plan, usual_rivals

    kept = {(r["key"], r["label"], r["role"]) for r in json.loads(making("first_picture").RECORDS.read_text("utf-8"))}
    recipes = [recipe_for({"label_noise": noise}) for noise in FIRST_NOISE]
    jobs = [j for r in recipes for j in plan(r, DEFAULT_METHODS, range(FIRST_SEEDS), rivals=usual_rivals(r))]
    assert kept == {(job.recipe.key, job.name, job.role) for job in jobs}
