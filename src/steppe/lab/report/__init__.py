"""Reports of comparisons: a table in the terminal, one HTML page, figures."""

from .page import write_report
from .terminal_table import table

__all__ = ["table", "write_report"]
