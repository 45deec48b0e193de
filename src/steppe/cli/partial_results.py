"""Partial results of `steppe measure`, kept in its output folder until the measurement is complete."""

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
    """The partial results of the same measurement of the same weights, model and data, or an empty set of results."""
    loss = f"{float(objective.loss()):.5g}"
    of = {"weights": digest(path), "loss": loss, "asked": {k: str(v) for k, v in sorted(asked.items())}}
    identity = hashlib.sha256(json.dumps(of).encode()).hexdigest()  # another measurement has another folder
    folder = out / ".partial" / identity[:16]
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    partial = Partial(folder, of)
    if partial.resumed:
        typer.echo(f"  resuming: {', '.join(partial.resumed)} already done", err=True)
    return partial


class Partial:
    """The finished measures of one model, and the files of the measure that is being computed.

    Results of another measurement, and files that cannot be read, are deleted with a message.
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
            if path.suffix == ".part" or _read(path) is None:  # left by a killed process, or not ours
                path.unlink()

    @property
    def resumed(self) -> list[str]:
        """The measures that are finished."""
        return list(self._done)

    def file(self, name: str) -> Path:
        """The file in which a measure saves its state."""
        return self.folder / name

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """The result of a measure: the saved one if there is one, else computed now and saved."""
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
    except Exception:  # truncated, or not ours
        return None
    return state if isinstance(state, dict) and "of" in state else None
