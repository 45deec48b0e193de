"""The table, the page and the figures as text and files; the page in a browser is tested apart."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("scipy")
rich_console = pytest.importorskip("rich.console")

from helpers.report_records import comparison, diverged, flat, many, record  # noqa: E402
from steppe.lab.report import chart_sections, figures, table, write_report  # noqa: E402
from steppe.lab.report import formatting as w  # noqa: E402
from steppe.lab.report.chart_data import POINTS, charts, curve, gamma, polynomial, thinned  # noqa: E402
from steppe.lab.report.forest_plot import Scale, forest, scale_of  # noqa: E402
from steppe.lab.report.html import Markup, join, tag  # noqa: E402
from steppe.lab.report.page import report  # noqa: E402
from steppe.lab.report.run_details import shown  # noqa: E402
from steppe.lab.statistics import Difference, Mean, group_records, mean_of, summarise  # noqa: E402
from steppe.methods.gam import transformation  # noqa: E402

EVIL = '<script>alert("x")</script> & "quoted" \'too\''


class Reader(HTMLParser):
    """Tags in order, text, and a check that every element is closed where it should be."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def rows(*args, **settings) -> dict[str, Any]:
    return {row.label: row for row in summarise(*args, **settings)}


def printed(records, width=160):
    out = io.StringIO()
    rich_console.Console(file=out, width=width).print(table(records))
    return out.getvalue()


# Words


def test_a_row_in_a_sentence():
    sam, gam = rows(comparison(3))["SAM rho=0.1"], rows(comparison(3))["GAM T=2"]
    assert w.sentence(sam, "test_accuracy") == (
        "+2.02 points [+1.96, +2.07] over the base, 2.0× the gradients: better (n = 3). "
        "At equal cost +1.60 [+1.29, +1.91]: better (n = 3)."
    )
    assert w.sentence(gam, "test_accuracy").endswith("(n = 3). Not compared at equal cost.")


def test_sentences_say_what_is_not_known():
    one = [record("SGD", 0.9, 0, role="base"), record("SAM", 0.88, 0, cost=2.0), diverged("GAM", 0)]
    assert w.sentence(rows(one)["SAM"], "test_accuracy") == (
        "−2.00 points against the base, 2.0× the gradients: n too small to tell (n = 1). Not compared at equal cost."
    )
    assert w.sentence(rows(one)["GAM"], "test_accuracy") == "all diverged (1 of 1 runs)."
    assert w.base_sentence(rows(one)["SGD"], "test_accuracy") == "90.00 % test accuracy (n = 1), 400 gradients, 2 s."
    some = [record("SGD", 0.9 + s / 100, s, role="base") for s in range(4)]
    some += [record("SAM", 0.8 + s / 90, s) for s in range(3)] + [diverged("SAM", 3)]
    assert w.sentence(rows(some)["SAM"], "test_accuracy").startswith("1 of 4 runs diverged; the others: −9.8")
    assert w.verdict(rows(some)["SAM"]) == "1 of 4 diverged; the others: worse"


def test_a_correction_that_changes_the_word_is_named():
    base = [0.90, 0.91, 0.92, 0.93]
    records = [record("SGD", a, s, role="base") for s, a in enumerate(base)]
    gain = [0.010, 0.016, 0.004, 0.012]  # p = 0.03 alone
    for k in range(3):
        records += [record(f"M{k}", a + gain[(s + k) % 4], s) for s, a in enumerate(base)]
    row = rows(records)["M0"]
    assert row.difference.mean.low > 0
    assert row.difference.p < 0.05 < row.difference.adjusted == pytest.approx(3 * row.difference.p)
    assert ": no difference seen (n = 4, after correction for 3 comparisons)" in w.sentence(row, "test_accuracy")


def test_numbers_as_people_write_them():
    assert w.mean(Mean(3, 0.95347, 0.00148), "test_accuracy") == "95.35 ± 0.15"
    assert w.mean(Mean(3, 2.7223, 0.0783)) == "2.722 ± 0.078"
    assert w.mean(Mean(3, -120.4, 35.0)) == "−120 ± 35"
    assert w.mean(Mean(1, 2.5)) == "2.5"
    assert w.mean(None) == "–"
    assert [w.signed_value(x, "accuracy") for x in (0.011, -0.011, 0.0, -1e-9)] == ["+1.10", "−1.10", "0.00", "0.00"]
    assert [w.p_value(p) for p in (None, 1e-5, 0.0123, 0.25)] == ["–", "< 0.001", "0.012", "0.25"]
    assert [w.duration(x) for x in (0.13, 42.0, 600.0, 36000.0)] == ["0.13 s", "42 s", "10.0 min", "10.0 h"]
    assert w.count(12345) == "12\u202f345"
    assert [shown(x) for x in (None, True, 5e-4, 123456, {"a": 1.0})] == [
        "none",
        "yes",
        "0.0005",
        "123\u202f456",
        "a=1",
    ]


# The table of the terminal


def test_the_terminal_table_shows_everything():
    said = printed([*comparison(3), diverged("SAM rho=0.1", 3, "loss became NaN in epoch 3", cost=2.0)])
    lines = said.splitlines()
    first = next(k for k, line in enumerate(lines) if line.lstrip().startswith("SAM"))
    plain = [" ".join(line.split()) for line in lines[first : first + 2]]
    assert plain[0] == "SAM rho=0.1 96.18 ± 0.13 2.0× +2.02 [+1.96, +2.07] +1.60 [+1.29, +1.91]"
    assert plain[1] == "n = 3, 1 diverged 2.0× 1 of 4 diverged; the others: better the others: better"
    assert "SAM rho=0.1: loss became NaN in epoch 3" in said
    assert "Holm" in said


def test_the_table_fits_an_ordinary_terminal():
    lines = printed(comparison(3), width=80).splitlines()
    first = next(k for k, line in enumerate(lines) if line.lstrip().startswith("SAM"))
    assert lines[first].endswith("+1.60 [+1.29, +1.91]") and lines[first + 1].split()[-2:] == ["better", "better"]


@pytest.mark.parametrize("width", range(40, 120, 5))
def test_nothing_is_cut_off_on_a_narrow_terminal(width):
    """Every word of the wide table is there, in columns that fold."""
    records = [*comparison(3), diverged("SAM rho=0.1", 3, "loss became NaN", cost=2.0), diverged("GNAM", 0)]
    letters = [sorted("".join(printed(records, wide).replace("─", "").split())) for wide in (200, width)]
    assert letters[0] == letters[1]


def test_labels_fold_before_numbers():
    records = [record("A label of many words", 0.9, s, cost=2.0) for s in range(3)]
    said = printed(comparison(3) + records, width=80)
    assert "+1.60 [+1.29, +1.91]" in said and "A label of\n" in "\n".join(x[:14].rstrip() for x in said.splitlines())


def test_labels_are_not_markup_in_the_terminal():
    assert "[red]x[/red]" in printed([record("[red]x[/red]", 0.9, 0), diverged("y", 0, "[bold]why[/bold]")])
    assert "[bold]why[/bold]" in printed([diverged("y", 0, "[bold]why[/bold]")])


def test_problems_are_apart_in_the_terminal():
    said = printed([record("SGD", 0.9, 0, role="base"), record("SGD", 0.5, 0, role="base", data="mnist")])
    assert (
        said.index("digits, digits-mlp") < said.index("90.00") < said.index("mnist, digits-mlp") < said.index("50.00")
    )


# HTML


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", EVIL, title=EVIL).count("<script>") == 0
    assert tag("p", Markup("<b>x</b>"), None, class_="a b", hidden=True) == '<p class="a b" hidden><b>x</b></p>'
    assert join("a<", tag("br")) == "a&lt;<br>"


def test_everything_foreign_is_escaped(tmp_path):
    records = [record(EVIL, 0.9, s, data=EVIL, curvature=flat()) for s in range(3)]
    records += [record("SGD", 0.8, s, role="base", data=EVIL) for s in range(3)]
    records += [diverged("SAM", 0, EVIL, data=EVIL)]
    for one in records:
        one["environment"] = {"steppe": EVIL, "commit": EVIL, EVIL: EVIL}
        one["method"]["name"] = EVIL
    page = report(records, command=EVIL, title=EVIL)
    assert "<script>alert" not in page
    assert len(Reader(page).all("script")) == 2  # the data and our own
    assert "".join(Reader(page).text).count('<script>alert("x")</script>') > 5  # shown as it was written


@pytest.mark.parametrize(
    "records",
    [
        [],
        comparison(3),
        comparison(1),
        many(40),
        [record("SGD", 0.9, 0, role="base")],
        [diverged("SGD", s, role="base") for s in range(2)] + [diverged("SAM", s) for s in range(2)],
        [record("SGD", 0.9, 0, role="base", status="running", reached=1)],
        [record("SGD", 0.9, 0, role="base"), record("SGD", 0.5, 0, role="base", data="mnist")],
        [{**record("SGD", 0.9, 0, role="base"), "epochs": [], "environment": None}],
    ],
    ids=["none", "three", "one seed", "forty", "one run", "all diverged", "unfinished", "two problems", "bare"],
)
def test_the_page_is_whole_and_asks_for_nothing(records, tmp_path):
    path = write_report(records, tmp_path / "new" / "report.html", command="steppe compare --seeds 3")
    page = path.read_text(encoding="utf-8")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    reader = Reader(page)
    for name, attribute in (("link", "href"), ("img", "src"), ("script", "src"), ("iframe", "src")):
        assert not any(attribute in attributes for attributes in reader.all(name))
    addresses = set(re.findall(r"[a-z]+://[^\s\"'<>)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, which nothing fetches
    assert "@import" not in page and "url(" not in page.replace("url(#", "")
    assert "steppe compare --seeds 3" in "".join(reader.text)
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in reader.tags:
        assert attributes.get("aria-labelledby", ids[0]) in ids


odd_numbers = st.one_of(st.floats(0, 1), st.sampled_from([None, "nan", "inf", 0.0, 1e-300, -1.0]))


@st.composite
def odd_records(draw):
    """Runs as they may be found: half done, broken, without this or that."""
    made = []
    for _ in range(draw(st.integers(0, 6))):
        role = draw(st.sampled_from(["base", "method", "equal-cost"]))
        label = draw(st.sampled_from(["SGD", "SAM", "<i>", "]]>", "a\u2028b"]))
        one = record(
            label, 0.9, draw(st.integers(0, 2)), role=role, cost=draw(st.sampled_from([1.0, 2.0])), gamma=[0.1]
        )
        one["status"] = draw(st.sampled_from(["done", "diverged", "running"]))
        one["curvature"] = draw(st.sampled_from([None, {}, flat(), {"top": {"value": "nan"}}, {"landscape": None}]))
        for place in [one["final"], *one["epochs"]]:
            for name in draw(st.sets(st.sampled_from(["test_accuracy", "test_loss", "seconds", "gradients"]))):
                place[name] = draw(odd_numbers)
        if draw(st.booleans()):
            one["final"] = None
        if draw(st.booleans()):
            one["epochs"] = one["epochs"][: draw(st.integers(0, 2))]
        made.append(one)
    return made


@settings(max_examples=30, deadline=None)
@given(odd_records(), st.sampled_from(["test_accuracy", "test_loss", "top", "seconds"]))
def test_no_record_breaks_the_page(records, metric):
    page = report(records, metric=metric)
    reader = Reader(page)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    problems = json.loads(data)
    labels = [row.label for row in summarise(records, metric)]
    assert [group["label"] for one in problems for group in one["groups"]] == labels
    assert all(label in "".join(reader.text) for label in labels)
    assert printed(records)


def test_a_page_that_could_not_be_written_leaves_the_old_one_alone(tmp_path):
    resource = pytest.importorskip("resource")
    path = write_report(comparison(2), tmp_path / "report.html")
    old = path.read_bytes()
    (tmp_path / "report.html.part").write_text("another process's")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as if the disk were full
    try:
        with pytest.raises(OSError, match="too large"):
            write_report(comparison(3), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == old and (tmp_path / "report.html.part").read_text() == "another process's"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "report.html.part"]


def test_only_our_script_may_run():
    page = report(comparison(3))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    script = re.findall(r"<script>(.*)</script>", page, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.replace("&#x27;", "'") == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


def test_the_answer_comes_first_and_cautions_are_plain():
    text = " ".join("".join(Reader(report(comparison(3))).text).split())
    assert text.index("SAM and GAM on digits") < text.index("better") < text.index("Results")
    single = "".join(Reader(report(comparison(1))).text)
    assert "One seed: there are no intervals and n is too small to tell methods apart." in single
    assert "One run each, so there are no bands." in single
    lost = "".join(Reader(report([record("SGD", 0.9, 0, role="base"), diverged("SAM", 0, "loss became NaN")])).text)
    assert "1 of 2 runs diverged. Means are over the other runs" in lost and "loss became NaN" in lost
    nothing = "".join(Reader(report([diverged("SGD", 0, role="base")])).text)
    assert "1 of 1 runs diverged. There is nothing to compare" in nothing and "No run finished." in nothing
    assert "1 s of training" in nothing  # two epochs of half a second
    assert "No base was run" in "".join(Reader(report([record("SAM", 0.9, 0)])).text)


def test_what_survived_of_a_method_is_not_called_better_in_the_table():
    """Neither against the base nor at equal cost, where it is said of the others alone and has no mark."""
    records = [*comparison(3), diverged("SAM rho=0.1", 3)]
    reader = Reader(report([r for r in records if r["label"] != "GAM T=2"]))
    assert "1 of 4 diverged; the others: better" in reader.text and "the others: better, n = 3" in reader.text
    marks = [a["class"] for a in reader.all("span") if (a.get("class") or "").startswith("verdict")]
    assert marks[-2:] == ["verdict lost", "verdict open"]


def test_the_table_is_a_table():
    reader = Reader(report(comparison(3)))
    heads = [a for a in reader.all("th") if a.get("scope") == "col" and a.get("aria-sort")]
    assert {a["aria-sort"] for a in heads} == {"none"}
    assert len([a for a in reader.all("th") if a.get("scope") == "row" and "data-value" in a]) == 2 * 4
    assert len(reader.all("caption")) == 3
    values = [float(a["data-value"]) for a in reader.all("td") if a.get("class") == "number" and a["data-value"]]
    assert pytest.approx(mean_of([0.94, 0.944, 0.941]).value, rel=1e-15) in values


def test_several_problems_begin_with_an_overview():
    second = [{**r, "recipe": {**r["recipe"], "data": "mnist"}} for r in comparison(2) if r["label"] != "GAM T=2"]
    reader = Reader(report([*comparison(3), *second]))
    assert [a["href"] for a in reader.all("a")] == ["#problem-0", "#problem-1"]
    text = "|".join(part.strip() for part in reader.text)
    assert "method|digits, digits-mlp|mnist, digits-mlp|SGD|94.17 ± 0.12|94.20 ± 0.20|" in text
    assert "GAM T=2|95.50 ± 0.00|–|" in text
    marks = [a.get("class") for a in reader.all("span") if a.get("title")]
    assert marks == ["open", "open", "better", "open", "better", "open", "better"]  # two seeds tell nothing


def test_what_was_run_is_all_there():
    text = "".join(Reader(report(comparison(3))).text)
    for said in (
        "weight decay0.0005",
        "schedulecosine",
        "commit 0123456789",
        "12 runs: 4 recipes, 3 seeds",
        "parameters4810",
    ):
        assert said in text


# What charts are drawn from


def test_curves_are_means_with_intervals_at_epochs_all_finished_runs_have():
    records = [record("SAM", a, s, cost=2.0) for s, a in enumerate((0.8, 0.9, 0.94))]
    records.append(diverged("SAM", 3, cost=2.0))
    (group,) = group_records(records)
    points = curve(group, "test_error")
    expected = mean_of([100 * (1 - r["epochs"][1]["test_accuracy"]) for r in records[:3]])
    assert len(points) == 4
    assert points[1] == pytest.approx([2, 400, 2.0, expected.value, expected.low, expected.high], rel=1e-5)
    data = charts(summarise(records), "test_accuracy")["groups"][0]
    assert [len(one) for one in data["broken"]["test_loss"]] == [2]
    assert list(data["curves"]) == ["test_error", "test_loss", "train_loss", "surrogate_gap"]


def test_one_seed_gives_curves_without_bands():
    (group,) = group_records([record("SAM", 0.9, 0)])
    assert [point[4:] for point in curve(group, "test_loss")] == [[None, None]] * 4


def test_gamma_and_its_polynomial():
    (group,) = group_records([record("GAM", 0.9, s, gamma=[0.2 + s / 10, 0.05], curvature=flat()) for s in range(2)])
    found: Any = gamma(group)
    assert found["last"] == [[0.2, 0.05], [0.3, 0.05]]
    assert found["largest"] == 2.0
    assert [point[3] for point in found["curves"][0]] == pytest.approx([0.0625, 0.125, 0.1875, 0.25])
    for coefficients, points in zip(found["last"], found["polynomials"], strict=True):
        grid = torch.tensor([x for x, _ in points], dtype=torch.float64)
        assert [y for _, y in points] == pytest.approx(transformation(coefficients, grid).tolist(), rel=1e-5)
    assert polynomial([0.5, 2.0], 3.0) == 3 + 0.5 * 9 + 2 * 27
    assert gamma(group_records([record("SAM", 0.9, 0)])[0]) is None


def test_coefficients_of_normalised_directions_are_of_no_polynomial():
    def page(method: str, coefficients: list[float]) -> tuple[int, bool]:
        records = [record("GAM", 0.9, s, gamma=coefficients, method=method) for s in range(2)]
        (row,) = summarise(records)
        section = str(chart_sections.coefficients(0, [row]))
        found: Any = gamma(row.group)
        assert len(found["curves"]) == len(coefficients) and "Coefficients" in section
        return len(found["polynomials"]), "Polynomial" in section

    assert page("gam", [0.2, 0.05]) == (2, True)
    assert page("gam:normalize=true", [0.2, 0.05]) == (0, False)
    assert page("every:k=2,method=(gam:normalize=true)", [0.2, 0.05]) == (0, False)
    assert page("gam:T=1,normalize=true", [0.2]) == (2, True)  # the first direction is as long as it is


def test_numbers_that_are_none_do_not_break_the_charts():
    one = record("SAM", 0.9, 0, curvature=flat())
    one["curvature"]["landscape"]["loss"][0][0] = "inf"
    one["curvature"]["density"]["density"][3] = "nan"
    one["epochs"][1]["test_loss"] = "nan"
    data = charts(summarise([one]), "test_accuracy")
    json.dumps(data, allow_nan=False)
    group = data["groups"][0]
    assert group["landscape"]["loss"][0][0] is None
    assert len(group["density"]["points"]) == 42
    assert [point[0] for point in group["curves"]["test_loss"]] == [1, 3, 4]


def test_long_curves_are_thinned_and_keep_their_ends():
    points = thinned(list(range(1001)))
    assert (len(points), points[0], points[-1]) == (POINTS, 0, 1000)
    assert points == sorted(set(points))
    assert thinned([1, 2, 3]) == [1, 2, 3]


def test_a_small_picture_of_a_difference():
    def against(value, low=None, high=None):
        return Difference("SGD", Mean(3, value, 0.1, low, high), 0.1)

    scale = Scale(2.0)
    assert [scale.at(x) for x in (-2, 0, 1, 5)] == [3.6, 60.0, 88.2, 116.4]
    assert (
        scale_of([against(0.01, -0.01, 0.03), against(0.02, 0.0, 0.04), against(-0.9, -1.0, -0.8), None]).reach == 0.04
    )
    drawn = forest(against(1.0, 0.0, 2.0), scale)
    assert 'cx="88.2"' in drawn and 'x1="60.0" x2="116.4"' in drawn
    assert 'class="outside"' in forest(against(5.0), scale)
    assert scale_of([]).reach == 1.0
    assert scale_of([against(0.0)]).reach == 1.0


# Figures


@pytest.mark.parametrize("records", [comparison(3), comparison(1), [record("SGD", 0.9, 0, role="base")]])
def test_figures_show_what_the_table_says(records):
    pytest.importorskip("matplotlib")
    summary: list[Any] = summarise(records)
    axes: Any = figures.cost_figure(records).axes[0]
    drawn = {round(float(y), 6) for line in axes.lines for y in line.get_ydata()}
    assert {round(100 * row.mean.value, 6) for row in summary} <= drawn
    axes = figures.curves_figure(records, "test_error").axes[0]
    expected = [point[3] for point in curve(summary[0].group, "test_error")]
    assert list(axes.lines[0].get_ydata()) == expected


def test_many_curves_have_their_last_interval_beside_them():
    pytest.importorskip("matplotlib")
    records = many(6)
    axes: Any = figures.curves_figure(records, "test_error").axes[0]
    assert not axes.collections  # no bands
    bars = [list(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) == 2]
    assert bars == [curve(row.group, "test_error")[-1][4:] for row in summarise(records)]
    assert len(figures.curves_figure(comparison(3)).axes[0].collections) == 3


def test_equal_costs_stand_side_by_side():
    assert figures._side_by_side([70.0, 140.0, 140.0, 140.0]) == [70.0, 140.0, 142.0, 138.0]


def test_a_failure_is_an_arrow_at_the_edge():
    pytest.importorskip("matplotlib")
    assert figures.outliers([0.95, 0.96, 0.94, 0.1]) == {0.1}
    assert figures.outliers([0.95, 0.1]) == set()
    axes: Any = figures.cost_figure([*many(4), record("Lost", 0.1, 0)]).axes[0]
    assert axes.get_ylim()[0] > 92
    (mark,) = [line for line in axes.lines if line.get_label() == "Lost (10.00)"]
    assert list(mark.get_ydata()) == [0.02]


def test_figures_are_the_same_file_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    first, second = (figures.write_figures(comparison(2), tmp_path / name) for name in "ab")
    assert [p.name for p in first] == ["cost.png", "cost.svg", "curves.png", "curves.svg"]
    assert all(p.stat().st_size > 1000 for p in first)
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
