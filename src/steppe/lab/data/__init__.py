"""Data sets by name.

>>> digits = load("digits")
>>> digits.input_shape, digits.classes, len(digits.train), len(digits.test)
((1, 8, 8), 10, 1437, 360)
"""

from __future__ import annotations

from .corruptions import CORRUPTIONS, SEVERITIES, all_corrupted, corrupt, corrupted
from .dataset import Batch, DataSet, Readable, Split, first, prepare, subset, with_label_noise, with_targets
from .loading import Listing, data_names, data_root, load

__all__ = [
    "CORRUPTIONS",
    "SEVERITIES",
    "Batch",
    "DataSet",
    "Listing",
    "Readable",
    "Split",
    "all_corrupted",
    "corrupt",
    "corrupted",
    "data_names",
    "data_root",
    "first",
    "load",
    "prepare",
    "subset",
    "with_label_noise",
    "with_targets",
]
