"""Downloading published data, with verified checksums and a progress bar. A file appears completely or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...support.errors import UserError, describe, one_line
from .file_formats import md5

_BLOCK = 1 << 20
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")


@dataclass(frozen=True)
class Source:
    """A published file: its address, its checksum, and its folder (relative to the data folder)."""

    url: str
    md5: str
    folder: str = ""

    @property
    def name(self) -> str:
        """The file's name."""
        return self.url.rsplit("/", 1)[-1].partition("?")[0]

    @property
    def packed(self) -> bool:
        """Whether it is an archive that must be unpacked."""
        return self.name.endswith(_ARCHIVES)


def command(sources: tuple[Source, ...], root: Path) -> str:
    """A shell command that downloads these files."""
    folder = root / sources[0].folder
    if not sources[0].packed:
        return f"mkdir -p {folder} && cd {folder} && curl -fL --remote-name-all {' '.join(s.url for s in sources)}"
    one = sources[0]
    if one.name.endswith(".zip"):
        return f"mkdir -p {folder} && cd {folder} && curl -fLO {one.url} && unzip -q {one.name}"
    return f"mkdir -p {folder} && curl -fL {one.url} | tar x{'' if one.name.endswith('.tar') else 'z'} -C {folder}"


def download(sources: tuple[Source, ...], root: Path) -> None:
    """Download every source into its folder. A partial file or one with a wrong checksum is never left there."""
    for source in sources:
        folder = root / source.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
                part = Path(temporary) / source.name
                _fetch(source, part)
                _move_in(_unpack(part) if source.packed else [part], folder)
        except OSError as error:
            where = f"on a machine with a network: {command(sources, root)}"
            raise UserError(f"cannot download {source.url} ({describe(error)}); {where}") from error


def _fetch(source: Source, part: Path) -> None:
    with urllib.request.urlopen(source.url, timeout=60) as answer, part.open("wb") as file:
        total = int(answer.headers.get("Content-Length") or 0)
        with _progress(source.name, total) as advance:
            while block := answer.read(_BLOCK):
                file.write(block)
                advance(len(block))
    found = md5(part)
    if found != source.md5:
        size = part.stat().st_size
        raise UserError(f"{source.url} is not the published file: md5 {found} of {size} bytes, expected {source.md5}")


def _unpack(archive: Path) -> list[Path]:
    inside = archive.parent / "unpacked"
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(inside)  # zipfile never writes outside this folder
        else:
            with tarfile.open(archive) as packed:
                settings: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # early 3.10 has none
                packed.extractall(inside, **settings)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{archive.name} cannot be unpacked: {one_line(error)}") from error
    return sorted(inside.iterdir())


def _move_in(found: list[Path], folder: Path) -> None:
    for path in found:  # on the same file system, so that each appears completely or not at all
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], Any]]:
    """A progress bar on a terminal, one line elsewhere. Call the yielded function with the number of new bytes."""
    if not sys.stderr.isatty():
        print(f"downloading {name}{f', {total / 1e6:.0f} MB' if total else ''}", file=sys.stderr)
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        yield partial(bar.advance, bar.add_task(name, total=total or None))
