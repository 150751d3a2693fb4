"""Reports on finished runs: tables for the terminal, plots, and one self-contained web page.

`write_report` writes the page; the modules hold its parts.
"""

from coterie.report.page import write_report

__all__ = ["write_report"]
