"""Grouping columns: which of them contain whole clients, which are crossed with clients, and pairs such as `a:b`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coterie.data import column_types as columns

if TYPE_CHECKING:
    import polars

MOST_GROUPS = 10_000  # levels of a grouping column that are counted, the most frequent ones
PAIR = ":"  # between the columns whose values together are one level, as in lme4


def names_of(cluster: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the grouping columns that were named, one or several."""
    if cluster is None:
        return ()
    return (cluster,) if isinstance(cluster, str) else tuple(cluster)


def combined(frame: polars.DataFrame, names: Sequence[str]) -> polars.DataFrame:
    """Return the table with a column for each name such as `school:class`, whose levels are pairs of values.

    Parameters
    ----------
    frame
        A table from `tables.read`.
    names
        Names of columns; those that the table has, or whose parts it does not have, are left as they are.

    Returns
    -------
    polars.DataFrame
        The table, perhaps with further columns.

    Examples
    --------
    >>> from coterie.data import tables
    >>> from coterie.data.grouping import combined
    >>> frame = tables.read({"school": ["s", "t"], "class": [1, 1]})
    >>> combined(frame, ["school:class"])["school:class"].to_list()
    ['s:1', 't:1']
    """
    import polars as pl

    for name in names:
        parts = name.split(PAIR)
        if name in frame.columns or len(parts) < 2 or not set(parts) <= set(frame.columns):
            continue
        labels = [columns.labels(frame[part]).alias(str(k)) for k, part in enumerate(parts)]
        pairs = pl.DataFrame(labels).select(pl.concat_str(pl.all(), separator=PAIR).alias(name))
        frame = frame.with_columns(pairs[name])
    return frame


def only_in_pairs(names: Sequence[str]) -> set[str]:
    """Return the columns that occur in pairs only: labels, which are no features of their own."""
    return {part for name in names if PAIR in name for part in name.split(PAIR)} - set(names)


def decide(
    frame: polars.DataFrame, client: str, names: Sequence[str]
) -> tuple[str | None, tuple[str, ...], list[str]]:
    """Return the column of known clusters, the grouping columns with effects of their own, and notes.

    One column in which every client has one value names the known clusters. Several columns, or one in which more
    than half of the clients have several values, are grouping columns.

    Parameters
    ----------
    frame
        A table with these columns.
    client
        Name of the client column.
    names
        The columns.

    Returns
    -------
    tuple
        A name or None, names, and a sentence for each grouping column.

    Examples
    --------
    >>> from coterie.data import tables
    >>> from coterie.data.grouping import decide
    >>> rows = {"student": ["a", "a", "b", "b"], "lecturer": ["x", "y", "x", "y"], "school": ["p", "p", "q", "q"]}
    >>> frame = tables.read(rows)
    >>> decide(frame, "student", ["school"])[:2], decide(frame, "student", ["lecturer"])[:2]
    (('school', ()), (None, ('lecturer',)))
    >>> for note in decide(frame, "student", ["lecturer", "school"])[2]:
    ...     print(note)
    Column 'lecturer' is crossed with clients: 2 of 2 have rows in several of its 2 levels.
    Column 'school' contains clients: 2 levels.
    """
    several = {name: _in_several(frame, client, name) for name in names}
    total = frame[client].n_unique()
    if len(names) == 1 and 2 * several[names[0]] <= total:
        return names[0], (), []
    notes = []
    for name, count in several.items():
        levels = frame[name].n_unique()
        notes.append(
            f"Column {name!r} is crossed with clients: {count} of {total} have rows in several of its {levels} levels."
            if count
            else f"Column {name!r} contains clients: {levels} levels."
        )
    return None, tuple(several), notes


def finest(frame: polars.DataFrame, client: str, names: Sequence[str]) -> str | None:
    """Return the grouping column with the most levels in which every client has one value, or None."""
    constant = [name for name in names if not _in_several(frame, client, name)]
    return max(constant, key=lambda name: frame[name].n_unique(), default=None)


def _in_several(frame: polars.DataFrame, client: str, name: str) -> int:
    """Return how many clients have rows in several levels of a column."""
    import polars as pl

    pairs = pl.DataFrame({"client": columns.labels(frame[client]), "level": columns.labels(frame[name])})
    counts = pairs.group_by("client").agg(pl.col("level").n_unique())
    return int((counts["level"] > 1).sum())
