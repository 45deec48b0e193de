"""`steppe.compare` and `steppe.tune` from Python: any form of methods, models and data."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import steppe
from steppe.lab.comparing import Lines
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.records import RecordWarning, read_records
from steppe.lab.runner.jobs import Job
from steppe.lab.runner.local import News, perform
from steppe.support.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*too short to compare:steppe.lab.records.RecordWarning"),
    pytest.mark.filterwarnings("ignore:only .* test examples:steppe.lab.records.RecordWarning"),
]

X, Y = (torch.tensor(array) for array in load_digits(return_X_y=True))
DATA = (X[:200].float() / 16, Y[:200]), (X[200:300].float() / 16, Y[200:300])


ONE = nn.Linear(64, 10)


def make_model(shape, classes):
    return nn.Linear(shape[0], classes)


@dataclass(frozen=True)
class Nearer(steppe.SAM):
    """A method of a notebook."""

    rho: steppe.Number = 0.01


@pytest.fixture(autouse=True)
def _own_methods_are_forgotten():
    yield
    torch.set_num_threads(1)


def compare(folder, **given: Any):
    usual = {"data": DATA, "model": make_model, "methods": ["sam"], "base": "sgd", "seeds": 2, "epochs": 1, "batch": 50}
    more = {"out": folder, "jobs": 1, "curvature": False, "equal_cost": False, "progress": False}
    more |= {"rivals": [], "device": "cpu"}
    return steppe.compare(**{**usual, **more, **given})


def test_methods_in_every_form_and_what_comes_back(tmp_path):
    methods = ["sam:rho=0.1", steppe.ASAM(rho=1.0), Nearer, Nearer(rho=0.02), steppe.SAM(rho=lambda step, lr: lr)]
    result = compare(tmp_path, methods=methods)
    labels = ["SGD", "SAM rho=0.1", "ASAM rho=1.0", "Nearer", "Nearer rho=0.02", "SAM rho=<lambda>"]
    assert sorted(result.table.index) == sorted(labels) and len(result.records) == len(result.frame) == 12
    row, runs = result.table.loc["ASAM rho=1.0"], result.frame[result.frame.label == "ASAM rho=1.0"]
    assert row["test_accuracy"] == pytest.approx(runs.test_accuracy.mean()) and row["cost"] == 2
    assert row["low"] <= row["test_accuracy"] <= row["high"] and row["verdict"] == "n too small to tell"
    best = result.best()
    assert best.mean.value == result.table.test_accuracy.max() and best.label not in best.tied
    assert repr(best) == str(best) and set(best.tied) | {best.label} <= set(labels) and best.label in str(best)
    assert repr(result).startswith("Nothing can be said with fewer than 3 seeds") and "Nearer" in repr(result)


def test_the_report_is_shown_and_saved(tmp_path):
    result = compare(tmp_path, data="digits", model=None, share=0.2)
    page = result.save(tmp_path / "report.html").read_text("utf-8")
    assert page.startswith("<!doctype html>") and "SAM" in page
    shown = result._repr_html_()
    assert (
        shown.startswith("<iframe")
        and "&lt;!doctype html&gt;" in shown
        and '"' not in shown.partition("srcdoc=")[2][1:-11]
    )
    figure = result.plot()
    shown_figure: Any = figure
    assert shown_figure._repr_png_().startswith(b"\x89PNG"), "a notebook shows it, also without pyplot"
    assert figure.axes and figure.axes[0].get_xlabel() == "gradient evaluations"


def test_in_a_notebook_the_result_is_shown_once(tmp_path, monkeypatch):
    """rich, if it sees a notebook, displays the table itself: the report would be the second thing shown."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    displayed: list[Any] = []
    monkeypatch.setattr("rich.jupyter.display", lambda *shown: displayed.append(shown))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as kernels of notebooks have it
    text = repr(compare(tmp_path, seeds=1))
    assert "SGD" in text and "\x1b" not in text and not displayed


def test_what_is_done_is_not_done_again_until_the_code_changes(tmp_path):
    def model_of(width):
        return lambda: nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))

    def stamps():
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}

    first = compare(tmp_path, model=model_of(3))
    before = stamps()
    again = compare(tmp_path, model=model_of(3))
    assert stamps() == before and again.table.equals(first.table)
    with pytest.warns(RecordWarning, match="^python:model has changed since 4 runs in .* ended: trained again") as told:
        compare(tmp_path, model=model_of(4))
    assert {one.filename for one in told} == {__file__}, "a warning is at the line that called steppe"
    assert stamps().keys() == before.keys() and stamps() != before
    other = (DATA[0], (X[300:400].float() / 16, Y[300:400]))
    compare(tmp_path, model=model_of(4), data=other)
    assert len(read_records(tmp_path)) == 8, "other data has runs of its own"


def test_models_classes_modules_partials_and_data_functions(tmp_path):
    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(64, 10))

    module = Net()
    for model in (Net, module, functools.partial(nn.Linear, 64, 10), lambda: nn.Linear(64, 10)):
        result = compare(tmp_path / type(model).__name__, model=model, data=lambda: DATA, seeds=1)
        assert len(result.records) == 2
    losses = [r["epochs"][0]["train_loss"] for r in compare(tmp_path / "Net", model=module, seeds=1, lr=0.0).records]
    with torch.no_grad():
        x, y = DATA[0]
        exact = nn.functional.cross_entropy(module[0](x), y)
    assert losses == pytest.approx([float(exact)] * 2, rel=1e-5), "runs start from the module's weights"


def test_a_model_may_know_more_classes_and_tokens_than_the_data_has(tmp_path):
    """A language model has the vocabulary of its tokenizer, not that of the text."""
    few = tuple((x[y < 9], y[y < 9]) for x, y in DATA)
    assert len(compare(tmp_path, data=few, model=lambda: nn.Linear(64, 10), seeds=1).records) == 2
    tokens = torch.tensor(list(b"All happy families are alike; each unhappy family is unhappy in its own way. " * 9))
    net = lambda: nn.Sequential(nn.Embedding(500, 4), nn.Linear(4, 500))  # noqa: E731
    result = compare(tmp_path, data=(tokens, tokens), model=net, task="language", batch=2, seeds=1)
    assert result.metric == "test_perplexity" and "python:" not in repr(result)


def test_a_base_a_loss_and_a_metric_of_ones_own(tmp_path):
    def base(params, lr):
        return [torch.optim.SGD([p], lr=lr) for p in params]

    result = compare(
        tmp_path, base=base, task="regression", data=tuple((x, x.mean(1)) for x, _ in DATA), lower_is_better=True,
        model=lambda: nn.Linear(64, 1), loss=lambda out, y: (out.flatten() - y).abs().mean(),
        metric=lambda out, y: (out.flatten() - y).abs().max(),
    )  # fmt: skip
    assert result.metric == "test_metric" and "base" in result.table.index
    given = {"loss": nn.CrossEntropyLoss(label_smoothing=0.1), "seeds": 1, "label_smoothing": 0.0}
    smooth = compare(tmp_path / "module", **given).records[0]["epochs"][0]["train_loss"]
    same = compare(tmp_path / "setting", seeds=1, label_smoothing=0.1).records[0]["epochs"][0]["train_loss"]
    assert smooth == same, "a module of torch.nn is a loss"
    means = result.table.test_metric
    assert result.best().mean.value == means.min(), "lower is better"
    assert next(iter(result.table.index)) == "base"


WRONG: dict[str, dict[str, Any]] = {
    "name a model for your own data: model=make_model": {"model": None},
    "a method is a name such as 'sam:rho=0.1' or steppe.SAM": {"methods": [3]},
    "Every has settings without a default": {"methods": [steppe.Every]},
    "no method 'sma'": {"methods": ["sma"]},
    "no recipe field 'epoch'": {"epoch": 3},
    "model must be a name or a function, not a int": {"model": 3},
    "data-.* must return|give two": {"data": torch.ones(3)},
    "failed with ZeroDivisionError": {"data": lambda: 1 / 0},
    "could not be built: ZeroDivisionError": {"model": lambda: 1 / 0},
    "returned a int, not a torch.nn.Module": {"model": lambda: 3},
    "returned a int, not a torch.optim.Optimizer": {"base": lambda params: 3},
    "gave the same module again: make a new one each time": {"model": lambda: ONE},
    "every run needs its own: give its class": {"base": torch.optim.SGD(ONE.parameters(), lr=0.1)},
    "lower_is_better is for a metric of your own": {"lower_is_better": True},
    "the largest class is 10": {"data": tuple((x, y + 1) for x, y in DATA), "model": lambda: nn.Linear(64, 10)},
    "needs at least one method and one seed": {"seeds": 0},
    "on must be 'local' or 'ray', not 'mars'": {"on": "mars"},
    "batch 50 is larger than the 1 training examples": {"data": ((X[:1].float(), Y[:1]), (X[:9].float(), Y[:9]))},
}


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_reported_in_one_line(tmp_path, message):
    with pytest.raises(UserError, match=message) as raised:
        compare(tmp_path, **WRONG[message])
    assert "\n" not in str(raised.value)


def test_code_that_cannot_be_read_is_trained_every_time_and_this_is_said(tmp_path):
    class Slots:
        __slots__ = ()

        def __call__(self):
            return nn.Linear(64, 10)

    with pytest.warns(RecordWarning, match="the source of model cannot be read"):
        compare(tmp_path, model=Slots(), seeds=1)


def test_lines_tell_how_long_the_rest_will_take(monkeypatch):
    jobs = [Job(Recipe(seed=seed, epochs=10)) for seed in range(4)]
    said: list[str] = []
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    show = Lines(jobs, said.append)
    show(News(jobs[0].recipe.key, 10, ended=True, result="97 %", before=True))
    for job in jobs[1:]:  # other processes need 15 seconds to start
        now += 15
        show(News(job.recipe.key, 5))
        now += 15
        show(News(job.recipe.key, 10, ended=True, result="97 %"))
    assert [line.partition("about ")[2] for line in said] == ["60 s left", "30 s left", ""]
    assert said[0] == "2/4  Adam, seed 1: 97 %, about 60 s left"


SCRIPT = """
    import torch, steppe
    from dataclasses import dataclass
    from torch import nn
    from sklearn.datasets import load_digits

    @dataclass(frozen=True)
    class Mine(steppe.SAM):
        pass

    width = 5
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data = (x[:100].float(), y[:100]), (x[100:150].float(), y[100:150])
    make = lambda: nn.Sequential(nn.Linear(64, width), nn.Linear(width, 10))
    result = steppe.compare(data, make, [Mine(rho=0.02)], jobs={jobs}, seeds=2, epochs=2, batch=10, out="runs",
                            curvature=False, equal_cost=False, device="cpu")
    print(result.frame[["label", "seed", "test_loss"]].to_csv())
"""


@pytest.mark.slow
def test_other_processes_get_what_a_script_defines_and_do_not_run_it_again(tmp_path):
    """A script without `if __name__ == "__main__"`; the same numbers as in one process, whose runs are recognised."""
    said = []
    for jobs in (2, 1):
        (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT).replace("{jobs}", str(jobs)))
        command = [sys.executable, "-W", "ignore", "script.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done)
    assert said[0].stdout == said[1].stdout and said[0].stdout.count("Mine rho=0.02") == 2
    assert "seed 0" in said[0].stderr and "seed 0" not in said[1].stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the source of make cannot be read:steppe.lab.records.RecordWarning")
def test_what_cannot_be_sent_is_told(tmp_path):
    lock = __import__("threading").Lock()

    def make():
        assert lock is not None
        return nn.Linear(64, 10)

    with pytest.raises(UserError, match=r"make cannot be sent to other processes .*: pass jobs=1"):
        compare(tmp_path, model=make, jobs=2)


def test_importing_steppe_does_not_import_the_lab():
    code = "import steppe, sys; assert not any(name.startswith('steppe.lab') for name in sys.modules); "
    code += "assert 'compare' in dir(steppe); print(steppe.compare.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "steppe.lab.comparing"
    with pytest.raises(AttributeError, match="no attribute 'compere'"):
        steppe.compere  # pyright: ignore[reportAttributeAccessIssue]


def tune(folder, **given: Any):
    pytest.importorskip("optuna")
    usual = {"data": DATA, "model": make_model, "method": "sam", "base": "sgd", "epochs": 4, "batch": 40, "trials": 5}
    more = {"seeds": 2, "keep": 2, "out": folder, "jobs": 1, "progress": False, "device": "cpu"}
    return steppe.tune(**{**usual, **more, **given})


def test_tuning_halves_the_candidates_and_judges_on_held_out_data(tmp_path):
    tuned = tune(tmp_path, radius=(0.01, 1.0), lr=(0.01, 0.5))
    records = read_records(tmp_path)
    assert {r["recipe"]["hold_out"] for r in records} == {0.2}
    assert sorted(t["epochs"] for t in tuned.trials) == [1, 1, 2, 4, 4]  # five, then three, then two
    finalists = tuned.finalists.records
    assert len(finalists) == 4 and {r["recipe"]["seed"] for r in finalists} == {0, 1}
    means = tuned.finalists.table.test_accuracy
    assert tuned.choice.mean.value == means.max() and tuned.recipe.hold_out == 0
    assert f"rho={tuned.recipe.build_method().rho}" in tuned.method  # type: ignore[attr-defined]
    assert 0.01 <= tuned.lr <= 0.5 and set(tuned.tied) <= set(means.index)
    assert "on held-out training data, 5 candidates" in str(tuned) and ": held-out accuracy 0." in str(tuned)
    again = tune(tmp_path, radius=(0.01, 1.0), lr=(0.01, 0.5))
    assert again.trials == tuned.trials and len(read_records(tmp_path)) == len(records), "nothing is trained again"


def test_candidates_that_do_not_depend_on_each_other_are_trained_together(tmp_path, monkeypatch):
    """Processes are started once for all of them, not once for each few."""
    counts = []

    def counted(jobs, *more):
        counts.append(len(jobs))
        return perform(jobs, *more)

    monkeypatch.setattr("steppe.lab.comparing.perform", counted)
    tune(tmp_path, radius=(0.01, 1.0), trials=12, keep=1, epochs=1, seeds=1)
    assert counts == [10, 1, 1, 6, 1]


def test_ranges_of_a_search(tmp_path):
    """A list is a range too; a number is not searched; whole numbers stay whole."""
    tuned = tune(tmp_path, radius=0.03, lr=[0.01, 0.5], trials=2, keep=1, seeds=1)
    assert [set(t["values"]) for t in tuned.trials] == [{"lr"}] * 2 and "rho=0.03" in tuned.method
    tuned = tune(tmp_path, ranges={"batch": (20, 40)}, lr=(0.01, 0.5), trials=1, keep=1, seeds=1)
    assert set(tuned.trials[0]["values"]) == {"sam.rho", "lr", "batch"} and isinstance(tuned.recipe.batch, int)
    for wrong in ({"radius": "big"}, {"lr": (1, 2, 3)}, {"radius": (0.1, None)}):
        with pytest.raises(UserError, match="must be a range, such as"):
            tune(tmp_path, **wrong)


def test_rivals_are_of_comparisons_at_equal_cost(tmp_path):
    """As on the command line."""
    given = {"momentum": 0.9, "seeds": 1, "rivals": None}
    labels = [compare(tmp_path, **given, equal_cost=equal).table.index for equal in (False, True)]
    for rival in ("SGD, Nesterov", "SGD, weight decay 0.0005", "SGD, EMA over 10 %"):
        assert [rival in one for one in labels] == [False, True]


def test_a_search_without_a_range_or_with_two_methods_is_refused(tmp_path):
    with pytest.raises(UserError, match="tune takes one method, not 2"):
        tune(tmp_path, method=["sam", "gsam"])
    with pytest.raises(UserError, match="Plain has no radius to search"):
        tune(tmp_path, method="plain", radius=(0.1, 1.0))
    with pytest.raises(UserError, match="nothing to search"):
        tune(tmp_path, method="plain")
