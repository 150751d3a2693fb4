"""What could be known: python benchmarks/advisor_ceiling.py [worlds] [first seed] [kind] [draws] [--told].

An advisor who knows the covariance of the features and the ranges from which worlds are drawn samples the posterior of
every client's parameters and noise and names what has the lowest expected risk; the real advisor is shown on the same
worlds. With --told it also knows the world's own noise, heterogeneity, centre and spread. Deviations and centres are
taken as normal with the right mean square, where worlds draw them on spheres. The truth is exact, without drawn noise.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from coterie.select.advice import METHODS
from coterie.select.synthetic_worlds import AdviceScore, TrueWorld, judge, random_world

Array = npt.NDArray[np.float64]
Picks = npt.NDArray[np.intp]

BURN_IN = 60
START = 0.5  # of every level that is not told
RANGES: dict[
    str, dict[str, tuple[float, float]]
] = {  # of worlds' levels, even in their logarithms, as `random_world` draws them
    "few": {"sigma2": (0.1, 3), "r2": (0.05, 3), "centre2": (0.1, 3)},
    "wide": {"sigma2": (0.05, 5), "r2": (0.02, 5), "centre2": (0.02, 5)},
    "middling": {"sigma2": (0.1, 4), "r2": (0.1, 4), "centre2": (0.05, 4)},
    "reference": {"sigma2": (0.1, 10), "r2": (0.03, 4), "centre2": (0.01, 1.5)},
}


@dataclass(frozen=True)
class Geometry:
    """What the rows of n clients say, each in the axes of its own X'X, and how L penalties filter it."""

    rows: Array  # [n]
    gram: Array  # [n, d, d], X'X
    values: Array  # [n, d], eigenvalues of X'X, exactly 0 outside the rows' span
    axes: Array  # [n, d, d], eigenvectors as columns
    moments: Array  # [n, d], X'y in these axes
    squares: Array  # [n], y'y
    pooled: Array  # [d, d], the inverse of the sum of all X'X
    metric: Array  # [n, d, d], the covariance of the features in these axes
    penalties: Array  # [L], from 0 (fit to the end) to infinity (stay at the start)
    fitted: Array  # [n, L, d], what multiplies X'y: 1 / (value + rows * penalty)
    kept: Array  # [n, L, d], what multiplies the start: 1 - fitted * value

    @classmethod
    def of(cls, world: TrueWorld) -> Geometry:
        inputs, targets = [x.numpy() for x in world.xs], [y.numpy() for y in world.ys]
        rows = np.array([float(len(x)) for x in inputs])
        gram = np.stack([x.T @ x for x in inputs])
        total = gram.sum(0)
        values, axes = np.linalg.eigh(gram)
        values = np.where(values > 1e-10 * values[:, -1:], values, 0.0)
        scale = np.trace(total) / rows.sum() / min(len(total), rows.mean())
        penalties = scale * np.concatenate([[0.0], 10.0 ** np.linspace(-4, 4, 49), [np.inf]])
        damped = values[:, None] + rows[:, None, None] * penalties[:, None]
        fitted = np.divide(1, damped, out=np.zeros_like(damped), where=values[:, None] > 0)
        moments = np.stack([v.T @ (x.T @ y) for v, x, y in zip(axes, inputs, targets, strict=True)])
        squares = np.array([y @ y for y in targets])
        pooled = np.linalg.pinv(total, rcond=1e-10, hermitian=True)
        metric = axes.transpose(0, 2, 1) @ world.covariance.numpy() @ axes
        kept = 1 - fitted * values[:, None]
        return cls(rows, gram, values, axes, moments, squares, pooled, metric, penalties, fitted, kept)


def noise_risks(g: Geometry) -> tuple[Array, Array]:
    """Risk of client i per unit of client j's noise around the shared model [i, j, L], and of its own alone [i, L]."""
    alone = (g.fitted**2 * (g.values * np.diagonal(g.metric, axis1=1, axis2=2))[:, None]).sum(-1)
    shared = np.empty((len(g.rows), *alone.shape))
    spread = g.pooled @ g.gram @ g.pooled
    for i, (axes, kept) in enumerate(zip(g.axes, g.kept, strict=True)):
        shared[i] = ((kept @ (axes.T @ spread @ axes * g.metric[i])) * kept).sum(-1)
        both = axes.T @ g.pooled @ axes * g.metric[i]
        shared[i, i] += 2 * (((1 - kept) @ both) * kept).sum(-1) + alone[i]
    return shared, alone


def risks(g: Geometry, models: Array, noise: Array, chosen: Picks | None = None) -> tuple[Array, Picks]:
    """Risks [D, n, methods] if D draws of parameters [D, n, d] and noise variances [D, n] were true.

    Penalties, [n, 2] places in `penalties` alone and shared, are `chosen` or those of lowest mean risk over the draws.
    """
    from_shared, from_own = noise_risks(g)
    centres = np.einsum("nab,Dnb->Da", g.gram, models) @ g.pooled
    found, places = np.empty((*noise.shape, len(METHODS))), np.zeros((len(g.rows), 2), np.intp)
    for i, axes in enumerate(g.axes):
        alone = models[:, i] @ axes, noise[:, i : i + 1] * from_own[i]
        shared = (models[:, i] - centres) @ axes, noise @ from_shared[i]
        places[i] = [lowest(g, i, *alone), lowest(g, i, *shared)] if chosen is None else chosen[i]
        ridge, tuned = places[i]
        in_order = (0, alone), (ridge, alone), (-1, shared), (0, shared), (tuned, shared)  # that of METHODS
        found[:, i] = np.stack([risk_at(g, i, place, *way) for place, way in in_order], -1)
    return found, places


def risk_at(g: Geometry, i: int, place: int, gaps: Array, variances: Array) -> Array:
    """Client i's risks [D] at one penalty, from the gaps between truth and start [D, d] and the noise's part [D, L]."""
    bias = gaps * g.kept[i, place]
    return np.asarray(((bias @ g.metric[i]) * bias).sum(-1) + variances[:, place])


def lowest(g: Geometry, i: int, gaps: Array, variances: Array) -> int:
    """The place of the penalty, neither 0 nor infinite, with the lowest mean of `risk_at`."""
    bias = ((g.kept[i] @ (gaps.T @ gaps / len(gaps) * g.metric[i])) * g.kept[i]).sum(-1)
    return int((bias + variances.mean(0))[1:-1].argmin()) + 1


@dataclass(frozen=True)
class Prior:
    """Logs of a world's sigma2, r2 and centre2, and its spread, even over grids; clients' own logs normal around."""

    middles: dict[str, Array]
    spreads: Array
    levels: Array  # the grid of a client's own log r2 or sigma2
    narrowest: float  # the least spread that this grid can show

    @classmethod
    def of(cls, kind: str, told: TrueWorld | None = None) -> Prior:
        bottom, top = math.log(1e-4), math.log(100)
        if told is not None:
            middles = {name: np.log([float(told.settings[name])]) for name in RANGES[kind]}
            spread = float(told.settings["spread"])
            return cls(middles, np.array([spread]), np.linspace(bottom, top, 421), 0.02)
        logs = {name: (math.log(low), math.log(high)) for name, (low, high) in RANGES[kind].items()}
        middles = {name: np.linspace(low, high, 41) for name, (low, high) in logs.items()}
        spreads = np.linspace(0, 0.8, 9) if kind == "few" else np.array([0.0, 0.5, 1.0])
        return cls(middles, spreads, np.linspace(bottom, top, 221), 0.04)

    def start(self, name: str) -> float:
        return math.exp(self.middles[name][0]) if len(self.middles[name]) == 1 else START

    def of_clients(self, name: str) -> Array:
        """Chances of a client's level given the world's spread and middle, [spreads, middles, levels]."""
        width = np.maximum(self.spreads, self.narrowest)[:, None, None]
        chances = np.exp(-0.5 * ((self.levels - self.middles[name][:, None]) / width) ** 2)
        return np.asarray(chances / chances.sum(-1, keepdims=True))


def centre_given_levels(g: Geometry, r2: Array, sigma2: Array, centre2: float) -> tuple[Array, Array]:
    """Mean [d] and precision [d, d] of the common centre, all clients' parameters integrated out."""
    d = g.values.shape[1]
    weight = 1 / (r2[:, None] / d * g.values + sigma2[:, None])
    precision = ((g.axes * (weight * g.values)[:, None]) @ g.axes.transpose(0, 2, 1)).sum(0)
    precision += d / centre2 * np.eye(d)
    return np.linalg.solve(precision, np.einsum("nab,nb->a", g.axes, weight * g.moments)), precision


def models_given_centre(g: Geometry, r2: Array, sigma2: Array, centre: Array) -> tuple[Array, Array]:
    """Means and precisions [n, d] of clients' parameters along their own axes; `centre` is [n, d] in these axes."""
    pull = g.values.shape[1] / r2[:, None]
    precision = g.values / sigma2[:, None] + pull
    return (g.moments / sigma2[:, None] + pull * centre) / precision, precision


def level_likelihood(levels: Array, squares: Array, counts: Array) -> Array:
    """Of a variance exp(level), from sums of squares [n] of so many normal numbers [n]; [n, levels], largest is 1."""
    logs = -0.5 * (counts[:, None] * levels + squares[:, None] / np.exp(levels))
    return np.asarray(np.exp(logs - logs.max(-1, keepdims=True)))


def draw_levels(
    rng: np.random.Generator, prior: Prior, chances: Sequence[Array], likelihoods: Sequence[Array]
) -> list[Array]:
    """Clients' r2 and sigma2: first their common spread, then the middle of each, then everybody's own level."""
    evidence = [
        np.log(np.einsum("spf,nf->nsp", c, like) + 1e-300).sum(0)
        for c, like in zip(chances, likelihoods, strict=True)
    ]
    spread = _draw(rng, np.sum([np.logaddexp.reduce(e, axis=1) for e in evidence], axis=0))
    drawn = []
    for chance, like, weights in zip(chances, likelihoods, evidence, strict=True):
        middle = _draw(rng, weights[spread])
        below = (chance[spread, middle] * like).cumsum(-1)
        place = (rng.random((len(like), 1)) > below / below[:, -1:]).sum(-1)
        drawn.append(np.exp(prior.levels[place]))
    return drawn


def draw_centre2(rng: np.random.Generator, prior: Prior, centre: Array) -> float:
    """The expected square of the centre's length."""
    grid = prior.middles["centre2"]
    return math.exp(grid[_draw(rng, -0.5 * len(centre) * (grid + centre @ centre / np.exp(grid)))])


def sample(g: Geometry, prior: Prior, draws: int, seed: int) -> tuple[Array, Array]:
    """Gibbs sampling: parameters [draws, n, d] and noise variances [draws, n]."""
    rng = np.random.default_rng([seed, 5])
    n, d = g.values.shape
    r2, sigma2 = (np.full(n, prior.start(name)) for name in ("r2", "sigma2"))
    centre2, chances = prior.start("centre2"), (prior.of_clients("r2"), prior.of_clients("sigma2"))
    models, noise = np.empty((draws, n, d)), np.empty((draws, n))
    for step in range(-BURN_IN, draws):
        mean, precision = centre_given_levels(g, r2, sigma2, centre2)
        centre = mean + np.linalg.solve(np.linalg.cholesky(precision).T, rng.normal(size=d))
        turned = np.einsum("nab,a->nb", g.axes, centre)
        means, precisions = models_given_centre(g, r2, sigma2, turned)
        own = means + rng.normal(size=(n, d)) / np.sqrt(precisions)
        apart = d * ((own - turned) ** 2).sum(-1)
        left = g.squares - 2 * (own * g.moments).sum(-1) + (own**2 * g.values).sum(-1)
        likelihoods = (
            level_likelihood(prior.levels, apart, np.full(n, d)),
            level_likelihood(prior.levels, np.maximum(left, 1e-12), g.rows),
        )
        r2, sigma2 = draw_levels(rng, prior, chances, likelihoods)
        centre2 = draw_centre2(rng, prior, centre)
        if step >= 0:
            models[step], noise[step] = np.einsum("nab,nb->na", g.axes, own), sigma2
    return models, noise


def _draw(rng: np.random.Generator, logs: Array) -> int:
    chances = np.exp(logs - logs.max())
    return int(rng.choice(len(chances), p=chances / chances.sum()))


@dataclass(frozen=True)
class Named:
    """How the posterior's choice fared, as `AdviceScore` has it for the advisor."""

    exact: Array  # [n]
    within: Array  # [n]
    log_excess: Array  # [n]
    federation: bool


def judge_posterior(world: TrueWorld, kind: str, draws: int, seed: int, told: bool = False) -> Named:
    """Name what has the lowest expected risk and compare with the truth at the same penalties."""
    g = Geometry.of(world)
    expected, places = risks(g, *sample(g, Prior.of(kind, world if told else None), draws, seed))
    true = risks(g, torch.stack(world.truth).numpy()[None], np.array([world.noise]) ** 2, places)[0][0]
    picks, lowest = expected.mean(0).argmin(-1), true.min(-1)
    got = np.take_along_axis(true, picks[:, None], 1)[:, 0]
    right = expected.mean((0, 1)).argmin() == true.mean(0).argmin()
    exact, within = (picks == true.argmin(-1)).astype(float), (got <= 1.1 * lowest).astype(float)
    return Named(exact, within, np.log(got / lowest), bool(right))


def show(who: str, scores: Sequence[Named | AdviceScore]) -> None:
    """Shares with standard errors over worlds."""
    print(f"  {who}")
    for name in ("exact", "within", "log_excess", "federation"):
        parts = [np.atleast_1d(np.asarray(getattr(score, name), float)) for score in scores]
        mean = np.concatenate(parts).mean()
        error = math.sqrt(sum((part - mean).sum() ** 2 for part in parts)) / sum(map(len, parts))
        print(f"    {name:12s} {mean:7.3f}   standard error {error:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", type=int, nargs="?", default=200)
    parser.add_argument("first", type=int, nargs="?", default=9000)
    parser.add_argument("kind", choices=RANGES, nargs="?", default="few")
    parser.add_argument("draws", type=int, nargs="?", default=200)
    parser.add_argument("--told", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    started, known, advised = time.process_time(), [], []
    for seed in range(asked.first, asked.first + asked.worlds):
        world = random_world(seed, asked.kind)
        known.append(judge_posterior(world, asked.kind, asked.draws, seed, asked.told))
        advised.append(judge(world)[0])
    seconds = time.process_time() - started
    print(f"{asked.kind}: {asked.worlds} worlds from seed {asked.first}, {seconds:.0f} CPU-seconds")
    show(f"posterior, {asked.draws} draws" + (", told the world's levels" if asked.told else ""), known)
    show("advisor", advised)


if __name__ == "__main__":
    main()
