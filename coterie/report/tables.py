"""Results as tables for the terminal."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from rich.table import Table

from coterie.algorithms.base import Algorithm
from coterie.models.metrics import HIGHER_IS_BETTER, main_metric

if TYPE_CHECKING:
    from coterie.runs.compare import Comparison
    from coterie.runs.run import Run


def comparison_table(comparison: Comparison) -> Table:
    """One line per method: how well, for whom, at what price."""
    direction = "higher" if HIGHER_IS_BETTER[comparison.metric] else "lower"
    table = Table(title=f"Test {comparison.metric} over {comparison.clients} clients ({direction} is better)")
    table.add_column("method")
    for name in (
        "mean ± sd", "worst", "quartiles", "improved", "harmed", "gain over local, 95 %", "rounds", "MB up", "MB down", "s"
    ):
        table.add_column(name, justify="right")
    best = comparison.chosen()
    for row in comparison.rows:
        own = row["algorithm"] == "local"
        gain = "" if own or row["gain_low"] is None else f"{row['gain_low']:+.3f} … {row['gain_high']:+.3f}"
        table.add_row(
            row["algorithm"],
            f"{row['mean']:.3f} ± {row['sd']:.3f}",
            f"{row['worst']:.3f}",
            f"{row['q25']:.3f} {row['median']:.3f} {row['q75']:.3f}",
            "" if own else f"{row['improved']:.0f} %",
            "" if own else f"{row['harmed']:.0f} %",
            gain,
            f"{row['rounds']:.0f}",
            f"{row['mb_up']:.3f}",
            f"{row['mb_down']:.3f}",
            f"{row['seconds']:.1f}",
            style="bold" if row["algorithm"] == best else None,
        )
    return table


def run_table(run: Run, most: int = 20) -> Table:
    """Test (or validation, or training) metric per client; the middle is left out when there are many."""
    metric = main_metric(run.fed.model.task)
    split = next(split for split in ("test", "validation", "train") if run.fed.has_rows(split))
    scores = run.score(split, metric)
    table = Table(title=f"{run.algorithm.name}: {split} {metric}, mean {float(scores.nanmean()):.3f}")
    table.add_column("client")
    table.add_column("training rows", justify="right")
    table.add_column(metric, justify="right")
    shown = list(range(run.fed.n))
    if run.fed.n > most:
        shown = [*range(most // 2), -1, *range(run.fed.n - most // 2, run.fed.n)]
    for k in shown:
        if k < 0:
            table.add_row("…", "…", "…")
            continue
        value = float(scores[k])
        table.add_row(run.fed.names[k], str(int(run.fed.sizes[k])), "no rows" if value != value else f"{value:.3f}")
    return table


def describe_algorithm(cls: type[Algorithm]) -> dict[str, Any]:
    """Name, one-line summary and hyperparameters, as JSON values."""
    return {
        "name": cls.name,
        "class": cls.__name__,
        "summary": _summary(cls),
        "settings": [
            {"name": field.name, "default": field.default, **{k: v for k, v in field.metadata.items() if v is not None}}
            for field in dataclasses.fields(cls)
        ],
    }


def algorithms_table(classes: list[type[Algorithm]]) -> Table:
    table = Table(title="Methods")
    table.add_column("name")
    table.add_column("what it does")
    for cls in classes:
        table.add_row(cls.name, _summary(cls))
    return table


def algorithm_page(cls: type[Algorithm]) -> Table:
    """The docstring and the hyperparameters of one method."""
    table = Table(title=f"{cls.name}\n\n{inspect.getdoc(cls)}", title_justify="left", title_style="")
    for name in ("hyperparameter", "default", "range", "meaning"):
        table.add_column(name)
    for field in dataclasses.fields(cls):
        limits = field.metadata
        bounds = [
            f"{sign} {limits[key]}" for key, sign in (("low", "≥"), ("above", ">"), ("high", "≤")) if limits.get(key) is not None
        ]
        allowed = ", ".join(limits["options"]) if limits.get("options") else ", ".join(bounds)
        table.add_row(field.name, str(field.default), allowed, limits.get("help", ""))
    return table


def experiments_table(found: list[tuple[str, str]]) -> Table:
    table = Table(title="Experiments")
    table.add_column("name")
    table.add_column("what it repeats")
    for name, title in found:
        table.add_row(name, title)
    return table


def description_tables(description: dict[str, Any], most: int = 30) -> list[Any]:
    """What `coterie data describe` prints: a summary line, columns, clients."""
    summary = ", ".join(
        f"{name.replace('_', ' ')}: {value}" for name, value in description.items() if not isinstance(value, dict | list)
    )
    parts: list[Any] = [summary]
    for name in ("columns", "clients_table", "per_client"):
        rows = description.get(name)
        if rows:
            parts.append(_rows_table(name.replace("_", " "), rows[:most], len(rows)))
    return parts


def _rows_table(title: str, rows: list[dict[str, Any]], total: int) -> Table:
    table = Table(title=title if len(rows) == total else f"{title} (first {len(rows)} of {total})")
    for name in rows[0]:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(part)}" for key, part in value.items())
    return "" if value is None else str(value)


def _summary(cls: type[Algorithm]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]
