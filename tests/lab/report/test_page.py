"""The page as text; test_report_browser.py has it in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("scipy")
pytest.importorskip("rich.console")

from helpers.report_records import comparison, diverged, flat, many, printed, record
from steppe.lab.report import write_report
from steppe.lab.report.html import Markup, join, tag
from steppe.lab.report.page import report
from steppe.lab.statistics import mean_of, summarise

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


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", EVIL, title=EVIL).count("<script>") == 0
    assert tag("p", Markup("<b>x</b>"), None, class_="a b", hidden=True) == '<p class="a b" hidden><b>x</b></p>'
    assert join("a<", tag("br")) == "a&lt;<br>"


def test_text_from_records_is_escaped(tmp_path):
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
def test_the_page_is_self_contained(records, tmp_path):
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
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
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


def test_a_method_with_diverged_runs_is_not_marked_better():
    """Neither against the base nor at equal cost, where the verdict is on its other runs and has no mark."""
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


def test_recipes_seeds_and_versions_are_on_the_page():
    text = "".join(Reader(report(comparison(3))).text)
    for said in (
        "weight decay0.0005",
        "schedulecosine",
        "commit 0123456789",
        "12 runs: 4 recipes, 3 seeds",
        "parameters4810",
    ):
        assert said in text


def test_the_conclusion_is_the_title_unless_another_is_given():
    sentence = "SAM rho=0.1 is worth its cost: +1.60 points "
    page = report(comparison(3))
    assert f"<title>{sentence}" in page
    assert f'<h1 class="conclusion"><span>{sentence.replace(" points", chr(160) + "points")}' in page
    other = report(comparison(3), title="Mine")
    assert (
        "<title>Mine</title>" in other
        and "<h1>Mine</h1>" in other
        and f'<p class="conclusion">{sentence[:12]}' in other
    )
    assert "<title>There are no runs to show.</title>" in report([])
