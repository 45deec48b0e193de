"""What is released: a wheel and a source archive that hold everything, install, and work."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import steppe
from steppe.cli.commands.doctor import module_of, optional_packages

ROOT = Path(__file__).parents[1]
HERE = Path(steppe.__file__).parent


def run(*command: str | Path, **options) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_in(folder: Path, *patterns: str) -> set[str]:
    found = [path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()]
    return {str(path.relative_to(folder)) for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel, built from the source archive; and that."""
    for module in ("build", "hatchling"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def wheel_files(archives) -> dict[str, bytes]:
    with zipfile.ZipFile(archives[0]) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


@pytest.fixture(scope="module")
def source_files(archives) -> set[str]:
    with tarfile.open(archives[1]) as source:
        return {member.name.partition("/")[2] for member in source.getmembers() if member.isfile()}


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory) -> Path:
    """A fresh environment with the wheel in it, and what it depends on within reach."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    its_python = folder / "bin" / "python"
    packages = Path(run(its_python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A path listed here is searched, but what it lists itself (an editable steppe) is not.
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    options = ("--no-deps", "--no-index", "--no-cache-dir", "--disable-pip-version-check", "-q")
    run(sys.executable, "-m", "pip", "--python", its_python, "install", *options, archives[0])
    return folder


def call(installed: Path, program: str, *arguments: str) -> str:
    """Run a program of the fresh environment, somewhere else."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return run(installed / "bin" / program, *arguments, cwd=installed, env=clean).strip()


def test_the_version_is_defined_in_one_place(archives):
    wheel, source = archives
    assert wheel.name == f"steppe-{steppe.__version__}-py3-none-any.whl"
    assert source.name == f"steppe-{steppe.__version__}.tar.gz"
    assert f"\nversion: {steppe.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_the_wheel_holds_the_package_and_nothing_else(wheel_files):
    packed = {name.removeprefix("steppe/") for name in wheel_files if name.startswith("steppe/")}
    assert packed == files_in(HERE, "*")
    assert {"py.typed", "lab/report/static/page.js", "lab/report/static/page.css"} <= packed
    assert {name.split("/")[0] for name in wheel_files} == {"steppe", f"steppe-{steppe.__version__}.dist-info"}


def test_the_metadata_of_the_wheel(wheel_files):
    info = f"steppe-{steppe.__version__}.dist-info"
    metadata = Parser().parsestr(wheel_files[f"{info}/METADATA"].decode())
    assert (metadata["Name"], metadata["License-Expression"]) == ("steppe", "Apache-2.0")
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line.split(">")[0] for line in needed] == ["torch"]
    assert {"cli", "curvature", "test"} <= set(metadata.get_all("Provides-Extra", []))
    assert str(metadata.get_payload()).startswith("# steppe")
    assert wheel_files[f"{info}/entry_points.txt"].decode().split() == [
        "[console_scripts]", "steppe", "=", "steppe.__main__:main",
    ]  # fmt: skip
    assert f"{info}/licenses/LICENSE" in wheel_files


def test_the_source_archive_holds_what_makes_and_checks_it(source_files):
    wanted = {f"src/steppe/{name}" for name in files_in(HERE, "*")}
    for folder, patterns in {
        "tests": ("*.py", "*.json"),
        "examples": ("*.py",),
        "benchmarks": ("*.py", "*.json"),
        "docs": ("*.md", "*.py", "*.svg", "*.css"),
    }.items():
        wanted |= {f"{folder}/{name}" for name in files_in(ROOT / folder, *patterns)}
    wanted |= {"pyproject.toml", "mkdocs.yml", "constraints.txt", "LICENSE", "CITATION.cff"}
    wanted |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    assert sorted(wanted - source_files) == []


def test_nothing_made_on_the_way_is_released(source_files):
    unwanted = ("__pycache__", ".pyc", "site/", "runs/", ".venv", ".hypothesis", ".pytest_cache")
    assert [name for name in source_files if any(part in name for part in unwanted)] == []


@pytest.mark.slow
def test_the_installed_package_trains_with_torch_alone(installed):
    code = """
import sys, steppe, torch
model = torch.nn.Linear(2, 1)
opt = steppe.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "gsam", model=model)
loss = opt.step(lambda: model(torch.ones(4, 2)).square().mean())
loaded = sorted(name for name in sys.modules if "." not in name)
print(steppe.__file__, opt.metrics["looks"], torch.isfinite(loss).item(), *loaded)
"""
    where, looks, finite, *loaded = call(installed, "python", "-c", code).split()
    assert Path(where).is_relative_to(installed) and (looks, finite) == ("2", "True")
    optional = {module_of(package) for package in optional_packages()}
    assert "typer" in optional
    assert optional.intersection(loaded) == set()


@pytest.mark.slow
def test_the_installed_command_runs(installed):
    assert call(installed, "steppe", "--version") == steppe.__version__
    assert "GNAMFast" in call(installed, "steppe", "methods", "--markdown")
