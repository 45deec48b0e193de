"""The README's Python runs, top to bottom, as a reader would type it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest

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
    differences, text = first.differences, first.text
    said = " ".join(README.read_text(encoding="utf-8").split())
    noisy, longer, clean = (differences(0.6), differences(0.6, "SGD, 2x longer"), differences(0.0))
    assert all(len(values) == 10 for rows in (noisy, longer, clean) for values in rows.values())
    assert f"SAM is {text(noisy['SAM rho=0.1'])} points above SGD" in said
    assert f"and {text(longer['SAM rho=0.1'])} above SGD trained as long as SAM takes" in said
    assert f"there is no difference: {text(clean['SAM rho=0.1'])}" in said


@pytest.mark.parametrize(
    ("regime", "sentence"), [("cifar-40", "{best} % against {base} %"), ("cifar-clean", "{best} against {base}")]
)
def test_the_numbers_of_the_radius_study_are_those_of_its_records(regime, sentence):
    lines = (ROOT / "studies" / "radius" / "records" / "cifar.jsonl").read_text("utf-8").splitlines()
    found = [record for record in map(json.loads, lines) if record["regime"] == regime]
    rows = {r["candidate"]: r["accuracy"]["20"] for r in found if r["candidate"].startswith("sam rho=")}
    base = rows.pop("sam rho=0")
    best = max(rows.values(), key=mean)
    assert len(rows) == 5 and len(base) == len(best) == 4
    shown = {name: f"{mean(v):.1f} ± {stdev(v) / 2:.1f}" for name, v in (("base", base), ("best", best))}
    assert sentence.format(**shown) in " ".join(README.read_text(encoding="utf-8").split())
