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

import numpy as np

from coterie.data.reversed_labels import find_reversed
from coterie.data.statistics import Moments, Statistics
from coterie.data.table_spec import TableSpec

LIMIT = 6.0  # standard deviations; a value of a client with outliers that is further away becomes the mean
FEWEST_CLIENTS = 4
FEWEST_ROWS = 4  # of a client that can be odd
_FACTOR = 1.0  # power of ten: times the usual spread, or as little
_PROPORTION = math.log10(5)  # where mean and spread are larger alike, this is enough
_ALIKE = math.log10(5)  # most clients have a spread within this factor of the median
_MOST = 0.25  # share of the clients that can be odd; where more are, clients are just different
_DEVIATIONS = 5.0  # times the median deviation of the clients' spreads
_GAP = 2.0  # times the largest spread of the others: a client with outliers; at four rows twice as much
_HEAVY = 25.0  # times that, where more clients have outliers than can be odd
_SHIFT = 20.0  # spreads between a client's mean and the usual one


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
        "units", "outliers", "reversed", or "opposite", which is only named.
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
        if self.kind in ("outliers", "opposite"):
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
        if self.kind == "outliers":
            return (
                f"{where}: {self.count} value(s) are far from all others. Check them; in training and in scores "
                "they count as the mean."
            )
        size = f"{self.factor:,.0f}" if self.factor >= 100 else f"{self.factor:.3g}"
        times = f"about {size} times" if self.factor else "on another scale than"
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
            elif odd[name] == "outliers":
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
            found += _other_units(names, column, sums[:, k]) or _outliers(names, column, sums[:, k])
    groups = np.array(statistics.by_client.groups)
    for group in dict.fromkeys(groups.tolist()) if spec.task in ("regression", "binary") else ():
        mine = np.flatnonzero(groups == group)
        back = find_reversed(sums[mine], spec.task == "binary")
        for kind, places in (("reversed", back.turned), ("opposite", back.opposite)):
            found += [
                OddClient(names[i], spec.target, kind, mean=float(sums[i, -1, 1]))
                for i in mine[list(places)].tolist()
            ]
    return OddClients(found, columns, statistics)


def _other_units(names: Sequence[str], column: str, sums: np.ndarray) -> list[OddClient]:
    """Return clients whose spread or mean is far from that of the others, which are alike."""
    count, mean = sums[:, 0] - sums[:, 3], sums[:, 4]
    spread = np.sqrt(sums[:, 5] / np.maximum(count, 1))
    enough = (count >= FEWEST_ROWS) & (spread > 1e-9 * np.abs(mean))
    if enough.sum() < FEWEST_CLIENTS:
        return []
    level = np.log10(np.where(enough, spread, 1.0))
    usual, centre = float(np.median(level[enough])), float(np.median(mean[enough]))
    ratio, sd = level - usual, 10**usual
    away = np.abs(mean - centre) / np.maximum(spread, sd)
    alike = _in_proportion(mean, centre, ratio, sd)
    larger = (ratio >= _FACTOR) | ((ratio >= _PROPORTION) & alike)
    smaller = ((ratio <= -_PROPORTION) & alike) | ((ratio <= -2) & (count >= 2 * FEWEST_ROWS))
    smaller &= np.sqrt(sums[:, 2] / np.maximum(sums[:, 0], 1)) <= 10 ** (usual - _PROPORTION)  # outliers, too
    odd = enough & (larger | smaller | (away >= _SHIFT))
    if (sums[enough, 3] > 0).mean() > _MOST:  # heavy tails, of which a few rows say little
        odd &= (np.abs(ratio) >= 2 * _FACTOR) & (count >= 5 * FEWEST_ROWS)
    usually = float(
        np.median(np.abs(ratio[enough]))
    )  # where spreads differ among all, few rows or tails explain more
    odd &= (np.abs(ratio) >= _DEVIATIONS * usually) | (away >= _SHIFT)
    usual_ones = np.abs(ratio[enough]) <= _ALIKE
    usual_ones &= np.abs(mean[enough] - centre) <= _SHIFT / 4 * sd
    if odd.sum() > max(1, _MOST * enough.sum()) or usual_ones.mean() < 1 - 1.5 * _MOST:
        return []
    return [
        _unit(names[i], column, mean[i], spread[i], ratio[i], centre, sd)
        for i in np.flatnonzero(odd).tolist()
    ]


def _in_proportion(mean: np.ndarray, centre: float, ratio: np.ndarray, sd: float) -> np.ndarray:
    """Return True where the mean is as much smaller or larger as the spread is; False if the usual mean is near 0."""
    if abs(centre) < sd:
        return np.zeros(len(mean), dtype=bool)
    with np.errstate(all="ignore"):
        found: np.ndarray = (mean / centre > 0) & (np.abs(np.log10(np.abs(mean / centre)) - ratio) <= 0.4)
    return found


def _unit(
    name: str, column: str, mean: float, spread: float, ratio: float, centre: float, sd: float
) -> OddClient:
    """Return a client in other units: by a factor, a power of ten if possible, that fits its mean and spread."""
    means_tell = bool(_in_proportion(np.array([mean]), centre, np.array([ratio]), sd)[0])
    exact = math.log10(mean / centre) if means_tell else ratio
    power = round(exact)
    is_power = power != 0 and abs(exact - power) <= (0.15 if means_tell else 0.4)
    factor = 10.0**power if is_power and abs(mean / 10.0**power - centre) <= 3 * sd else 0.0
    return OddClient(
        name, column, "units", factor or (mean / centre if means_tell else 0.0), float(mean), float(spread)
    )


def _outliers(names: Sequence[str], column: str, sums: np.ndarray) -> list[OddClient]:
    """Return clients whose outliers make them spread much more than any other client.

    Where tails are heavy, spreads with outliers are of all sizes; a client whose outliers are foreign leaves a gap.
    """
    count, outliers = np.maximum(sums[:, 0], 1), sums[:, 3]
    inner = np.sqrt(sums[:, 5] / np.maximum(count - outliers, 1))
    spread = np.sqrt(sums[:, 2] / count)
    usual = float(np.median(inner[sums[:, 0] > 0])) if (sums[:, 0] > 0).any() else 0.0
    heavy = (outliers > 0).mean() > _MOST + 1 / len(names)
    order = np.argsort(-spread, kind="stable")
    most, gap = max(1, int(_MOST * len(names))), _GAP * (1 + FEWEST_ROWS / count) * (_HEAVY if heavy else 1)
    gaps = [
        k
        for k in range(1, most + 1)
        if spread[order[k - 1]] >= gap[order[k - 1]] * max(spread[order[k]], usual)
    ]
    odd = [i for i in order[: max(gaps, default=0)].tolist() if outliers[i] > 0]
    return [OddClient(names[i], column, "outliers", count=int(outliers[i])) for i in sorted(odd)]
