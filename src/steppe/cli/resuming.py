"""What `steppe measure` had found when it was stopped, kept beside its output until it is done."""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..curvature import checkpoints
from ..curvature.density import LogDet, Spectrum
from ..curvature.eigen import Eigenvalues
from ..curvature.estimates import Estimate


class Partial:
    """The finished measures of one model, and files for the one that is under way.

    Results of another measurement, or that cannot be read, are left out with a warning.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder, self._identity = folder, identity
        self._done: dict[str, Any] = {}
        state = _read(folder / "finished.pt")
        if state is None or state.get("of") != identity:
            if state is not None or (folder / "finished.pt").exists():
                _warn(folder, "belong to another measurement" if state else "cannot be read")
            shutil.rmtree(folder, ignore_errors=True)
            self._save()
        else:
            self._done = state["done"]
        for path in folder.glob("*"):
            if path.suffix == ".part" or _read(path) is None:  # killed while writing, or something else's
                path.unlink()

    @property
    def resumed(self) -> list[str]:
        """What need not be measured again."""
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
        """All is done and written elsewhere."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _save(self) -> None:
        checkpoints.write({"of": self._identity, "done": self._done}, self.folder / "finished.pt")


def digest(path: Path) -> str:
    """Tells files apart by what is in them."""
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
    except Exception:  # torn, or not ours: whatever it is, it is of no use here
        return None
    return state if isinstance(state, dict) and "of" in state else None


def _warn(folder: Path, why: str) -> None:
    warnings.warn(f"the partial results in {folder} {why}: starting over", stacklevel=3)
