"""Sums of each client by itself, by which one client in other units can be told from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import polars

FAR = (
    5.5  # times half the length of the shortest half of the values: one further from its middle is an outlier
)
FEW = 6.0  # rows of a client for which that is doubled, since their length says little
FEWEST_ROWS = 4  # clients with fewer rows have no outliers
FIELDS = ("count", "mean", "squares", "outliers", "inner_mean", "inner_squares", "product")


@dataclass(frozen=True)
class ClientSums:
    """Seven sums for each client and column, the target last.

    Parameters
    ----------
    names
        Names of the clients.
    sums
        [clients, columns, 7]: number of values, mean and sum of squares about it; number of outliers; mean and sum
        of squares of the other values; sum of products with the target, both about their means.
    groups
        Known cluster of each client; "" where there are none.
    """

    names: tuple[str, ...]
    sums: np.ndarray
    groups: tuple[str, ...]

    @classmethod
    def of(
        cls, owner: polars.Series, values: Sequence[polars.Series], group: polars.Series | None = None
    ) -> Self:
        """Return the sums of these rows.

        Parameters
        ----------
        owner
            Client of each row.
        values
            Numeric columns and, last, the target, with nulls.
        group
            Cluster of each row, where clusters are known.

        Returns
        -------
        ClientSums
            The sums of every client that has a row.
        """
        names = owner.unique(maintain_order=True).to_list()
        code = owner.replace_strict(names, list(range(len(names)))).to_numpy() if names else np.empty(0, int)
        target = values[-1].to_numpy()
        parts = [_sums(code, column.to_numpy(), target, len(names)) for column in values]
        first = np.unique(code, return_index=True)[1]
        groups = [""] * len(names) if group is None else group[first].to_list()
        return cls(tuple(names), np.stack(parts, 1), tuple(groups))

    @classmethod
    def none(cls, columns: int) -> Self:
        """Return the sums of no client, where what single clients have stays with them."""
        return cls((), np.zeros((0, columns, len(FIELDS))), ())

    def merge(self, other: ClientSums) -> ClientSums:
        """Return the sums of both sets of clients."""
        return ClientSums(
            (*self.names, *other.names),
            np.concatenate([self.sums, other.sums]),
            (*self.groups, *other.groups),
        )

    def to_json(self) -> dict[str, Any]:
        """Return names and sums as JSON values."""
        return {"names": list(self.names), "sums": self.sums.tolist(), "groups": list(self.groups)}

    @classmethod
    def from_json(cls, stored: Any, columns: int) -> Self:
        """Return the sums that `to_json` wrote; raise ValueError for sums that no rows have."""
        names, groups = tuple(stored["names"]), tuple(stored["groups"])
        sums = np.array(stored["sums"], dtype=np.float64)
        sums = sums.reshape(0, columns, len(FIELDS)) if not names else sums
        if sums.shape != (len(names), columns, len(FIELDS)) or not all(
            isinstance(name, str) for name in names
        ):
            raise ValueError("sums of clients in another shape")
        if not all(isinstance(name, str) for name in (*names, *groups)):
            raise ValueError("clients without names")
        if not np.isfinite(sums).all() or (sums[..., [0, 2, 3, 5]] < 0).any():
            raise ValueError("sums of clients that no rows have")
        return cls(names, sums, groups)


def _sums(owner: np.ndarray, values: np.ndarray, target: np.ndarray, clients: int) -> np.ndarray:
    """Return the seven sums of one column, [clients, 7]; zeros for a client without values."""
    with np.errstate(all="ignore"):
        there = ~np.isnan(values)
        who, x = owner[there], values[there]
        count, mean, squares = _moments(who, x, clients)
        middle, length = _shortest_half(who, x, clients)
        far = FAR * (1 + FEW / np.maximum(count, 1)) * length
        inner = np.abs(x - middle[who]) <= far[who]
        inner |= (count < FEWEST_ROWS)[who]
        inner_count, inner_mean, inner_squares = _moments(who[inner], x[inner], clients)
        y = target[there]
        paired = inner & ~np.isnan(y)
        by, gap = who[paired], (x - inner_mean[who])[paired]
        product = np.bincount(by, gap * (y[paired] - _moments(by, y[paired], clients)[1][by]), clients)
        found = np.stack([count, mean, squares, count - inner_count, inner_mean, inner_squares, product], -1)
        finite: np.ndarray = np.nan_to_num(found, nan=0.0, posinf=1e300, neginf=-1e300)
        return finite


def _moments(owner: np.ndarray, values: np.ndarray, clients: int) -> tuple[np.ndarray, ...]:
    count = np.bincount(owner, minlength=clients).astype(float)
    mean = np.bincount(owner, values, clients) / np.maximum(count, 1)
    return count, mean, np.bincount(owner, np.square(values - mean[owner]), clients)


def _shortest_half(owner: np.ndarray, values: np.ndarray, clients: int) -> tuple[np.ndarray, ...]:
    """Return middle and half the length of the shortest interval with half of each client's values.

    Half of the values decides, wherever the others are. The length is infinite where it is 0.
    """
    order = np.lexsort((values, owner))
    ranked, by = values[order], owner[order]
    count = np.bincount(owner, minlength=clients)
    last = np.arange(len(ranked)) + (count // 2)[by]
    within = last < count.cumsum()[by]
    low, by = ranked[within], by[within]
    high = ranked[last[within]]
    shortest = np.lexsort((high - low, by))
    found, first = np.unique(by[shortest], return_index=True)
    low, high = low[shortest[first]], high[shortest[first]]
    middle, length = np.zeros(clients), np.full(clients, np.inf)
    middle[found], length[found] = low / 2 + high / 2, high / 2 - low / 2
    return middle, np.where(length > 0, length, np.inf)
