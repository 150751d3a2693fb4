"""Threshold rules: how large the ball around a centre is in threshold clustering.

A rule takes the distances of all points from every centre and returns a radius for each. `Size`, `Auto` and `HalfGap`
need neither the spread rho of a cluster nor the distance Delta between clusters; `Theory` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coterie._core.errors import SettingError

RULES = ("auto", "size", "halfgap", "theory", "fixed")
SPLIT_SURE, SPLIT_SHARE, SPLIT_SLOPE = 0.998, 0.72, 2.4  # 99 % point of the share for one cluster of s points


class Rule(Protocol):
    """What `threshold_cluster` requires of a rule."""

    def radius(self, ascending: Tensor, centres: Tensor, step: int) -> Tensor:
        """Return the radius of every ball, [K].

        Parameters
        ----------
        ascending
            Distances of the points from every centre, sorted, [K, N].
        centres
            The centres, [K, d].
        step
            The pass, 0, 1, ...; the last call is for the balls that are returned.

        Returns
        -------
        Tensor
            [K].
        """
        ...


@dataclass(frozen=True)
class Fixed:
    """Use the same radius tau for every ball in every pass.

    Examples
    --------
    >>> from coterie.theory.threshold import Fixed, threshold_cluster
    >>> threshold_cluster([[0.0], [0.1], [5.0]], k=2, rule=Fixed(1.0)).membership.tolist()
    [0, 0, 1]
    """

    tau: float

    def __post_init__(self) -> None:
        _require(self.tau >= 0, f"tau = {self.tau}; a radius is not negative")

    def radius(self, ascending: Tensor, centres: Tensor, step: int) -> Tensor:
        return ascending.new_full((len(ascending),), self.tau)


@dataclass(frozen=True)
class Size:
    """Use the distance of the ceil(share N)-th nearest point; choose share slightly below the cluster's fraction.

    Examples
    --------
    >>> from coterie.theory.threshold import Size, threshold_cluster
    >>> threshold_cluster([[0.0], [0.1], [5.0], [5.1]], k=2, rule=Size(0.5)).sizes.tolist()
    [2, 2]
    """

    share: float

    def __post_init__(self) -> None:
        _require(0 < self.share <= 1, f"share = {self.share}; it must be above 0 and at most 1")

    def radius(self, ascending: Tensor, centres: Tensor, step: int) -> Tensor:
        return ascending[:, _count(self.share, ascending.shape[1]) - 1]


@dataclass(frozen=True)
class Auto:
    """Split the log distances into two classes, again and again while the split is clear, down to `low` N points.

    The near class is kept if more than `high` N points are left, or if the split explains more of the variance
    than one unimodal cluster of s points does in 99 % of the cases: min(.998, .72 + 2.4/s). The radius is the
    geometric mean of the last distance inside and the first one outside; infinite if nothing was split off.
    Half the smallest and 1.5 times the largest cluster fraction are good bounds.

    Examples
    --------
    >>> from coterie.theory.threshold import Auto, threshold_cluster
    >>> points = [[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]]
    >>> threshold_cluster(points, k=2, rule=Auto(low=0.25, high=0.75)).sizes.tolist()
    [3, 3]
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _require(0 < self.low <= self.high, f"low = {self.low}, high = {self.high}; give 0 < low <= high")

    def radius(self, ascending: Tensor, centres: Tensor, step: int) -> Tensor:
        points = ascending.shape[1]
        if points < 2:
            return torch.full_like(ascending[:, 0], math.inf)
        floor = torch.finfo(ascending.dtype).tiny
        third = ascending[:, min(2, points - 1)].clamp(min=floor)
        logs = torch.maximum(ascending, third.unsqueeze(1)).log()
        size = self._kept(logs, max(2, _count(self.low, points)))
        whole = size == points
        last = ascending.gather(1, size.unsqueeze(1) - 1).squeeze(1)
        beyond = ascending.gather(1, size.clamp(max=points - 1).unsqueeze(1)).squeeze(1)
        return torch.where(whole, math.inf, torch.sqrt(last) * torch.sqrt(beyond))

    def _kept(self, logs: Tensor, least: int) -> Tensor:
        """Return how many of the nearest points are in the ball of each centre, [K]."""
        centres, points = logs.shape
        logs = logs - logs.mean(1, keepdim=True)
        sums, squares = logs.cumsum(1), (logs * logs).cumsum(1)
        near = torch.arange(1, points + 1, device=logs.device)
        size = torch.full((centres,), points, device=logs.device)
        going = torch.ones(centres, dtype=torch.bool, device=logs.device)
        while going.any():
            rows = going.nonzero().squeeze(1)
            s = size[rows].unsqueeze(1)
            total = sums[rows].gather(1, s - 1)
            variance = squares[rows].gather(1, s - 1) - total * total / s
            tried = near[least - 1 : int(s.max()) - 1]
            if len(tried) == 0:
                break
            gap = s * sums[rows, least - 1 : int(s.max()) - 1] - tried * total
            between = (gap * gap).div_(s * tried * (s - tried).clamp(min=1))
            best, place = between.masked_fill_(tried >= s, -1.0).max(1)
            share = best / variance.squeeze(1).clamp(min=torch.finfo(logs.dtype).tiny)
            s = s.squeeze(1)
            sure = share > (SPLIT_SHARE + SPLIT_SLOPE / s).clamp(max=SPLIT_SURE)
            keep = (best > 0) & (sure | (s > self.high * points))
            size[rows] = torch.where(keep, place + least, s)
            going[rows] = keep
        return size


@dataclass(frozen=True)
class HalfGap:
    """Use half the distance to the nearest other centre (infinite if there is none); for a server with K centres.

    Examples
    --------
    >>> from coterie.theory.threshold import HalfGap, threshold_cluster
    >>> threshold_cluster([[0.0], [0.1], [5.0], [5.1]], k=2, rule=HalfGap()).sizes.tolist()
    [2, 2]
    """

    def radius(self, ascending: Tensor, centres: Tensor, step: int) -> Tensor:
        if len(centres) < 2:
            return torch.full_like(ascending[:, 0], math.inf)
        gaps = torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")
        return gaps.fill_diagonal_(math.inf).min(1).values / 2


@dataclass(frozen=True)
class Theory:
    """Use the corrected threshold of the paper: tau_l^2 = (n/N)(c_l^2 + rho^2) Delta/rho.

    c_0 = rho, c_{l+1}^2 = (1 - (n/N)^2/2) c_l^2 + ((34 + 48/n) rho/Delta + 4/n) rho^2. The theorem backs it only where
    `applies`: for four equal clusters that is Delta/rho above 1000.

    Parameters
    ----------
    rho
        Spread of a cluster.
    gap
        Distance Delta between clusters.
    size
        Points n of a cluster.
    points
        All points N.

    Examples
    --------
    >>> from coterie.theory.threshold import Theory
    >>> Theory(rho=1.0, gap=10.0, size=25, points=100).applies, Theory(1.0, 2000.0, 25, 100).applies
    (False, True)
    """

    rho: float
    gap: float
    size: int
    points: int

    def __post_init__(self) -> None:
        _require(self.rho > 0 and self.gap > 0, f"rho = {self.rho}, gap = {self.gap}; both must be positive")
        _require(
            1 <= self.size <= self.points, f"size = {self.size} of {self.points} points is no cluster size"
        )

    @property
    def applies(self) -> bool:
        """Whether Delta and every tau_l meet the conditions of the theorem."""
        n, share = self.size, self.size / self.points
        far = self.gap > 2 * (34 + 48 / n) * self.rho / share**2
        limit = self.gap**2 / 12
        spread = [self._spread(step) for step in range(self.rounds + 1)]
        return far and all(self._squared(c) + c + self.rho**2 <= limit for c in spread)

    @property
    def rounds(self) -> int:
        """Passes after which the theorem's error is reached."""
        share = self.size / self.points
        if share == 1:
            return 1
        wanted = math.log(self.rho / self.gap + 1 / self.size) / math.log(1 - share**2 / 2)
        return max(1, math.ceil(wanted))

    def radius(self, ascending: Tensor, centres: Tensor, step: int) -> Tensor:
        return ascending.new_full((len(ascending),), math.sqrt(self._squared(self._spread(step))))

    def _spread(self, step: int) -> float:
        """Return c_l^2."""
        n, shrink = self.size, 1 - (self.size / self.points) ** 2 / 2
        rise = ((34 + 48 / n) * self.rho / self.gap + 4 / n) * self.rho**2
        limit = rise / (1 - shrink)
        return limit + shrink**step * (self.rho**2 - limit)

    def _squared(self, spread: float) -> float:
        return self.size / self.points * (spread + self.rho**2) * self.gap / self.rho


def make_rule(
    name: str, clusters: int, points: int, *, share: float = 0.0, tau: float = 0.0, rho: float = 0.0
) -> Rule:
    """Return a rule from the settings of an algorithm.

    Parameters
    ----------
    name
        One of `RULES`: auto, size, halfgap, theory, fixed.
    clusters
        Number of clusters.
    points
        Number of points.
    share
        Fraction of a cluster; 0 means 1/clusters.
    tau
        Radius of "fixed", or distance between clusters of "theory".
    rho
        Spread of a cluster, for "theory".

    Returns
    -------
    Rule
        The rule.

    Raises
    ------
    SettingError
        If there is no such rule, or it lacks a number that it needs.

    Examples
    --------
    >>> from coterie.theory.threshold import make_rule
    >>> make_rule("auto", clusters=4, points=100)
    Auto(low=0.125, high=0.375)
    """
    share = min(1.0, share or 1 / max(clusters, 1))
    if name == "size":
        return Size(share)
    if name == "auto":
        return Auto(0.5 * share, 1.5 * share)
    if name == "halfgap":
        return HalfGap()
    if name == "theory":
        _require(
            rho > 0 and tau > 0, "rule 'theory' needs rho, the spread of a cluster, and tau, their distance"
        )
        return Theory(rho, tau, _count(share, points), points)
    if name == "fixed":
        _require(tau > 0, "rule 'fixed' needs a positive tau")
        return Fixed(tau)
    raise SettingError(f"no threshold rule {name!r}; choose one of {', '.join(RULES)}")


def _count(share: float, points: int) -> int:
    return min(points, max(1, math.ceil(share * points - 1e-9)))


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise SettingError(problem)
