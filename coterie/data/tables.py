"""Read and check tables with a client column."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie._core.errors import DataError, nearest
from coterie._core.panics import panics_as_errors
from coterie.data import column_facts, column_formats, delimited, grouping, survival_times, unpack
from coterie.data import column_types as columns
from coterie.data.column_facts import ColumnFacts
from coterie.data.column_readings import read as read_columns
from coterie.data.table_spec import TableSpec, spec_of
from coterie.data.target_task import find_task

if TYPE_CHECKING:
    import polars

_PARQUET = (".parquet", ".pq")
_MEMORY_PER_CELL = 24  # bytes of a number and its copies
_SOURCE = "the table"


def read(table: Any) -> polars.DataFrame:
    """Read a table from a file, a frame or a dict of columns.

    Parameters
    ----------
    table
        A path to CSV, TSV or semicolon-separated text (plain, .gz, .bz2, .xz, .zst) or Parquet; a polars or
        pandas frame; or a dict of columns.

    Returns
    -------
    polars.DataFrame
        Names and text without surrounding spaces; the words of `column_types.MISSING` and NaN as null; text columns as
        whole numbers, numbers, booleans or dates where all values are.

    Raises
    ------
    DataError
        If the table cannot be read; the message names the file, the line and a remedy.

    Examples
    --------
    >>> from coterie.data import tables
    >>> frame = tables.read({"site ": [" a", "b"], "age": ["41", "?"]})
    >>> frame.columns, frame["age"].to_list()
    (['site', 'age'], [41, None])
    """
    import polars as pl

    decimal_comma = False
    if isinstance(table, str | os.PathLike):
        frame, decimal_comma = _from_file(Path(table))
    else:
        frame = _from_memory(table)
    return pl.DataFrame([columns.tidy(column, decimal_comma) for column in frame.get_columns()])


def _from_file(path: Path) -> tuple[polars.DataFrame, bool]:
    """Return the raw columns, and whether numbers may be written with a decimal comma."""
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
            f"text may be packed ({', '.join(unpack.COMPRESSIONS)})."
        )


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() in _PARQUET


def _read_parquet(path: Path) -> polars.DataFrame:
    import polars as pl

    try:
        with panics_as_errors():
            scan = pl.scan_parquet(path, glob=False)
            cells = int(scan.select(pl.len()).collect().item()) * len(scan.collect_schema())
            unpack.require_memory(path, _MEMORY_PER_CELL * cells, f"a table of {cells:,} values")
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
    """Convert a pandas frame, through pyarrow if it is installed; polars requires that for text."""
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
    cluster: str | Sequence[str] | None = None,
    drop: Iterable[str] = (),
    task: str | None = None,
    source: str = _SOURCE,
    keep: Iterable[str] = (),
    event: str | None = None,
    time: str | None = None,
) -> TableSpec:
    """Find out what each column is for, or raise an error that says what stops the table from being used.

    Parameters
    ----------
    frame
        A table from `read`.
    client
        Name of the client column.
    target
        Name of the target column.
    cluster
        Name of the cluster column, or of several grouping columns; `school:class` pairs two columns.
    drop
        Names of columns to leave out.
    task
        "regression", "classification", "binary" or "multiclass"; by default inferred from the target.
    source
        Path of the file, if there is one, so that errors can name its lines.
    keep
        Names of columns to use although they look like identifiers, free text or copies of client or target.
    event
        Name of the column that says whether the event happened at the time in `target`: the task is then "survival".
    time
        Name of a column with the time of each row, which is no feature unless it is in `keep`.

    Returns
    -------
    TableSpec
        The role of every column, and warnings.

    Raises
    ------
    DataError
        If a column is missing or unusable, or a client is in two clusters.

    Examples
    --------
    >>> from coterie.data import tables
    >>> frame = tables.read({"site": ["a", "a", "b"], "age": [41, 50, 32], "ill": ["no", "yes", "no"]})
    >>> spec = tables.check(frame, client="site", target="ill")
    >>> spec.task, spec.classes, spec.numeric
    ('binary', ('no', 'yes'), ('age',))
    """
    drop, keep, names = tuple(drop), tuple(keep), grouping.names_of(cluster)
    frame = grouping.combined(frame, names)
    roles = [("client", client), ("target", target), *(("cluster", name) for name in dict.fromkeys(names))]
    roles += [] if event is None else [("event", event)]
    _require_roles(frame, roles, drop, keep, source)
    known, groups, notes = grouping.decide(frame, client, names) if names else (None, (), [])
    if known is not None:
        _require_one_cluster(frame, client, known, source)
    if event is None:
        task, classes, hints, format = find_task(frame, client, target, task, source)
    else:
        hints = survival_times.check_times(frame, client, target, event, task, source)
        task, classes, format = survival_times.TASK, (), ""
    unused = {client, target, event, known, *drop, *({time} - set(keep))} | (
        grouping.only_in_pairs(groups) - set(keep)
    )
    names = tuple(name for name in frame.columns if name not in unused)
    constant = [
        name for name in names if columns.kind(frame[name]) and frame[name].drop_nulls().n_unique() == 1
    ]
    constant = [name for name in constant if not frame[name].null_count()]
    readings = read_columns(all_facts(frame, names, client, target, classes, format), keep, constant, groups)
    spec = spec_of(readings, client, target, known, task, classes, groups, event, format)
    if not (spec.numeric or spec.categories):
        why = "; ".join(f"{one.column!r} {one.why}" for one in readings)
        raise DataError(
            f"{source}: no feature column is left{f' ({why})' if why else ''}. Add columns to learn from, drop fewer, "
            "or keep one with --keep COLUMN."
        )
    for name in spec.numeric:
        spec.numbers(frame, name, source, client)
    spec.warnings.extend(notes + hints + _client_warnings(frame, client, target, bool(classes)))
    return spec


def all_facts(
    frame: polars.DataFrame,
    names: Iterable[str],
    client: str,
    target: str,
    classes: Sequence[str],
    format: str = "",
) -> dict[str, ColumnFacts]:
    """Return the facts of feature columns.

    Parameters
    ----------
    frame
        Rows of one or more clients.
    names
        The columns.
    client
        Name of the client column.
    target
        Name of the target column.
    classes
        Names of the classes; empty for a quantity.
    format
        Format in which the target is written.

    Returns
    -------
    dict
        What `column_facts.read` needs, by column.
    """
    label = columns.labels(frame[client])
    owner = columns.codes(label, label.unique(maintain_order=True).to_list())
    if classes:
        values = columns.codes(columns.labels(frame[target]), classes).astype(float)
    else:
        found = column_formats.parse(frame[target], format) if format else columns.as_floats(frame[target])
        values = found.to_numpy()
    return {name: column_facts.facts(frame, name, owner, values, bool(classes)) for name in names}


def _require_roles(
    frame: polars.DataFrame,
    roles: Sequence[tuple[str, str]],
    drop: Sequence[str],
    keep: Sequence[str],
    source: str,
) -> None:
    """Check that the named columns exist, differ from each other, and have a value in every row."""
    others = [*(("dropped", name) for name in drop), *(("kept", name) for name in keep)]
    for role, name in [*roles, *others]:
        if name not in frame.columns:
            raise DataError(f"{source}: there is no {role} column {name!r}.{nearest(name, frame.columns)}")
    used = [*(name for _, name in roles), *dict.fromkeys(drop), *dict.fromkeys(keep)]
    for name in used:
        if used.count(name) > 1:
            raise DataError(
                f"{source}: column {name!r} was given two roles among client, target, event, cluster, drop and keep. "
                "Name a different column for each."
            )
    for role, name in roles:
        require_values(frame, role, name, source)


def require_plain(frame: polars.DataFrame, role: str, name: str, source: str) -> None:
    """Raise `DataError` if a column holds lists, bytes or the like."""
    column = frame[name]
    if columns.kind(column) is None:
        raise DataError(
            f"{source}: {role} column {name!r} holds {column.dtype}, not plain values. Write it as text or numbers."
        )


def require_values(frame: polars.DataFrame, role: str, name: str, source: str) -> None:
    """Raise `DataError` if a column has no plain value in some row."""
    require_plain(frame, role, name, source)
    column = frame[name]
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


def _client_warnings(frame: polars.DataFrame, client: str, target: str, classes: bool) -> list[str]:
    """Return warnings about clients that will train from very little."""
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
    alike = table.filter(table["client"].str.to_lowercase().is_duplicated())["client"]
    if len(alike):
        found.append(
            f"Clients that differ in upper and lower case alone count as different: {columns.some(alike)}."
        )
    return found


def by_client(frame: polars.DataFrame, client: str) -> tuple[polars.DataFrame, list[str], list[int]]:
    """Sort a table by client, keeping the file's order inside each.

    Parameters
    ----------
    frame
        A table from `read`.
    client
        Name of the client column.

    Returns
    -------
    tuple
        The sorted rows, the names of the clients, and how many rows each has.
    """
    import polars as pl

    order, label = columns.order_and_label(frame[client])
    keys = pl.DataFrame({"order": order, "label": label}).with_row_index("row")
    keys = keys.sort("order", "label", "row")
    counts = keys.group_by("label", maintain_order=True).len()
    return frame[keys["row"]], counts["label"].to_list(), counts["len"].to_list()
