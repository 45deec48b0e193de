"""The sentences about radii on the page that helps to choose are what the records of the study say."""

from __future__ import annotations

import re

from helpers.pages import DOCS, making

radius = making("radius")


def rows(kind: str, base: str, epochs: str) -> dict[str, float]:
    found = radius.accuracies()
    regime = f"digits-{kind}-{base}-{epochs}"
    theirs = found[regime, "sam rho=0"]
    return {rho: sum(found[regime, f"sam rho={rho}"]) / 24 - sum(theirs) / 24 for rho in radius.RADII}


def test_the_page_says_what_the_records_say():
    said = " ".join((DOCS / "choose.md").read_text("utf-8").split())
    gains = [max(rows(kind, base, "120").values()) for base in ("sgd", "adam") for kind in ("40", "60")]
    numbers = re.search(r"gains (\d+) and (\d+) points under SGD, (\d+) and (\d+) under Adam", said)
    assert numbers is not None and [round(gain) for gain in gains] == [int(n) for n in numbers.groups()]
    clean = max(max(rows("clean", "sgd", epochs).values()) for epochs in ("20", "40", "120"))
    assert f"With clean labels it gains at most {clean:.1f} points under SGD" in said
    assert (
        max(
            rows("tenth", base, epochs)[rho]
            for base in radius.BASES
            for epochs in ("20", "40", "120")
            for rho in radius.RADII
        )
        < 0.15
    )
    assert all(gain < 0 for kind in radius.KINDS for gain in rows(kind, "adam", "20").values())


def test_the_table_has_a_row_for_each_regime():
    head, line, *body = radius.markdown().splitlines()
    assert head.count("|") == line.count("|") == 11
    assert len([row for row in body if row.startswith("|")]) == 24 and "n = 24" in body[-1]
