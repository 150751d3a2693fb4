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

from coterie.data.client_sums import FEW
from coterie.data.reversed_labels import find_reversed
from coterie.data.standing_out import MOST, chance_of, gap_to_next
from coterie.data.statistics import Moments, Statistics
from coterie.data.table_spec import TableSpec

LIMIT = 6.0  # standard deviations; a value of a client with outliers that is further away becomes the mean
FEWEST_CLIENTS = 4
FEWEST_ROWS = 4  # from which a client's own spread counts
_UNITS = 0.03  # chance, over all clients and columns, that an honest client is so far from the others
_SHIFT = 3.0  # usual spreads between a client's mean and the usual one, at least
_WIDER = math.log(3)  # logarithm of its spread, in usual ones, at least
_NARROWER = math.log(0.1)  # at most
_ALIKE = math.log(1.8)  # where mean and spread are larger or smaller alike, this is enough
_OUTLIERS = 0.004  # chance, over all clients and columns, of such outliers where tails are heavy
_CLEARLY = 1.5  # times the spread without outliers
_GAP = 2.0  # times the largest spread of the others, with outliers: that of a client with such ones, at least
_LIGHT = 0.015  # share of outliers that the others have: up to this, counting one more, a gap is enough
_LIGHT_GAP = 2.75  # the gap there
_HUGE = 50.0  # the gap that is enough in any tails
_SAME = 3.0, 0.95  # outliers that are alike, as a code for missing values: so many, and this share of all
_SAME_GAP = 3.0  # the gap of those
_LONE = 6.0  # times the largest spread of the others: how far few rows are in which no outlier can be told
_FAR = 10.0  # usual spreads, of four rows 2.5 times as many: the same
_FEW_ROWS = 10  # clients with fewer rows may have no rows but outliers


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
            found += _odd_in(names, column, sums[:, k], len(columns))
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
    whole_mean: np.ndarray
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
        return cls(rows, sums[:, 3], mean, spread, whole, sums[:, 1], centre, sd) if sd > 0 else None


def _odd_in(names: Sequence[str], column: str, sums: np.ndarray, columns: int) -> list[OddClient]:
    """Return what is odd in one of so many columns."""
    there = _Column.of(sums)
    if there is None:
        return []
    with np.errstate(all="ignore"):  # squares of large numbers
        units = _other_units(there, columns) | _lone(there) | _same_everywhere(there)
        outliers = _outliers(there, columns)
    found = [_unit(names[i], column, there, i) for i in np.flatnonzero(units).tolist()]
    return found + [
        OddClient(names[i], column, "outliers", count=int(there.outliers[i]))
        for i in np.flatnonzero(outliers & ~units).tolist()
    ]


def _other_units(there: _Column, columns: int) -> np.ndarray:
    """Return True for clients whose mean or spread is far from that of the others, with outliers and without."""
    odd = np.zeros(len(there.rows), dtype=bool)
    enough = there.rows >= FEWEST_ROWS
    if enough.sum() >= FEWEST_CLIENTS:
        rows = there.rows[enough]
        error = np.maximum(there.whole[enough], there.sd) / np.sqrt(rows)
        chances = [chance_of(mean[enough], error, rows) for mean in (there.mean, there.whole_mean)]
        chances += _chance_of_factor(there.mean[enough], error, rows)
        moved = np.abs(there.mean[enough] - there.centre) >= _SHIFT * there.sd
        odd[enough] = moved & (np.max(chances, 0) * columns < _UNITS)
    enough &= there.spread > 1e-9 * np.abs(there.mean)
    if enough.sum() >= FEWEST_CLIENTS:
        rows = there.rows[enough]
        inner, whole = np.log(there.spread[enough]), np.log(there.whole[enough])
        chances = [chance_of(spread, np.sqrt(0.5 / rows), rows) for spread in (inner, whole)]
        ratio = inner - math.log(there.sd)
        alike = _in_proportion(there.mean[enough], there.centre, ratio / math.log(10), there.sd)
        other = (ratio >= _WIDER) | (ratio <= _NARROWER) | (alike & (np.abs(ratio) >= _ALIKE))
        other &= ratio * (whole - np.median(whole)) > 0
        odd[enough] |= other & (np.max(chances, 0) * columns < _UNITS)
    return odd


def _chance_of_factor(mean: np.ndarray, error: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Return the chance of a mean so many times larger or smaller, 0 for one of another sign; nothing if signs vary.

    Means of counts and amounts honestly differ by factors.
    """
    same = np.sign(mean) == np.sign(np.median(mean))
    if same.mean() < 1 - MOST or same.sum() < FEWEST_CLIENTS:
        return []
    found = np.zeros(len(mean))
    size = np.abs(mean[same])
    found[same] = chance_of(np.log(size), error[same] / size, rows[same])
    return [found]


def _same_everywhere(there: _Column) -> np.ndarray:
    """Return True for clients with one value in all rows, far from those of the others, who all have several."""
    enough = there.rows + there.outliers >= FEWEST_ROWS
    same = enough & (there.whole <= 1e-9 * np.abs(there.whole_mean))
    if same.sum() != 1 or enough.sum() < 2:
        return np.zeros(len(enough), dtype=bool)
    found: np.ndarray = same & (np.abs(there.mean - there.centre) >= _SHIFT * there.sd)
    return found


def _lone(there: _Column) -> np.ndarray:
    """Return True for clients of a few rows that are further away than all the spread of the others explains.

    Among so few values none is an outlier by itself.
    """
    few = (there.rows < _FEW_ROWS) & (there.outliers == 0)
    distance = np.hypot(there.mean - there.centre, there.spread)
    usual = there.whole[there.rows >= FEWEST_ROWS]
    unit = max(there.sd, float(np.median(usual)) if len(usual) else 0.0)
    far = _FAR * (1 + FEW / np.maximum(there.rows, FEWEST_ROWS)) * unit
    gap = gap_to_next(np.maximum(np.where(few, distance, there.whole), there.sd))
    found: np.ndarray = few & (there.rows > 0) & (distance >= far) & (gap >= _LONE)
    return found


def _outliers(there: _Column, columns: int) -> np.ndarray:
    """Return True for clients whose outliers make them spread much more than the others.

    A gap is enough where others have hardly any outliers, or where several are alike. Elsewhere it has to be more than
    such spreads differ by chance.
    """
    rows = there.rows + there.outliers
    gap = gap_to_next(np.maximum(there.whole, there.sd))
    share = (there.outliers.sum() - there.outliers + 1) / np.maximum(rows.sum() - rows, 1)
    sure = (gap >= _HUGE) | ((share <= _LIGHT) & (gap >= _LIGHT_GAP))
    squares = rows * there.whole**2 - there.rows * there.spread**2
    alike = np.square(rows * (there.whole_mean - there.mean)) / np.maximum(squares, 1e-300)
    sure |= (alike >= np.maximum(_SAME[0], _SAME[1] * there.outliers)) & (gap >= _SAME_GAP)
    enough = (there.rows >= FEWEST_ROWS) & (there.whole > 0)
    if enough.sum() >= FEWEST_CLIENTS:
        chance = chance_of(np.log(there.whole[enough]), np.sqrt(0.5 / rows[enough]), rows[enough])
        sure[enough] |= chance * columns < _OUTLIERS
    found: np.ndarray = sure & (there.outliers > 0) & (gap >= _GAP) & (there.whole > _CLEARLY * there.spread)
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
