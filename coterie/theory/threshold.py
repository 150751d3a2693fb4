"""Threshold clustering: centres that average only the points in a ball around them.

"Towards Provably Personalized Federated Learning via Threshold-Clustering of Similar Clients" (2022), with the
corrected update. A centre v of N points with s of them within tau moves to v + (s/N)(their mean - v).
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.errors import SettingError
from coterie.federation import randomness
from coterie.theory.threshold_rules import Auto, Fixed, HalfGap, Rule, Size, Theory, make_rule

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
    "few_threads",
    "group_weights",
    "make_rule",
    "seed_weights",
    "threshold_cluster",
]

SMALL = 1 << 20  # elements below which scikit-learn gets one thread
FEW = 4  # dimensions per point, and points per pass of a centre, with which their inner products cost less than passes
REST = 0.1  # of the standard error of a ball's mean: what is left of the way then adds 1 % to its variance


@dataclass(frozen=True)
class Clustering:
    """What was found. Rows of points that are not finite belong nowhere: membership -1, weight 0."""

    centres: Tensor  # [K, d]
    membership: Tensor  # [N] the nearest centre, whether or not the point is in its ball
    balls: Tensor  # [K, N] who is within the radius; balls may overlap
    radius: Tensor  # [K]
    weights: Tensor  # [K, N] centres = weights @ points (+ what is left of given starts)
    moved: Tensor  # [K] length of the last move of each centre: near 0 when the balls are stable
    left_out: Tensor  # [N] points that are not finite

    @property
    def leftover(self) -> Tensor:
        """Points in no ball, [N]."""
        return ~self.balls.any(0) & ~self.left_out

    @property
    def sizes(self) -> Tensor:
        """Points in each ball, [K]; 0 means that the centre never moved."""
        return self.balls.sum(1)

    def diagnostics(self) -> dict[str, float]:
        """Counts that tell whether the result can be trusted."""
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
    """Cluster `points` [N, d] around k centres, by K-means++ and then `rounds` passes of the robust update.

    Centres start at `starts` [K, d], at `start_weights` [K, N] times the points, or at the best of `tries`
    K-means++ draws followed by `lloyd` steps of K-means. `rule` is an object of this module or one of the names
    auto, size, halfgap with equal clusters assumed. The result depends on `seed` and on nothing random.
    With `rest` it stops early, when no centre is farther from the mean of its ball than `rest` times the standard
    error of that mean.
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
    """Whether what is left to the mean of every ball is below `rest` times that mean's standard error.

    moved = (s/N) |mean - v|, of which (1 - s/N) is left; the standard error is sqrt(squares/s)/sqrt(s).
    """
    left = moved * (count - sizes)
    return bool((left <= rest * squares.sqrt()).all())


def seed_weights(
    points: Tensor, k: int, *, lloyd: int = 5, tries: int = 1, far: float | None = None, seed: int = 0
) -> Tensor:
    """Starting centres as weights [k, N] of the points: K-means++ (scikit-learn's), then steps of K-means.

    With `far`, points farther from the coordinate-wise median than so many times the median of that distance
    are not used: K-means++ would otherwise spend its centres on them.
    """
    points = points.detach().double()
    if not 1 <= k <= len(points):
        raise SettingError(f"k = {k} centres cannot be drawn from {len(points)} points; give 1 <= k <= N")
    if far is not None:
        length = torch.linalg.vector_norm(points - points.median(0).values, dim=1)
        near = length <= far * length.median()
        if k <= int(near.sum()) < len(points):
            weights = points.new_zeros(k, len(points))
            weights[:, near] = seed_weights(points[near], k, lloyd=lloyd, tries=tries, seed=seed)
            return weights
    squares = (points * points).sum(1)
    best, lowest = None, float("inf")
    for attempt in range(tries):
        weights = _drawn(points, k, int(randomness.key(seed, "k-means++", attempt)) & 0x7FFFFFFF)
        for _ in range(lloyd):
            weights = _lloyd(weights, points, squares)
        inertia = float(_squared_distances(weights @ points, points, squares).min(0).values.sum())
        if best is None or inertia < lowest:
            best, lowest = weights, inertia
    assert best is not None
    return best


def _drawn(points: Tensor, k: int, draw: int) -> Tensor:
    """k different rows of the points by D^2 sampling, as weights."""
    from sklearn.cluster import kmeans_plusplus

    with few_threads(points.numel()):
        _, chosen = kmeans_plusplus(points.cpu().numpy(), k, random_state=draw)
    weights = points.new_zeros(k, len(points))
    weights[torch.arange(k), torch.as_tensor(chosen, dtype=torch.long)] = 1.0
    return weights


def group_weights(points: Tensor, labels: Tensor, k: int) -> Tensor:
    """Starting centres [k, N] from groups found before: the mean of the half nearest to the group's median.

    Fewer than half of a group cannot drag it away. A group without points starts at the mean of all.
    """
    weights = points.new_full((k, len(points)), 1.0 / len(points), dtype=torch.float64)
    for group in labels.unique().tolist():
        members = (labels == group).nonzero().squeeze(1)
        if not 0 <= group < k:
            continue
        own = points[members].double()
        length = torch.linalg.vector_norm(own - own.median(0).values, dim=1)
        near = members[length.argsort(stable=True)[: (len(members) + 1) // 2]]
        weights[group] = 0.0
        weights[group, near] = 1.0 / len(near)
    return weights


def byzantine_price(radius: Tensor | float, honest: int, bad: int) -> Tensor | float:
    """How far `bad` points can pull a stable centre from the mean of the `honest` points in its ball.

    At a fixed point sum over honest (x - v) = -sum over bad (x - v), and a bad point counts only within the
    radius: |v - honest mean| <= (bad/honest) tau.
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
    """Weights [K, N or more] and the pool they refer to; given starts join the pool behind the points."""
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
    """The points in axes of their own span, where they are few beside dimensions and `products` with all of them.

    Distances stay, and passes no longer read whole points.
    """
    if len(points) * FEW > points.shape[1] or len(points) > FEW * products:
        return points
    squares, axes = torch.linalg.eigh(points @ points.T)
    return axes * squares.clamp_(min=0).sqrt_()


def _lloyd(weights: Tensor, points: Tensor, squares: Tensor) -> Tensor:
    """One step of K-means; a centre without points stays."""
    nearest = _squared_distances(weights @ points, points, squares).argmin(0)
    own = torch.zeros_like(weights)
    own[nearest, torch.arange(len(points), device=points.device)] = 1.0
    total = own.sum(1, keepdim=True)
    return torch.where(total > 0, own / total.clamp(min=1.0), weights)


def _squared_distances(centres: Tensor, points: Tensor, squares: Tensor) -> Tensor:
    """|centre - point|^2 as [K, N] through one matrix product."""
    own = (centres * centres).sum(1, keepdim=True)
    return (own + squares - 2 * centres @ points.T).clamp_(min=0.0)


def _balls(
    centres: Tensor, points: Tensor, squares: Tensor, rule: Rule, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    distances = _squared_distances(centres, points, squares).sqrt_()
    radius = rule.radius(distances.sort(1).values, centres, step)
    return distances <= radius.unsqueeze(1), radius, distances


@functools.cache
def _thread_pools() -> Any:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()


def few_threads(elements: int) -> AbstractContextManager[Any]:
    """One thread for small arrays: waking a second one costs more than it saves, most of all beside other work."""
    return nullcontext() if elements > SMALL else _thread_pools().limit(limits=1)


def _spread(values: Tensor, finite: Tensor, empty: float | bool | int) -> Tensor:
    """Results for the finite points, put back into rows for all points (the last axis)."""
    if finite.all():
        return values
    whole = values.new_full((*values.shape[:-1], len(finite)), empty)
    whole[..., finite] = values
    return whole
