"""The page of benchmarks is that of the records; the equal-cost table says what they say."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from helpers.pages import DOCS


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_benchmarks", DOCS / "make_benchmarks.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["make_benchmarks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_benchmarks"]


def test_pages_and_pictures_are_those_of_the_records(maker):
    stale = [path.name for path, text in maker.pages().items() if path.read_text("utf-8") != text]
    wanted = maker.pictures()
    for path, (chart, _) in wanted.items():
        if not path.exists() or maker.digest(chart) not in path.read_text("utf-8"):
            stale.append(path.name)
    stale += [path.name for path in maker.CHARTS.glob("*.svg") if path not in wanted]
    assert not stale, "run python docs/make_benchmarks.py"


def test_a_changed_number_changes_the_digest(maker):
    chart = maker.Chart("name", "title", "axis", {"net": {"steppe": 1.25}})
    other = maker.Chart("name", "title", "axis", {"net": {"steppe": 1.26}})
    assert maker.digest(chart) != maker.digest(other)


def test_a_chart_says_its_numbers(maker, tmp_path):
    bars = {"net one": {"steppe": 1.25, "two-step loop": 2.5}, "net two": {"steppe": 0.875}}
    chart = maker.Chart("name", "title", "time of a step", bars, "two bare passes")
    for scheme in maker.COLOURS:
        path = tmp_path / f"{scheme}.svg"
        maker.draw(chart, scheme, path)
        svg = path.read_text("utf-8")
        for said in ("net one", "net two", "1.25", "2.50", "0.875", "two-step loop", "(1: two bare passes)"):
            assert said in svg, said
        assert maker.digest(chart) in svg and maker.COLOURS[scheme]["series"][0] in svg


def test_a_record_of_another_kind_is_named(maker, tmp_path):
    path = tmp_path / "something_new-cpu.json"
    path.write_text('{"environment": {}}')
    assert maker.charts_of(path) == []
    assert "- `something_new-cpu.json`" in maker.page([path])


@pytest.mark.parametrize(
    ("value", "said"), [(1.0, "1.00"), (1.6, "1.60"), (17.25, "17.2"), (117, "117"), (1278.4, "1278"), (0.01, "0.0100")]
)
def test_three_digits(maker, value, said):
    assert maker.three_digits(value) == said


def run(method: str, seed: int, accuracy: float, gradients: int, role: str) -> dict:
    recipe = {
        "data": "digits",
        "model": "net",
        "method": method,
        "epochs": 2 if role == "equal-cost" else 1,
        "seed": seed,
    }
    final = {"test_accuracy": accuracy, "gradients": gradients, "seconds": 1.0}
    label = {"base": "SGD", "equal-cost": "SGD, 2x longer"}.get(role, "SAM")
    return {"label": label, "role": role, "status": "done", "recipe": recipe, "final": final}


def test_without_records_the_equal_cost_place_says_how_to_make_them(maker, tmp_path):
    said = maker.equal_cost(tmp_path / "absent.json")
    assert "no published records yet" in said and "steppe compare" in said and "|" not in said


def test_equal_cost_is_against_the_base_trained_longer(maker, tmp_path):
    records = []
    for seed, noise in enumerate((0.0, 0.001, 0.002)):
        records.append(run("plain", seed, 0.90 + noise, 100, "base"))
        records.append(run("plain", seed, 0.92 + noise, 200, "equal-cost"))
        records.append(run("sam", seed, 0.93 + 2 * noise, 200, "method"))
    path = tmp_path / "equal_cost.json"
    path.write_text(json.dumps(records))
    rows = [line.split(" | ") for line in maker.equal_cost(path).splitlines() if line.startswith("| S")]
    # SAM minus the longer SGD, seed by seed: 1.0, 1.1, 1.2 points, and t(2) at 97.5 % is 4.30 times 0.1/√3
    assert rows == [
        ["| SGD", "90.10 ± 0.25 %", "1 x", "", "3 |"],
        ["| SGD, 2x longer", "92.10 ± 0.25 %", "2 x", "", "3 |"],
        ["| SAM", "93.20 ± 0.50 %", "2 x", "+1.10 ± 0.25 (better)", "3 |"],
    ]
