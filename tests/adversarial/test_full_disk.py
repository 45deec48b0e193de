"""A disk that is full when a command writes: one line, earlier files as they were, and the same command goes on."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from helpers.curvature_problems import mlp
from steppe.cli.app import app

pytestmark = pytest.mark.slow
DATA = "from helpers.curvature_problems import digits, mlp\n"
DATA += "def model(): return mlp(4).double()\ndef data(): return digits(30, side=4)\n"
COMMANDS = {
    "train": "train --epochs 2 --share 0.2 --out out",
    "compare": "compare sam --jobs 1 --seeds 1 --epochs 1 --share 0.2 --no-curvature --no-equal-cost --out out",
    "sweep": "sweep --method sam --grid sam.rho=0.05 --seeds 1 --epochs 1 --share 0.2 --out out",
    "measure": "measure start.pt --model a_project:model --data a_project:data --what eigenvalues --out out",
    "paper": "paper run s0/fig4 --scale smoke --seeds 1 --out out",
}


class Disk:
    """Lets so many files be written whole, and then a part of one."""

    def __init__(self, monkeypatch, files):
        self.left, self.full = files, False
        write_text, save = Path.write_text, torch.save

        def text(path, data, *args, **kwargs):
            if self._room(path):
                return write_text(path, data, *args, **kwargs)
            write_text(path, data[: len(data) // 2], *args, **kwargs)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def saved(value, path, *args, **kwargs):
            if self._room(path):
                return save(value, path, *args, **kwargs)
            Path(path).write_bytes(b"half")
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 3136 vs 3030")

        monkeypatch.setattr(Path, "write_text", text)
        monkeypatch.setattr(torch, "save", saved)

    def _room(self, path):
        if not str(path).endswith(".part"):
            return True  # not a file of a result
        self.left -= 1
        self.full |= self.left < 0
        return self.left >= 0


def run(command):
    return CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "200"})


def results(folder):
    """What the runs in a folder found, without times."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        found[path.name] = without_times({key: content.get(key) for key in ("final", "measures", "values", "curve")})
    return found


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if "second" not in key}
    return value


@pytest.fixture
def _a_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("a_project", None)
    (tmp_path / "a_project.py").write_text(DATA)
    torch.manual_seed(0)
    torch.save(mlp(4).double().state_dict(), tmp_path / "start.pt")


@pytest.mark.usefixtures("_a_project")
@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_command_goes_on_when_there_is_room(name, tmp_path):
    straight = run(COMMANDS[name].replace("--out out", "--out straight"))
    assert straight.exit_code == 0, straight.output
    files = 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, files)
            stopped = run(COMMANDS[name])
        if not disk.full:
            break
        said = [line for line in stopped.stderr.splitlines() if "cannot be written" in line]
        assert stopped.exit_code == 2, stopped.output
        assert len(said) == 1 and said[0].startswith("steppe: out"), stopped.stderr
        assert "make room and run the same command again" in said[0]
        assert not list((tmp_path / "out").glob(".*.part"))
        files = 2 * files + 1
    assert files >= 1 and stopped.exit_code == 0, stopped.output
    assert results(tmp_path / "out") == results(tmp_path / "straight") != {}
