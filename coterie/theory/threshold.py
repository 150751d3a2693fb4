"""Threshold clustering: centres that average only the points in a ball around them.

"Towards Provably Personalized Federated Learning via Threshold-Clustering of Similar Clients" (2022), with the
corrected update. A centre v of N points with s of them within tau moves to v + (s/N)(their mean - v).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.theory.threshold_rules import Auto, Fixed, HalfGap, Rule, Size, Theory, make_rule
from coterie.theory.threshold_starts import seed_weights, squared_distances

__all__ = [
    "REST",
    "Auto",
    "Clustering",
    "Fixed",
    "HalfGap",
    "Rule",
    "Size",
    "Theory",
    "byzantine_price",
    "make_rule",
    "threshold_cluster",
]

FEW = 4  # dimensions per point, or points per pass, from which inner products cost less than passes
REST = 0.1  # in standard errors of a ball's mean: stopping there adds 1 % to its variance


@dataclass(frozen=True)
class Clustering:
    """What `threshold_cluster` found; points that are not finite belong nowhere (membership -1, weight 0).

    Parameters
    ----------
    centres
        The centres, [K, d].
    membership
        The nearest centre of each point, whether or not the point is in its ball, [N].
    balls
        Which points are within each radius, [K, N]; balls may overlap.
    radius
        Radius of each ball, [K].
    weights
        centres = weights @ points (plus what is left of given starts), [K, N].
    moved
        Length of the last move of each centre, [K]: near 0 when the balls are stable.
    left_out
        Which points are not finite, [N].

    Examples
    --------
    >>> from coterie.theory.threshold import threshold_cluster
    >>> found = threshold_cluster([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]], k=2)
    >>> found.sizes.tolist(), found.diagnostics()["leftover"]
    ([3, 3], 0)
    """

    centres: Tensor
    membership: Tensor
    balls: Tensor
    radius: Tensor
    weights: Tensor
    moved: Tensor
    left_out: Tensor

    @property
    def leftover(self) -> Tensor:
        """Points in no ball, [N]."""
        return ~self.balls.any(0) & ~self.left_out

    @property
    def sizes(self) -> Tensor:
        """Number of points in each ball, [K]; 0 means that the centre never moved."""
        return self.balls.sum(1)

    def diagnostics(self) -> dict[str, float]:
        """Return counts that tell whether the result can be trusted."""
        return {
            "leftover": int(self.leftover.sum()),
            "shared": int((self.balls.sum(0) > 1).sum()),
            "empty_balls": int((self.sizes == 0).sum()),
            "left_out": int(self.left_out.sum()),
            "largest_move": float(self.moved.max()) if len(self.moved) else 0.0,
        }


def threshold_cluster(
    points: Any,
    k: int | None = None,
    *,
    rule: Rule | str = "auto",
    starts: Any = None,
    start_weights: Tensor | None = None,
    rounds: int = 8,
    rest: float = 0.0,
    lloyd: int = 5,
    tries: int = 1,
    seed: int = 0,
) -> Clustering:
    """Cluster points around k centres: K-means++, then passes of the robust update.

    Parameters
    ----------
    points
        Points, [N, d].
    k
        Number of centres; not needed with `starts` or `start_weights`.
    rule
        Radius of the balls: an object of this module, or "auto", "size" or "halfgap" with equal clusters assumed.
    starts
        Centres to start from, [K, d].
    start_weights
        Centres to start from as weights of the points, [K, N].
    rounds
        Most passes of the update.
    rest
        Stop early when no centre is farther from the mean of its ball than `rest` standard errors of that mean.
    lloyd
        Steps of K-means after each K-means++ draw.
    tries
        K-means++ draws, of which the best is used.
    seed
        Seed of the draws.

    Returns
    -------
    Clustering
        Centres, balls and diagnostics.

    Raises
    ------
    SettingError
        If there are no finite points, or more centres than points.

    Examples
    --------
    >>> from coterie.theory.threshold import threshold_cluster
    >>> found = threshold_cluster([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]], k=2)
    >>> sorted(round(centre, 2) for centre in found.centres.flatten().tolist())
    [0.1, 5.1]
    """
    given = torch.as_tensor(points)
    if given.dim() != 2 or len(given) == 0:
        raise SettingError(f"points must be a non-empty matrix [N, d]; got shape {list(given.shape)}")
    finite = torch.isfinite(given).all(1)
    kept = given.double() if finite.all() else given[finite].double()
    count = len(kept)
    if count == 0:
        raise SettingError("no point is finite, so there is nothing to cluster")
    centre = kept.mean(0)
    kept = kept - centre
    weights, pool = _starting_weights(kept, k, starts, start_weights, finite, centre, lloyd, tries, seed)
    rule = make_rule(rule, len(weights), count) if isinstance(rule, str) else rule
    places = _coordinates(pool, products=len(weights) * (rounds + 1))
    near = places[:count]
    squares = (near * near).sum(1)
    centres = weights @ places
    moved = torch.zeros_like(centres[:, 0])
    passed = 0
    for step in range(rounds):
        balls, _, distances = _balls(centres, near, squares, rule, step)
        inside = balls.to(weights.dtype)
        sizes = inside.sum(1)
        weights = weights * (1 - sizes / count).unsqueeze(1)
        weights[:, :count] += inside / count
        before, centres = centres, weights @ places
        moved = torch.linalg.vector_norm(centres - before, dim=1)
        passed = step + 1
        if rest and _resting(moved, sizes, (inside * distances**2).sum(1), count, rest):
            break
    balls, radius, distances = _balls(centres, near, squares, rule, passed)
    centres = weights @ pool
    return Clustering(
        centres=(centres + centre).to(given.dtype) if given.is_floating_point() else centres + centre,
        membership=_spread(distances.argmin(0), finite, -1),
        balls=_spread(balls, finite, False),
        radius=radius,
        weights=_spread(weights[:, :count], finite, 0.0),
        moved=moved,
        left_out=~finite,
    )


def _resting(moved: Tensor, sizes: Tensor, squares: Tensor, count: int, rest: float) -> bool:
    """Return True if the mean of every ball is nearer than `rest` times its standard error.

    moved = (s/N) |mean - v|, of which (1 - s/N) is left; the standard error is sqrt(squares/s)/sqrt(s).
    """
    left = moved * (count - sizes)
    return bool((left <= rest * squares.sqrt()).all())


def byzantine_price(radius: Tensor | float, honest: int, bad: int) -> Tensor | float:
    """Return how far bad points can move a stable centre from the mean of the honest points in its ball.

    At a fixed point sum over honest (x - v) = -sum over bad (x - v), and a bad point counts only within the
    radius: |v - honest mean| <= (bad/honest) tau.

    Parameters
    ----------
    radius
        Radius tau of the ball.
    honest
        Honest points in the ball.
    bad
        Bad points in the ball.

    Returns
    -------
    Tensor or float
        The bound.

    Examples
    --------
    >>> from coterie.theory.threshold import byzantine_price
    >>> byzantine_price(2.0, honest=8, bad=2)
    0.5
    """
    if honest < 1:
        raise SettingError(f"honest = {honest}; a ball without honest points has no honest mean")
    return radius * (bad / honest)


def _starting_weights(
    kept: Tensor,
    k: int | None,
    starts: Any,
    start_weights: Tensor | None,
    finite: Tensor,
    centre: Tensor,
    lloyd: int,
    tries: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return weights [K, N or more] and the pool they refer to; given starts join the pool behind the points."""
    if starts is not None:
        first = torch.as_tensor(starts).to(kept)
        if first.dim() != 2 or first.shape[1] != kept.shape[1]:
            raise SettingError(f"starts must be [K, {kept.shape[1]}]; got shape {list(first.shape)}")
        first = first - centre
        weights = torch.zeros(len(first), len(kept) + len(first), dtype=kept.dtype, device=kept.device)
        weights[:, len(kept) :] = torch.eye(len(first), dtype=kept.dtype, device=kept.device)
        return weights, torch.cat([kept, first])
    if start_weights is not None:
        return start_weights[:, finite].to(kept), kept
    if k is None:
        raise SettingError("say how many clusters: k=..., or where the centres start: starts=...")
    return seed_weights(kept, k, lloyd=lloyd, tries=tries, seed=seed), kept


def _coordinates(points: Tensor, products: int) -> Tensor:
    """Return the points in axes of their span, if they are few beside their dimensions and passes over them.

    Distances stay the same, and passes no longer read whole points.
    """
    if len(points) * FEW > points.shape[1] or len(points) > FEW * products:
        return points
    squares, axes = torch.linalg.eigh(points @ points.T)
    coordinates: Tensor = axes * squares.clamp_(min=0).sqrt_()
    return coordinates


def _balls(
    centres: Tensor, points: Tensor, squares: Tensor, rule: Rule, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    distances = squared_distances(centres, points, squares).sqrt_()
    radius = rule.radius(distances.sort(1).values, centres, step)
    return distances <= radius.unsqueeze(1), radius, distances


def _spread(values: Tensor, finite: Tensor, empty: float | bool | int) -> Tensor:
    """Put results for the finite points back into rows for all points (the last axis)."""
    if finite.all():
        return values
    whole = values.new_full((*values.shape[:-1], len(finite)), empty)
    whole[..., finite] = values
    return whole
