"""Atomic writes: a file is written completely or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError, one_line

_GO_ON = "Earlier files are as they were: make room and run the same command again"
DISK_FULL = f"the disk is full. {_GO_ON}"

# Words in the errors of torch and safetensors when a file cannot be written: neither raises an OSError.
_NOT_WRITTEN = ("inline_container", "PytorchStreamWriter", "I/O error")


def disk_is_full(error: BaseException) -> bool:
    """Whether an error says that the disk is full or the user's quota is exceeded."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A context with a temporary path to write to. It replaces `path` at the end; after an error it is removed.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with whole_file(folder / "answer.txt") as temporary:
    ...     _ = temporary.write_text("42")
    >>> [path.name for path in folder.iterdir()]
    ['answer.txt']
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    except Exception as error:
        if disk_is_full(error):
            raise UserError(f"{path} cannot be written: {DISK_FULL}") from None
        if not isinstance(error, OSError) and any(word in str(error) for word in _NOT_WRITTEN):
            raise UserError(f"{path} cannot be written; is the disk full? ({one_line(error)}) {_GO_ON}") from None
        raise
    finally:
        temporary.unlink(missing_ok=True)
