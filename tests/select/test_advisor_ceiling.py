"""The sampler behind the advisor's ceilings: risks against the trial's, conditionals against dense solutions."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import integrate

from benchmarks import advisor_ceiling as ceiling
from coterie.select import synthetic_worlds
from coterie.select.advice import METHODS, Advice
from coterie.select.advise import advise


@pytest.fixture(scope="module", params=[0.6, 2.5], ids=["more rows", "more features"])
def world(request: pytest.FixtureRequest) -> synthetic_worlds.TrueWorld:
    settings = {"sigma2": 0.7, "r2": 0.5, "centre2": 0.8, "spread": 0.5, "row_spread": 0.3}
    draw = np.random.default_rng(3)
    return synthetic_worlds.make_world(
        draw, clients=5, features=8, gamma=request.param, covariance="ar", **settings
    )


@pytest.fixture(scope="module")
def advice(world: synthetic_worlds.TrueWorld) -> Advice:
    return advise(world.federation())


def at_truth(
    world: synthetic_worlds.TrueWorld, places: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    truth, noise = torch.stack(world.truth).numpy()[None], np.array([world.noise]) ** 2
    risks, places = ceiling.risks(ceiling.Geometry.of(world), truth, noise, places)
    return risks[0], places


@pytest.mark.parametrize("noisy", [False, True])
def test_risks_at_given_penalties(
    world: synthetic_worlds.TrueWorld, advice: Advice, noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not noisy:
        world = dataclasses.replace(world, noise=[0.0] * len(world.noise))
    monkeypatch.setattr(synthetic_worlds, "NOISES", 10_000 if noisy else 1)
    places = np.array([[20 + i, 29 - i] for i in range(5)])
    lam_alone, lam_shared = torch.from_numpy(ceiling.Geometry.of(world).penalties[places]).unbind(1)
    own = dataclasses.replace(advice.own, lam_alone=lam_alone, lam_shared=lam_shared)
    advice = dataclasses.replace(advice, own=own)
    expected = synthetic_worlds.true_risks(world, advice).numpy()
    np.testing.assert_allclose(at_truth(world, places)[0], expected, rtol=0.05 if noisy else 1e-6, atol=1e-9)


def test_best_penalties(
    world: synthetic_worlds.TrueWorld, advice: Advice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic_worlds, "NOISES", 4_000)
    best, (found, places) = synthetic_worlds.best_risks(world, advice).numpy(), at_truth(world)
    np.testing.assert_allclose(found, best, rtol=0.05)
    for step in (-1, 1):
        other = at_truth(world, places + step)[0]
        for name in ("ridge-local", "rtfa"):
            column = METHODS.index(name)
            assert (other[:, column] >= found[:, column]).all()


def test_conditionals_are_those_of_the_joint_normal(world: synthetic_worlds.TrueWorld) -> None:
    """Centre and parameters of all clients at once, by one dense solution."""
    g = ceiling.Geometry.of(world)
    n, d = g.values.shape
    draw = np.random.default_rng(0)
    r2, sigma2, centre2 = draw.uniform(0.2, 1, n), draw.uniform(0.2, 1, n), 0.8
    joint, side = np.zeros((n + 1, d, n + 1, d)), np.zeros((n + 1, d))
    joint[n, :, n] = d * (1 / centre2 + (1 / r2).sum()) * np.eye(d)
    for i, (x, y) in enumerate(zip(world.xs, world.ys, strict=True)):
        joint[i, :, i] = (x.T @ x).numpy() / sigma2[i] + d / r2[i] * np.eye(d)
        joint[i, :, n] = joint[n, :, i] = -d / r2[i] * np.eye(d)
        side[i] = (x.T @ y).numpy() / sigma2[i]
    covariance = np.linalg.inv(joint.reshape((n + 1) * d, -1))
    means = (covariance @ side.ravel()).reshape(n + 1, d)
    centre, precision = ceiling.centre_given_levels(g, r2, sigma2, centre2)
    np.testing.assert_allclose(centre, means[n], atol=1e-10)
    np.testing.assert_allclose(np.linalg.inv(precision), covariance[-d:, -d:], atol=1e-10)

    turned = np.einsum("nab,a->nb", g.axes, centre)
    own, precisions = ceiling.models_given_centre(g, r2, sigma2, turned)
    np.testing.assert_allclose(np.einsum("nab,nb->na", g.axes, own), means[:n], atol=1e-10)
    dense = np.einsum("nab,nb,ncb->nac", g.axes, precisions, g.axes)
    np.testing.assert_allclose(dense, np.stack([joint[i, :, i] for i in range(n)]), atol=1e-8)


def test_levels_follow_their_posterior() -> None:
    """One middle and spread, so that a client's level has a density that quadrature knows."""
    told = {"sigma2": math.log(0.5), "r2": math.log(0.2), "centre2": 0.0}
    middles = {name: np.array([value]) for name, value in told.items()}
    prior = ceiling.Prior(middles, np.array([0.6]), np.linspace(math.log(1e-4), math.log(100), 421), 0.02)
    squares, counts, copies = np.array([4.0, 9.0]), np.array([7.0, 12.0]), 4_000
    names = ("r2", "sigma2")
    likelihoods = [
        ceiling.level_likelihood(prior.levels, np.full(copies, s), np.full(copies, c))
        for s, c in zip(squares, counts, strict=True)
    ]
    chances = [prior.of_clients(name) for name in names]
    drawn = ceiling.draw_levels(np.random.default_rng(0), prior, chances, likelihoods)
    for name, levels, s, c in zip(names, drawn, squares, counts, strict=True):

        def density(t: float, power: int, name: str = name, s: float = s, c: float = c) -> float:
            return t**power * math.exp(-0.5 * (c * t + s * math.exp(-t) + ((t - told[name]) / 0.6) ** 2))

        total, first, second = (integrate.quad(density, -5, 5, args=(power,))[0] for power in range(3))
        mean, deviation = first / total, math.sqrt(second / total - (first / total) ** 2)
        assert np.log(levels).mean() == pytest.approx(mean, abs=5 * deviation / math.sqrt(copies))
        assert np.log(levels).std() == pytest.approx(deviation, rel=0.05)


def test_told_that_clients_are_alike_the_models_are_the_pooled_ridge() -> None:
    """Without heterogeneity everybody's parameters are the centre, whose posterior is a ridge on all rows."""
    draw = np.random.default_rng(1)
    world = synthetic_worlds.make_world(
        draw, clients=6, features=4, gamma=0.2, sigma2=0.5, r2=1e-3, centre2=1.0
    )
    g = ceiling.Geometry.of(world)
    models, noise = ceiling.sample(g, ceiling.Prior.of("few", told=world), 400, seed=0)
    total = g.gram.sum(0) + 4 * 0.5 * np.eye(4)
    ridge = np.linalg.solve(total, np.einsum("nab,nb->a", g.axes, g.moments))
    np.testing.assert_allclose(models.mean((0, 1)), ridge, atol=0.02)
    np.testing.assert_allclose(noise.mean(), 0.5, rtol=0.02)
