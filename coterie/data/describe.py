"""Describe a checked table: sizes of clients, targets, columns and missing values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.data import column_types as columns
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
    frame, names, sizes = by_client(frame, spec.client)
    features = [*spec.numeric, *spec.categories]
    owner = np.repeat(np.arange(len(names)), sizes)
    missing = sum((frame[name].is_null().to_numpy().astype(float) for name in features), np.zeros(len(owner)))
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
        "columns": [_describe_column(frame, name, name in spec.numeric) for name in features],
        "warnings": list(spec.warnings),
    }


def _target_by_client(
    frame: polars.DataFrame, spec: TableSpec, owner: np.ndarray, sizes: np.ndarray
) -> list[dict[str, Any]]:
    """Return the mean of each client's target, or the share of each class."""
    if spec.task == "regression":
        values = columns.numbers(frame, spec.target).to_numpy()
        return [{"target_mean": float(mean)} for mean in np.bincount(owner, values) / sizes]
    width = len(spec.classes)
    cell = owner * width + columns.codes(columns.labels(frame[spec.target]), spec.classes)
    shares = np.bincount(cell, minlength=len(sizes) * width).reshape(-1, width) / sizes[:, None]
    return [{"class_shares": dict(zip(spec.classes, row.tolist(), strict=True))} for row in shares]


def _describe_column(frame: polars.DataFrame, name: str, numeric: bool) -> dict[str, Any]:
    """Describe a column; numeric and category columns have the same keys, None where one does not apply."""
    values = columns.numbers(frame, name).drop_nulls().to_numpy() if numeric else None
    return {
        "column": name,
        "kind": "category" if values is None else "numeric",
        "missing_percent": 100 * frame[name].null_count() / frame.height,
        "levels": list(columns.levels(frame[name])) if values is None else None,
        "mean": None if values is None else float(values.mean()),
        "sd": None if values is None else float(values.std()),
    }
