"""Format numbers for readers: shares in per cent, errors in the target's units."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coterie.data.column_types import some
from coterie.models.metrics import find

FAR = 0.05  # weight below which a client's rows count for nothing with the others


def show(metric: str, value: float) -> str:
    """Format a metric.

    >>> show("accuracy", 0.86), show("rmse", 12.3)
    ('86.0 %', '12.30')
    """
    if not math.isfinite(value):
        return "not known"
    return f"{100 * value:.1f} %" if find(metric).percent else digits(value)


def show_gain(metric: str, value: float, unit: bool = True) -> str:
    """Format a difference of metrics with its sign.

    >>> show_gain("accuracy", 0.012), show_gain("rmse", -0.31)
    ('+1.2 points', '−0.3100')
    """
    if not math.isfinite(value):
        return "not known"
    percent = find(metric).percent
    points = " points" if percent and unit else ""
    text = f"{100 * value:+.1f}" if percent else ("+" if value > 0 else "") + digits(value)
    return ("0.0" if text in ("+0.0", "-0.0") else text).replace("-", "−") + points


def digits(value: float) -> str:
    """Format a number with four significant digits, without exponent if it is of ordinary size."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "not known"
    if 1e-4 <= abs(value) < 1e9:
        places = max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:,.{places}f}"
    return f"{value:.3g}"


def count(number: int, one: str, many: str | None = None) -> str:
    """Format a count with its noun.

    >>> count(1, "client"), count(1000, "client")
    ('1 client', '1,000 clients')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def listed(names: list[str], most: int = 4) -> str:
    """Join names into a list.

    >>> listed(["a", "b", "c"]), listed(list("abcdefgh"))
    ('a, b and c', 'a, b, c and 5 more')
    """
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def far_clients(names: Sequence[str], weights: np.ndarray | None) -> str:
    """Return a sentence on clients whose rows fit nobody else's, so that they count for nothing with the others.

    >>> far_clients(["a", "b"], np.array([0.0, 1.1]))[:44]
    'This client has a weight near 0 with the oth'
    """
    if weights is None:
        return ""
    far = [name for name, weight in zip(names, weights, strict=True) if weight < FAR]
    if not far:
        return ""
    who = "This client has" if len(far) == 1 else "These clients have"
    return (
        f"{who} a weight near 0 with the others, because rows are too far from theirs (other units, or wrong values?): "
        f"{some(far)}."
    )
