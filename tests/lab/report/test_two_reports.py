"""Two reports on one page: which methods are compared, and the conclusion."""

from __future__ import annotations

import io
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("rich.console")

from helpers.report_records import comparison, diverged, record
from steppe.lab.report.page import report
from steppe.lab.report.two_reports import alone, difference_table, differing, pairs, sentence
from steppe.lab.statistics import mean_of, summarise

METRIC = "test_accuracy"
BUMPS = (0.0, 0.004, 0.001, 0.003, 0.002)


def runs(label: str, start: float, seeds: range = range(5), slope: float = 1.0, **rest: Any) -> list[Any]:
    return [record(label, start + slope * BUMPS[seed % 5], seed, **rest) for seed in seeds]


def first() -> list[Any]:
    return runs("SGD", 0.90, role="base") + runs("SAM", 0.95, cost=2.0, slope=1.2) + runs("GAM", 0.93)


def second() -> list[Any]:
    """Another learning rate; SAM is worse, SGD the same, and ASAM takes GAM's place."""
    made = runs("SGD", 0.90, role="base", lr=0.05) + runs("SAM", 0.92, cost=2.0, lr=0.05) + runs("ASAM", 0.93, lr=0.05)
    for one in made:
        one["environment"] = {**one["environment"], "torch": "3"}
    return made


def found(one: list[Any], other: list[Any]) -> list[Any]:
    return pairs(summarise(one), summarise(other), METRIC)


def test_methods_in_both_are_paired_by_seed():
    sgd, sam = found(first(), second())
    assert (sgd.one.label, sam.one.label) == ("SGD", "SAM")
    assert sgd.difference.mean.value == 0 and sgd.verdict == "no difference seen"
    expected = mean_of([0.03 + 0.2 * bump for bump in BUMPS])
    assert sam.difference.mean.value == pytest.approx(expected.value, rel=1e-12)
    assert sam.difference.mean.error == pytest.approx(expected.error, rel=1e-9)
    assert sam.verdict == "better" and sam.difference.n == 5
    assert differing(sam) == {"lr": ("0.1", "0.05"), "torch": ("2", "3")}
    ones, others = summarise(first()), summarise(second())
    assert alone(ones, others, pairs(ones, others, METRIC)) == (["GAM"], ["ASAM"])
    assert sentence([sgd, sam], ("a", "b"), METRIC) == (
        "Better in a than in b: SAM, +3.04 points "
        + f"[+{100 * sam.difference.mean.low:.2f}, +{100 * sam.difference.mean.high:.2f}]; 1 not told apart."
    )


def test_only_the_seeds_of_both_count_and_other_data_are_not_compared():
    (sgd, sam) = found(first(), runs("SGD", 0.8, range(3, 9), role="base") + runs("SAM", 0.8, range(4, 9)))
    assert sorted(sgd.difference.by_seed) == [3, 4] and sorted(sam.difference.by_seed) == [4]
    assert found(first(), runs("SGD", 0.8, range(7, 9), role="base")) == []  # no seed in common
    changes: list[dict[str, Any]] = [{"data": "mnist"}, {"label_noise": 0.4}, {"share": 0.5}, {"method": "other"}]
    for change in changes:
        assert found(first(), runs("SAM", 0.8, **change)) == []
    assert len(found(first(), runs("SAM", 0.8, model="cnn"))) == 1  # another model is worth comparing


def test_each_row_is_paired_once_with_the_most_similar_one():
    other = runs("SAM", 0.5, lr=0.2, batch=8) + runs("SAM", 0.6, lr=0.2) + runs("SAM", 0.7, model="cnn")
    (pair,) = found(runs("SAM", 0.9), other)
    assert pair.other.group.recipe["lr"] == 0.2 and pair.other.group.recipe["batch"] == 32
    longer = [(f"SGD, {k}x longer", 4 * k) for k in (2, 3)]
    made = [r for label, epochs in longer for r in runs(label, 0.9, role="equal-cost", epochs=epochs)]
    assert [(p.one.label, p.other.label) for p in found(made, made[::-1])] == [(label, label) for label, _ in longer]


def test_no_conclusion_from_few_seeds_or_diverged_runs():
    names = "a", "b"
    assert sentence([], names, METRIC) == "a and b have no method with the same data and seeds in common."
    few = found(comparison(2), comparison(2))
    assert sentence(few, names, METRIC).startswith("Nothing can be said about a and b: fewer than 3 seeds")
    same = found(first(), first())
    assert sentence(same, names, METRIC).startswith("No method is told apart between a and b")
    lost = found(runs("SAM", 0.95), [*runs("SAM", 0.90, range(4), slope=1.2), diverged("SAM", 4)])
    assert lost[0].verdict == "1 diverged; the others: better" and not lost[0].judged
    assert "better" not in sentence(lost, names, METRIC).lower()


def test_both_are_on_one_page_with_the_differences_first():
    page = report(first(), against=second(), names=("runs/a", "runs/<b>"))
    assert page.count("runs/<b>") == 0
    places = [page.index(text) for text in ("<h1", 'id="differences"', 'id="problem-0"', 'id="problem-1"', "<footer")]
    assert places == sorted(places)
    assert "<title>Better in runs/a than in runs/&lt;b&gt;: SAM, +3.04 points" in page
    assert "Only in runs/a: GAM." in page and "Only in runs/&lt;b&gt;: ASAM." in page
    assert "lr 0.1 / 0.05, torch 2 / 3" in page
    assert "runs/a: digits, digits-mlp" in page and "runs/&lt;b&gt;: digits, digits-mlp" in page
    assert "no method with the same data" in report(first(), against=runs("SAM", 0.9, data="mnist"))


def test_the_differences_in_the_terminal():
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=160).print(difference_table(found(first(), second()), ("[a]", "b"), METRIC))
    text = out.getvalue()
    assert "[a] minus b" in text and "better, n = 5" in text and "lr 0.1 / 0.05" in text


def test_the_command_writes_one_page_with_both(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from steppe.cli.app import app
    from steppe.lab.records import write_record

    monkeypatch.chdir(tmp_path)
    for name, records in (("a", first()), ("b", second())):
        for one in records:
            keyed: Any = {**one, "key": f"{one['label']}-{one['recipe']['seed']}"}
            write_record(keyed, tmp_path / name)

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, ["report", *args], env={"COLUMNS": "160"})

    made = run("a", "--against", "b")
    assert (
        made.exit_code == 0 and "Better in a than in b: SAM" in made.stdout and "wrote a/difference.html" in made.stdout
    )
    assert 'id="differences"' in (tmp_path / "a" / "difference.html").read_text("utf-8")
    again = run("a", "--against", "b", "--out", "both.html", "--metric", "test_loss")
    assert again.exit_code == 0 and (tmp_path / "both.html").exists()
    wrong = {("a", "--against", "a"): "are the same runs", ("a", "--against", "c"): "c does not exist"}
    (tmp_path / "empty").mkdir()
    wrong["a", "--against", "empty"] = "there are no records in empty"
    for args, said in wrong.items():
        failed = run(*args)
        assert failed.exit_code != 0 and said in failed.output
