"""Numbers as a reader wants them: shares in per cent, errors in the target's units."""

from __future__ import annotations

import math


def show(metric: str, value: float) -> str:
    """A metric, such as '86.0 %' or '12.3'."""
    if not math.isfinite(value):
        return "not known"
    return f"{100 * value:.1f} %" if metric == "accuracy" else digits(value)


def show_gain(metric: str, value: float, unit: bool = True) -> str:
    """A difference of metrics with its sign: '+1.2 points' or '−0.31'."""
    if not math.isfinite(value):
        return "not known"
    points = " points" if metric == "accuracy" and unit else ""
    text = f"{100 * value:+.1f}" if metric == "accuracy" else ("+" if value > 0 else "") + digits(value)
    return ("0.0" if text in ("+0.0", "-0.0") else text).replace("-", "−") + points


def digits(value: float) -> str:
    """Four significant digits, no exponent for numbers of ordinary size."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "not known"
    if 1e-4 <= abs(value) < 1e9:
        places = max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:,.{places}f}"
    return f"{value:.3g}"


def size(megabytes: float) -> str:
    """'12 kB', '3.4 MB' or '1.2 GB'."""
    if megabytes == 0:
        return "nothing"
    for factor, unit in ((1e-3, "GB"), (1.0, "MB"), (1e3, "kB"), (1e6, "bytes")):
        if megabytes * factor >= 1 or unit == "bytes":
            number = megabytes * factor
            return f"{number:.0f} {unit}" if number >= 100 or unit == "bytes" else f"{number:.2g} {unit}"
    raise AssertionError


def count(number: int, one: str, many: str | None = None) -> str:
    """'1 client', '4 clients', '1,000 clients'."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def listed(names: list[str], most: int = 4) -> str:
    """'a, b and c', or 'a, b, c and 7 more'."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
