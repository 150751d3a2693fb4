"""What each column of a table is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from coterie.data import column_types as columns
from coterie.data.column_readings import ColumnReading, column_warnings

if TYPE_CHECKING:
    import polars


@dataclass(frozen=True)
class TableSpec:
    """What each column of a checked table is for.

    Parameters
    ----------
    client
        Name of the client column.
    target
        Name of the target column.
    cluster
        Name of the cluster column, or None.
    task
        "regression", "binary", "multiclass" or "survival".
    classes
        Names of the classes; empty for regression.
    numeric
        Names of the numeric feature columns.
    categories
        Names of the category feature columns.
    warnings
        What the reader of a report should know about columns and clients.
    formats
        Format of each numeric column, and of the target, that is written as text, such as "dd/mm/yyyy".
    left_out
        Columns that are not used, and why in a word, such as "identifier".
    readings
        How every feature column is read, for `coterie data describe`.
    groups
        Category columns whose levels are groups of rows, crossed with clients or containing them.
    event
        Name of the column that says whether the event happened, for "survival"; else None.
    """

    client: str
    target: str
    cluster: str | None
    task: str
    classes: tuple[str, ...]
    numeric: tuple[str, ...]
    categories: tuple[str, ...]
    warnings: list[str] = field(default_factory=list, compare=False)
    formats: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    readings: tuple[ColumnReading, ...] = field(default=(), compare=False)
    groups: tuple[str, ...] = ()
    event: str | None = None

    def numbers(
        self, frame: polars.DataFrame, name: str, source: str = "the table", client: str | None = None
    ) -> polars.Series:
        """Return a numeric column, or a target that is a quantity, as `column_types.numbers` does."""
        return columns.numbers(frame, name, source, client, self.formats.get(name, ""))

    def stored(self) -> dict[str, Any]:
        """Return the fields as JSON values, without warnings and what is empty."""
        values = asdict(self) | {"warnings": []}
        del values["readings"]
        optional = ("formats", "left_out", "groups", "event")
        return {name: value for name, value in values.items() if value or name not in optional}


def spec_of(
    readings: Sequence[ColumnReading],
    client: str,
    target: str,
    cluster: str | None,
    task: str,
    classes: tuple[str, ...],
    groups: tuple[str, ...] = (),
    event: str | None = None,
    target_format: str = "",
) -> TableSpec:
    """Return the roles of all columns, given how the feature columns and the target are read."""
    used = [one for one in readings if one.used]
    return TableSpec(
        client,
        target,
        cluster,
        task,
        classes,
        tuple(one.column for one in used if one.kind != "category"),
        tuple(one.column for one in used if one.kind == "category"),
        column_warnings(readings),
        {one.column: one.format for one in used if one.format}
        | ({target: target_format} if target_format else {}),
        {one.column: one.kind for one in readings if not one.used},
        tuple(readings),
        groups,
        event,
    )
