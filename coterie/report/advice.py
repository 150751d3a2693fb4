"""Advice as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from coterie.theory.advisor import Advice

MEANING = (
    "noise: variance that no model explains; distance: squared, of the client's model from the shared one; "
    "error: predicted squared error beyond the noise, 90 % interval where clients differ"
)


def advice_tables(advice: Advice, most: int = 15) -> list[str | Table]:
    """The verdict and its reasons, then the clients: what was estimated and what is recommended for each."""
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
    sent = f"The advice took {advice.floats_up:.0f} floats up and {advice.floats_down:.0f} down per client."
    return [advice.text(), table, sent]


def _interval(low: float, high: float) -> str:
    if low != low:
        return ""
    first, last = (f"{value if value > 1e-9 else 0.0:.2g}" for value in (low, high))
    return first if first == last else f"{first} to {last}"


def _short(value: object) -> str:
    number = float(value)  # type: ignore[arg-type]
    return "" if number != number else f"{number:.3g}"
