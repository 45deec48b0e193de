"""`steppe doctor` finds what works, says how to get what is missing, and never fails itself."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

from steppe import __version__
from steppe.cli.app import app
from steppe.cli.commands import doctor
from steppe.cli.commands.doctor import Finding, examine, line_for, module_of, optional_packages, try_imports

WORDS = {"ok", "no", "broken"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package whose __init__ is this code."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, code: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
        return name

    return make


@pytest.fixture
def declared(monkeypatch):
    """Lets steppe declare other extras."""

    def declare(*lines: str) -> None:
        monkeypatch.setattr(doctor.metadata, "requires", lambda name: list(lines))

    return declare


def run(*args: str):
    return CliRunner().invoke(app, ["doctor", *args], env={"STEPPE_DATA": ""})


def found(name: str, check: str) -> Finding:
    return {finding.name: finding for finding in doctor.CHECKS[check]()}[name]


# Packages


def test_imports_that_work_fail_crash_exit_and_print(package):
    names = [
        package("steppe_fine", "print('noise on the way')"),
        package("steppe_broken", "raise RuntimeError('first line\\nsecond line')"),
        package("steppe_crash", "import os; os._exit(7)"),
        package("steppe_exit", "raise SystemExit(3)"),
        package("steppe_after", ""),
    ]
    assert try_imports([*names, "steppe_absent"]) == {
        "steppe_fine": "",
        "steppe_broken": "RuntimeError: first line",
        "steppe_crash": "its import ended the process (exit status 7)",
        "steppe_exit": "SystemExit: 3",
        "steppe_after": "",
        "steppe_absent": "missing",
    }


def test_an_import_that_hangs_is_aborted(package, monkeypatch):
    """The first process is given up at once, as if its time had passed: this test waits for no clock."""
    wait, given = subprocess.Popen.communicate, []

    def impatient(process, *args, timeout=None):
        given.append(timeout)
        if len(given) == 1:
            raise subprocess.TimeoutExpired(process.args, 600)
        return wait(process, *args, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", impatient)
    names = [package("steppe_slow", "import time; time.sleep(1000)"), package("steppe_after", "")]
    assert try_imports(names, seconds=600) == {
        "steppe_slow": "its import took longer than 600 s",
        "steppe_after": "",
    }
    assert given == [600, None, 600]


def test_torchvision_is_never_imported(package, tmp_path):
    seen = tmp_path / "seen"
    package("torchvision", f"open({str(seen)!r}, 'w')")
    names = [package("steppe_eager", "import torchvision.ops"), package("steppe_shy", SHY)]
    assert try_imports(names) == {"steppe_eager": "not tried", "steppe_shy": ""}
    assert not seen.exists()


SHY = """
try:
    import torchvision
except ImportError:
    pass
"""


def test_a_package_whose_dependency_is_missing_is_broken(package):
    assert try_imports([package("steppe_needy", "import steppe_absent")]) == {
        "steppe_needy": "ModuleNotFoundError: No module named 'steppe_absent'"
    }


def test_every_state_of_a_package(package, declared):
    package("steppe_fine", "")
    package("steppe_broken", "raise OSError('no such library\\nmore')")
    package("steppe_eager", "import torchvision")
    lines = (f"{name}; extra == 'few'" for name in ("steppe-fine>=1", "steppe-broken", "steppe-eager", "steppe-absent"))
    declared("torch>=2.6", *lines, "steppe-other; extra == 'test'")
    assert list(doctor.CHECKS["extras"]()) == [
        Finding("steppe-absent", "no", 'pip install "steppe[few]"'),
        Finding("steppe-broken", "broken", "found, but OSError: no such library"),
        Finding("steppe-eager", "ok", "found; its import was not tried, because it needs torchvision"),
        Finding("steppe-fine", "ok", "found"),
    ]


def test_the_smallest_extra_is_recommended(declared):
    declared("a; extra == 'all'", "b; extra == 'all'", 'c[x]<3,>=2; python_version >= "3.10" and extra == "all"',
             "a; extra == 'one'", "pytest; extra == 'test'")  # fmt: skip
    assert optional_packages() == {"a": "one", "b": "all", "c": "all"}


def test_versions_are_those_installed(declared):
    declared("rich; extra == 'cli'")
    assert list(doctor.CHECKS["extras"]()) == [Finding("rich", "ok", metadata.version("rich"))]


def test_every_declared_package_is_known_by_its_module():
    owners = metadata.packages_distributions()
    wrong = []
    for package in optional_packages():
        names = {name.lower().replace("_", "-") for name in owners.get(module_of(package), [])}
        if is_installed(package) and package.lower() not in names:
            wrong.append(package)
    assert not wrong, "say in doctor._MODULES by which name they are imported"
    assert module_of("scikit-learn") == "sklearn" and is_installed("scikit-learn")


def is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def test_without_an_installed_steppe(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", absent)
    (finding,) = doctor.CHECKS["extras"]()
    assert (finding.name, finding.state) == ("extras", "no")


# The machine


def test_half_precision_and_captured_steps_are_tried():
    device = doctor.best_device()
    assert found("bf16 autocast", "half precision").state == "ok"
    assert f"GradScaler on {device}" in found("fp16 autocast", "half precision").text
    captured = found("captured steps", "captured steps")
    if device == "cpu":
        assert captured == Finding("captured steps", "no", "eager: the parameters are not on a CUDA device")
    else:
        assert captured.state == "ok" and captured.text.startswith("replayed (1 recorded)")


def test_a_step_that_fails_is_broken(monkeypatch):
    def fail(dtype, device):
        raise NotImplementedError("no kernel\nfor this")

    monkeypatch.setattr(doctor, "_step_in", fail)
    findings = list(doctor.CHECKS["half precision"]())
    assert [f.state for f in findings] == ["broken", "broken"]
    assert findings[0].text.endswith(": NotImplementedError: no kernel")


def test_the_doctor_changes_no_random_number():
    before = torch.get_rng_state()
    for check in ("half precision", "captured steps"):
        list(doctor.CHECKS[check]())
    assert torch.equal(before, torch.get_rng_state())


def test_distributed_backends():
    assert "gloo" in found("distributed", "distributed").text


# Data


def test_where_the_data_is(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path / "gone"))
    finding = found("data folder", "data")
    assert finding == Finding("data folder", "no", f"{tmp_path / 'gone'} (from STEPPE_DATA; not there)")
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    assert found("data folder", "data") == Finding("data folder", "ok", f"{tmp_path} (from STEPPE_DATA)")
    assert found("data digits", "data").state == "ok"
    assert "mnist" in found("other data", "data").text


# The command


def test_a_check_that_raises_is_one_line_and_the_rest_follow(monkeypatch):
    def fail():
        yield Finding("half", "ok", "of it")
        raise ValueError("\n")

    def fine():
        yield Finding("data", "ok", "here")

    monkeypatch.setattr(doctor, "CHECKS", {"trouble": fail, "data": fine})
    assert list(examine()) == [
        Finding("half", "ok", "of it"),
        Finding("trouble", "broken", "ValueError"),
        Finding("data", "ok", "here"),
    ]
    result = run()
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"steppe {__version__}",
        "✓ ok     half               of it",
        "✗ broken trouble            ValueError",
        "✓ ok     data               here",
    ]


def test_where_marks_cannot_be_written():
    assert [line_for(Finding("x", state, ""), "ascii")[0] for state in ("ok", "no", "broken")] == [
        "+ ok    ",
        "- no    ",
        "x broken",
    ]


def test_all_findings_as_json(declared):
    declared("rich; extra == 'cli'")
    result = run("--json")
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert said["steppe"] == __version__
    by_name = {finding["name"]: finding for finding in said["findings"]}
    assert {finding["state"] for finding in said["findings"]} <= WORDS
    assert {"Python", "torch", "captured steps", "distributed", "torch.compile", "rich", "data folder"} <= set(by_name)
    assert by_name["torch"]["text"].startswith(torch.__version__)
    assert not [finding for finding in said["findings"] if finding["state"] == "broken"]


def test_no_optional_package_is_loaded_with_the_command_line():
    code = "import sys, steppe.cli.app; print([m for m in ('torchvision', 'lightning', 'ray') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
