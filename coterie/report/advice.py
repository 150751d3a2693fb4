"""Print the advice of `coterie advise` as tables in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.select.advice import Advice

MEANING = (
    "noise: variance that no model explains; distance: squared distance between the client's model and the shared one; "
    "error: predicted squared error beyond the noise, as a 90 % interval where clients differ"
)


def advice_tables(advice: Advice, most: int = 15) -> list[str | Table]:
    """Return the verdict with its reasons, then a table of what is estimated and recommended for each client.

    Parameters
    ----------
    advice
        What `coterie.advise` returned.
    most
        Clients listed in the table.

    Returns
    -------
    list of str and rich.table.Table
        Parts to print, in this order.

    Examples
    --------
    >>> import coterie
    >>> from coterie.report.advice import advice_tables
    >>> fed = coterie.Federation.from_table("heart_disease", "hospital", "sick")
    >>> text, table, sent = advice_tables(coterie.advise(fed, probe=0))
    >>> table.row_count
    4
    """
    sent = f"The advice took {advice.floats_up:.0f} floats up and {advice.floats_down:.0f} down per client."
    if advice.own is None:
        return [advice.text(), sent]
    more = f" (first {most} of {len(advice.names)})" if len(advice.names) > most else ""
    table = Table(title=f"Recommended for each client{more}", caption=MEANING)
    for name in ("client", "rows per feature", "noise", "distance", "method", "lambda", "error"):
        table.add_column(name, justify="left" if name in ("client", "method") else "right")
    for k, client in enumerate(advice.names[:most]):
        method = advice.methods[k]
        low, high = advice.intervals[method][k].tolist()
        table.add_row(
            client,
            f"{1 / float(advice.gamma[k]):.2g}",
            _short(advice.sigma2[k]),
            _short(advice.r2[k]),
            method,
            _short(advice.lams[k]),
            _interval(low, high),
        )
    return [advice.text(), table, sent]


def _interval(low: float, high: float) -> str:
    """Format an interval; empty if it is unknown, one number if both ends print alike."""
    if low != low:
        return ""
    first, last = (f"{value if value > 1e-9 else 0.0:.2g}" for value in (low, high))
    return first if first == last else f"{first} to {last}"


def _short(value: Tensor) -> str:
    """Format a number with three significant digits; empty for NaN."""
    number = float(value)
    return "" if number != number else f"{number:.3g}"
