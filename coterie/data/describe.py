"""Describe a checked table: sizes of clients, targets, columns and missing values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie._core.errors import DataError
from coterie.data import column_formats
from coterie.data import column_types as columns
from coterie.data.column_readings import ColumnReading
from coterie.data.grouping import combined
from coterie.data.preprocess import Preprocessor
from coterie.data.scales import FEWEST
from coterie.data.statistics import local_statistics
from coterie.data.survival_times import signed_times
from coterie.data.table_spec import TableSpec
from coterie.data.tables import by_client

if TYPE_CHECKING:
    import polars


def describe(frame: polars.DataFrame, spec: TableSpec) -> dict[str, Any]:
    """Summarise a checked table as JSON values, as `coterie data describe` prints it.

    Parameters
    ----------
    frame
        A table from `tables.read`.
    spec
        Its roles, from `tables.check`.

    Returns
    -------
    dict
        Counts, quartiles of the clients' sizes, one entry per client and per column, and the warnings.
    """
    frame, names, sizes = by_client(combined(frame, spec.groups), spec.client)
    useless = _notice(frame, spec)
    features = [*spec.numeric, *spec.categories]
    owner = np.repeat(np.arange(len(names)), sizes)
    values = {one.column: _values(frame, spec, one) for one in spec.readings}
    missing = sum(
        (values[name].is_null().to_numpy().astype(float) for name in features), np.zeros(len(owner))
    )
    missing_share = np.bincount(owner, missing) / (np.array(sizes) * len(features))
    targets = _target_by_client(frame, spec, owner, np.array(sizes))
    clients = [
        {"client": name, "rows": size, **target, "missing_share": float(share)}
        for name, size, target, share in zip(names, sizes, targets, missing_share, strict=True)
    ]
    quartiles = np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1]).tolist()
    return {
        "rows": frame.height,
        "clients": len(names),
        "task": spec.task,
        "target": spec.target,
        "client_sizes": dict(zip(("min", "q1", "median", "q3", "max"), quartiles, strict=True)),
        "per_client": clients,
        "columns": [
            _describe_column(frame[one.column], values[one.column], spec, one, one.column in useless)
            for one in spec.readings
        ],
        "warnings": list(spec.warnings),
    }


def _notice(frame: polars.DataFrame, spec: TableSpec) -> list[str]:
    """Add to the warnings what fitting the encoding notices, and return categories that have rare levels only."""
    try:
        found = Preprocessor.from_statistics(spec, local_statistics(frame, spec), every_group=True)
    except DataError as problem:
        spec.warnings.append(str(problem))
        return []
    useful = {one.name for one in found.choices if one.levels}
    return [name for name in spec.categories if name not in useful]


def _values(frame: polars.DataFrame, spec: TableSpec, one: ColumnReading) -> polars.Series:
    """Return a column as it is read: numbers where it is one, null for a value that is none."""
    if one.column not in spec.numeric:
        return frame[one.column]
    return columns.numbers(frame, one.column, format=one.format)


def _target_by_client(
    frame: polars.DataFrame, spec: TableSpec, owner: np.ndarray, sizes: np.ndarray
) -> list[dict[str, Any]]:
    """Return the mean of each client's target, or the share of each class, or of rows with and without event."""
    if spec.event is not None:
        happened = signed_times(frame, spec.target, spec.event) > 0
        share = np.bincount(owner, happened, len(sizes)) / sizes
        return [{"class_shares": {"event": s, "censored": 1 - s}} for s in share.tolist()]
    if spec.task == "regression":
        values = spec.numbers(frame, spec.target).to_numpy()
        with np.errstate(all="ignore"):
            return [{"target_mean": _finite(float(mean))} for mean in np.bincount(owner, values) / sizes]
    width = len(spec.classes)
    cell = owner * width + columns.codes(columns.labels(frame[spec.target]), spec.classes)
    shares = np.bincount(cell, minlength=len(sizes) * width).reshape(-1, width) / sizes[:, None]
    return [{"class_shares": dict(zip(spec.classes, row.tolist(), strict=True))} for row in shares]


def _describe_column(
    written: polars.Series, read: polars.Series, spec: TableSpec, one: ColumnReading, useless: bool
) -> dict[str, Any]:
    """Describe a column as it is written and read; all columns have the same keys, None where one does not apply."""
    bounds = column_formats.bounds(written) if one.column in spec.numeric else 0
    why = [one.why] if one.why else []
    if bounds:
        why.append(f"{bounds} written as bounds, such as <0.3, which is read as 0.3")
    if useless:
        why = [f"has only levels of fewer than {FEWEST[0]} rows, or of one client only"]
    found = {
        "column": one.column,
        "kind": one.kind if not one.used else "numeric" if one.column in spec.numeric else "category",
        "read_as": _read_as(written, one),
        "used": one.used and not useless,
        "why": "; ".join(why),
        "missing_percent": 100 * read.null_count() / len(read),
        "levels": list(columns.levels(written)) if one.column in spec.categories else None,
    }
    mean = sd = None
    if one.column in spec.numeric:
        values = read.drop_nulls().to_numpy()
        with np.errstate(all="ignore"):
            mean, sd = (_finite(float(value)) for value in (values.mean(), values.std()))
    return {**found, "mean": mean, "sd": sd}


def _read_as(written: polars.Series, one: ColumnReading) -> str:
    """Return what a column is read as, with the format of text."""
    import polars as pl

    if one.used and written.dtype in (pl.Date, pl.Datetime):
        return "date"
    return f"{one.kind} {one.format}".strip() if one.kind != "number" or not one.format else one.format


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
