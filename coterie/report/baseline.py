"""The run that trained alone on the same rows, against which the gains of another run are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coterie._core.errors import RunError
from coterie.report.facts import RunFacts, read_run
from coterie.report.held_out import held_out

MOST_SIBLINGS = 200  # at most this many neighbouring folders are searched


def same_rows(run: RunFacts, other: RunFacts) -> bool:
    """Return True if two runs were tested on the same rows, as far as is known.

    Models that encode rows in their own way (trees, ensembles) have other hashes; their held-out targets tell.
    """
    if (run.seeds, run.folds) != (other.seeds, other.folds):
        return False
    if run.rows_hash != other.rows_hash and not _same_targets(run, other):
        return False
    mine, theirs = run.test_rows, other.test_rows
    return mine is None or theirs is None or np.array_equal(mine.row, theirs.row)


def _same_targets(run: RunFacts, other: RunFacts) -> bool:
    if run.data.get("source") != other.data.get("source") or run.data.get("source") is None:
        return False
    mine, theirs = held_out(run), held_out(other)
    if mine is None or theirs is None or not np.array_equal(mine.client, theirs.client):
        return False
    return mine.target.shape == theirs.target.shape and np.allclose(mine.target, theirs.target, rtol=1e-5)


def baseline(run: RunFacts, runs: Sequence[RunFacts]) -> RunFacts | None:
    """Return the first run that trained alone on the same rows, or None; a run that trained alone is its own."""
    if run.alone:
        return run
    return next((one for one in runs if one.alone and same_rows(run, one)), None)


def with_baseline(runs: list[RunFacts]) -> list[RunFacts]:
    """Add a run that trained alone on the rows of the first one, if only a neighbouring folder has one.

    A comparison over folds shows means over them; the models in its folders are those of the federation's own split.
    """
    first = runs[0]
    if baseline(first, runs) is not None:
        return runs
    around = first.folder.resolve().parent
    places = [*sorted(around.glob("*/config.toml")), *sorted(around.glob("*/local/config.toml"))]
    for place in places[:MOST_SIBLINGS]:
        try:
            other = read_run(place.parent, first.metric)
        except RunError:
            continue
        if other is not None and other.alone and same_rows(first, other):
            shown = any(run.label == other.label for run in runs)
            return [*runs, replace(other, label=f"{other.label}, same rows") if shown else other]
    return runs
