"""Format amounts of data."""

from __future__ import annotations


def size(megabytes: float) -> str:
    """Format an amount of data.

    >>> size(0.012), size(3.4), size(1200)
    ('12 kB', '3.4 MB', '1.2 GB')
    """
    if megabytes == 0:
        return "nothing"
    for factor, unit in ((1e-3, "GB"), (1.0, "MB"), (1e3, "kB"), (1e6, "bytes")):
        if megabytes * factor >= 1 or unit == "bytes":
            number = megabytes * factor
            return f"{number:.0f} {unit}" if number >= 100 or unit == "bytes" else f"{number:.2g} {unit}"
    raise AssertionError
