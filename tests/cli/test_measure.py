"""The commands, through typer's own runner."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers.curvature_problems import digits, mlp, trained

typer = pytest.importorskip("typer", reason="typer is not installed")
from typer.testing import CliRunner  # noqa: E402

from steppe.cli.app import app  # noqa: E402
from steppe.curvature import Hessian, checkpoints  # noqa: E402

MODULE = """
import torch
from helpers.curvature_problems import digits, mlp
def model(): return mlp(4).double()
def averaged(): return torch.optim.swa_utils.AveragedModel(model())
def data(): return digits(30, side=4)
def broken(): raise RuntimeError("the disc is full")
def wrong(): return 3
def misfit(): return torch.zeros(3, 7, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
def of_logits(output, target): return torch.nn.functional.cross_entropy(output.logits, target)
def seven(output, target): assert output.shape[1] == 7
def table(output, target): return {}["loss"]
def ascent(output, target): return -torch.nn.functional.cross_entropy(output, target)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_project.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("a_project", None)
    torch.manual_seed(0)
    model = mlp(4).double()
    torch.save(model.state_dict(), tmp_path / "start.pt")
    trained(model, F.cross_entropy, digits(30, side=4), steps=40)
    torch.save({"model": {"module." + k: v for k, v in model.state_dict().items()}, "epoch": 3}, tmp_path / "end.pt")
    torch.save(mlp(9).state_dict(), tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "unreadable.py").write_text("def model(:")

    def invoke(*arguments: str):
        return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})

    return invoke


COMMON = ("--model", "a_project:model", "--data", "a_project:data")


def test_measure_prints_a_table_and_writes_json_and_figures(run, tmp_path):
    result = run(
        "measure", "end.pt", *COMMON, "--top", "3", "--what", "eigenvalues", "--what", "trace", "--what", "density"
    )
    assert result.exit_code == 0, result.output
    model = mlp(4).double()
    model.load_state_dict({k.removeprefix("module."): v for k, v in torch.load("end.pt")["model"].items()})
    dense = Hessian(model, F.cross_entropy, digits(30, side=4)).dense()
    truth = torch.linalg.eigvalsh(dense).flip(0)
    written = json.loads((tmp_path / "curvature" / "curvature.json").read_text())["measures"]["end"]
    assert [written[f"λ{i}"]["value"] for i in (1, 2, 3)] == pytest.approx(truth[:3].tolist(), rel=1e-3)
    assert written["trace"]["value"] == pytest.approx(float(dense.trace()), rel=0.05)
    assert written["trace"]["standard_error"] >= 0 and written["trace"]["matvecs"] > 0
    assert f"{float(truth[0]):.5g}" in result.output
    for name in ("density.png", "log_det.png", "eigenvalues.png"):
        assert (tmp_path / "curvature" / name).exists()


def test_several_checkpoints_give_paired_differences(run):
    result = run("measure", "start.pt", "end.pt", *COMMON, "--what", "trace", "--what", "flatness", "--rho", "0.1")
    assert result.exit_code == 0, result.output
    assert "end − start" in result.output and "surrogate gap" in result.output


def test_an_own_loss_and_a_subset_of_parameters(run, tmp_path):
    arguments = (
        "--loss",
        "a_project:ascent",
        "--params",
        "3.*",
        "--what",
        "eigenvalues",
        "--top",
        "1",
        "--out",
        "here",
    )
    result = run("measure", "start.pt", *COMMON, *arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "here" / "curvature.json").read_text())["measures"]["start"]["λ1"]["value"]
    model = mlp(4).double()
    model.load_state_dict(torch.load("start.pt"))
    block = Hessian(model, F.cross_entropy, digits(30, side=4), params="3.*").dense()
    assert found == pytest.approx(-float(torch.linalg.eigvalsh(block)[0]), rel=1e-3, abs=1e-9)


# Stopped and gone on with

ALL = ("--what", "density", "--what", "eigenvalues", "--what", "trace", "--what", "frobenius", "--top", "3")


def measured(folder) -> dict:
    """All numbers that were written, apart from the seconds."""
    written = json.loads((folder / "curvature.json").read_text())["measures"]
    return {
        model: {name: {k: v for k, v in one.items() if k != "seconds"} for name, one in measures.items()}
        for model, measures in written.items()
    }


class Stopping:
    """Stops the process's products after some, as Ctrl-C does; counts them."""

    def __init__(self, monkeypatch, after: int):
        self.products, multiply = 0, Hessian._multiply

        def stopping(operator, rows):
            self.products += len(rows)
            if self.products > after:
                raise KeyboardInterrupt
            return multiply(operator, rows)

        monkeypatch.setattr(Hessian, "_multiply", stopping)
        monkeypatch.setattr(checkpoints, "SAVE_EVERY", 0.0)


@pytest.mark.slow
def test_a_stopped_command_resumes(run, tmp_path):
    command = ("measure", "start.pt", "end.pt", *COMMON, *ALL, "--rtol", "0.02")
    with pytest.MonkeyPatch.context() as patch:
        whole = Stopping(patch, 10**9)
        assert run(*command, "--out", "unbroken").exit_code == 0
    for share in (0.1, 0.6, 0.95):
        with pytest.MonkeyPatch.context() as patch:
            Stopping(patch, int(share * whole.products))
            stopped = run(*command)
        assert stopped.exit_code == 130
        assert "Run the same command again" in stopped.stderr and "--no-resume" in stopped.stderr
        assert (tmp_path / "curvature" / ".partial").exists()
        with pytest.MonkeyPatch.context() as patch:
            rest = Stopping(patch, 10**9)
            resumed = run(*command)
        assert resumed.exit_code == 0, resumed.output
        assert measured(tmp_path / "curvature") == measured(tmp_path / "unbroken")
        assert rest.products < whole.products
        assert not list((tmp_path / "curvature" / ".partial").glob("*"))  # all is done: nothing is kept
        shutil.rmtree(tmp_path / "curvature")


def kept(tmp_path: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (tmp_path / "curvature" / ".partial").glob("*/*")}


def test_truncated_or_foreign_partial_results_are_not_used(run, tmp_path):
    command = ("measure", "end.pt", *COMMON, "--what", "trace", "--rtol", "0.05")

    def stop() -> None:
        with pytest.MonkeyPatch.context() as patch:
            Stopping(patch, 40)
            assert run(*command).exit_code == 130

    stop()
    before = kept(tmp_path)
    assert before and run(*command[:-1], "0.04", "--out", "curvature").exit_code == 0  # another question
    assert run(*command[:-1], "-1").exit_code == 2
    assert kept(tmp_path) == before
    (finished,) = (tmp_path / "curvature" / ".partial").glob("*/finished.pt")
    finished.write_bytes(finished.read_bytes()[:100])
    (finished.parent / "run.pt").write_bytes(b"torn")
    torn = run(*command)
    assert torn.exit_code == 0 and "cannot be read: starting over" in torn.stderr
    stop()
    assert run(*command, "--no-resume", "--out", "curvature").exit_code == 0
    assert run(*command, "--out", "unbroken").exit_code == 0
    assert measured(tmp_path / "curvature") == measured(tmp_path / "unbroken")


KILLED = """
import os, signal, sys
from steppe.curvature import Hessian, checkpoints
from steppe.cli.app import app
checkpoints.SAVE_EVERY = 0.0
multiply, products = Hessian._multiply, [0]
def until_killed(operator, rows):
    products[0] += len(rows)
    if products[0] > 80:
        os.kill(os.getpid(), signal.SIGKILL)
    return multiply(operator, rows)
Hessian._multiply = until_killed
app(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_command_resumes(run, tmp_path):
    command = ("measure", "end.pt", *COMMON, "--what", "eigenvalues", "--what", "trace", "--rtol", "0.01")
    here = Path(__file__).parent
    paths = [str(here.parent), str(here.parents[1] / "src"), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    killed = subprocess.run([sys.executable, "-c", KILLED, *command], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    resumed = run(*command)
    assert resumed.exit_code == 0 and "resuming: eigenvalues already done" in resumed.stderr
    assert run(*command, "--out", "unbroken").exit_code == 0
    assert measured(tmp_path / "curvature") == measured(tmp_path / "unbroken")


def test_landscape_writes_pictures(run, tmp_path):
    result = run("landscape", "start.pt", "end.pt", *COMMON, "--dimensions", "1", "--points", "5")
    assert result.exit_code == 0, result.output
    result = run(
        "landscape", "end.pt", *COMMON, "--points", "3", "--along", "eigenvectors", "--reach", "0.1", "--no-html"
    )
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "landscape").iterdir()}
    assert names == {"line.png", "line.svg", "end-contour.png", "end-contour.svg", "end-surface.png", "end-surface.svg"}


def test_landscape_writes_an_interactive_surface(run, tmp_path):
    pytest.importorskip("plotly", reason="plotly is not installed")
    result = run("landscape", "end.pt", *COMMON, "--points", "3")
    assert result.exit_code == 0, result.output
    assert '"type":"surface"' in (tmp_path / "landscape" / "end.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_checkpoints_of_one_name_have_pictures_of_their_own(run, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(tmp_path / "end.pt", tmp_path / folder)
    result = run("landscape", "a/end.pt", "b/end.pt", *COMMON, "--points", "3", "--no-html")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "landscape").glob("*.svg")}
    assert names == {"side-by-side.svg", *(f"end.pt-{i}-{kind}.svg" for i in (1, 2) for kind in ("contour", "surface"))}


@pytest.mark.parametrize(
    ("prefix", "model"),
    [("module._orig_mod.", "model"), ("_orig_mod.module.", "model"), ("_orig_mod.", "averaged"), ("", "averaged")],
)
def test_checkpoints_of_wrapped_models_are_read(run, tmp_path, prefix, model):
    inner = torch.load("start.pt")
    state = {"n_averaged": torch.tensor(3), **{"module." + k: v for k, v in inner.items()}}
    state = inner if model == "model" else state
    torch.save({prefix + k: v for k, v in state.items()}, "wrapped.pt")
    arguments = ("--model", f"a_project:{model}", "--data", "a_project:data", "--what", "eigenvalues", "--top", "1")
    assert (result := run("measure", "wrapped.pt", *arguments)).exit_code == 0, result.output
    plain = mlp(4).double()
    plain.load_state_dict(inner)
    truth = torch.linalg.eigvalsh(Hessian(plain, F.cross_entropy, digits(30, side=4)).dense())[-1]
    written = json.loads((tmp_path / "curvature" / "curvature.json").read_text())["measures"]["wrapped"]
    assert written["λ1"]["value"] == pytest.approx(float(truth), rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("measure", "nowhere.pt", *COMMON), "checkpoint nowhere.pt does not exist"),
        (("measure", "text.pt", *COMMON), "cannot be read"),
        (("measure", "other.pt", *COMMON), "does not fit"),
        (("measure", "end.pt", "--model", "a_project", "--data", "a_project:data"), "package.module:function"),
        (("measure", "end.pt", "--model", "no_such:model", "--data", "a_project:data"), "cannot import no_such"),
        (
            ("measure", "end.pt", "--model", "a_project:nothing", "--data", "a_project:data"),
            "has no function 'nothing'",
        ),
        (("measure", "end.pt", "--model", "a_project:wrong", "--data", "a_project:data"), "not a torch.nn.Module"),
        (("measure", "end.pt", "--model", "a_project:model", "--data", "a_project:broken"), "the disc is full"),
        (("measure", "end.pt", *COMMON, "--what", "everything"), "--what is one of"),
        (("measure", "end.pt", *COMMON, "--loss", "hinge"), "package.module:function"),
        (("measure", "end.pt", *COMMON, "--params", "none.*"), "no parameter is called"),
        (("measure", "end.pt", *COMMON, "--mode", "test"), "mode must be"),
        (("measure", "end.pt", *COMMON, "--device", "abacus"), "--device abacus"),
        (("measure", "end.pt", *COMMON, "--rtol", "0"), "rtol must be positive"),
        (("measure", "end.pt", *COMMON, "--rtol", "nan"), "--rtol must be positive"),
        (("measure", "end.pt", *COMMON, "--max-matvecs", "0"), "--max-matvecs must be positive"),
        (("measure", "end.pt", *COMMON, "--max-matvecs", "100"), "--max-matvecs must be at least 168"),
        (("measure", "end.pt", *COMMON, "--what", "flatness", "--rho", "-1"), "rho must be positive"),
        (("measure", "end.pt", *COMMON, "--loss", "mse"), "--model, --data and --loss do not fit together"),
        (("measure", "end.pt", "--model", "a_project:model", "--data", "a_project:misfit"), "do not fit together"),
        (("measure", "end.pt", *COMMON, "--loss", "a_project:of_logits"), "fit together: AttributeError"),
        (("measure", "end.pt", *COMMON, "--loss", "a_project:seven"), "fit together: AssertionError"),
        (("landscape", "end.pt", *COMMON, "--loss", "a_project:table"), "fit together: KeyError: 'loss'"),
        (
            ("measure", "end.pt", "--model", "unreadable:model", "--data", "a_project:data"),
            "importing unreadable failed with SyntaxError",
        ),
        (("measure", "end.pt", *COMMON, "--what", "trace", "--out", "text.pt"), "text.pt"),
        (("landscape", "end.pt", *COMMON, "--points", "3", "--out", "text.pt"), "text.pt"),
        (("landscape", "end.pt", *COMMON, "--points", "4"), "odd"),
        (("landscape", "end.pt", *COMMON, "--reach", "inf"), "reach must be positive and finite"),
        (("landscape", "end.pt", *COMMON, "--dimensions", "3"), "1 or 2"),
        (("landscape", "end.pt", *COMMON, "--along", "the road"), "random or eigenvectors"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_mistakes_are_reported_in_one_helpful_line(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    lines = [text for text in result.stderr.splitlines() if text.startswith("steppe:")]
    assert len(lines) == 1 and message in lines[0]
    assert "Traceback" not in result.output


TWO_SPLITS = """
import torch
from helpers.curvature_problems import digits, mlp
def data(): x, y = digits(30, side=4); return (x[:20], y[:20]), (x[20:], y[20:])
def as_numpy(): return tuple((x.numpy(), y.numpy()) for x, y in data())
def datasets(): return tuple(torch.utils.data.TensorDataset(*pair) for pair in data())
def loaders(): return {"train": torch.utils.data.DataLoader(datasets()[0], 7, shuffle=True), "test": datasets()[1]}
def model(shape, classes): assert (shape, classes) == ((1, 4, 4), 10); return mlp(4).double()
"""


@pytest.mark.parametrize("function", ["data", "as_numpy", "datasets", "loaders"])
def test_data_as_compare_takes_it_is_measured_on_one_split(run, tmp_path, function):
    """Training and test data used to be measured together, without a word."""
    (tmp_path / "two_splits.py").write_text(TWO_SPLITS)
    sys.modules.pop("two_splits", None)
    (x, y), model = digits(30, side=4), mlp(4).double()
    model.load_state_dict(torch.load("start.pt"))
    arguments = ("measure", "start.pt", "--model", "two_splits:model", "--data", f"two_splits:{function}")
    for split, rows in (("", slice(20)), ("train", slice(20)), ("test", slice(20, 30))):
        chosen = ("--split", split) if split else ()
        result = run(*arguments, *chosen, "--what", "eigenvalues", "--top", "1")
        assert result.exit_code == 0, result.output
        assert ("20 training examples; use --split test" in result.stderr) == (not split)
        written = json.loads((tmp_path / "curvature" / "curvature.json").read_text())["measures"]["start"]
        truth = F.cross_entropy(model(x[rows]), y[rows]).detach()
        assert written["loss"]["value"] == pytest.approx(float(truth), rel=1e-12)


def test_a_split_of_data_without_splits_is_a_mistake(run):
    result = run("measure", "end.pt", *COMMON, "--split", "test")
    assert result.exit_code == 2 and "data with two parts" in result.stderr
    result = run("measure", "end.pt", *COMMON, "--split", "half")
    assert result.exit_code == 2 and "--split must be train or test, not 'half'" in result.stderr


def test_weights_that_compare_has_kept_are_measured(run, tmp_path):
    """`steppe compare --keep-weights` writes safetensors."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(torch.load("start.pt"), tmp_path / "kept.safetensors")
    (tmp_path / "torn.safetensors").write_text("{")
    losses = []
    for name in ("start.pt", "kept.safetensors"):
        assert run("measure", name, *COMMON, "--what", "eigenvalues", "--top", "1").exit_code == 0
        (found,) = json.loads((tmp_path / "curvature" / "curvature.json").read_text())["measures"].values()
        losses.append(found["loss"]["value"])
    assert losses[0] == losses[1]
    result = run("measure", "torn.safetensors", *COMMON)
    assert result.exit_code == 2 and "cannot be read as a checkpoint of tensors" in result.stderr
