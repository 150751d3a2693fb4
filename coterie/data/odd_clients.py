"""Notice a client whose data are not like the others': other units, reversed labels, outliers.

Decided from sums of each client (`ClientSums`), before training. The client is then encoded in its own units
(`Preprocessor.for_client`): its columns and target get the scale that the others have, its predictions come back in
what it wrote, and nothing it wrote moves the encoding or the models of the others. Where clients differ so much that no
one of them stands out, none is odd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from coterie.data.reversed_labels import find_reversed
from coterie.data.statistics import Moments, Statistics
from coterie.data.table_spec import TableSpec

LIMIT = 6.0  # standard deviations; a value of a client with outliers that is further away becomes the mean
FEWEST_CLIENTS = 4
FEWEST_ROWS = 4  # from which a client's own spread counts
_FACTOR = 1.0  # power of ten: times the usual spread, or as little
_PROPORTION = math.log10(5)  # where mean and spread are larger alike, this is enough
_TWICE = math.log10(1.8)  # if besides the mean is twice as far away as any other's
_ALIKE = math.log10(5)  # most clients have a spread within this factor of the median
_MOST = 0.25  # share of the clients that can be odd; where more are, clients are just different
_DEVIATIONS = 5.0  # times the median deviation of the clients' spreads
_SHIFT = 3.0  # usual spreads between a client's mean and the usual one, of one row twice as many
_APART = 4.0  # times the largest such distance of the others
_WIDER = 3.0  # times the largest spread of the others, at four rows twice as much
_GAP = 2.0  # the same for a client with outliers, counted with them
_HEAVY = 2.0  # times that, where more clients have outliers than can be odd
_CLEARLY = 1.5  # times the spread without outliers
_OUTSIDE = 6.0  # usual spreads; outliers that far away are odd if others have none half as far


@dataclass(frozen=True)
class OddClient:
    """One thing that is odd about a client.

    Parameters
    ----------
    client
        Name of the client.
    column
        The column, or the target.
    kind
        "units", "outliers", "reversed", or "constant" and "opposite", which are only named.
    factor
        How many times larger its numbers are, if that is a power of ten; 0 if its own mean and spread are taken.
    mean, sd
        Its own mean and standard deviation.
    count
        Number of outliers.
    """

    client: str
    column: str
    kind: str
    factor: float = 0.0
    mean: float = 0.0
    sd: float = 1.0
    count: int = 0

    def scaled(self, mean: float, sd: float) -> tuple[float, float]:
        """Return mean and standard deviation for this client, given the usual ones."""
        if self.kind == "reversed":
            return -mean if abs(self.mean + mean) < abs(self.mean - mean) else mean, -sd
        if self.kind in ("outliers", "constant", "opposite"):
            return mean, sd
        return (mean * self.factor, sd * self.factor) if self.factor else (self.mean, self.sd)

    def warning(self) -> str:
        """Return a sentence that names client, column and remedy."""
        where = f"Client {self.client!r}, column {self.column!r}"
        if self.kind == "reversed":
            return (
                f"{where}: the columns that speak for a value at other clients speak against it here, as if labels "
                "were exchanged. Check their coding. They are turned round for training and back in predictions."
            )
        if self.kind == "opposite":
            return (
                f"{where}: some columns that speak for a value at other clients speak against it here. The client may "
                "just differ, so nothing is changed; if its labels are exchanged, turn them round in the table."
            )
        if self.kind == "constant":
            return (
                f"{where}: every value is {self.mean:g}, far from those of the other clients, as if it stood for a "
                "missing one. Check it, and leave cells without a value empty; nothing is changed."
            )
        if self.kind == "outliers":
            return (
                f"{where}: {self.count} value(s) are far from all others. Check them; in training and in scores "
                "they count as the mean."
            )
        size = f"{self.factor:,.0f}" if self.factor >= 100 else f"{self.factor:.3g}"
        times = f"about {size} times" if self.factor else "on another scale than"
        times = "of the other sign than" if self.factor == -1 else times
        return (
            f"{where}: the numbers are {times} those of the other clients. Check the units. They are converted for "
            "training, and predictions are in the client's own units."
        )


@dataclass(frozen=True)
class OddClients:
    """All that was noticed, and the sums of each client to leave some of them out.

    Parameters
    ----------
    clients
        What is odd, client by client.
    columns
        Names of numeric columns and, last, the target.
    statistics
        The statistics in which it was noticed.
    """

    clients: Sequence[OddClient]
    columns: Sequence[str]
    statistics: Statistics

    def moments(self, column: str, usual: Moments) -> Moments:
        """Return the moments of a column without the clients that are odd in it; the usual ones if none is."""
        odd = {
            one.client: one.kind
            for one in self.clients
            if one.column == column and one.kind in ("units", "outliers")
        }
        if not odd:
            return usual
        by_client = self.statistics.by_client
        whole = Moments(missing=usual.missing)
        for name, sums in zip(by_client.names, by_client.sums[:, self.columns.index(column)], strict=True):
            if name not in odd:
                whole = whole.merge(Moments(int(sums[0]), float(sums[1]), float(sums[2])))
            elif odd[name] == "outliers" and sums[3] > 0:  # otherwise all of its values are
                whole = whole.merge(Moments(int(sums[0] - sums[3]), float(sums[4]), float(sums[5])))
        return whole

    def warnings(self) -> list[str]:
        """Return a sentence for everything that is odd."""
        return [one.warning() for one in self.clients]


def find(statistics: Statistics, spec: TableSpec) -> OddClients:
    """Return the clients that stand out.

    Parameters
    ----------
    statistics
        Merged statistics of all clients' training rows.
    spec
        What each column is for.

    Returns
    -------
    OddClients
        What is odd; nothing where there are fewer than four clients.
    """
    names, sums = statistics.by_client.names, statistics.by_client.sums
    columns = [*spec.numeric, spec.target]
    if len(names) < FEWEST_CLIENTS or not len(columns):
        return OddClients((), columns, statistics)
    found: list[OddClient] = []
    for k, column in enumerate(columns):
        if column != spec.target or spec.task == "regression":
            found += _odd_in(names, column, sums[:, k])
    groups = np.array(statistics.by_client.groups)
    for group in dict.fromkeys(groups.tolist()) if spec.task in ("regression", "binary") else ():
        mine = np.flatnonzero(groups == group)
        back = find_reversed(sums[mine], spec.task == "binary")
        negated = {one.client for one in found if one.column == spec.target and one.factor < 0}
        for kind, places in (("reversed", back.turned), ("opposite", back.opposite)):
            found += [
                OddClient(names[i], spec.target, kind, mean=float(sums[i, -1, 1]))
                for i in mine[list(places)].tolist()
                if names[i] not in negated
            ]
    return OddClients(found, columns, statistics)


@dataclass(frozen=True)
class _Column:
    """Sums of one column, client by client, and what is usual; outliers are counted in `whole` alone."""

    rows: np.ndarray
    outliers: np.ndarray
    mean: np.ndarray
    spread: np.ndarray
    whole: np.ndarray
    centre: float
    sd: float

    @classmethod
    def of(cls, sums: np.ndarray) -> Self | None:
        """Return the column of clients that have values in it; None if they are few or do not vary."""
        rows, mean = sums[:, 0] - sums[:, 3], sums[:, 4]
        spread = np.sqrt(sums[:, 5] / np.maximum(rows, 1))
        whole = np.sqrt(sums[:, 2] / np.maximum(sums[:, 0], 1))
        there, enough = rows > 0, (rows >= FEWEST_ROWS) & (spread > 1e-9 * np.abs(mean))
        if there.sum() < FEWEST_CLIENTS:
            return None
        centre = float(np.median(mean[there]))
        if enough.sum() < FEWEST_CLIENTS:  # few rows each: the distances of all are the usual spread
            sd = 1.4826 * float(np.median(np.abs(mean - centre)[there]))
        else:
            sd = float(np.median(spread[enough]))
        return cls(rows, sums[:, 3], mean, spread, whole, centre, sd) if sd > 0 else None

    @property
    def heavy(self) -> bool:
        """Whether outliers make more clients spread clearly more than can be odd."""
        return bool((self.whole > _CLEARLY * self.spread).mean() > _MOST + 1 / len(self.rows))


def _odd_in(names: Sequence[str], column: str, sums: np.ndarray) -> list[OddClient]:
    """Return what is odd in one column."""
    there = _Column.of(sums)
    if there is None:
        return []
    with np.errstate(all="ignore"):  # squares of large numbers
        units, outliers = _other_units(there), _outliers(there)
    found = [_unit(names[i], column, there, i) for i in np.flatnonzero(units).tolist()]
    return found + [
        OddClient(names[i], column, "outliers", count=int(there.outliers[i]))
        for i in np.flatnonzero(outliers & ~units).tolist()
    ]


def _beyond(size: np.ndarray, factor: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """Return True for the few largest ones that are more than these factors above all others.

    Where clients differ, sizes of all kinds occur; one that is foreign leaves a gap.
    """
    order = np.argsort(-size, kind="stable")
    odd = np.zeros(len(size), dtype=bool)
    for k in range(max(1, int(_MOST * len(size))), 0, -1):
        if size[order[k - 1]] >= factor[order[k - 1]] * max(float(size[order[k]]), floor):
            odd[order[:k]] = True
            break
    return odd


def _other_units(there: _Column) -> np.ndarray:
    """Return True for clients whose mean or spread is far from that of the others, which are alike."""
    rows = np.maximum(there.rows, 1)
    few = 1 + FEWEST_ROWS / rows
    # The mean: further away than any other's, and than rows can be by chance.
    distance = np.where(there.rows > 0, np.abs(there.mean - there.centre), 0.0)
    moved = _beyond(distance, np.full(len(rows), _APART))
    moved &= distance >= _SHIFT * (1 + 1 / np.sqrt(rows)) * there.sd
    single = there.rows < FEWEST_ROWS
    usual_rows = there.whole[~moved & (there.rows > 1)]
    say_little = single | (there.heavy & (there.rows < 5 * FEWEST_ROWS))
    moved &= ~say_little | (distance >= 2 * _SHIFT * usual_rows.max(initial=there.sd))
    # The spread, of clients with enough rows to have one; with the mean, if both are larger or smaller alike.
    enough = ~single & (there.spread > 1e-9 * np.abs(there.mean))
    if enough.sum() < FEWEST_CLIENTS:
        return moved
    ratio = np.log10(np.where(enough, there.spread, there.sd) / there.sd)
    alike = _in_proportion(there.mean, there.centre, ratio, there.sd)
    larger = (ratio >= _FACTOR) | ((ratio >= _PROPORTION) & alike)
    larger |= _beyond(np.where(enough, there.spread, 0.0), _WIDER * few)
    smaller = ((ratio <= -_PROPORTION) & alike) | ((ratio <= -2) & (there.rows >= 2 * FEWEST_ROWS))
    smaller &= there.whole <= there.sd / 10**_PROPORTION  # outliers, too
    odd = enough & (larger | smaller)
    if there.heavy:  # tails of which a few rows say little
        outside = there.spread >= _GAP * few * there.whole[~larger].max(initial=there.sd)
        odd &= outside | ((np.abs(ratio) >= 2 * _FACTOR) & (there.rows >= 5 * FEWEST_ROWS))
    # Where spreads differ among all, few rows or tails explain more.
    usually = float(np.median(np.abs(ratio[enough])))
    odd &= np.abs(ratio) >= _DEVIATIONS * usually
    twice = _beyond(distance, np.full(len(rows), 2.0)) & (distance >= 2 * there.sd) & (not there.heavy)
    odd |= moved | (twice & alike & (np.abs(ratio) >= np.maximum(_TWICE, _DEVIATIONS * usually)))
    usual_ones = np.abs(ratio[enough]) <= _ALIKE
    usual_ones &= distance[enough] <= 5 * there.sd
    if odd.sum() > max(1, _MOST * len(rows)) or usual_ones.mean() < 1 - 1.5 * _MOST:
        return np.zeros(len(rows), dtype=bool)
    found: np.ndarray = odd
    return found


def _in_proportion(mean: np.ndarray, centre: float, ratio: np.ndarray, sd: float) -> np.ndarray:
    """Return True where the mean is as much smaller or larger as the spread is; False if the usual mean is near 0."""
    if abs(centre) < sd:
        return np.zeros(len(mean), dtype=bool)
    with np.errstate(all="ignore"):
        found: np.ndarray = (mean / centre > 0) & (np.abs(np.log10(np.abs(mean / centre)) - ratio) <= 0.4)
    return found


def _unit(name: str, column: str, there: _Column, i: int) -> OddClient:
    """Return a client in other units: by a factor that fits its mean and spread, -1 or a power of ten if possible.

    Its own mean and spread are taken if no factor fits; too few rows for that are outliers, and so is one value.
    """
    mean, spread, rows = float(there.mean[i]), float(there.spread[i]), float(there.rows[i])
    centre, sd = there.centre, there.sd
    factors = [-1.0, *(10.0**power for power in range(-9, 10) if power)]
    few = rows < FEWEST_ROWS
    close = 0.15 + 0.6 / math.sqrt(rows)  # two standard errors, and clients differ
    fits: dict[float, float] = {}
    for factor in factors:
        away = math.hypot(mean / factor - centre, spread / factor if few else 0.0) / sd
        alike = few or (spread > 0 and abs(math.log10(spread / abs(factor) / sd)) <= close)
        if alike and away <= (_SHIFT if few else _SHIFT / 2):
            fits[factor] = away
    if fits:
        best = min(fits, key=lambda factor: fits[factor])
        return OddClient(name, column, "units", best, mean, spread)
    one_value = spread <= 1e-9 * abs(mean)
    if few or (one_value and abs(mean - centre) > LIMIT * sd):
        return OddClient(name, column, "outliers", count=int(rows))
    if one_value:
        return OddClient(name, column, "constant", mean=mean)
    ratio = math.log10(spread / sd)
    if _in_proportion(np.array([mean]), centre, np.array([ratio]), sd)[0]:
        return OddClient(name, column, "units", mean / centre, mean, spread)
    by_chance = abs(ratio) <= 0.6 / math.sqrt(rows)  # two standard errors
    return OddClient(name, column, "units", 0.0, mean, sd if by_chance else spread)


def _outliers(there: _Column) -> np.ndarray:
    """Return True for clients whose outliers make them spread much more than any other, or who alone have any."""
    rows = np.maximum(there.rows + there.outliers, 1)
    share = there.outliers / rows
    rare = ~_beyond(share, np.full(len(rows), 2.0), 1 / float(rows.max()))  # as heavy tails have them
    heavy = np.where(there.heavy & rare, _HEAVY * (1 + 5 * FEWEST_ROWS / rows), 1.0)
    factor = _GAP * (1 + FEWEST_ROWS / rows) * heavy
    wide = _beyond(there.whole, factor, there.sd) & (there.whole > _CLEARLY * there.spread)
    squares = there.whole**2 * rows - there.spread**2 * there.rows
    distance = np.sqrt(np.maximum(squares, 0.0) / np.maximum(there.outliers, 1))
    distance = np.where(there.outliers > 0, distance / np.maximum(there.spread, there.sd), 0.0)
    alone = (distance >= _OUTSIDE) & ((distance >= _OUTSIDE / 2).sum() <= max(1, _MOST / 2 * len(rows)))
    found: np.ndarray = (there.outliers > 0) & (wide | alone)
    return found
