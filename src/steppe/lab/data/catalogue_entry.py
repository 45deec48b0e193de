"""An entry of the catalogue of built-in data sets: its files, their checksums, their download addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...support.errors import UserError
from .dataset import DataSet, Readable, Split
from .download import Source, command, download
from .file_formats import md5

Name = str
Checksum = str


class Layout(Protocol):
    """One way in which the files of a data set are arranged in a folder."""

    def there(self, root: Path) -> bool:
        """Whether its files exist."""
        ...

    def lacking(self, root: Path) -> Path | None:
        """A missing file or folder, if others exist; else None."""
        ...

    def read(self, root: Path, checksums: Mapping[Name, Checksum] | None) -> tuple[Readable, Readable]:
        """Training and test split. `checksums` are those of further files; None: check no file."""
        ...


@dataclass(frozen=True)
class Files:
    """Files with published checksums in one of these folders, plain or gzipped."""

    folders: tuple[str, ...]
    train: dict[Name, Checksum]
    test: dict[Name, Checksum]
    reader: Callable[[Sequence[Path]], Split]

    def there(self, root: Path) -> bool:
        """Whether every file exists."""
        return self._whole(root) is not None

    def lacking(self, root: Path) -> Path | None:
        """The first missing file, if others exist; else None."""
        for splits in self._paths(root):
            paths = [path for split in splits for path in split]
            if any(path.exists() for path in paths):
                return next((path for path in paths if not path.exists()), None)
        return None

    def read(self, root: Path, checksums: Mapping[Name, Checksum] | None) -> tuple[Readable, Readable]:
        """Both splits, after a check of their checksums."""
        paths = self._whole(root)
        assert paths is not None
        if checksums is not None:
            known = {**self.train, **self.test, **checksums}
            for path in (path for split in paths for path in split):
                _check(path, known.get(path.name))
        return self.reader(paths[0]), self.reader(paths[1])

    def _paths(self, root: Path) -> Iterator[list[list[Path]]]:
        for folder in self.folders:
            yield [[_path(root / folder, name) for name in names] for names in (self.train, self.test)]

    def _whole(self, root: Path) -> list[list[Path]] | None:
        return next((p for p in self._paths(root) if all(path.exists() for split in p for path in split)), None)


def _path(folder: Path, name: str) -> Path:
    plain, zipped = folder / name, folder / f"{name}.gz"
    return zipped if zipped.exists() and not plain.exists() else plain


def _check(path: Path, expected: Checksum | None) -> None:
    if expected and (found := md5(path)) != expected:
        size = path.stat().st_size
        raise UserError(
            f"{path} is truncated, damaged or another file: md5 {found} ({size} bytes), expected {expected}"
        )


@dataclass(frozen=True)
class Entry:
    """A built-in data set."""

    name: str
    about: str
    train: int
    test: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layouts: tuple[Layout, ...]
    sources: tuple[Source, ...] = ()
    by_hand: str = ""  # instructions, if there is no download address

    def found(self, root: Path) -> Layout | None:
        """The layout in which it is found in this folder, if any."""
        return next((layout for layout in self.layouts if layout.there(root)), None)

    def how(self, root: Path) -> str:
        """Instructions to get it: a shell command, or a text."""
        return command(self.sources, root) if self.sources else self.by_hand

    def load(self, root: Path, fetch: bool, verify: bool) -> DataSet:
        """Read it; download it first if it is missing and `fetch` is set."""
        layout = self.found(root)
        if layout is None and fetch and self.sources:
            download(self.sources, root)
            layout = self.found(root)
        if layout is None:
            raise UserError(self._missing(root))
        train, test = layout.read(root, {s.name: s.md5 for s in self.sources} if verify else None)
        if verify and (found := int(train.targets.max()) + 1) != self.classes:
            raise UserError(f"{self.name} in {root} has {found} classes, not {self.classes}: is it another data set?")
        return DataSet(self.name, train, test, self.classes, self.mean, self.std)

    def _missing(self, root: Path) -> str:
        lacking = next((path for layout in self.layouts if (path := layout.lacking(root))), None)
        where = f"is incomplete: {lacking} is missing" if lacking else f"is not in {root}"
        how = ", or add --download, or run: " if self.sources else "; to get it you need "
        return f"{self.name} {where}: name its folder with --data-dir or STEPPE_DATA{how}{self.how(root)}"
