"""How the rows of a comparison are divided: one split, several, or folds in which every row is tested once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import DataError, SettingError
from coterie.engine.federation import Federation
from coterie.engine.resplit import TEST, AllRows

FOLDS = 5
LEAST_FOLDS = 3  # one to test on, one to choose by, one to train on
FEW_TEST_ROWS = 20  # of the median client, below which rows are tested in folds


@dataclass(frozen=True)
class Division:
    """A federation with rows in splits, and which rows its test rows are among all."""

    number: int
    fed: Federation
    tested: Tensor


def federation(
    source: Any, client: str | None, target: str | None, seed: int, table: dict[str, Any]
) -> Federation:
    """Return the federation of a table, or a federation itself if it has validation and test rows."""
    if isinstance(source, Federation):
        fed, name = source, "a comparison"
        need = "build the federation with split=(0.6, 0.2, 0.2)"
    else:
        if client is None or target is None:
            raise SettingError("compare needs the names of the client and target columns")
        fed = Federation.from_table(source, client=client, target=target, seed=seed, **table)
        name = str(source) if isinstance(source, str | Path) else "the table"
        need = (
            "no client has any in this split. Give a client three rows or more, and each part a share: "
            "--split TRAIN,VALIDATION,TEST"
        )
    for split in ("validation", "test"):
        if not fed.has_rows(split):
            raise DataError(f"{name} needs {split} rows: {need}")
    return fed


def folds_for(fed: Federation, folds: int | None) -> int:
    """Return the number of folds: the one asked for, or five where the median client has few test rows.

    Where nobody has five rows there are as many folds as the largest client has rows, three at least: a client is
    tested in one fold for each of its rows, so that more folds would have nobody to validate on.

    Parameters
    ----------
    fed
        The federation.
    folds
        Number of folds, 1 for a single split, None to decide by the rows.

    Returns
    -------
    int
        1 for a single split.

    Examples
    --------
    >>> fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> folds_for(fed, None), folds_for(fed, 3)
    (1, 3)
    """
    visible = fed.runtime.capabilities.rows_visible and fed.texts is None
    largest = int(torch.stack(list(fed.rows.values())).sum(0).max())
    if folds is None:
        few = float(fed.rows["test"].double().median()) < FEW_TEST_ROWS
        return min(FOLDS, max(largest, LEAST_FOLDS)) if visible and few else 1
    if folds < 1 or 1 < folds < LEAST_FOLDS:
        raise SettingError(f"folds = {folds}; give 1 for a single split, or 3 or more")
    if folds > 1 and not visible:
        raise SettingError("folds need all rows in this process, as rows of a table")
    if folds > max(largest, LEAST_FOLDS):
        raise SettingError(
            f"folds = {folds}, but the largest client has {largest} rows; give at most so many"
        )
    return folds


def divisions(fed: Federation, seeds: int, folds: int) -> Iterator[Division]:
    """Yield the federation with its rows divided in every way of a comparison.

    One split is that of the federation. Further seeds divide the rows of a table anew; other federations keep their
    split and draw anew. Folds replace the split.
    """
    visible = fed.runtime.capabilities.rows_visible and fed.texts is None
    rows = AllRows.of(fed) if visible else None
    number = 0
    for seed in range(seeds):
        if rows is not None and folds > 1:
            for split in rows.folds(folds, fed.seed + seed):
                yield Division(number, rows.divided(split).fresh(fed.seed + seed), rows.places(split, TEST))
                number += 1
            continue
        if rows is not None and fed.table is not None and seed > 0:
            split = rows.again(fed.table.options["split"], fed.seed + seed)
            yield Division(seed, rows.divided(split).fresh(fed.seed + seed), rows.places(split, TEST))
            continue
        tested = torch.arange(int(fed.rows["test"].sum())) if rows is None else rows.places(rows.split, TEST)
        yield Division(seed, fed.fresh(fed.seed + seed), tested)
