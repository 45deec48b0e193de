"""The page and its figures are made from the kept results and from nothing else."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from PIL import Image

from helpers.paper_records import CURVATURE, kept
from steppe.papers.figures import FIGURES, described, draw, drawable
from steppe.papers.plotting import FigureResults
from steppe.papers.registry import claims, experiments, find, trends
from steppe.papers.show import fair, lines, print_experiment
from steppe.papers.store import Results, results_folder

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def maker():
    spec = importlib.util.spec_from_file_location("make_papers", DOCS / "make_papers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trends_of(name: str):
    return [trend for trend in trends() if trend.experiment == name]


def test_the_pages_are_what_the_results_say():
    for place, text in maker().pages(Results.read()).items():
        assert (DOCS / place).read_text("utf-8") == text, "run python docs/make_papers.py"


def test_the_pages_include_every_figure_that_can_be_drawn():
    texts = [path.read_text("utf-8") for path in (DOCS / "papers").glob("*.md")]
    shown = [name for text in texts for name in re.findall(r"^<!-- paper: (.+) -->$", text, re.MULTILINE)]
    results = Results.read()
    assert sorted(shown) == sorted(name for name in FIGURES if drawable(name, results))


def test_each_statement_is_judged_once_and_what_was_not_run_is_folded_away():
    made = maker().pages(Results.read())
    everything = "\n".join(made.values())
    for trend in trends():
        assert everything.count(f"- {trend.text}: ") <= 2  # the words, and folded away the numbers behind them
    for place, text in made.items():
        for name in re.findall(r"^- (\S+/\S+) · ", text, re.MULTILINE):
            assert text.index("<summary>Not run</summary>") < text.index(f"- {name} · "), place


def test_questions_of_ours_are_not_counted_as_a_papers_statements():
    text = maker().pages(Results())["papers.md"]
    of_paper = [trend for trend in trends() if trend.experiment.startswith("s0/") and not trend.ours]
    ours = [trend.name for trend in trends() if trend.ours]
    assert "theorem-printed" in ours and "none-lost" in ours and len(of_paper) == 13
    assert "| [S0 · Generalization Aware Minimization](papers/s0.md) |  |  |  |  | 13 |" in text.splitlines()


def test_a_page_begins_with_how_many_statements_hold():
    made = maker().pages(Results.read())
    _, answer = made["papers/s0.md"].split("\n\n")[:2]
    rows = [line.split(" | ") for line in made["papers.md"].splitlines() if "papers/s0.md" in line]
    counts = [int(n) for n in re.findall(r"[:,] (\d+) ", answer)]
    assert counts == [int(n) for n in (cell.strip(" |") for cell in rows[0][1:]) if n]
    assert answer.startswith(f"**The paper's {sum(counts)} statements: ")
    assert "statements:" not in made["papers/extra.md"]


def test_every_claim_points_to_a_record_or_says_not_run():
    results = Results.read()
    rows = [line for e in experiments().values() for line in lines(e, results) if line.judged is not None]
    assert len(rows) == len(claims())
    for line in rows:
        assert line.judged is not None
        records = results.best(find(line.judged.claim.experiment), line.cell)[1].records
        text = line.texts()
        if line.ours is None:
            assert text[3] == "not run" and text[4] == "0"
            assert line.verdict in ("not run", "not reproduced") and (line.verdict == "not run") == (not line.diverged)
        else:
            assert records and line.ours.n >= 1 and ("to" in text[3] or "no interval" in text[3])


def test_kept_results_are_of_cells_that_exist():
    results, files = Results.read(), list(results_folder().glob("*.jsonl"))
    assert sorted(path.stem for path in files) == sorted(results.by_file) and len(files) > 10
    for path in files:
        experiment = next(e for e in experiments().values() if e.slug == path.stem)
        for runs in results.by_file[path.stem].values():
            for line in runs.values():
                assert line["scale"] in ("full", "small") and line["environment"]["torch"]
                group = results.of(experiment, line["cell"], line["scale"])
                assert line["key"] in [record["key"] for record in group.records]


def test_without_results_everything_is_not_run(tmp_path):
    text = "\n".join(maker().pages(Results()).values())
    assert "<!-- paper: " not in text and "ours only" not in text
    assert all(f"- {name} · " in text for name in experiments())
    assert not any(draw(name, Results(), tmp_path) for name in FIGURES)


METRICS = {"gamma": [0.2, 0.04], "cos": 0.95, "surrogate_gap": 0.01}
ENTRIES = {"frobenius": {"value": 5.0, "error": 0.1}, "top_values": [3.0, 2.0], "trace": {"value": 9.0, "error": 0.1}}
DRAWN = [name for name in FIGURES if find(name).compute is None and name != "s4/vit-small"]


@pytest.mark.parametrize("name", [*DRAWN[:3], *(pytest.param(name, marks=pytest.mark.slow) for name in DRAWN[3:])])
def test_figures_are_drawn_and_marked(name, tmp_path):
    cells = {cell.name: [0.7, 0.72] for cell in find(name).cells if not cell.name.endswith(("wd-1e-08", "wd-1e-06"))}
    results = kept(tmp_path, name, cells, metrics=METRICS, entries=ENTRIES, curvature=CURVATURE)
    path = draw(name, results, tmp_path)
    assert path is not None
    with Image.open(path) as picture:
        assert picture.info["Description"] == described(FigureResults(find(name), results))
        assert min(picture.size) > 50


def test_other_results_have_another_mark(tmp_path):
    marks = set()
    for number, values in enumerate(([0.7, 0.72], [0.7], [0.7, 0.73])):
        results = kept(tmp_path / str(number), "s2/fig6", {"rho/0.1/gnam": values})
        marks.add(described(FigureResults(find("s2/fig6"), results)))
    assert len(marks) == 3


@pytest.mark.parametrize("name", ["s0/fig4", "s1/fig3"])
def test_computed_figures(name, tmp_path, capsys):
    from steppe.lab.runner.jobs import Place
    from steppe.papers.run import plan, run
    from steppe.papers.store import collect

    experiment = find(name)
    run(plan(experiment, "smoke"), Place(tmp_path / "runs"))
    for path in (tmp_path / "runs").glob("*.json"):  # as if it had been run in full
        text = path.read_text("utf-8").replace("smoke", "full")
        path.with_name(path.name.replace("smoke", "full")).write_text(text, "utf-8")
    count = len(experiment.cells) * experiment.seeds
    assert collect(tmp_path / "runs", experiment, "full", tmp_path / "results") == (count, count)
    results = Results.read(tmp_path / "results")
    assert draw(name, results, tmp_path) is not None
    assert f"<!-- paper: {experiment.name} -->" in maker().section(experiment, results).splitlines()
    print_experiment(experiment, results)
    shown = capsys.readouterr().out
    assert trends_of(name)[0].text in shown and "not run" not in shown


def test_the_page_shows_ours_beside_the_papers(tmp_path):
    results = kept(tmp_path, "s0/table1", {"cifar10/cnn-5/gam": [0.690, 0.692, 0.694]})
    text = "\n".join(maker().pages(results).values())
    row = "| cifar10/cnn-5/gam | GAM | 69.40 ± 0.15 | 69.20 (68.70 to 69.70) | 3 | -1.0 s.e. | 10 | reproduced |"
    assert row in text.splitlines()
    assert "| [S0 · Generalization Aware Minimization](papers/s0.md) | 1 |  |  | 50 |" in text.splitlines()
    assert "svhn/mlp-3/gam" not in text and "50 numbers were not run. `steppe paper show s0/table1` lists them." in text


def test_an_interval_of_an_accuracy_ends_where_accuracies_do(tmp_path):
    results = kept(tmp_path, "s0/table1", {"mnist/cnn-3/gam": [0.97, 0.96, 0.08]})
    text = maker().section(find("s0/table1"), results)
    line = next(line for line in text.splitlines() if line.startswith("| mnist/cnn-3/gam | GAM | 96"))
    assert "| 67.00 (0.00 to 100.00) | 3 |" in line


def test_the_grid_is_printed_as_papers_do(tmp_path):
    cells = {"cifar10/cnn-5/gam": [0.690, 0.692, 0.694], "cifar10/cnn-5/sgd": [0.66], "fashion/mlp-3/gam": [0.9, 0.92]}
    results = kept(tmp_path, "s0/table1", cells)
    text = maker().section(find("s0/table1"), results).splitlines()
    assert "|  | cifar10/cnn-5 | fashion/mlp-3 |" in text
    assert "| gam | 69.20 ± 0.12 (3) / 69.40 | 91.00 ± 1.00 (2) |" in text
    assert "| sgd | 66.00 (1) / 66.33 | not run |" in text
    ran = next(line for line in text if " runs on " in line and "torch" in line)
    assert ran.startswith("- 6 runs on ") and ran.endswith(": 1.0 minutes.")
    assert not any(line.startswith("Over ") for line in text)  # one number that can be compared is no offset


def test_the_grid_says_which_columns_are_of_shorter_training(tmp_path):
    kept(tmp_path, "s3/table2", {"cifar10/sam": [0.7, 0.8], "svhn/sam": [0.9], "svhn/frob": [0.9]}, "small")
    results = kept(tmp_path, "s3/table2", {"cifar10-s/sam": [0.5, 0.6], "svhn/frob": [0.95]})
    text = maker().section(find("s3/table2"), results)
    lines = text.splitlines()
    assert "|  | cifar10, small scale | cifar10-s | svhn, partly small scale |" in lines
    assert any(line.startswith("| sam | 75.00 ± 5.00 (2) / 93.74 | 55.00 ± 5.00 (2) / 51.96 |") for line in lines)
    assert "Small scale: one epoch for every 5 of the paper's, on all training data." in text


def test_offset_over_a_table(tmp_path):
    cells = {
        f"cifar10/cnn-5/{row}": [v, v + 0.002, v + 0.004] for row, v in (("sgd", 0.68), ("gam", 0.70), ("crsam", 0.7))
    }
    text = maker().section(find("s0/table1"), kept(tmp_path, "s0/table1", cells))
    mean = (68.2 - 66.334 + 70.2 - 69.396 + 70.2 - 69.444) / 3
    assert f"Over 3 cells ours minus the paper's is {mean:+.2f} points on average, from +0.76 to +1.87." in text


def test_methods_against_the_base_that_cost_as_much(tmp_path):
    cells = {"adam": [0.68, 0.69, 0.70], "crsam": [0.71, 0.721, 0.732]}
    results = kept(
        tmp_path, "extra/equal-cost", cells, curvature={**CURVATURE, "sharpness": {"value": 0.2, "rho": 0.05}}
    )
    head, base, method = fair(find("extra/equal-cost"), results)
    assert head[-3:] == ("λ_max", "trace", "sharpness")
    curved = ("3 ± 0", "30 ± 0", "0.2 ± 0")
    assert base == ("Adam", "3", "69.00 (66.52 to 71.48)", "1x", "10", "", "base", *curved)
    gain = "+3.1 points (+2.85 to +3.35, n = 3) against Adam"
    assert method == ("CRSAM", "3", "72.10 (69.37 to 74.83)", "1x", "10", gain, "better", *curved)
    assert f"| {' | '.join(method)} |" in maker().section(find("extra/equal-cost"), results).splitlines()
    assert fair(find("extra/equal-cost"), Results()) == [] == fair(find("s0/table1"), results)


def test_at_small_scale_a_little_longer_is_as_long(tmp_path):
    """A tenth more than four epochs is four epochs: the same runs, which are in the table once."""
    cells = {"adam": [0.5, 0.51, 0.52], "sam": [0.6, 0.61, 0.62]}
    results = kept(tmp_path, "extra/equal-cost", cells, "small", curvature=CURVATURE)
    assert results.of(find("extra/equal-cost"), "adam-22", "small").records
    assert [row[0] for row in fair(find("extra/equal-cost"), results)] == ["method", "Adam", "SAM"]


def test_cells_that_are_other_tables_too_are_not_yet_a_figure(tmp_path):
    results = kept(tmp_path, "s0/table1", {"cifar10/cnn-5/gam": [0.7], "cifar10/cnn-5/sgd": [0.68]}, metrics=METRICS)
    assert drawable("s0/fig3", results) is None and draw("s0/fig3", results, tmp_path) is None
    assert drawable("s0/fig2", results) is not None
    shown = {name: maker().section(find(name), results) for name in ("s0/fig2", "s0/fig3")}
    assert [f"<!-- paper: {name} -->" in text for name, text in shown.items()] == [True, False]
