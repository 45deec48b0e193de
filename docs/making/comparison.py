"""The report that `steppe compare` makes without options, as a page of the documentation."""

from __future__ import annotations

import json
from pathlib import Path

from .first_picture import RECORDS

REPORT = "assets/compare/report.html"  # where the report is in the site


def report(path: Path = RECORDS) -> str:
    """The report of the records, as `steppe report` writes it."""
    from steppe.lab.report.page import report

    return report(json.loads(path.read_text("utf-8")), command="steppe compare")
