"""Point clouds with known clusters, and the score by which threshold rules are compared on them.

The seed determines the shape: number and sizes of the clusters, dimension, and distribution of the points in a cluster
(Gaussian, few long axes, heavy tails, a ball). E|x - mu|^2 = rho^2 = 1 in every cluster. The two nearest cluster means
are `ratio` apart, the others at least that far and mostly not much farther. Sizes and dimensions are chosen so that
baselines score as in the published table; experiments/threshold/rules.toml has the details.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie._core.randomness import integers, key, normal, slots, uniform
from coterie.experiments.spec import Experiment
from coterie.theory.threshold import Auto, Fixed, Rule, Size, threshold_cluster

SIZES = ((12, 12, 12, 12), (15, 15, 15), (10, 10, 10, 10, 10), (6, 12, 18), (8, 16, 24), (6, 12, 18, 24))
DIMENSIONS = (10, 50, 200)
SCATTER = ("gaussian", "axes", "tails", "ball")
CORNER = 0.5**0.5
STRESS: dict[str, tuple[tuple[int, ...], tuple[dict[int, float], ...]]] = {
    "nested": (
        (12,) * 4,
        ({}, {0: 1.0}, {1: 10.0}, {1: 10.0, 2: 1.0}),
    ),  # two close pairs, far from each other
    "outliers": ((12,) * 3, tuple({k: CORNER} for k in range(3))),  # and 14 % outliers far away
    "unequal": ((30, 12, 5), tuple({k: CORNER} for k in range(3))),
    "one": ((48,), ({},)),
}
PASSES = 60  # enough for the smallest ball to converge: (1 - 1/11)^60 < 0.01
Method = Callable[["Cloud"], Tensor]


@dataclass(frozen=True)
class Cloud:
    """Points [N, d] with spread 1 and the true cluster of each, -1 for outliers."""

    points: Tensor
    truth: Tensor
    means: Tensor
    ratio: float

    @property
    def fractions(self) -> Tensor:
        """Share of each cluster in all points."""
        return torch.bincount(self.truth[self.truth >= 0]).double() / len(self.truth)

    def score(self, centres: Tensor) -> float:
        """Return mean_i |v_i - mu|^2 n_{k(i)} / rho^2 of one centre v_i per point; the true cluster's mean scores 1."""
        known = self.truth >= 0
        truth = self.truth[known]
        error = ((centres[known] - self.means[truth]) ** 2).sum(1)
        return float((error * torch.bincount(truth)[truth]).mean())


def draw_cloud(ratio: float, seed: int) -> Cloud:
    """Draw a cloud whose nearest clusters are `ratio` times their spread apart."""
    which = integers(slots(key(seed, "shape"), 3), torch.tensor([len(SIZES), len(DIMENSIONS), len(SCATTER)]))
    sizes, d, scatter = (
        torch.tensor(SIZES[int(which[0])]),
        DIMENSIONS[int(which[1])],
        SCATTER[int(which[2])],
    )
    truth = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    means = _means(len(sizes), d, seed)
    points = ratio * means[truth] + _scattered(len(truth), d, scatter, seed)
    return Cloud(points, truth, ratio * means, ratio)


def stress_cloud(name: str, ratio: float, seed: int, d: int = 20) -> Cloud:
    """Draw a Gaussian cloud of a kind that breaks simple rules; see `STRESS`."""
    sizes, places = STRESS[name]
    truth = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    means = torch.zeros(len(sizes), d, dtype=torch.float64)
    for row, place in enumerate(places):
        for axis, length in place.items():
            means[row, axis] = ratio * length
    points = means[truth] + _scattered(len(truth), d, "gaussian", seed)
    if name == "outliers":
        stray = 100 * ratio * normal(slots(key(seed, "stray", torch.arange(6)), d))
        points, truth = torch.cat([points, stray]), torch.cat([truth, torch.full((6,), -1)])
    return Cloud(points, truth, means, ratio)


def _means(count: int, d: int, seed: int) -> Tensor:
    """Return the most evenly spaced of 20 draws of cluster means, the closest pair at distance 1."""
    best, evenness = None, 0.0
    for attempt in range(20):
        drawn = normal(slots(key(seed, "means", attempt, torch.arange(count)), d))
        gaps = torch.pdist(drawn)
        if best is None or float(gaps.min() / gaps.max()) > evenness:
            best, evenness = drawn / gaps.min(), float(gaps.min() / gaps.max())
    assert best is not None
    return best


def _scattered(count: int, d: int, scatter: str, seed: int) -> Tensor:
    """Draw deviations from the cluster means with E|x|^2 = 1."""
    keys = key(seed, "scatter", torch.arange(count))
    noise = normal(slots(keys, d))
    if scatter == "axes":
        noise = noise * 1.5 ** -torch.arange(d).double()
        return noise / math.sqrt(float((2.25 ** -torch.arange(d).double()).sum()))
    if scatter == "tails":  # Student's t with 5 degrees of freedom, one scale per point, variance 5/3
        chi = (normal(slots(key(seed, "tails", torch.arange(count)), 5)) ** 2).sum(1, keepdim=True)
        return noise * torch.sqrt(5.0 / chi) / math.sqrt(5 / 3 * d)
    if scatter == "ball":
        length: Tensor = torch.linalg.vector_norm(noise, dim=1, keepdim=True)
        radius = uniform(key(seed, "radius", torch.arange(count))).unsqueeze(1) ** (1 / d)
        return noise / length * radius * math.sqrt((d + 2) / d)
    return noise / math.sqrt(d)


def own_point(make: Callable[[Cloud], Rule]) -> Method:
    """Start one cluster at every point, as every client of the decentralised method does."""

    def centres(cloud: Cloud) -> Tensor:
        return threshold_cluster(cloud.points, starts=cloud.points, rule=make(cloud), rounds=PASSES).centres

    return centres


def server(name: str, factor: float = 1.0) -> Method:
    """Start K centres by K-means++ and assign every point to the nearest; K is `factor` times the true number."""

    def centres(cloud: Cloud) -> Tensor:
        k = max(1, round(factor * len(cloud.means)))
        found = threshold_cluster(cloud.points, k, rule=name, rounds=PASSES, tries=5)
        return found.centres[found.membership]

    return centres


def auto(low: float, high: float | None) -> Method:
    """Apply AUTO between `low` times the smallest and `high` times the largest fraction (None: no upper bound)."""
    return own_point(
        lambda cloud: Auto(
            low * float(cloud.fractions.min()), 1.0 if high is None else high * float(cloud.fractions.max())
        )
    )


def _theory(cloud: Cloud) -> Rule:
    """Return the theoretical threshold at its start, c = rho; outside its conditions the recursion for c diverges."""
    return Fixed(math.sqrt(2 * float(cloud.fractions.min()) * cloud.ratio))


METHODS: dict[str, Method] = {
    "auto[f/2,1.5F]": auto(0.5, 1.5),
    "auto[f/4,2F]": auto(0.25, 2.0),
    "auto[.5/K,1.5/K]": own_point(lambda cloud: Auto(0.5 / len(cloud.means), 1.5 / len(cloud.means))),
    "auto[f/2,1]": auto(0.5, None),
    "size(f)": own_point(lambda cloud: Size(float(cloud.fractions.min()))),
    "size(2f)": own_point(lambda cloud: Size(min(1.0, 2 * float(cloud.fractions.min())))),
    "theory": own_point(_theory),
    "no sharing": lambda cloud: cloud.points,
    "global mean": lambda cloud: cloud.points.mean(0).expand_as(cloud.points),
    "server halfgap": server("halfgap"),
    "server auto": server("auto"),
    "server halfgap, 2K": server("halfgap", 2.0),
    "server halfgap, K/2": server("halfgap", 0.5),
}


def scores(method: Method, ratio: float, seeds: Iterable[int]) -> float:
    """Return the geometric mean of the score over data sets, one per seed."""
    logs = [math.log(cloud.score(method(cloud))) for cloud in (draw_cloud(ratio, seed) for seed in seeds)]
    return math.exp(sum(logs) / len(logs))


def measure(experiment: Experiment, seed: int) -> dict[str, float]:
    """Score a method at every ratio on `tries` data sets each, for `coterie reproduce threshold/rules`."""
    plan = experiment.plans[0]
    count = plan.tries or 96
    seeds = [seed * 100_000 + k for k in range(count)]
    method = METHODS[plan.settings["method"]]
    return {f"ratio {ratio:g}": scores(method, ratio, seeds) for ratio in plan.settings["ratios"]}
