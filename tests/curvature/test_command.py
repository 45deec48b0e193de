"""The commands, through typer's own runner."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.nn.functional as F

from curvature.problems import digits, mlp, trained

typer = pytest.importorskip("typer", reason="typer is not installed")
from typer.testing import CliRunner  # noqa: E402

from steppe.curvature import Hessian  # noqa: E402
from steppe.curvature.command import register  # noqa: E402

MODULE = """
import torch
from curvature.problems import digits, mlp
def model(): return mlp(4).double()
def data(): return digits(30, side=4)
def broken(): raise RuntimeError("the disc is full")
def wrong(): return 3
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
    app = typer.Typer()
    register(app)

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


def test_a_loss_of_ones_own_and_some_params(run, tmp_path):
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


def test_landscape_writes_pictures(run, tmp_path):
    result = run("landscape", "start.pt", "end.pt", *COMMON, "--dimensions", "1", "--points", "5")
    assert result.exit_code == 0, result.output
    result = run(
        "landscape", "end.pt", *COMMON, "--points", "3", "--along", "eigenvectors", "--reach", "0.1", "--no-html"
    )
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "landscape").iterdir()}
    assert names == {"line.png", "line.svg", "end-contour.png", "end-contour.svg", "end-surface.png", "end-surface.svg"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("measure", "nowhere.pt", *COMMON), "no checkpoint nowhere.pt"),
        (("measure", "text.pt", *COMMON), "cannot be read"),
        (("measure", "other.pt", *COMMON), "does not fit"),
        (("measure", "end.pt", "--model", "a_project", "--data", "a_project:data"), "package.module:function"),
        (("measure", "end.pt", "--model", "no_such:model", "--data", "a_project:data"), "cannot import no_such"),
        (
            ("measure", "end.pt", "--model", "a_project:nothing", "--data", "a_project:data"),
            "no function called nothing",
        ),
        (("measure", "end.pt", "--model", "a_project:wrong", "--data", "a_project:data"), "not a torch.nn.Module"),
        (("measure", "end.pt", "--model", "a_project:model", "--data", "a_project:broken"), "the disc is full"),
        (("measure", "end.pt", *COMMON, "--what", "everything"), "--what knows"),
        (("measure", "end.pt", *COMMON, "--loss", "hinge"), "package.module:function"),
        (("measure", "end.pt", *COMMON, "--params", "none.*"), "no parameter is called"),
        (("measure", "end.pt", *COMMON, "--mode", "test"), "mode must be"),
        (("measure", "end.pt", *COMMON, "--device", "abacus"), "--device abacus"),
        (("measure", "end.pt", *COMMON, "--rtol", "0"), "rtol must be positive"),
        (("measure", "end.pt", *COMMON, "--what", "flatness", "--rho", "-1"), "rho must be positive"),
        (("landscape", "end.pt", *COMMON, "--points", "4"), "odd"),
        (("landscape", "end.pt", *COMMON, "--dimensions", "3"), "1 or 2"),
        (("landscape", "end.pt", *COMMON, "--along", "the road"), "random or eigenvectors"),
    ],
)
def test_mistakes_get_one_helpful_line(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    lines = [text for text in result.stderr.splitlines() if text.startswith("error:")]
    assert len(lines) == 1 and message in lines[0]
    assert "Traceback" not in result.output
