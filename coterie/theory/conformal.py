"""Split conformal prediction for clients: how large a score a new row may have.

A score says how badly a row is predicted. Rows of a client are exchangeable among themselves, clients among each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coterie._core.errors import SettingError


def own_quantile(scores: Tensor, level: float) -> float:
    """Return the bound that a new row of the same client stays below with at least this probability.

    Parameters
    ----------
    scores
        Scores of the client's calibration rows, [m].
    level
        Coverage, such as 0.9.

    Returns
    -------
    float
        The ceil((m + 1) level)-th smallest score; infinity if there are too few.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.conformal import own_quantile
    >>> own_quantile(torch.arange(1.0, 10.0), 0.9), own_quantile(torch.arange(1.0, 9.0), 0.9)
    (9.0, inf)
    """
    _check(level)
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    return float(scores.sort().values[rank - 1]) if 0 < rank <= len(scores) else math.inf


def new_client_quantile(scores: list[Tensor], level: float) -> float:
    """Return the bound that a row of a new client stays below with at least this probability.

    Each of K clients has mass 1/(K + 1), spread evenly over its rows, and so has infinity (hierarchical conformal
    prediction: Dunn, Wasserman, Ramdas 2022; Lee, Barber, Willett 2023).

    Parameters
    ----------
    scores
        Scores of the calibration rows of each client.
    level
        Coverage.

    Returns
    -------
    float
        The bound; infinity if there are fewer than level / (1 - level) clients with rows.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.conformal import new_client_quantile
    >>> new_client_quantile([torch.tensor([float(k)]) for k in range(1, 10)], 0.9)
    9.0
    """
    _check(level)
    known = [one for one in scores if len(one)]
    if not known:
        return math.inf
    values = torch.cat(known).double()
    mass = torch.cat([torch.full((len(one),), 1 / ((len(known) + 1) * len(one))).double() for one in known])
    order = values.argsort()
    enough = (mass[order].cumsum(0) >= level - 1e-9).nonzero()
    return float(values[order[int(enough[0])]]) if len(enough) else math.inf


def quantiles(scores: list[Tensor], level: float) -> tuple[Tensor, Tensor, float]:
    """Return the bound of every client, which of them rest on own rows, and the bound for new clients.

    A client with at least level / (1 - level) calibration rows has a bound of its own; the others share the one for
    new clients, which covers on average over clients.

    Parameters
    ----------
    scores
        Scores of the calibration rows of each client.
    level
        Coverage.

    Returns
    -------
    tuple
        Bounds [n], bool [n], and a number.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.conformal import quantiles
    >>> bounds, own, new = quantiles([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0])], 0.5)
    >>> bounds.tolist(), own.tolist(), new
    ([2.0, 5.0], [True, True], 5.0)
    """
    new = new_client_quantile(scores, level)
    each = torch.tensor([own_quantile(one, level) for one in scores], dtype=torch.float64)
    own = each.isfinite()
    return torch.where(own, each, new), own, new


def _check(level: float) -> None:
    if not 0 < level < 1:
        raise SettingError(f"level = {level}; coverage lies between 0 and 1, such as 0.9")
