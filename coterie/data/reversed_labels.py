"""Tell a client with exchanged labels from one whose columns really go with the target the other way round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_ROWS = 4  # of a client that is judged
FEWEST_CLIENTS = 4
_MOST = 0.25  # share of the clients that can be reversed; where more are, clients are just different
_OPPOSITE = 2.0  # standard errors below zero of a client that goes the other way
_SIGNAL = 0.05  # squares of the usual correlations with the target, at least
_SURE = 0.02  # chance, over all clients, that slopes which differ as those of the others are so far off
_UNUSUAL = 0.04  # below this the client is named, and left as it is
_REFLECTED = 2.5  # standard deviations of a client with exchanged labels from the reflection of the others
_MISFIT = 3.0  # times the misfit of nine of ten clients to the usual slopes: its misfit to the reflected ones
_TAILS = 6  # degrees of freedom of differences between clients, at most


@dataclass(frozen=True)
class Reversed:
    """Places of clients that go the other way round.

    Parameters
    ----------
    turned
        Clients whose labels are exchanged: every slope is the reflection of the others', which do not differ enough to
        explain it.
    opposite
        Clients that may just differ.
    """

    turned: Sequence[int] = ()
    opposite: Sequence[int] = ()


def find_reversed(sums: np.ndarray, binary: bool) -> Reversed:
    """Return clients whose columns go with the target the other way round than at the others, which agree.

    A client's slopes (of classes: those of a linear discriminant, since chances level off where slopes are steep) are
    projected on the usual ones, the medians: about 1 for a client like the others, -1 with exchanged labels. Clients
    differ by a spread that is estimated, with heavy tails. Labels are exchanged if a draw from there is next to
    impossible and the reflection fits: the projection is near -1, or within a factor of two of it; all slopes together
    fit as those of others do; and the shares of the two classes are exchanged too.

    Parameters
    ----------
    sums
        `ClientSums.sums` of the clients, [n, columns, 7], the target last.
    binary
        Whether the target has two classes, coded 0 and 1.

    Returns
    -------
    Reversed
        Places in `sums`.
    """
    rows, yy = sums[:, -1, 0], sums[:, -1, 2]
    judged = (yy > 0) & (rows > FEWEST_ROWS)
    if judged.sum() < FEWEST_CLIENTS or sums.shape[1] < 2:
        return Reversed()
    slope, error, stretch, correlation = _slopes(sums, binary)
    if np.square(np.median(correlation[judged], 0)).sum() < _SIGNAL:
        return Reversed()
    usual = np.median(slope[judged], 0)
    unit = float(np.abs(usual).max())
    if not 0 < unit < math.inf:
        return Reversed()
    # Squares are finite whatever unit the target has.
    slope, error, usual = slope / unit, error / unit, usual / unit
    length = float(np.square(usual).sum())
    along = slope @ usual / length
    noise = np.sqrt(np.square(error * usual).sum(1)) / length
    back = along <= np.minimum(-0.4, -_OPPOSITE * noise)
    back &= judged
    others = judged & ~back
    agree = (along[others] > 0).mean() if others.any() else 0.0
    if not back.any() or back.sum() > max(1, _MOST * judged.sum()) or agree < 1 - _MOST / 2:
        return Reversed()
    from scipy.stats import t  # takes a while to load, and is seldom needed

    count = int(judged.sum())
    centre = float(np.median(along[others]))
    apart = 1.4826 * float(np.median(np.abs(along[others] - centre)))
    above = (1 + 1 / math.sqrt(count)) * apart**2  # few clients say little about how much they differ
    stretched = noise**2 + np.square(stretch * slope * usual).sum(1) / length**2
    spread = math.sqrt(max(0.0, above - float(np.median(stretched[others]))))
    sd = np.sqrt(spread**2 + noise**2)
    share = np.square(noise / sd)  # Satterthwaite: a slope of few rows has heavy tails, too
    degrees = 1 / ((1 - share) ** 2 / min(_TAILS, max(2, count - 2)) + share**2 / np.maximum(rows - 2, 1))
    chance = count * t.sf((centre - along) / sd, degrees)
    reflected = np.abs(along + centre) <= _REFLECTED * sd
    reflected |= (-along >= centre / 2) & (-along <= 2 * centre)
    misfit = _misfit(slope, usual, error, spread)
    reflected &= _misfit(-slope, usual, error, spread) <= _MISFIT * np.quantile(misfit[others], 0.9)
    if binary:
        reflected &= _shares_exchanged(sums[:, -1, 1], rows, others)
    turned = back & (chance < _SURE) & reflected
    opposite = back & (chance < _UNUSUAL) & ~turned
    return Reversed(np.flatnonzero(turned).tolist(), np.flatnonzero(opposite).tolist())


def _slopes(sums: np.ndarray, binary: bool) -> tuple[np.ndarray, ...]:
    """Return slopes per usual spread of a column, their standard errors, those of their size, correlations.

    Each [n, columns]. The error of the size stretches a slope and never turns it round.
    """
    rows = np.maximum(sums[:, -1:, 0], 1.0)
    xx, xy, yy = sums[:, :-1, 5], sums[:, :-1, 6], sums[:, -1:, 2]
    with np.errstate(all="ignore"):
        correlation = np.nan_to_num(xy / np.sqrt(xx * yy), nan=0.0, posinf=0.0, neginf=0.0).clip(-1, 1)
        unit = np.sqrt(np.median(xx / rows, 0))  # usual spread of a column
        left = np.maximum(1 - correlation**2, 1 / rows)
        slope = np.nan_to_num(xy / xx) * unit
        free = np.maximum(rows - 2, 1.0)
        error = np.sqrt(left * yy / (free * xx)) * unit
        if binary:  # difference of the classes' means over the variance inside them
            slope = slope * rows / (yy * left)
            error = unit * rows / np.sqrt(free * yy * xx * left)
    stretch = np.sqrt(2 / rows) * np.ones_like(slope) * binary
    return slope, np.nan_to_num(error, nan=1e9, posinf=1e9), stretch, correlation


def _misfit(slope: np.ndarray, usual: np.ndarray, error: np.ndarray, spread: float) -> np.ndarray:
    """Return the mean square of the differences to the usual slopes, each in its own standard deviation, [n]."""
    size = np.sqrt(np.square(usual).mean())
    found: np.ndarray = (np.square(slope - usual) / (error**2 + (spread * size) ** 2 + 1e-12)).mean(1)
    return found


def _shares_exchanged(share: np.ndarray, rows: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """Return True where the share of class 1 fits the reflection of the others' shares as well as these."""
    centre = float(np.median(share[usual]))
    apart = 1.4826 * float(np.median(np.abs(share[usual] - centre)))
    sd = np.sqrt(np.maximum(apart**2, 0.25 / np.maximum(rows, 1)))
    found: np.ndarray = np.abs(share - (1 - centre)) <= np.maximum(np.abs(share - centre), _REFLECTED * sd)
    return found
