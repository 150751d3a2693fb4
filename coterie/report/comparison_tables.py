"""A comparison as tables for the terminal: how good, who gains, what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from coterie.report.cells import Column, Decimals, direction, number_table
from coterie.train.drift import Drift

if TYPE_CHECKING:
    from coterie.select.comparison import Comparison

LEGEND = "against training alone, on the same test rows; bold: chosen by validation"
OVER_ROWS = {"auc": "AUC"}  # columns over all rows; the metric itself is "all rows"


def comparison_tables(comparison: Comparison, width: int) -> list[Table]:
    """Return the table of a comparison, or three tables if one would be too wide.

    Parameters
    ----------
    comparison
        What `coterie.compare` returned.
    width
        Columns of the terminal.

    Returns
    -------
    list of rich.table.Table
        A row per method: quality, clients improved and harmed, and cost.
    """
    scored = comparison.scored
    clients = f"{comparison.clients}" if scored == comparison.clients else f"{scored} of {comparison.clients}"
    whom = f"{clients} client{'' if clients == '1' else 's'}"
    title = f"Test {comparison.metric} over {whom} ({direction(comparison.metric)})"
    if comparison.folds > 1:
        usual = f"every row tested once in {comparison.folds} folds (± sd between them)"
        title += f", {comparison.folds} windows in time" if comparison.in_time else f", {usual}"
    method: Column = ("method", [row["algorithm"] for row in comparison.rows])
    quality, gains, price = _quality(comparison), _gains(comparison), _price(comparison.rows)
    quartiles, best = _quartiles(comparison), method[1].index(comparison.chosen())
    whole = number_table(title, method, [*quality, quartiles, *gains, *price], best, LEGEND)
    if Console(width=1000).measure(whole).maximum <= width:
        return [whole]
    return [
        number_table(title, method, quality, best),
        number_table("", method, gains, best, LEGEND),
        number_table("", method, [quartiles, *price], best),
    ]


def _quality(comparison: Comparison) -> list[Column]:
    """Return the columns about the metrics: means over clients, and over the rows of all of them."""
    rows, show = comparison.rows, _format(comparison)
    sd = len({trial.seed for trial in comparison.trials}) > 1
    spread = [f" ± {show(row['sd'])}" if sd else "" for row in rows]
    beside = [
        (
            _loss_name(comparison) if name == "loss" else OVER_ROWS.get(name, "all rows"),
            [_optional(row["over_rows"][name]) for row in rows],
        )
        for name in rows[0]["over_rows"]
    ]
    return [
        (
            "mean ± sd" if sd else "mean",
            [show(row["mean"]) + off for row, off in zip(rows, spread, strict=True)],
        ),
        ("worst", [show(row["worst"]) for row in rows]),
        *beside,
    ]


def _loss_name(comparison: Comparison) -> str:
    """Return what the loss is called: for survival it is minus the partial log-likelihood per event."""
    return "loss" if comparison.task == "survival" else "log-loss"


def _optional(value: float | None) -> str:
    """Format a value over all rows; empty if it is not defined."""
    return "" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def _gains(comparison: Comparison) -> list[Column]:
    """Return the columns about the gain over training alone, by paired rows."""
    rows = comparison.rows
    show = Decimals.for_metric(comparison.row_metric.name, _ends(rows))
    pairs = [(row, row["algorithm"] == "local") for row in rows]
    name = _loss_name(comparison) if comparison.row_metric.name == "loss" else comparison.row_metric.name
    kept = [f"{row['guard']['kept']:.3g}" if "guard" in row else "" for row in rows]
    return [
        *([("keep own", kept)] if comparison.guard else []),
        ("clients better", ["" if own else f"{row['improved']:.0f} %" for row, own in pairs]),
        ("worse", ["" if own else f"{row['harmed']:.0f} %" for row, own in pairs]),
        (f"{name} gain, 95 %", ["" if own else _interval(row, show) for row, own in pairs]),
    ]


def _ends(rows: list[dict[str, Any]]) -> list[float]:
    """Return the ends of all intervals."""
    ends = [row[end] for row in rows for end in ("gain_low", "gain_high")]
    return [10 * abs(end) for end in ends if end]


def _interval(row: dict[str, Any], show: Decimals) -> str:
    """Format the 95 % interval of the mean gain; empty if unknown."""
    if row["gain_low"] is None:
        return ""
    return f"{show(row['gain_low'], '+')} … {show(row['gain_high'], '+')}"


def _quartiles(comparison: Comparison) -> Column:
    """Return the column with the quartiles over clients."""
    show = _format(comparison)
    return (
        "quartiles",
        [" ".join(show(row[name]) for name in ("q25", "median", "q75")) for row in comparison.rows],
    )


def _price(rows: list[dict[str, Any]]) -> list[Column]:
    """Return the columns about rounds, traffic and time."""
    return [
        ("rounds", [f"{row['rounds']:.0f}" for row in rows]),
        ("MB up", [f"{row['mb_up']:.3f}" for row in rows]),
        ("MB down", [f"{row['mb_down']:.3f}" for row in rows]),
        ("s", [f"{row['seconds']:.1f}" for row in rows]),
    ]


def _format(comparison: Comparison) -> Decimals:
    """Return the number format of a comparison's metric."""
    return Decimals.for_metric(comparison.metric, (row["mean"] for row in comparison.rows))


def drift_notes(comparison: Comparison) -> list[str]:
    """Return a sentence if the past does not predict the future for the method that validation rows prefer."""
    drift = Drift.of(comparison.of(comparison.chosen())[-1].run)
    return [drift.sentence()] if drift is not None and drift.sentence() else []
