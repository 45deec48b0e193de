"""Results of an interrupted `steppe measure`, kept beside its output until the measurement is complete."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer

from ..curvature import checkpoints
from ..curvature.density import LogDet, Spectrum
from ..curvature.eigen import Eigenvalues
from ..curvature.estimates import Estimate
from ..curvature.objective import Objective
from .errors import say


def partial_results(out: Path, path: Path, objective: Objective, asked: dict[str, Any], resume: bool) -> Partial:
    """The results of an earlier command that asked the same of the same weights, model and data; else none yet."""
    loss = f"{float(objective.loss()):.5g}"
    of = {"weights": digest(path), "loss": loss, "asked": {k: str(v) for k, v in sorted(asked.items())}}
    one = hashlib.sha256(json.dumps(of).encode()).hexdigest()  # another question has another folder
    folder = out / ".partial" / one[:16]
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    partial = Partial(folder, of)
    if partial.resumed:
        typer.echo(f"  going on: {', '.join(partial.resumed)} were found before", err=True)
    return partial


class Partial:
    """The finished measures of one model, and files for the measure that is under way.

    Results of another measurement, and files that cannot be read, are deleted; the user is told.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder, self._identity = folder, identity
        self._done: dict[str, Any] = {}
        state = _read(folder / "finished.pt")
        if state is None or state.get("of") != identity:
            if state is not None or (folder / "finished.pt").exists():
                why = "belong to another measurement" if state else "cannot be read"
                say(f"the partial results in {folder} {why}: starting over")
            shutil.rmtree(folder, ignore_errors=True)
            self._save()
        else:
            self._done = state["done"]
        for path in folder.glob("*"):
            if path.suffix == ".part" or _read(path) is None:  # written by a process that was killed, or not ours
                path.unlink()

    @property
    def resumed(self) -> list[str]:
        """The measures that are finished."""
        return list(self._done)

    def file(self, name: str) -> Path:
        """Where a measure saves its state."""
        return self.folder / name

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """The result of a measure: the saved one, or else a new one, which is then saved."""
        if name not in self._done:
            self._done[name] = measure()
            self._save()
        return self._done[name]

    def remove(self) -> None:
        """Delete the files: all results are written elsewhere."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _save(self) -> None:
        checkpoints.write({"of": self._identity, "done": self._done}, self.folder / "finished.pt")


def digest(path: Path) -> str:
    """A digest of a file's content."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        with torch.serialization.safe_globals([Eigenvalues, Estimate, LogDet, Spectrum]):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # cut short, or not ours: of no use here
        return None
    return state if isinstance(state, dict) and "of" in state else None
