"""Small pieces of HTML with which results show themselves in notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence


def text(value: object) -> str:
    """Return a value as text that is safe inside HTML."""
    return html.escape(str(value))


def paragraph(value: object) -> str:
    """Return a paragraph.

    >>> paragraph("a < b")
    '<p>a &lt; b</p>'
    """
    return f"<p>{text(value)}</p>"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], most: int = 20) -> str:
    """Return a table whose first column names the row; the middle of a long one is left out.

    Parameters
    ----------
    headers
        Titles of the columns.
    rows
        Cells, as text or numbers.
    most
        Rows shown.

    Returns
    -------
    str
        The element.

    Examples
    --------
    >>> table(["client", "rows"], [["north", 3]]).count("<tr>")
    2
    """
    shown = list(rows)
    if len(shown) > most:
        gap = ["…", *[""] * (len(headers) - 1)]
        shown = [*shown[: most // 2], gap, *shown[len(shown) - most // 2 :]]
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in headers)
    body = "".join(
        f'<tr><th scope="row" style="text-align:left">{text(row[0])}</th>'
        + "".join(f"<td>{text(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in shown
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
