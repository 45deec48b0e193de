"""The page about the self-tuned radius agrees with the records of the study."""

from __future__ import annotations

import json
import re
from statistics import mean, stdev

import pytest

import steppe
from helpers.pages import DOCS, ROOT, making

page = making("radius_page")
TEXT = " ".join((DOCS / "radius.md").read_text("utf-8").split())
ROWS = {(row.regime, row.epochs): row for row in page.rows()}


def test_the_table_has_a_row_for_each_regime_of_the_records():
    lines = page.table().splitlines()
    assert lines[0] == page.counts()
    body = [line for line in lines if line.startswith("| ")][1:]
    assert len(body) == len(ROWS) >= 34 and {line.count("|") for line in body} == {8}
    names = {record["regime"] for record in page.records() if page.shipped(record["candidate"])}
    assert {regime for regime, _ in ROWS} == names


def test_rows_are_what_the_study_has_written():
    """Three rows as findings.md has them."""
    row = ROWS["cifar-40", 20]
    assert (page.cell(row.base), page.cell(row.gap), row.best) == ("37.4 ± 0.2", "62.9 ± 0.3", "1")
    assert row.seeds == (200, 201, 202, 203, 204, 205) and row.judged(row.gap) == (True, True) and not row.turns
    row = ROWS["digits-tenth-sgd", 40]
    assert row.seeds == tuple(range(500, 524)) and (page.cell(row.base), page.cell(row.turns)) == (
        "90.6 ± 0.1", "90.1 ± 0.2"
    )  # fmt: skip
    assert row.judged(row.turns) == (False, False) and row.judged(row.gap) == (False, True)
    row = ROWS["digits-60-sgd", 40]
    assert (page.cell(row.turns), page.cell(row.sam["0.2"]), row.best) == ("87.5 ± 0.3", "85.8 ± 0.6", "0.2")
    assert page.name_of("digits-60-sgd") == ("digits, MLP", "60 % wrong labels", "SGD")
    assert page.name_of("resnet-augmented")[0] == "resnet"  # a regime that is still to come


def test_the_form_in_turns_is_that_of_the_method():
    """The study's form has the numbers of GapSAM's source: leap, eighth and quarter."""
    good = "window times=2 pass_steps=21 leap=2.0 quarter=0.125 half=0.25 hold=64 scheme=double"
    assert page.in_turns(good) and not page.shipped(good)
    for other in (good.replace("2.0", "4.0"), good + " offset=False", good.replace("window", "gap")):
        assert not page.in_turns(other)
    method = steppe.GapSAM(epoch_steps=100, period=1)
    does = {method._update(step) for step in range(700, 800)}
    assert does == {"begin", "measure"}, "epoch 8: the first eighth of the turn of epochs 8 to 15"
    assert {method._update(step) for step in range(800, 900)} == {"grow"}
    assert {method._update(step) for step in range(900, 1500)} == {"move"} and method._update(1500) == "begin"


def test_the_page_says_how_often_the_goal_is_reached():
    near, rows, safe, again = page.reached("turns", "digits")
    assert (near, safe) == (20, 20) and rows == again == 24
    assert f"in {near} of {rows} regimes, and 0.2 points above it on average" in TEXT
    own = {key: row for key, row in ROWS.items() if row.turns and "digits" in key[0]}
    gains = {key: mean(row.turns) - mean(row.sam[row.best]) for key, row in own.items()}
    assert round(mean(gains.values()), 1) == 0.2
    fixed = {rho: sum(row.judged(row.sam[rho])[0] for row in own.values()) for rho in page.GRID}
    assert max(fixed.values()) == 15 and "No fixed radius is within it in more than 15" in TEXT
    same = sum(row.judged(row.gap)[0] for row in own.values())
    assert same == 10 and "tolerance in 10 of the 24 regimes, with others in turns in 20" in TEXT
    below = {key: mean(row.base) - mean(row.turns) for key, row in own.items()}
    unsafe = {key for key, row in own.items() if not row.judged(row.turns)[1]}
    assert {(round(min(below[k] for k in unsafe), 1), round(max(below[k] for k in unsafe), 1))} == {(0.4, 0.6)}
    assert len(unsafe) == again - safe and "In 4 regimes it is below its base, by 0.4 to 0.6 points" in TEXT
    assert unsafe == {
        ("digits-clean-adam", 20), ("digits-clean-adam", 40), ("digits-tenth-sgd", 40), ("digits-tenth-adam", 120)
    }  # fmt: skip
    tenth = {key: -gain for key, gain in gains.items() if "tenth" in key[0]}
    assert f"up to {max(tenth.values()):.1f} points below the best radius. In two of six" in TEXT
    in_tenth = sorted((below[key] for key in tenth), reverse=True)[:3]
    assert "by {2:.1f} and {1:.1f} points; in a third by {0:.1f}".format(*in_tenth) in TEXT
    best = max(mean(ROWS[key].sam[ROWS[key].best]) - mean(ROWS[key].base) for key in tenth)
    assert f"gains at most {best:.1f} there" in TEXT
    adam = [below["digits-clean-adam", epochs] for epochs in (20, 40)]
    assert "{:.1f} points below the base with clean labels after 20 epochs, {:.1f} after 40".format(*adam) in TEXT
    late = {round(-gains[f"digits-{noise}-adam", 120], 1) for noise in (40, 60)}
    assert late == {0.4} and "with wrong labels it is 0.4 points below the best radius" in TEXT


def test_other_pages_say_the_same():
    names = ("choose.md", "../README.md", "../CHANGELOG.md")
    said = {name: " ".join((DOCS / name).read_text("utf-8").split()) for name in names}
    near, rows, _, _ = page.reached("turns", "digits")
    assert f"level with the best of six radii in {near} of {rows} regimes" in said["choose.md"]
    assert f"reaches {mean(ROWS['cifar-40', 20].gap):.1f} % on the first (n = 6, other seeds)" in said["choose.md"]
    vit = ROWS["fashion-clean-adamw", 30]
    accuracies = [mean(values) for values in (*(vit.sam[rho] for rho in ("0.02", "0.5", "1")), vit.base)]
    words = "reaches {:.1f} % with ρ = 0.02, {:.1f} % with 0.5 and {:.1f} % with 1; AdamW alone reaches {:.1f} %"
    assert (
        words.format(*accuracies) in said["choose.md"]
        and f"and {mean(vit.turns):.1f} % on the second" in said["choose.md"]
    )
    assert f"level with the best of six radii in {near} of {rows} regimes of digits" in said["../CHANGELOG.md"]
    assert (
        f"level with the best of six radii in {near} of {rows} regimes of scikit-learn's digits" in said["../README.md"]
    )
    own = " ".join((steppe.GapSAM.__doc__ or "").split())
    assert f"or one standard error of the best of six fixed radii in {near} of {rows} regimes, and 0.2" in own


def test_the_page_says_what_mnist_says():
    of = {
        (r["candidate"].split()[0], r["candidate"].split()[1]): r["accuracy"]["30"]
        for r in page.records()
        if r["regime"] == "mnist-40"
    }
    turns = next(values for (kind, _), values in of.items() if kind == "window")
    best = max(mean(values[:3]) for (kind, word), values in of.items() if kind == "sam" and word != "rho=0")
    base = mean(of["sam", "rho=0"][:3])
    said = f"in turns {mean(turns):.1f} % (n = 3), the best radius {best:.1f} % on these seeds, the base {base:.1f} %"
    assert len(turns) == 3 and said in TEXT


def test_only_the_shipped_form_is_in_the_table():
    assert page.shipped("gap rate=0.2 times=2 start=0.001 hold=500 draw=100 scheme=double")
    for other in ("gap rate=0.2 times=1 start=0.001 hold=500", "gap rate=0.2 times=2 start=0.001 gate=True hold=64"):
        assert not page.shipped(other)
    assert not page.shipped("gap rate=0.2 times=2 start=0.001 hold=-1")
    assert page.shipped("gap rate=0.2 times=2 start=0.001 cap=0.8 hold=500")
    assert not page.shipped("gap rate=0.2 times=2 start=0.001 cap=0.5 hold=500")
    method = steppe.GapSAM()
    assert {f"rate={method.rate:g}", f"times={method.times:g}", f"start={method.least:g}"} == page.SHIPPED
    assert f"cap={method.ceiling:g}" == page.CEILING


def test_the_page_says_what_the_records_say():
    falls = re.search(
        r"MLP-3 with 40 % wrong labels\*\*: ([\d.]+) % after 10 epochs, ([\d.]+) % after 20. Without .* was ([\d.]+) %",
        TEXT,
    )
    early, late = (ROWS["mlp3-40", epochs] for epochs in (10, 20))
    assert falls is not None
    assert [float(n) for n in falls.groups()] == [round(mean(v), 1) for v in (early.gap, late.gap, late.without)]
    assert "four of five trainings fell" in TEXT
    assert sum(after < before - 2 for before, after in zip(early.without, late.without, strict=True)) == 4
    for (regime, _), row in ROWS.items():
        if regime in ("cifar-clean", "cifar-40"):
            assert mean(row.gap) > max(mean(values) for values in row.sam.values())


def test_the_page_says_what_the_map_says():
    frontier, said = making("frontier"), " ".join(TEXT.split())
    tables = {name: frontier.table_of(name) for name in ("cifar-clean", "cifar-40", "cifar-tenth", "resnet-plain")}
    gains = [100 * tables[name].row("gapsam").gain.mean.value for name in ("cifar-clean", "cifar-40")]
    assert "by {:.1f} points with clean labels and by {:.1f} with 40 % wrong ones (n = 10,".format(*gains) in said

    def accuracy(name, cell):
        mean = tables[name].row(cell).group.mean("test_accuracy")
        return f"{100 * mean.value:.1f}", f"{100 * mean.value:.1f} ± {100 * mean.error:.1f}"

    plain = [accuracy("resnet-plain", cell)[0] for cell in ("gapsam", "sam", "base-1")]
    assert "({} and {} %, SGD {} %; n = 3)".format(*plain) in said
    small = [accuracy("cifar-tenth", cell) for cell in ("gapsam", "base-1", "sam")]
    assert f"always it is {small[0][1]} % (n = 10)" in said
    by_seed = {
        cell: {
            run["seed"]: 100 * run["final"]["test_accuracy"] for run in tables["cifar-tenth"].row(cell).group.records
        }
        for cell in ("gapsam-turns", "base-1", "sam")
    }
    turns, adam, sam = by_seed.values()
    over, under = [turns[seed] - adam[seed] for seed in turns], [sam[seed] - turns[seed] for seed in turns]
    found = (
        f"{_with_error(list(turns.values()))} %, {_with_error(over)} points above Adam and {_with_error(under)} below"
    )
    assert f"{found} SAM with ρ = 1 (n = {len(turns)})" in said
    runs = tables["cifar-tenth"].row("gapsam").group.records
    assert {run["train_examples"] for run in runs} == {4900} and len(runs) == 10


def test_the_page_says_what_the_transformer_says():
    clean, noisy = (ROWS[f"fashion-{labels}-adamw", 30] for labels in ("clean", "40"))
    assert {len(values) for row in (clean, noisy) for values in (row.turns, row.gap, row.base, *row.sam.values())} == {
        5
    }
    below = [mean(row.sam[row.best]) - mean(row.turns) for row in (clean, noisy)]
    above = [mean(row.turns) - mean(row.base) for row in (clean, noisy)]
    said = "GapSAM is {:.1f} and {:.1f} points below the best radius, and {:.1f} and {:.1f} above its base"
    assert said.format(*below, *above) in TEXT
    assert (clean.best, noisy.best, ROWS["cifar-40", 20].best) == ("0.02", "0.05", "1")  # 50 and 20 times smaller
    assert clean.judged(clean.turns) == (True, True) and noisy.judged(noisy.turns) == (False, True)
    shown = page.cell(noisy.turns), page.cell(noisy.sam["0.05"])
    assert "{} %, SAM with ρ = 0.05 {} %".format(*shown) in TEXT
    regimes = making("regimes")
    curves = regimes.study("vit")["fashion-40-adamw", "longer"]
    best = max((values for mark, values in curves.items() if "averaged" in mark), key=sum)
    assert f"AdamW averaged and stopped early has {page.cell(best)} %" in TEXT
    for name in ("vit-40", "vit-clean"):
        row = regimes.rows()[name]
        assert row.gain.against == row.gap.against == "AdamW, 2x longer, EMA 0.99, stopped early"
        assert row.gain.verdict == row.gap.verdict == "no difference seen"


def test_the_page_says_what_mlp_3_says():
    clean, noisy = (ROWS[f"fashionmlp-{labels}-adam", 60] for labels in ("clean", "40"))
    lists = [values for row in (clean, noisy) for values in (row.turns, row.gap, row.base, *row.sam.values())]
    assert {len(values) for values in lists} == {5} and len(clean.sam) == len(noisy.sam) == 6
    assert clean.judged(clean.turns) == noisy.judged(noisy.turns) == (True, True)
    best = [mean(row.sam[row.best]) for row in (clean, noisy)]
    numbers = [mean(clean.turns), mean(noisy.turns), *best, mean(clean.base), mean(noisy.base)]
    assert (
        "({:.1f} and {:.1f} %, the best radius {:.1f} and {:.1f}, Adam {:.1f} and {:.1f}; n = 5)".format(*numbers)
        in TEXT
    )
    early = next(r["accuracy"] for r in page.records() if (r["regime"], r["candidate"]) == (noisy.regime, "early"))
    mark = max((mark for mark in early if "averaged" in mark), key=lambda mark: sum(early[mark]))
    turns, always, sam = (page.cell(values) for values in (noisy.turns, noisy.gap, noisy.sam[noisy.best]))
    assert f"in turns {turns} %, the same 100 held out always {always} %, though" in TEXT
    assert (
        f"the best radius, {sam} %. Adam averaged and stopped at epoch {mark.split()[0]} has {page.cell(early[mark])} %"
        in TEXT
    )
    curve = next(r["rho"] for r in page.records() if r["regime"] == noisy.regime and page.in_turns(r["candidate"]))
    assert f"ρ falls from {curve[32]:.1f} to {min(curve[32:48]):.1f}" in TEXT
    relay = next(r["accuracy"]["60"] for r in page.records()
                 if r["regime"] == noisy.regime and r["candidate"].startswith("relay"))  # fmt: skip
    assert f"mend that ({page.cell(relay)} %)" in TEXT
    rows = making("regimes").rows()
    assert rows["mlp-clean"].gap.verdict == "better"
    assert rows["mlp-40"].gap.verdict == rows["mlp-40"].gain.verdict == "worse"
    assert "with an MLP more than SAM and GapSAM" in " ".join((DOCS / "choose.md").read_text("utf-8").split())


def test_the_page_says_what_ten_thousand_examples_say():
    clean, noisy = (ROWS[f"cifar-{labels}-fifth", 30] for labels in ("clean", "40"))
    assert {len(values) for row in (clean, noisy) for values in (row.turns, row.gap, row.base, row.sam["1"])} == {3}
    curves = [next(r["accuracy"] for r in page.records() if (r["regime"], r["candidate"]) == (row.regime, "plain"))
              for row in (clean, noisy)]  # fmt: skip
    best = [page.cell(max((v for mark, v in one.items() if "averaged" in mark), key=sum)) for one in curves]
    turns, always, sam, adam = (page.cell(v) for v in (noisy.turns, noisy.gap, noisy.sam["1"], noisy.base))
    assert f"in turns {turns} %, the same 100 held out always {always} %. SAM with ρ = 1 has {sam} %" in TEXT
    assert f"Adam {adam} %, and Adam averaged and stopped early {best[1]} %" in TEXT
    turns, always, sam = (page.cell(v) for v in (clean.turns, clean.gap, clean.sam["1"]))
    said = f"in turns has {turns} %, the same 100 always {always} %, SAM with ρ = 1 {sam} %, Adam at best {best[0]} %"
    assert said in TEXT and clean.best is None  # one radius is no choice


def test_the_page_says_what_going_back_gains():
    lines = map(json.loads, (page.RECORDS / "backtrack.jsonl").read_text("utf-8").splitlines())
    mine = {
        one["seeds"][0]: one["accuracy"]["60"][0]
        for one in lines
        if (one["regime"], one["candidate"]) == ("cifar-tenth", "Backtrack")
    }
    table, said = making("frontier").table_of("cifar-tenth"), [f"{_with_error(list(mine.values()))} %"]
    for cell, sign, words in (("base-1", 1, "points above Adam"), ("sam", -1, "below SAM")):
        others = {run["seed"]: 100 * run["final"]["test_accuracy"] for run in table.row(cell).group.records}
        said.append(f"{_with_error([sign * (value - others[seed]) for seed, value in mine.items()])} {words}")
    text = " ".join(TEXT.split())
    assert all(one in text for one in said) and f"(n = {len(mine)} of these seeds" in text


def test_the_page_says_what_the_language_model_says():
    table = making("frontier").table_of("language")
    row = {
        cell: table.row(cell).group.mean("test_perplexity") for cell in ("gapsam", "base-1", "base-2", "sam-default")
    }
    shown = {cell: f"{one.value:.3f} ± {one.error:.3f}" for cell, one in row.items()}
    said = f"{shown['gapsam']}, AdamW {shown['base-1']}, and {row['base-2'].value:.3f} when trained twice as long"
    assert said in TEXT and f"SAM with ρ = 0.05 has {shown['sam-default']}" in TEXT
    assert {one.n for one in row.values()} == {3}
    lines = map(json.loads, (ROOT / "results" / "extra-frontier.jsonl").read_text("utf-8").splitlines())
    chosen = {
        line["method"]["settings"]["rho"]: line["final"]["test_perplexity"]
        for line in lines
        if line["cell"].startswith("language/choose/")
    }
    assert list(chosen) == sorted(chosen, key=chosen.__getitem__) and min(chosen) == 0.02 and len(chosen) == 7
    assert max(run["metrics"]["rho"][-1] for run in table.row("gapsam").group.records) < 0.08


def test_the_page_says_what_in_turns_costs_on_all_of_cifar_10():
    """Trainings that were cut off count as far as they came: at the same epoch, paired by seed with the map's."""
    curves = list(map(json.loads, (page.RECORDS / "turns-cifar.jsonl").read_text("utf-8").splitlines()))
    found = {}
    for regime in ("cifar-40", "cifar-clean"):
        runs = making("frontier").table_of(regime).row("gapsam").group.records
        kept = {run["seed"]: {one["epoch"]: one["test_accuracy"] for one in run["epochs"]} for run in runs}
        for epoch in (10, 20):
            found[regime, epoch] = [
                100 * kept[one["seeds"][0]][epoch] - one["accuracy"][str(epoch)][0]
                for one in curves
                if one["regime"] == regime and str(epoch) in one["accuracy"]
            ]
    wrong, clean, end = found["cifar-40", 10], found["cifar-clean", 10], found["cifar-40", 20]
    assert (len(wrong), len(clean), len(end)) == (10, 8, 2)
    assert f"after ten epochs {_with_error(wrong)} points below GapSAM with the same examples held out always" in TEXT
    assert f"(n = 10), and {_with_error(clean)} with clean ones (n = 8)" in TEXT
    assert f"Two trainings with wrong labels ran to the end: {_with_error(end)} points below" in TEXT


def _with_error(values):
    return f"{mean(values):.1f} ± {stdev(values) / len(values) ** 0.5:.1f}"


def test_what_averages_gain_is_what_the_records_say():
    said = " ".join((DOCS / "compare.md").read_text("utf-8").split())
    numbers = re.search(
        r"gains ([\d.]+) points with clean labels and ([\d.]+) with 40 % wrong ones after 20 epochs; "
        r"after 80 epochs ([\d.]+) and ([\d.]+)\..*SAM's best gains ([\d.]+) and ([\d.]+)",
        said,
    )
    plain = {r["regime"]: r["accuracy"] for r in page.records() if r["candidate"] == "plain"}
    regimes = ("cifar-clean", "cifar-40")
    gains = [mean(plain[r][f"{e} averaged"]) - mean(plain[r][e]) for e in ("20", "80") for r in regimes]
    best = [max(mean(v) for v in ROWS[r, 20].sam.values()) - mean(ROWS[r, 20].base) for r in regimes]
    assert numbers is not None and [float(n) for n in numbers.groups()] == [round(g, 1) for g in gains + best]


def test_a_picture_has_a_panel_for_each_data_set_net_and_base():
    pytest.importorskip("matplotlib")
    panels = page.curves()
    assert len(panels) >= 5 and all(rho > 0 for lines in panels.values() for curve in lines.values() for rho in curve)
    titles = [axis.get_title() for axis in page.draw().axes if axis.get_visible()]
    assert titles == list(panels)


def test_the_picture_has_a_row_for_each_regime_with_fixed_radii():
    pytest.importorskip("matplotlib")
    shown = [row for row in page.rows() if row.best is not None]
    (axis,) = page.draw_goal().axes
    assert [label.get_text() for label in axis.get_yticklabels()] == [page.title(row) for row in shown]
    row = ROWS["digits-60-sgd", 40]
    middle, low, high = page._less_the_best(row, row.turns)
    assert round(middle, 1) == 1.7 and (high - low) / 2 == pytest.approx(page._error(row.turns, row.sam["0.2"]))
    ends = [line.get_xdata() for line in axis.lines if len(line.get_xdata()) == 2]
    assert any(list(one) == pytest.approx([low, high]) for one in ends)
