"""The settings of a row, as the table and the tooltips name them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("scipy")

from helpers.report_records import record
from steppe.lab.report.page import report
from steppe.lab.report.settings import display_value, listed, settings
from steppe.lab.statistics import summarise


def made(label: str, found: dict[str, Any], **rest: Any) -> dict[str, Any]:
    one = record(label, 0.9, **rest)
    one["method"]["settings"] = found
    return one


def test_the_radius_comes_first_and_the_recipe_is_named_where_it_differs():
    records = [
        made("SGD", {}, role="base"),
        made("SGD, 2x longer", {}, role="equal-cost", epochs=8),
        made("GSAM", {"alpha": 0.4, "rho": "0.1..0.02", "adaptive": False}, lr=0.05),
    ]
    rows = summarise(records)
    base, longer, gsam = (settings(row, rows) for row in rows)
    assert listed(base) == (
        "lr = 0.1, momentum = 0.9, weight decay = 0.0005, batch = 32, epochs = 4, schedule = cosine"
    )
    assert longer == {"epochs": "8"}
    assert list(gsam.items()) == [("ρ", "0.1..0.02"), ("alpha", "0.4"), ("adaptive", "no"), ("lr", "0.05")]
    page = report(records)
    assert "ρ = 0.1..0.02, alpha = 0.4, adaptive = no, lr = 0.05" in page


def test_many_settings_are_cut_and_all_are_in_the_tooltip():
    found = {f"s{k}": str(k) for k in range(8)}
    assert listed(found, 5) == "s0 = 0, s1 = 1, s2 = 2, s3 = 3, s4 = 4, 3 more"
    assert listed({k: found[k] for k in list(found)[:6]}, 5).endswith("s5 = 5")  # "1 more" would be as long
    page = report([made("SGD", {}, role="base"), made("GAM", {f"s{k}": k for k in range(8)})])
    assert 'title="s0 = 0, s1 = 1, s2 = 2, s3 = 3, s4 = 4, s5 = 5, s6 = 6, s7 = 7"' in page


def test_setting_values_as_text():
    assert [display_value(v) for v in (None, True, 0.25, [0.9, 0.95], {"eps": 1e-6}, 20000, "a")] == [
        "none", "yes", "0.25", "(0.9, 0.95)", "eps=1e-06", "20\u202f000", "a",
    ]  # fmt: skip


def test_lines_of_papers_without_a_method_have_none():
    one = record("SAM", 0.9)
    del one["method"]
    assert settings(*(lambda rows: (rows[0], rows))(summarise([one]))) == {}
