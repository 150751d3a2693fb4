"""Which of two models is better for whom, judged by paired losses on the same held-out rows.

Client i has the mean difference D_i over n_i rows, which is off by a standard error s_i. True differences are taken as
normal around a common mean, with a spread that the clients show: what is known of one client helps to judge another, so
that few rows of one client do not make a verdict by themselves. The spread is integrated over, by its restricted
likelihood and a half-Cauchy prior (Gelman, 2006); variances of clients with few rows borrow from those of the others.
Mean and spread are estimated as if a row varied alike at every client: weights by a client's own variance would favour
clients that happened to have no outlier, and so bias the mean where differences are skewed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie._core.errors import DataError, SettingError

SURE = 0.975  # posterior probability of a sign that is said: 5 % in both directions together
CLEAR_ROWS = 20  # rows of a client from which on a difference may be called clear
BORROWED = 4  # rows that the variance over all clients counts in that of one client
SPREADS = 192  # points at which the spread between clients is integrated
_HALVINGS = 40


@dataclass(frozen=True)
class Evidence:
    """Mean differences of clients and how far they may be off, [n] each; NaN for a client without rows.

    Parameters
    ----------
    difference
        Mean over the client's rows of how much better the first model is than the second.
    variance
        Squared standard error of that mean.
    common
        The same if a row varied at every client as it does over all of them.
    freedom
        Degrees of freedom with which the variance is known.
    rows
        Number of distinct rows.
    pooled_freedom
        Degrees of freedom with which the variance over all clients is known.

    Examples
    --------
    >>> import numpy as np
    >>> from coterie.theory.verdicts import Evidence
    >>> found = Evidence.of_rows(np.array([1.0, 3.0, 5.0, 7.0]), np.array([0, 0, 2, 2]), clients=3)
    >>> found.difference, found.variance, found.pooled_freedom
    (array([ 2., nan,  6.]), array([ 1., nan,  1.]), 2)
    """

    difference: np.ndarray
    variance: np.ndarray
    common: np.ndarray
    freedom: np.ndarray
    rows: np.ndarray
    pooled_freedom: int

    @classmethod
    def of_rows(
        cls, differences: np.ndarray, client: np.ndarray, clients: int, row: np.ndarray | None = None
    ) -> Evidence:
        """Return the evidence in paired differences of rows.

        Parameters
        ----------
        differences
            How much better the first model is on each row, [rows].
        client
            Index of the client of each row, [rows].
        clients
            Number of clients.
        row
            What tells rows apart, [rows]. A row that was held out several times, by other splits, counts once, with
            the mean of its differences: repeating a split makes no new rows. All rows are distinct if not given.

        Returns
        -------
        Evidence
            Variances are mixed with the variance over all clients, as if a client had four more rows.

        Examples
        --------
        >>> import numpy as np
        >>> found = Evidence.of_rows(np.array([1.0, 0.0, 2.0, 3.0]), np.array([0, 0, 1, 1]), clients=2)
        >>> found.difference, found.rows
        (array([0.5, 2.5]), array([2, 2]))
        """
        differences, client = np.asarray(differences, dtype=float), np.asarray(client, dtype=int)
        known = np.isfinite(differences)
        differences, client = differences[known], client[known]
        looks = np.ones(len(client))
        if row is not None:
            _, first, place = np.unique(
                np.stack([client, np.asarray(row)[known]]), axis=1, return_index=True, return_inverse=True
            )
            looks = np.bincount(place.ravel(), minlength=len(first)).astype(float)
            differences = np.bincount(place.ravel(), differences, len(first)) / looks
            client = client[first]
        rows = np.bincount(client, minlength=clients)
        with np.errstate(all="ignore"):
            share = looks / np.bincount(client, looks, clients)[client]
            mean = np.where(rows > 0, np.bincount(client, share * differences, clients), np.nan)
            left = differences - mean[client]
            squares = np.bincount(client, left * left, clients)
            effective = 1 / np.bincount(client, share * share, clients)  # fewer than rows where looks differ
        common, inside = _common_variance(mean, squares, rows)
        freedom = np.maximum(rows - 1, 0) + BORROWED
        variance = (squares + BORROWED * common) / freedom
        own, shared = (np.where(rows > 0, one / effective, np.nan) for one in (variance, common))
        return cls(mean, own, shared, np.minimum(freedom, inside).astype(float), rows, inside)


def _common_variance(mean: np.ndarray, squares: np.ndarray, rows: np.ndarray) -> tuple[float, int]:
    """Return the variance of rows inside clients, between clients where none has two rows, and its freedom."""
    inside = int(np.maximum(rows - 1, 0).sum())
    if inside:
        return float(squares.sum() / inside), inside
    known = mean[rows > 0]
    return (float(known.var(ddof=1)), len(known) - 1) if len(known) > 1 else (np.nan, 0)


@dataclass(frozen=True)
class Mean:
    """A mean difference over clients with its 95 % interval.

    Parameters
    ----------
    value
        The mean.
    low, high
        Ends of the interval; None where nothing tells how far the mean may be off.

    Examples
    --------
    >>> from coterie.theory.verdicts import Mean
    >>> Mean(0.3, 0.1, 0.5).sign, Mean(0.3, -0.1, 0.7).sign, Mean(0.3, None, None).sign
    (1, 0, 0)
    """

    value: float
    low: float | None
    high: float | None

    @property
    def sign(self) -> int:
        """1 or -1 if the interval lies on one side of zero, else 0."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True)
class Verdicts:
    """What paired losses allow to say about each client, [n] each, and about all of them.

    Parameters
    ----------
    evidence
        The differences themselves.
    estimate, low, high
        Shrunken difference of each client and its 95 % interval; NaN where nothing is known.
    better
        Posterior probability that the first model is better for the client.
    called
        1 where the first model is better, -1 where the second is, else 0: signs with a probability of at least 97.5 %,
        and a false discovery rate over clients of 5 %. With fewer than 20 rows in all nobody is called.
    by_rows, by_clients
        Mean difference of these clients, each row or each client counting alike.
    spread
        Posterior mean of the standard deviation of true differences between clients.

    Examples
    --------
    Three clients gain alike, the last of them with few rows.

    >>> import numpy as np
    >>> from coterie.theory.verdicts import Evidence, judge
    >>> client = np.repeat([0, 1, 2], [40, 40, 5])
    >>> gains = 2 + np.random.default_rng(0).normal(size=len(client))
    >>> found = judge(Evidence.of_rows(gains, client, 3))
    >>> found.called.tolist(), found.clear.tolist(), found.by_clients.sign
    ([1, 1, 1], [1, 1, 0], 1)
    """

    evidence: Evidence
    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray
    better: np.ndarray
    called: np.ndarray
    by_rows: Mean
    by_clients: Mean
    spread: float

    @property
    def known(self) -> np.ndarray:
        """Clients about which anything is known, [n]."""
        return np.asarray(~np.isnan(self.evidence.difference))

    @property
    def clear(self) -> np.ndarray:
        """`called` where the client has rows enough to call it clear, else 0, [n]."""
        return np.where(self.evidence.rows >= CLEAR_ROWS, self.called, 0)

    @property
    def false_sign_rate(self) -> float:
        """Expected share of wrong signs among the clients that are called; 0 if none is."""
        said = self.called != 0
        wrong = np.where(self.called > 0, 1 - self.better, self.better)[said]
        return float(wrong.mean()) if said.any() else 0.0


def judge(evidence: Evidence) -> Verdicts:
    """Judge every client by its own rows and by what the other clients show.

    Parameters
    ----------
    evidence
        Mean differences and variances of the clients.

    Returns
    -------
    Verdicts
        Shrunken differences, posterior probabilities, calls and means.

    Raises
    ------
    DataError
        If no client has a difference.

    Examples
    --------
    >>> import numpy as np
    >>> draw = np.random.default_rng(0)
    >>> gains = 0.5 + draw.normal(size=(6, 40))
    >>> found = judge(Evidence.of_rows(gains.ravel(), np.repeat(np.arange(6), 40), 6))
    >>> found.called.tolist(), found.by_rows.sign
    ([1, 1, 1, 1, 1, 1], 1)
    """
    known = ~np.isnan(evidence.difference)
    if not known.any():
        raise DataError("no client has rows on which both models were scored")
    difference, rows = evidence.difference[known], evidence.rows[known].astype(float)
    variance, freedom = evidence.variance[known], evidence.freedom[known]
    empty = np.full(len(known), np.nan)
    estimate, low, high, better = (empty.copy() for _ in range(4))
    called, spread = np.zeros(len(known), dtype=int), np.nan
    told = np.flatnonzero(known)[np.isfinite(variance)]
    if len(told):
        wide = evidence.variance[told] * _tails(evidence.freedom[told])
        posterior = _Posterior(evidence.difference[told], wide, evidence.common[told])
        estimate[told], better[told], spread = posterior.mean, posterior.above(0.0), posterior.spread
        low[told], high[told] = posterior.quantile(1 - SURE), posterior.quantile(SURE)
        if rows.sum() >= CLEAR_ROWS:
            same = evidence.difference[told] == 0  # as where a client keeps the second model: nothing to say
            called[told] = np.where(same, 0, _called(better[told]))
    return Verdicts(
        evidence,
        estimate,
        low,
        high,
        better,
        called,
        _mean(difference, variance, freedom, rows / rows.sum(), evidence.pooled_freedom),
        _mean(difference, variance, freedom, np.full(len(rows), 1 / len(rows)), evidence.pooled_freedom),
        spread,
    )


def guarded(verdicts: Verdicts, doubt: float = 0.2) -> np.ndarray:
    """Return the clients that should keep the second model, because held-out evidence speaks against the first.

    Judge on validation rows, which no model was trained on, and score what clients then deploy on test rows.

    Parameters
    ----------
    verdicts
        What `judge` returned for a collaborative model and the client's own.
    doubt
        A client keeps its own model if the collaborative one is better with at most this probability.

    Returns
    -------
    numpy.ndarray
        True for clients that keep their own model, bool [n]; False where nothing is known.

    Examples
    --------
    >>> import numpy as np
    >>> gains = np.random.default_rng(0).normal(size=(3, 50)) + np.array([[1.0], [1.0], [-1.0]])
    >>> guarded(judge(Evidence.of_rows(gains.ravel(), np.repeat(np.arange(3), 50), 3)))
    array([False, False,  True])
    """
    if not 0 <= doubt <= 0.5:
        raise SettingError(f"doubt is {doubt}; it is a probability from 0 to 0.5")
    return np.asarray(np.nan_to_num(verdicts.better, nan=1.0) <= doubt)


def _called(better: np.ndarray) -> np.ndarray:
    """Return the sign of each client that may be said, with the false discovery rate over clients at 5 %.

    By Benjamini and Hochberg (1995) on the posterior's two tails: few calls among many clients need more evidence
    each, and nobody is called with a probability below `SURE`.
    """
    tails = np.clip(2 * np.minimum(better, 1 - better), 0, 1)
    order = np.argsort(tails)
    within = tails[order] * len(tails) <= 2 * (1 - SURE) * np.arange(1, len(tails) + 1)
    said = np.zeros(len(tails), dtype=bool)
    said[order[: 1 + np.flatnonzero(within).max(initial=-1)]] = True  # up to the last that is within
    return np.where(said, np.where(better > 0.5, 1, -1), 0)


def _tails(freedom: np.ndarray) -> np.ndarray:
    """Return the variance of Student's t, by which a normal distribution stands in for it."""
    return np.asarray(freedom / np.maximum(freedom - 2, 0.1))


def _mean(
    difference: np.ndarray, variance: np.ndarray, freedom: np.ndarray, share: np.ndarray, most: int
) -> Mean:
    """Return the mean over these clients, with Satterthwaite's degrees of freedom, at most those of all rows."""
    from scipy.special import stdtrit

    value = float((share * difference).sum())
    parts = share * share * variance
    if not np.isfinite(parts).all():
        return Mean(value, None, None)
    total = float(parts.sum())
    if total == 0:
        return Mean(value, value, value)
    effective = min(float(most), total * total / float((parts * parts / freedom).sum()))
    half = float(stdtrit(effective, SURE)) * total**0.5
    return Mean(value, value - half, value + half)


class _Posterior:
    """Posterior of true differences [n]: a mixture of normal distributions, one for each spread."""

    def __init__(self, difference: np.ndarray, variance: np.ndarray, common: np.ndarray) -> None:
        least = 1e-12 * float((difference**2).max()) + 1e-300
        variance, common = np.maximum(variance, least), np.maximum(common, least)
        scale = float(np.median(np.sqrt(common)))
        spread = scale * np.tan(np.pi / 2 * (np.arange(SPREADS) + 0.5) / SPREADS)  # of equal prior weight
        total = common + spread[:, None] ** 2  # [spreads, n]
        precision = (1 / total).sum(1, keepdims=True)
        centre = (difference / total).sum(1, keepdims=True) / precision
        log = -0.5 * (np.log(total) + (difference - centre) ** 2 / total).sum(1)
        log -= 0.5 * np.log(precision[:, 0])
        weight = np.exp(log - log.max())
        weight /= weight.sum()
        kept = weight > 1e-6
        own = variance + spread[kept, None] ** 2
        off = (own / (total[kept] * precision[kept]) ** 2).sum(1, keepdims=True)  # variance of the centre
        pull = variance / own
        self._weight = weight[kept, None] / weight[kept].sum()
        self._means = (1 - pull) * difference + pull * centre[kept]
        self._sds = np.sqrt((1 - pull) * variance + pull * pull * off)
        self.mean = (self._weight * self._means).sum(0)
        self.spread = float((weight * spread).sum())

    def above(self, value: float | np.ndarray) -> np.ndarray:
        """Return the probability of a difference above a value."""
        from scipy.special import ndtr

        return np.asarray((self._weight * ndtr((self._means - value) / self._sds)).sum(0))

    def quantile(self, level: float) -> np.ndarray:
        """Return the value below which a difference lies with this probability."""
        low = (self._means - 9 * self._sds).min(0)
        high = (self._means + 9 * self._sds).max(0)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            below = 1 - self.above(middle) < level
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.asarray((low + high) / 2)
