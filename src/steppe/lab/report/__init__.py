"""Reports of comparisons: a table in the terminal, one HTML page, figures."""

from .page import write_report
from .terminal_table import headline, table

__all__ = ["headline", "table", "write_report"]
