"""Claims of runs in a shared folder: of many processes, on many machines, one trains a run.

A claim is a file that only one process can create (O_EXCL), with a number: KEY.1, KEY.2, ... Its owner touches it again
and again. If it is not touched for a while, its owner is dead, and the process that creates the next number has the
run. Files are never taken away from anybody, so that no two processes can both believe that they own the same number.
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

STALE = 60.0  # seconds without a touch after which an owner counts as dead


@dataclass(frozen=True)
class Claim:
    """The right to train a run."""

    path: Path
    number: int

    @classmethod
    def take(cls, folder: Path, key: str, stale: float = STALE) -> Claim | None:
        """Claim a run; None if another process has it."""
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
        """Whether another process has taken the run over, because this one seemed dead."""
        return _newest(self.path.parent, self.key) > self.number

    def release(self) -> None:
        """Give the run back, or away when it is done."""
        for number in range(1, self.number + 1):
            self.path.with_name(f"{self.key}.{number}").unlink(missing_ok=True)

    @contextmanager
    def held(self, stale: float = STALE) -> Iterator[None]:
        """Touch the claim while the block runs, in a thread; then release it."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(stale / 6):
                with contextlib.suppress(OSError):
                    os.utime(self.path)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if not self.lost():
                self.release()


def owners(folder: Path, stale: float = STALE) -> dict[str, str]:
    """Who trains which run at the moment: host and process, by key."""
    claims = folder / ".claims"
    newest: dict[str, int] = {}
    for path in claims.glob("*.*") if claims.is_dir() else ():
        key, _, number = path.name.rpartition(".")
        if number.isdigit():
            newest[key] = max(newest.get(key, 0), int(number))
    living = {key: claims / f"{key}.{number}" for key, number in newest.items()}
    return {key: _read(path) for key, path in living.items() if not _is_stale(path, stale)}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _newest(claims: Path, key: str) -> int:
    numbers = [path.name.rpartition(".")[2] for path in claims.glob(f"{key}.*")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _is_stale(path: Path, stale: float) -> bool:
    """Whether a claim was not touched for so long. The clock is the file system's: machines' clocks may differ."""
    probe = path.with_name(f".clock-{uuid.uuid4().hex}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime > stale
    except FileNotFoundError:  # released just now: the next look finds it free
        return False
    finally:
        probe.unlink(missing_ok=True)
