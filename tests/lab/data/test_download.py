"""Downloads are complete and verified, or leave no file."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
import zipfile
from dataclasses import replace

import pytest

from helpers.file_formats import half, same, told, write_cifar10_pickle
from steppe.lab.data import load
from steppe.lab.data.catalogue import ENTRIES
from steppe.lab.data.download import Source, command, download


@pytest.fixture
def home(tmp_path):
    """A place that data is downloaded from: real addresses, but of files here."""
    place = tmp_path / "home"
    place.mkdir()
    return place


def source(path, folder=""):
    return Source(path.as_uri(), hashlib.md5(path.read_bytes()).hexdigest(), folder)


def test_an_archive_is_downloaded_checked_and_unpacked(tmp_path, home, monkeypatch, capsys):
    write_cifar10_pickle(home / "cifar-10-batches-py")
    with tarfile.open(home / "cifar.tar.gz", "w:gz") as archive:
        archive.add(home / "cifar-10-batches-py", "cifar-10-batches-py")
    entry = replace(ENTRIES["cifar-10"], sources=(source(home / "cifar.tar.gz"),))
    monkeypatch.setitem(ENTRIES, "cifar-10", entry)
    root = tmp_path / "new" / "root"
    data = load("cifar-10", root, download=True, verify=False)
    assert same(data.train, *half("cifar10", 0))
    assert sorted(path.name for path in root.iterdir()) == ["cifar-10-batches-py"]  # nothing else stays
    assert capsys.readouterr().err == "downloading cifar.tar.gz, 1 MB\n"
    (home / "cifar.tar.gz").unlink()
    load("cifar-10", root, download=True, verify=False)  # it is there: nothing is fetched


def test_a_terminal_shows_a_bar(tmp_path, home, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    (home / "file.gz").write_bytes(bytes(2000))
    download((source(home / "file.gz"),), tmp_path / "root")
    assert "file.gz" in terminal.getvalue() and "2.0/2.0 kB" in terminal.getvalue()


def test_plain_files_and_zip_archives(tmp_path, home):
    (home / "one.gz").write_bytes(b"kept as it is")
    with zipfile.ZipFile(home / "two.zip", "w") as archive:
        archive.writestr("inside/file", "x")
    download((source(home / "one.gz", "A/raw"), source(home / "two.zip")), tmp_path / "root")
    assert (tmp_path / "root/A/raw/one.gz").read_bytes() == b"kept as it is"
    assert (tmp_path / "root/inside/file").read_text() == "x"
    assert [p.name for p in (tmp_path / "root/A/raw").iterdir()] == ["one.gz"]


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path, home):
    (home / "file.gz").write_bytes(b"other bytes")
    wrong = replace(source(home / "file.gz"), md5="0" * 32)
    said = told(download, (wrong,), tmp_path / "root")
    found = hashlib.md5(b"other bytes").hexdigest()
    assert said == f"{wrong.url} is not the published file: md5 {found} of 11 bytes, expected {'0' * 32}"
    assert list((tmp_path / "root").iterdir()) == []


def test_a_broken_archive_leaves_nothing_behind(tmp_path, home):
    for name in ("a.zip", "a.tar.gz"):
        (home / name).write_bytes(b"not an archive")
        assert told(download, (source(home / name),), tmp_path / "root").startswith(f"{name} cannot be unpacked: ")
        assert list((tmp_path / "root").iterdir()) == []


def test_without_a_network_the_download_command_is_shown(tmp_path, home):
    gone = Source((home / "gone.tar.gz").as_uri(), "0" * 32)
    said = told(download, (gone,), tmp_path)
    assert said.startswith(f"cannot download {gone.url} (URLError: ")
    assert said.endswith(
        f"on a machine with a network: mkdir -p {tmp_path} && curl -fL {gone.url} | tar xz -C {tmp_path}"
    )


def test_commands(tmp_path):
    def sources(*names):
        return tuple(Source(f"https://h/{name}", "", "F") for name in names)

    into = f"mkdir -p {tmp_path}/F && "
    assert command(sources("a.gz", "b.gz"), tmp_path) == (
        f"{into}cd {tmp_path}/F && curl -fL --remote-name-all https://h/a.gz https://h/b.gz"
    )
    assert (
        command(sources("a.zip"), tmp_path) == f"{into}cd {tmp_path}/F && curl -fLO https://h/a.zip && unzip -q a.zip"
    )
    assert command(sources("a.tar"), tmp_path) == f"{into}curl -fL https://h/a.tar | tar x -C {tmp_path}/F"
