"""Tell whether a client stands out from the others by more than honest clients do.

Clients differ, and a few rows vary by chance. How much clients differ is estimated from the others, and chances count
for all clients together, so that among many the furthest one is not odd for being the furthest.
"""

from __future__ import annotations

import numpy as np

MOST = 0.25  # share of the clients that can be odd; where more are, clients are just different
_DEGREES = (
    5  # of Student's t, at most: what differs between clients has tails, like the logarithm of a power law
)
_FEW_CLIENTS = (
    3.0  # clients for which the variance between them is doubled, since they may be alike by chance
)


def chance_of(values: np.ndarray, error: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return, for each client, the chance that any of so many is so far from the others.

    The variance between the others and the client's own error add up, with the degrees of freedom of Welch and
    Satterthwaite.

    Parameters
    ----------
    values
        What is compared: a mean, or the logarithm of a spread.
    error
        Standard error of each client's value.
    rows
        Number of rows of each client.

    Returns
    -------
    np.ndarray
        Chances of single clients, or of the furthest few together, which can be above 1.

    Examples
    --------
    >>> import numpy as np
    >>> from coterie.data.standing_out import chance_of
    >>> means = np.array([0.1, -0.2, 0.0, 0.3, -0.1, 9.0])
    >>> chance_of(means, np.full(6, 0.2), np.full(6, 20)).round(3).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    """
    from scipy.special import stdtr  # takes a while to load

    count = len(values)
    most = max(1, int(MOST * count))
    gap = values - np.median(values)
    order = np.argsort(-np.abs(gap), kind="stable")
    chance = np.ones(count)
    for odd in range(most, 0, -1):
        far, others = order[:odd], order[odd:]
        rest = len(others)
        between = max(float(np.var(gap[others], ddof=1)), float(np.square(error[others]).mean()))
        between *= 1 + _FEW_CLIENTS / (rest - 1)
        within = np.square(error[far])
        total = np.maximum(between + within, 1e-300)
        degrees = (between / total) ** 2 / min(rest - 1, _DEGREES)
        degrees = 1 / (degrees + (within / total) ** 2 / np.maximum(rows[far] - 1, 1))
        away = np.abs(gap[far] - gap[others].mean()) / np.sqrt(total)
        chance[far] = np.minimum(chance[far], 2 * count * stdtr(degrees, -away).max())
    return chance


def gap_to_next(size: np.ndarray) -> np.ndarray:
    """Return how many times larger each client's size is than the largest of the others.

    Examples
    --------
    >>> import numpy as np
    >>> from coterie.data.standing_out import gap_to_next
    >>> gap_to_next(np.array([1.0, 2.0, 8.0])).tolist()
    [0.125, 0.25, 4.0]
    """
    second, first = np.sort(size)[-2:]
    found: np.ndarray = size / np.maximum(np.where(size == first, second, first), 1e-300)
    return found
