"""Parts of an encoding: the scale of a numeric column, the levels of a category, the units of one client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from coterie._core.errors import DataError
from coterie.data import column_types as columns
from coterie.data.odd_clients import LIMIT, OddClients
from coterie.data.statistics import Levels, Moments

if TYPE_CHECKING:
    import polars

FEWEST = (5, 2)  # rows and clients that a level of a category needs to be named in a model
MOST_FEATURES = 100  # levels of a category that become features; the others are pooled


@dataclass(frozen=True)
class Scale:
    """How a numeric column is standardised.

    An `sd` of 0 leaves its values out, `missing` adds an indicator column, and a value that is more than `limit`
    standard deviations from the mean becomes the mean (0: none does).
    """

    name: str
    mean: float
    sd: float
    missing: bool
    limit: float = 0.0


@dataclass(frozen=True)
class OneHot:
    """The levels that a category column is spread over.

    With `missing`, a missing value is one more level; with `other`, every level that is not listed is one more.
    """

    name: str
    levels: tuple[str, ...]
    missing: bool
    other: bool = False

    @property
    def width(self) -> int:
        """Number of encoded features."""
        return len(self.levels) + self.missing + self.other


@dataclass(frozen=True)
class ClientUnits:
    """What differs in the encoding of one client, which has its columns or its target in other units.

    Parameters
    ----------
    scales
        Scales of its columns that differ from those of the others.
    target
        Mean and standard deviation of its target, if they differ; a negative one for a target with the other sign.
    reversed_classes
        Whether its two classes are named the other way round.
    limit
        Standard deviations from the mean beyond which a target counts as the mean; 0: none.
    """

    scales: tuple[Scale, ...] = ()
    target: tuple[float, float] | None = None
    reversed_classes: bool = False
    limit: float = 0.0


def standardised(values: polars.Series, scale: Scale) -> np.ndarray:
    """Return the encoded values of a column; 0 for what is missing or beyond the limit."""
    found: np.ndarray = ((values - scale.mean) / scale.sd).fill_null(0.0).to_numpy(writable=True)
    if scale.limit:
        found[np.abs(found) > scale.limit] = 0.0
    return found


def one_hot(name: str, seen: Levels, rows: int, clients: int, most: int | None = MOST_FEATURES) -> OneHot:
    """Keep the levels with enough rows and clients, the most frequent ones if they are many; pool the others."""
    enough = [level for level, found in seen.counts.items() if found[0] >= rows and found[1] >= clients]
    kept = sorted(enough, key=lambda level: (-seen.counts[level][0], level))[:most]
    return OneHot(name, tuple(sorted(kept)), seen.missing, len(kept) < len(seen.counts) and bool(kept))


def all_levels(name: str, seen: Levels) -> OneHot:
    """Keep every level of a grouping column; what training rows did not have is all zeros."""
    return OneHot(name, tuple(sorted(seen.counts)), seen.missing)


def pooled_levels(seen: Mapping[str, Levels], choices: Sequence[OneHot]) -> list[str]:
    """Say which columns lost levels."""
    pooled = {choice.name: (len(choice.levels), len(seen[choice.name].counts)) for choice in choices}
    some = [
        f"{name!r} ({kept} of {all} levels stay)" for name, (kept, all) in pooled.items() if 0 < kept < all
    ]
    none = [name for name, (kept, all) in pooled.items() if kept == 0 and all > 1]
    rare = f"seen in fewer than {FEWEST[0]} training rows or at one client only"
    found = [f"Rare levels, {rare}, are pooled into one: {', '.join(some)}."] if some else []
    return found + ([f"Left out, because all levels are {rare}: {columns.some(none)}."] if none else [])


def client_units(
    odd: OddClients, usual_scales: Sequence[Scale], target: Scale, task: str
) -> dict[str, ClientUnits]:
    """Return what differs in the encoding of the clients that were noticed."""
    scales = {scale.name: scale for scale in usual_scales}
    found: dict[str, ClientUnits] = {}
    for one in odd.clients:
        if one.kind in ("constant", "opposite"):
            continue
        units = found.get(one.client, ClientUnits())
        if one.kind == "reversed" and task == "binary":
            units = replace(units, reversed_classes=True)
        elif one.column == target.name:
            mean, sd = units.target or (target.mean, target.sd or 1.0)
            limit = LIMIT if one.kind == "outliers" else units.limit
            units = replace(units, target=one.scaled(mean, sd), limit=limit)
        elif one.column in scales and scales[one.column].sd:
            usual = scales[one.column]
            mean, sd = one.scaled(usual.mean, usual.sd)
            limit = LIMIT if one.kind == "outliers" else 0.0
            units = replace(units, scales=(*units.scales, replace(usual, mean=mean, sd=sd, limit=limit)))
        found[one.client] = units
    return {client: units for client, units in found.items() if units != ClientUnits()}


def scale_of(name: str, moments: Moments) -> Scale:
    """Return the scale that makes a column with these moments standard; raise DataError if it overflows."""
    if not math.isfinite(moments.squares):
        raise DataError(
            f"Column {name!r} holds numbers too large to square. Rescale it, or leave it out: --drop {name}"
        )
    return Scale(name, moments.mean, moments.sd, moments.missing > 0 and moments.count > 0)
