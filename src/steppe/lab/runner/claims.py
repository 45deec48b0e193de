"""Claims on runs in a shared folder: of many processes, on many machines, exactly one trains a run.

A claim is a numbered file that only one process can create (O_EXCL): KEY.1, KEY.2, ... Its owner updates its
modification time regularly. If that stops, the owner counts as dead, and the process that creates the next number gets
the run. A process never deletes the claim of another, so no two processes can both believe that they own one number.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STALE = 60.0  # seconds without an update after which the owner of a claim counts as dead


class TakenOver(Exception):
    """Another process has taken over the run that this one trains."""


@dataclass(frozen=True)
class Claim:
    """The right to train a run."""

    path: Path
    number: int

    @classmethod
    def take(cls, folder: Path, key: str, stale: float = STALE) -> Claim | None:
        """Try to claim a run; None if another process has it."""
        claims = folder / ".claims"
        claims.mkdir(parents=True, exist_ok=True)
        number = _newest(claims, key)
        if number and not _is_stale(claims / f"{key}.{number}", stale):
            return None
        mine = cls(claims / f"{key}.{number + 1}", number + 1)
        try:
            with open(mine.path, "x") as file:
                file.write(f"{socket.gethostname()} {os.getpid()}\n")
        except FileExistsError:
            return None
        return mine

    @property
    def key(self) -> str:
        """The key of the run."""
        return self.path.name.rpartition(".")[0]

    def lost(self) -> bool:
        """Whether another process has taken over the run, and perhaps ended it, because this one seemed dead."""
        return not self.path.exists() or _newest(self.path.parent, self.key) > self.number

    def release(self) -> None:
        """Delete the claim, when the run is done or given up."""
        for number in range(1, self.number + 1):
            self.path.with_name(f"{self.key}.{number}").unlink(missing_ok=True)

    @contextmanager
    def held(self, stale: float = STALE) -> Iterator[None]:
        """Keep the claim alive while the block runs, from a thread; then release it."""
        ended = threading.Event()

        def heartbeat() -> None:
            while not ended.wait(stale / 6):
                with contextlib.suppress(OSError):
                    os.utime(self.path)

        thread = threading.Thread(target=heartbeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if not self.lost():
                self.release()


def owners(folder: Path, stale: float = STALE) -> dict[str, str]:
    """Host and process that train each run at the moment, by the key of the run."""
    claims = folder / ".claims"
    newest: dict[str, int] = {}
    for path in claims.glob("*.*") if claims.is_dir() else ():
        key, _, number = path.name.rpartition(".")
        if number.isdigit():
            newest[key] = max(newest.get(key, 0), int(number))
    files = {key: claims / f"{key}.{number}" for key, number in newest.items()}
    return {key: _read(path) for key, path in files.items() if not _is_stale(path, stale)}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _newest(claims: Path, key: str) -> int:
    numbers = [path.name.rpartition(".")[2] for path in claims.glob(f"{key}.*")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _is_stale(path: Path, stale: float) -> bool:
    """Whether a claim was not updated for this long, by the clock of the file system: those of machines may differ."""
    probe = path.with_name(f".clock-{uuid.uuid4().hex}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime > stale
    except FileNotFoundError:  # released just now: the next attempt finds it free
        return False
    finally:
        probe.unlink(missing_ok=True)
