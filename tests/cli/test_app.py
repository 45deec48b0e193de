"""The command line as a whole: which commands there are, and how all of them report mistakes."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command as command_of
from typer.testing import CliRunner

import steppe
from steppe.__main__ import main
from steppe.cli import commands, options
from steppe.cli.app import app
from steppe.cli.commands import paper
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.runner.jobs import Place


def run(*args: str):
    return CliRunner().invoke(app, args, env={"COLUMNS": "200"})


def test_the_version_is_printed():
    assert run("--version").stdout.strip() == steppe.__version__


def test_every_file_is_a_command():
    top: Any = command_of(app)
    for package, group in ((commands, top), (paper, top.commands["paper"])):
        files = {path.stem for path in Path(package.__path__[0]).iterdir() if not path.name.startswith("_")}
        assert set(group.commands) == files and len(files) >= 5


def test_options_are_named_after_the_fields_they_set():
    assert {options.FIELDS.get(name, name) for name in options.RECIPE} <= {field.name for field in fields(Recipe)}
    apart = {"compile", "data_dir", "download", "curvature"}  # what these set has another form
    assert set(options.PLACE) - apart <= {field.name for field in fields(Place)}


def test_methods_are_listed_with_their_cost():
    result = run("methods")
    assert result.exit_code == 0
    for name in ("SAM", "GNAMFast", "DetSAM", "Every"):
        assert name in result.stdout
    row = next(line for line in run("methods", "--markdown").stdout.splitlines() if line.startswith("| GAM "))
    assert row.split(" | ")[2:4] == ["6", "7"] and "T=2" in row


def test_one_method_in_full():
    result = run("methods", "gam-norm")
    assert result.stdout.startswith("GNAM(rho=0.1") and "w_adv" in result.stdout


def test_a_wrong_name_is_reported_in_one_line():
    result = run("methods", "gsma")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and "did you mean 'gsam'" in result.stderr


def test_without_its_packages_the_command_names_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from steppe.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.strip() == 'the steppe command needs typer: pip install "steppe[cli]"'


WRONG = [("compar", "did you mean"), ("--nonsense", "No such option"), ("list recipe", "recipes")]


@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_a_wrong_command_is_reported_in_one_line(wrong, says):
    result = run(*wrong.split())
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1 and says in result.stderr


def test_recipes_are_listed():
    result = run("list", "recipes")
    assert result.exit_code == 0 and "s0/table1" in result.stdout


def test_without_a_command_the_help_is_printed():
    assert "compare" in run().output


def test_help_is_wrapped_by_the_terminal_and_not_by_the_source():
    top: Any = command_of(app)
    assert "a small net, four methods, ten seeds" in top.commands["compare"].help
    assert top.commands["compare"].help.count("\n\n") == 1


@pytest.mark.parametrize(
    "line", ["measure", "measure x --top x", "landscape --bogus", "doctor --foo", "methods a b", "methods --bogus"]
)
def test_usage_errors_are_one_line(line):
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2 and result.stderr.startswith("steppe: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("line", ["methods sam", "paper list", "paper show s0/table1"])
def test_a_terminal_without_greek_letters(line, encoding, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["steppe", *line.split()])
    written = io.BytesIO()
    for name, file in (("stdout", written), ("stderr", io.BytesIO())):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(file, encoding=encoding))
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    sys.stdout.flush()
    assert written.getvalue().strip()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for line in ("paper collect . s0/table1 --results file", f"compare --epochs 1 --out {300 * 'a'}"):
        result = CliRunner().invoke(app, line.split())
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("steppe: ") and result.stderr.count("\n") == 1, result.stderr
