"""Ranks of methods over data sets: Friedman's test, Nemenyi's critical difference, and the Pareto front.

Demšar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 7 (2006): each data set is one
observation of every method's rank. The tests ask for every method on every data set, at least three methods, and data
sets that were drawn independently of each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from coterie._core.errors import DataError

FEWEST_METHODS = 3  # two are compared by a signed-rank test, not by Friedman's
FEWEST_DATA_SETS = 5


@dataclass(frozen=True)
class Ranking:
    """Mean ranks of methods, 1 for the best, and what may be said about their differences.

    Attributes
    ----------
    mean_ranks
        Mean over data sets, [methods].
    statistic, p
        Friedman's chi-square, corrected for ties, and its p-value: the probability of such differences if all methods
        were alike.
    critical_difference
        Mean ranks that are further apart differ, with all pairs together wrong with probability `alpha` at most.
    alpha
        That probability.

    Examples
    --------
    >>> import numpy as np
    >>> found = friedman(np.array([[1.0, 1.0, 3.0]] * 6))
    >>> found.mean_ranks.tolist(), found.p < found.alpha
    ([1.5, 1.5, 3.0], True)
    """

    mean_ranks: np.ndarray
    statistic: float
    p: float
    critical_difference: float
    alpha: float

    def cliques(self) -> list[list[int]]:
        """Return the largest groups of methods, best first, whose mean ranks lie within the critical difference.

        Examples
        --------
        >>> import numpy as np
        >>> Ranking(np.array([3.0, 1.0, 2.5]), 5.0, 0.08, 1.6, 0.05).cliques()
        [[1, 2], [2, 0]]
        """
        order = np.argsort(self.mean_ranks, kind="stable").tolist()
        found: list[list[int]] = []
        reached = -1
        for first in range(len(order)):
            last = first
            while (
                last + 1 < len(order)
                and self.mean_ranks[order[last + 1]] - self.mean_ranks[order[first]]
                <= self.critical_difference
            ):
                last += 1
            if last > first and last > reached:
                found.append(order[first : last + 1])
                reached = last
        return found


def ranks(costs: np.ndarray) -> np.ndarray:
    """Return the ranks of each row, 1 for the smallest cost; ties share the mean of their ranks.

    Parameters
    ----------
    costs
        What each method loses on each data set, [data sets, methods].

    Returns
    -------
    ndarray
        [data sets, methods].

    Examples
    --------
    >>> import numpy as np
    >>> ranks(np.array([[0.3, 0.1, 0.3]])).tolist()
    [[2.5, 1.0, 2.5]]
    """
    from scipy.stats import rankdata

    return np.asarray(rankdata(costs, axis=1), dtype=float)


def why_not(data_sets: int, methods: int) -> str | None:
    """Return why Friedman's test does not apply to a table of this size; None if it does.

    Parameters
    ----------
    data_sets
        Rows of the table.
    methods
        Columns of the table.

    Returns
    -------
    str or None

    Examples
    --------
    >>> why_not(12, 2)
    'it compares three methods or more, and 2 ran on every data set'
    """
    if methods < FEWEST_METHODS:
        return f"it compares three methods or more, and {methods} ran on every data set"
    if data_sets < FEWEST_DATA_SETS:
        return (
            f"its approximation needs at least {FEWEST_DATA_SETS} data sets, and there "
            f"{'is' if data_sets == 1 else 'are'} {data_sets}"
        )
    return None


def friedman(costs: np.ndarray, alpha: float = 0.05) -> Ranking:
    """Return mean ranks with Friedman's test and Nemenyi's critical difference.

    CD = q sqrt(k (k + 1) / (6 N)) for k methods on N data sets, with q the quantile of the studentised range for k and
    infinitely many degrees of freedom, over sqrt 2.

    Parameters
    ----------
    costs
        What each method loses on each data set, [data sets, methods], all known.
    alpha
        Probability of any wrong claim.

    Returns
    -------
    Ranking

    Raises
    ------
    DataError
        If the tests do not apply.

    Examples
    --------
    >>> import numpy as np
    >>> found = friedman(np.array([[1.0, 2.0, 3.0]] * 6))
    >>> found.mean_ranks.tolist(), round(found.p, 4), round(found.critical_difference, 3)
    ([1.0, 2.0, 3.0], 0.0025, 1.353)
    """
    from scipy.stats import chi2, studentized_range

    rows, methods = costs.shape
    problem = why_not(rows, methods)
    if problem is not None or not np.isfinite(costs).all():
        raise DataError(f"Friedman's test does not apply: {problem or 'some costs are not known'}")
    found = ranks(costs)
    mean = found.mean(0)
    spread = float(((found - (methods + 1) / 2) ** 2).sum()) / (rows * (methods - 1))
    statistic = 0.0
    if spread > 0:
        statistic = float(rows * ((mean - (methods + 1) / 2) ** 2).sum() / spread)
    quantile = float(studentized_range.ppf(1 - alpha, methods, np.inf)) / math.sqrt(2)
    difference = quantile * math.sqrt(methods * (methods + 1) / (6 * rows))
    return Ranking(mean, statistic, float(chi2.sf(statistic, methods - 1)), difference, alpha)


def pareto(costs: np.ndarray) -> np.ndarray:
    """Return which points are on the Pareto front: none other is as cheap in every way and cheaper in one.

    Parameters
    ----------
    costs
        Points, [points, ways to be costly]; those with a NaN are never on the front.

    Returns
    -------
    ndarray
        Booleans, [points].

    Examples
    --------
    >>> import numpy as np
    >>> pareto(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [3.0, 1.0]])).tolist()
    [True, True, False, True]
    """
    known = np.isfinite(costs).all(1)
    no_worse = (costs[:, None] <= costs[None]).all(2)
    better = (costs[:, None] < costs[None]).any(2)
    beaten = (no_worse & better & known[:, None]).any(0)
    return np.asarray(known & ~beaten)
