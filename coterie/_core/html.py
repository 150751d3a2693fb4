"""Small pieces of HTML with which results show themselves in notebooks, and data for the scripts of pages."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from typing import Any


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


def script_json(value: Any) -> Any:
    """Return JSON that is safe inside a script element of a template; None for NaN and infinities.

    >>> print(script_json({"name": "</b>", "value": float("nan")}).replace(chr(92), "!"))
    {"name":"!u003c/b!u003e","value":null}
    """
    from markupsafe import Markup

    written = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        written = written.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(written)


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON has not, by None."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
