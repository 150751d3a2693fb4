"""CoBo's Example 2, where all quantities are known: losses a_i/2 |x - mu_k|^2 and gradient noise of a given size."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from coterie._core.randomness import key, normal, slots, uniform
from coterie.algorithms import make
from coterie.algorithms.cobo import PRINTED, CoBo
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.experiments.spec import Experiment
from coterie.models.base import Model, dot
from coterie.report.weights import weights_of
from coterie.theory.collaboration import stationary_consensus, theorem_one, weight_quality
from coterie.train.fit import fit

Numbers = dict[str, Any]
POOL = 512  # rows per client, each one draw of the gradient noise


@dataclass(frozen=True)
class Bowl(Model):
    """Quadratic loss a/2 |w - p|^2 of a row (a p, a); p = mu + noise/a gives the gradient a (w - mu) - noise."""

    features: int = 0

    @property
    def d(self) -> int:
        """Number of parameters."""
        return self.features

    @property
    def task(self) -> str:
        """Task of the model."""
        return "regression"

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        """Return the model for rows of this width."""
        return dataclasses.replace(self, features=x.shape[-1] - 1)

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted loss."""
        return 0.5 * dot(self.scores(w, x).squeeze(-1).square(), weight)

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted gradient."""
        mean = (weight.unsqueeze(-2) @ x).squeeze(-2)
        return mean[..., -1:] * w - mean[..., :-1]

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        """Return sqrt(a) |w - p|: for a target of zero the squared error is twice the loss."""
        a = x[..., -1:]
        distance: Tensor = torch.linalg.vector_norm(w.unsqueeze(-2) - x[..., :-1] / a, dim=-1, keepdim=True)
        return a.sqrt() * distance

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the mean curvature a."""
        return (weight * x[..., -1]).sum(-1, keepdim=True)


def bowls(
    sizes: Sequence[int],
    d: int = 10,
    apart: float = 5.0,
    curvature: tuple[float, float] = (0.8, 1.2),
    noise: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> Federation:
    """Build clients with quadratic losses in clusters of these sizes.

    Parameters
    ----------
    sizes
        Clients per cluster.
    d
        Number of parameters.
    apart
        Approximate distance between the minimisers mu_k, which lie in random directions.
    curvature
        Range of the curvatures a_i.
    noise
        Root of E|noise|^2 of a gradient, all coordinates together.
    seed
        Seed of all draws.
    **options
        Options of `Federation.from_arrays`.

    Returns
    -------
    Federation
        `fed.truth` holds the minimiser of every client.
    """
    clusters = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(list(sizes)))
    n = len(clusters)
    centres = normal(slots(key(seed, "bowl centre", torch.arange(len(sizes))), d))
    centres = apart / math.sqrt(2) * centres / torch.linalg.vector_norm(centres, dim=-1, keepdim=True)
    low, high = curvature
    a = (low + (high - low) * uniform(key(seed, "bowl", torch.arange(n)))).unsqueeze(-1)
    truth = centres[clusters]
    rows = torch.cat([a * truth, a], -1).unsqueeze(1)
    if noise > 0:
        draws = normal(slots(slots(key(seed, "bowl noise", torch.arange(n)), POOL), d))
        draws = draws - draws.mean(1, keepdim=True)
        draws = draws * noise / draws.square().sum(-1, keepdim=True).mean(1, keepdim=True).sqrt()
        rows = rows + torch.nn.functional.pad(draws, (0, 1))
    targets = torch.zeros(rows.shape[:2], dtype=torch.float64)
    return Federation.from_arrays(
        list(rows), list(targets), Bowl(), clusters=clusters, truth=truth, seed=seed, **options
    )


def curvatures(fed: Federation) -> Tensor:
    """Return the curvatures a_i of clients built by `bowls`, [n, 1]."""
    rows = fed.runtime.rows("train")
    return rows.x[rows.start, -1:]


def block_weights(fed: Federation) -> Tensor:
    """Return the ideal weights W*: one inside clusters, zero between."""
    clusters = fed.known_clusters()
    return (clusters.unsqueeze(1) == clusters).double().fill_diagonal_(0)


def trajectory(
    fed: Federation, algorithm: CoBo, rounds: int, weights: Tensor | None = None
) -> Iterator[State]:
    """Yield the state before the first round and after each, starting from given weights or the usual ones."""
    fed = fed.fresh()
    fed.enter_round(0, None)
    state = algorithm.start(fed)
    state = state if weights is None else state.replace(weights=weights)
    yield state
    for t in range(1, rounds + 1):
        fed.enter_round(t, state)
        state = algorithm.round(fed, state, t)
        yield state


def centres(fed: Federation) -> Tensor:
    """Return mu_k of every client's cluster, [n, d]."""
    assert fed.truth is not None
    return fed.truth


def inside(fed: Federation, pairwise: Tensor) -> Tensor:
    """Average a quantity [n, n] over the pairs of each cluster, then over clusters."""
    clusters = fed.known_clusters()
    members = [clusters == k for k in sorted(set(clusters.tolist()))]
    return torch.stack([pairwise[own][:, own].mean() for own in members]).mean()


def squared_distances(x: Tensor) -> Tensor:
    """Return |x_i - x_j|^2 for all pairs, [n, n]."""
    return torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()


def noise_free(experiment: Experiment, seed: int) -> Numbers:
    """Run CoBo without noise; return the distance of W from W*, consensus, gradient and error at the end."""
    plan = experiment.plans[0]
    world, method = _parts(plan.settings)
    fed = bowls(**{**world, "seed": seed})
    run = fit(fed, make("cobo", **method, batch=0), plan.rounds)
    x, w = run.personal, run.state.weights
    slopes = curvatures(fed) * (x - centres(fed))
    rounds, recovery = run.history.curve("server", "recovery")
    quality = weight_quality(w, fed.clusters, method.get("domain") == "simplex")
    return {
        "W - W*": float((w - block_weights(fed)).abs().max()),
        "recovery": float(quality["recovery"]),
        "inside": float(quality["inside"]),
        "between": float(quality["between"]),
        "consensus": float(inside(fed, squared_distances(x))),
        "gradient": float(slopes.square().sum(-1).mean()),
        "error": float((x - centres(fed)).square().sum(-1).mean()),
        "pair gradients": run.fed.ledger.total("messages_down", phase="agree") / max(1, plan.rounds),
        "curve": {"split": "weights", "metric": "recovery", "rounds": rounds, "values": recovery},
        "plots": {"weights": weights_of(run.history, fed.names, fed.clusters, "CoBo on Example 2")},
    }


def consensus(experiment: Experiment, seed: int) -> Numbers:
    """Measure mean |x_i - x_j|^2 with noise and fixed W*, after a quarter of the rounds, beside its closed form."""
    plan = experiment.plans[0]
    world, method = _parts(plan.settings)
    a, c = float(world["curvature"][0]), int(world["sizes"][0])
    fed = bowls(**{**world, "seed": seed})
    algorithm = CoBo(**{**PRINTED, **method}, gamma=0.0, rate=1e-9, guard=0.0, batch=1)
    values = [
        float(inside(fed, squared_distances(state.models)))
        for t, state in enumerate(trajectory(fed, algorithm, plan.rounds, block_weights(fed)))
        if t > plan.rounds // 4
    ]
    measured = statistics.fmean(values) * c / (c - 1)
    exact = stationary_consensus(method["lr"], a, method["rho"] * c, world["noise"] ** 2)
    return {"measured": measured, "closed form": exact, "ratio": measured / exact}


def bounds(experiment: Experiment, seed: int) -> Numbers:
    """Return the largest ratio of measured values to the bounds of the corrected Theorem 1 over random problems."""
    plan = experiment.plans[0]
    slopes, gaps = [], []
    for k in range(plan.tries or 20):
        ratio = bound_ratios(1000 * seed + k, plan.rounds)
        slopes.append(ratio[0])
        gaps.append(ratio[1])
    found = {"gradient": max(slopes), "consensus": max(gaps)}
    return {**found, "violations": sum(value > 1 for value in slopes + gaps)}


def bound_ratios(seed: int, rounds: int) -> tuple[float, float]:
    """Return measured value over bound for gradient and consensus, on one problem within the theorem's conditions."""
    draw = uniform(slots(key(seed, "theorem"), 6)).tolist()
    c, d, noise = 2 + int(7 * draw[0]), 2 + int(18 * draw[1]), 10 ** (-3 + 4 * draw[2])
    smoothness, apart = 10 ** (-1 + 2 * draw[3]), 5 * draw[4]
    fed = bowls((c,), d, apart, (smoothness / 1.5, smoothness), noise, seed)
    a = curvatures(fed).squeeze(-1)
    unlikeness = float((a.max() - a.min()) / (a.max() + a.min()))
    largest = float(a.max())
    pull = math.sqrt(3) * largest * (1 + 2 * draw[5])
    lr = min(1 / (2 * largest), 1 / pull) * (0.2 + 0.8 * draw[0])
    start = float((0.5 * (a.unsqueeze(1) + a) / 2).mean() * (apart**2 / 2))
    algorithm = CoBo(lr=lr, rho=pull / c, gamma=0.0, rate=1e-9, guard=0.0, batch=1, **PRINTED)
    slope, gap = 0.0, 0.0
    for t, state in enumerate(trajectory(fed, algorithm, rounds, block_weights(fed))):
        if t == rounds:
            break
        x = state.models
        middle = 0.5 * (x.unsqueeze(1) + x) - centres(fed)[0]
        pairs = (0.5 * (a.unsqueeze(1) + a)).unsqueeze(-1) * middle
        slope += float(pairs.square().sum(-1).mean()) / rounds
        gap += float(squared_distances(x).mean()) / rounds
    limits = theorem_one(lr, rounds, largest, pull, noise**2, unlikeness, start)
    return slope / limits[0], gap / limits[1]


def errors(experiment: Experiment, seed: int) -> Numbers:
    """Return mean |x_i - mu|^2 of several methods (settings: methods) on the same noisy problem."""
    plan = experiment.plans[0]
    world, _ = _parts(plan.settings)
    fed = bowls(**{**world, "seed": seed})
    found = {}
    for name, settings in plan.settings["methods"].items():
        chosen = {"batch": 1, **settings}
        rounds = min(plan.rounds, chosen.pop("rounds", plan.rounds))
        run = fit(fed, make(**chosen), rounds, evaluate_every=0)
        found[name] = float((run.personal - centres(fed)).square().sum(-1).mean())
    return found


def _parts(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the data and of the method."""
    return dict(settings["world"]), dict(settings.get("method", {}))
