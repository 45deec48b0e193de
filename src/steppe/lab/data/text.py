"""Text as a data set: bytes in rows of equal length, where the target of each byte is the next one.

Whole documents are held out for the test. Bytes need no vocabulary, so text in any language and any file works; the
perplexity is per byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...support.errors import UserError
from .dataset import DataSet, Examples

LENGTH = 128  # bytes per row
BYTES = 256
TENTH = 10


def text_in(path: Path) -> DataSet:
    """The data set of a text file, or of all files NAME.txt in a folder and its subfolders.

    Test data is every tenth document of a folder, in alphabetical order, or the last tenth of a single file.
    """
    if path.is_file():
        whole = _read(path)
        cut = len(whole) - len(whole) // TENTH
        train, test = [whole[:cut]], [whole[cut:]]
    elif path.is_dir():
        documents = [_read(file) for file in sorted(path.rglob("*.txt"))]
        if len(documents) < TENTH:
            raise UserError(
                f"{path} has {len(documents)} files NAME.txt: at least {TENTH} are needed, or name one file"
            )
        test = documents[TENTH - 1 :: TENTH]
        train = [one for place, one in enumerate(documents, 1) if place % TENTH]
    else:
        raise UserError(f"{path} does not exist: name a text file, or a folder of files NAME.txt")
    splits = [_rows(documents, path) for documents in (train, test)]
    return DataSet(f"text:{path.name}", *splits, classes=BYTES, tokens=True)


def _read(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes() or b"\0"), dtype=torch.uint8)


def _rows(documents: Sequence[Tensor], path: Path) -> Examples:
    """The rows of all documents; an incomplete row at the end of a document is dropped."""
    inputs, targets = [], []
    for document in documents:
        count = (len(document) - 1) // LENGTH
        inputs.append(document[: count * LENGTH].view(count, LENGTH))
        targets.append(document[1 : count * LENGTH + 1].view(count, LENGTH))
    x, y = torch.cat(inputs).long(), torch.cat(targets).long()
    if not len(x):
        raise UserError(f"{path} has too little text: a document needs more than {LENGTH} bytes")
    return Examples(x, y)
