"""Tables with a client column: reading, checking and describing them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.data import column_types as columns
from coterie.data import delimited
from coterie.errors import DataError, SettingError, nearest

if TYPE_CHECKING:
    import polars

MOST_LEVELS = 1000
_PARQUET = (".parquet", ".pq")
_SOURCE = "the table"


@dataclass(frozen=True)
class TableSpec:
    """What each column of a checked table is for."""

    client: str
    target: str
    cluster: str | None
    task: str
    classes: tuple[str, ...]
    numeric: tuple[str, ...]
    categories: tuple[str, ...]
    warnings: list[str] = field(default_factory=list, compare=False)


def read(table: Any) -> polars.DataFrame:
    """A table from a file (CSV, TSV, semicolons; .gz .bz2 .xz .zst; Parquet), a frame or a dict of columns.

    Names and text lose surrounding spaces, `columns.MISSING` words and NaN become null, and a text column
    takes the type (whole number, number, boolean, date) that all its values have.
    """
    import polars as pl

    decimal_comma = False
    if isinstance(table, str | os.PathLike):
        frame, decimal_comma = _from_file(Path(table))
    else:
        frame = _from_memory(table)
    return pl.DataFrame([columns.tidy(column, decimal_comma) for column in frame.get_columns()])


def _from_file(path: Path) -> tuple[polars.DataFrame, bool]:
    """The raw columns, and whether numbers may be written with a decimal comma."""
    _require_file(path)
    frame, separator = (_read_parquet(path), "") if _is_parquet(path) else delimited.load(path)
    if frame.height == 0:
        raise DataError(f"{path}: there is a header but no row. Expected one line per row after it.")
    return frame, separator == ";"


def _require_file(path: Path) -> None:
    known = (*delimited.SUFFIXES, *_PARQUET)
    if not path.exists():
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        tables = sorted(file.name for file in beside if file.suffix in known)[:20]
        raise DataError(f"{path}: no such file.{nearest(path.name, tables)} Check the path.")
    if path.is_dir():
        raise DataError(f"{path}: is a folder. Name one file in it.")
    if not (_is_parquet(path) or delimited.is_delimited(path)):
        raise DataError(
            f"{path}: unknown kind of file {path.suffix!r}. Convert it to one of {', '.join(known)}; "
            f"text may be packed ({', '.join(delimited.COMPRESSIONS)})."
        )


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() in _PARQUET


def _read_parquet(path: Path) -> polars.DataFrame:
    import polars as pl

    try:
        return pl.read_parquet(path, glob=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as Parquet ({error}). The file is truncated or is not Parquet: "
            "copy or write it again."
        ) from None


def _from_memory(table: Any) -> polars.DataFrame:
    import polars as pl

    try:
        if isinstance(table, pl.LazyFrame):
            table = table.collect()
        elif isinstance(table, Mapping):
            table = pl.DataFrame(dict(table))
        elif type(table).__module__.split(".")[0] == "pandas":
            table = _from_pandas(table)
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        raise DataError(
            f"{_SOURCE}: cannot be made into columns ({error}). "
            "Give columns of equal length, each of one type."
        ) from None
    if not isinstance(table, pl.DataFrame):
        raise DataError(
            f"Expected a path, a polars or pandas DataFrame or a dict of columns, got {type(table).__name__}."
        )
    if table.height == 0:
        raise DataError(f"{_SOURCE}: there are no rows.")
    names = [name.strip() for name in table.columns]
    if len(set(names)) < len(names):
        raise DataError(f"{_SOURCE}: two columns have one name but for spaces around it: {table.columns}.")
    return table


def _from_pandas(table: Any) -> polars.DataFrame:
    """By way of pyarrow if it is installed; polars wants it for text."""
    import polars as pl

    try:
        return pl.from_pandas(table)
    except ImportError:
        present = table.notna()
        pairs = {name: zip(table[name], present[name], strict=True) for name in table.columns}
        return pl.DataFrame(
            {str(name): [value if here else None for value, here in column] for name, column in pairs.items()}
        )


def check(
    frame: polars.DataFrame,
    client: str,
    target: str,
    cluster: str | None = None,
    drop: Iterable[str] = (),
    task: str | None = None,
    source: str = _SOURCE,
) -> TableSpec:
    """Find out what each column is, or say what stops the table (from `read`) from being used.

    `task` is 'regression', 'classification', 'binary', 'multiclass' or None (inferred from the target);
    `source` is the path of the file, if there is one, so that errors can name its lines.
    """
    drop = tuple(drop)
    roles = {"client": client, "target": target} | ({"cluster": cluster} if cluster is not None else {})
    _require_roles(frame, roles, drop, source)
    features = [name for name in frame.columns if name not in {*roles.values(), *drop}]
    if cluster is not None:
        _require_one_cluster(frame, client, cluster, source)
    task, classes = _task(frame, client, target, task, source)
    kinds = {name: _feature_kind(frame, name, client, source) for name in features}
    numeric = tuple(name for name, kind in kinds.items() if kind == "numeric")
    categories = tuple(name for name, kind in kinds.items() if kind == "category")
    if not kinds or not (numeric or categories):
        constant = f" ({columns.some(kinds)} never change)" if kinds else ""
        raise DataError(
            f"{source}: no feature column is left{constant}. Add columns to learn from, or drop fewer."
        )
    warnings = _column_warnings(frame, kinds) + _client_warnings(frame, client, target, bool(classes))
    return TableSpec(client, target, cluster, task, classes, numeric, categories, warnings)


def _require_roles(
    frame: polars.DataFrame, roles: Mapping[str, str], drop: Sequence[str], source: str
) -> None:
    """The named columns exist, differ from each other, and have a value in every row."""
    for role, name in [*roles.items(), *(("dropped", name) for name in drop)]:
        if name not in frame.columns:
            raise DataError(f"{source}: there is no {role} column {name!r}.{nearest(name, frame.columns)}")
    used = [*roles.values(), *dict.fromkeys(drop)]
    for name in used:
        if used.count(name) > 1:
            raise DataError(
                f"{source}: column {name!r} was given two roles among client, target, cluster and drop. "
                "Name a different column for each."
            )
    for role, name in roles.items():
        _require_values(frame, role, name, source)


def _require_values(frame: polars.DataFrame, role: str, name: str, source: str) -> None:
    column = frame[name]
    if columns.kind(column) is None:
        raise DataError(f"{source}: {role} column {name!r} holds {column.dtype}, not plain values.")
    missing = column.is_null() | column.is_nan() if column.dtype.is_float() else column.is_null()
    if missing.any():
        raise DataError(
            f"{source}: {role} column {name!r} has {missing.sum()} missing value(s), the first in "
            f"{columns.place(frame, int(missing.arg_max() or 0), source)}. Fill them in or remove these rows."
        )


def _require_one_cluster(frame: polars.DataFrame, client: str, cluster: str, source: str) -> None:
    import polars as pl

    pairs = pl.DataFrame({"client": columns.labels(frame[client]), "cluster": columns.labels(frame[cluster])})
    pairs = pairs.unique().sort("client", "cluster")
    twice = pairs.filter(pairs["client"].is_duplicated())
    if twice.height:
        name = twice["client"][0]
        clusters = twice.filter(pl.col("client") == name)["cluster"]
        raise DataError(
            f"{source}: client {name!r} is in {len(clusters)} clusters of column {cluster!r}: "
            f"{columns.some(clusters)}. Put all its rows into one, or name another cluster column."
        )


def _task(
    frame: polars.DataFrame, client: str, target: str, task: str | None, source: str
) -> tuple[str, tuple[str, ...]]:
    """The task and, unless it is regression, the names of the classes."""
    known = ("regression", "classification", "binary", "multiclass")
    if task is not None and task not in known:
        raise SettingError(f"Unknown task {task!r}.{nearest(task, known)}")
    column = frame[target]
    distinct = column.n_unique()
    if distinct == 1:
        raise DataError(
            f"{source}: target column {target!r} has one value only ({columns.labels(column)[0]!r}), "
            "so there is nothing to learn. Name another target."
        )
    if columns.kind(column) == "numeric" or task == "regression":
        columns.numbers(frame, target, source, client)
    if (task or _natural_task(column)) == "regression":
        return "regression", ()
    if distinct > MOST_LEVELS or (column.dtype.is_float() and distinct > 50):
        raise DataError(
            f"{source}: target column {target!r} has {distinct} different values, too many for classes. "
            "Use --task regression for a quantity, or name another target."
        )
    found = "binary" if distinct == 2 else "multiclass"
    if task not in (None, "classification", found):
        raise DataError(f"{source}: target column {target!r} has {distinct} classes, so the task is {found}.")
    return found, columns.levels(column)


def _natural_task(target: polars.Series) -> str:
    """What a target is when nobody says: few whole numbers, two values or words are classes."""
    import polars as pl

    distinct = target.n_unique()
    if columns.kind(target) == "category" or target.dtype == pl.Boolean or distinct == 2:
        return "classification"
    whole = target.dtype.is_integer() or (
        target.dtype == pl.String and target.cast(pl.Int64, strict=False).null_count() == 0
    )
    return "classification" if whole and distinct <= 20 else "regression"


def _feature_kind(frame: polars.DataFrame, name: str, client: str, source: str) -> str:
    """'numeric', 'category', or 'constant' for a column without information."""
    column = frame[name]
    remedy = f"Leave the column out: --drop {name}"
    if column.null_count() == len(column):
        raise DataError(f"{source}: column {name!r} has no values at all. {remedy}")
    kind = columns.kind(column)
    if kind is None:
        raise DataError(f"{source}: column {name!r} holds {column.dtype}, not plain values. {remedy}")
    if kind == "numeric":
        column = columns.numbers(frame, name, source, client)
    distinct = column.n_unique()
    if kind == "category" and distinct > MOST_LEVELS:
        raise DataError(
            f"{source}: column {name!r} holds {distinct} different texts, more than {MOST_LEVELS}: "
            f"it looks like an identifier. {remedy}"
        )
    return "constant" if distinct == 1 else kind


def _column_warnings(frame: polars.DataFrame, kinds: Mapping[str, str]) -> list[str]:
    constant = [name for name, kind in kinds.items() if kind == "constant"]
    found = [f"Column {name!r} is constant and is kept out of the features." for name in constant]
    for name in kinds:
        if frame.height >= 20 and columns.looks_like_identifier(frame[name]):
            found.append(
                f"Column {name!r} has a different whole number in every row. "
                f"If it is an identifier, leave it out: --drop {name}"
            )
    return found


def _client_warnings(frame: polars.DataFrame, client: str, target: str, classes: bool) -> list[str]:
    """Clients that will train, but from very little."""
    import polars as pl

    table = pl.DataFrame({"client": columns.labels(frame[client]), "target": frame[target]})
    table = table.group_by("client").agg(rows=pl.len(), values=pl.col("target").n_unique()).sort("client")
    rows, values = pl.col("rows"), pl.col("values")
    cases = [(rows == 1, "one row only"), ((rows > 1) & (rows < 5), "fewer than 5 rows")]
    if classes:
        cases.append(((rows > 1) & (values == 1), "a single class in the target"))
    found = []
    for condition, what in cases:
        names = table.filter(condition)["client"]
        if len(names):
            found.append(f"{len(names)} client(s) with {what}: {columns.some(names)}.")
    return found


def by_client(frame: polars.DataFrame, client: str) -> tuple[polars.DataFrame, list[str], list[int]]:
    """The rows sorted by client (in file order within each), the clients' names and their row counts."""
    import polars as pl

    order, label = columns.order_and_label(frame[client])
    keys = pl.DataFrame({"order": order, "label": label}).with_row_index("row")
    keys = keys.sort("order", "label", "row")
    counts = keys.group_by("label", maintain_order=True).len()
    return frame[keys["row"]], counts["label"].to_list(), counts["len"].to_list()


def describe(frame: polars.DataFrame, spec: TableSpec) -> dict[str, Any]:
    """What `coterie data describe` prints, as JSON values."""
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
    """Mean of the target of each client, or the share of each class."""
    if spec.task == "regression":
        values = columns.numbers(frame, spec.target).to_numpy()
        return [{"target_mean": float(mean)} for mean in np.bincount(owner, values) / sizes]
    width = len(spec.classes)
    cell = owner * width + columns.codes(columns.labels(frame[spec.target]), spec.classes)
    shares = np.bincount(cell, minlength=len(sizes) * width).reshape(-1, width) / sizes[:, None]
    return [{"class_shares": dict(zip(spec.classes, row.tolist(), strict=True))} for row in shares]


def _describe_column(frame: polars.DataFrame, name: str, numeric: bool) -> dict[str, Any]:
    """The same keys for both kinds; what does not apply is None."""
    values = columns.numbers(frame, name).drop_nulls().to_numpy() if numeric else None
    return {
        "column": name,
        "kind": "category" if values is None else "numeric",
        "missing_percent": 100 * frame[name].null_count() / frame.height,
        "levels": list(columns.levels(frame[name])) if values is None else None,
        "mean": None if values is None else float(values.mean()),
        "sd": None if values is None else float(values.std()),
    }
