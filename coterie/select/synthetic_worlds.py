"""Random linear federations with known truth, on which the advisor is tested."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.engine.federation import Federation
from coterie.models.linear import linear
from coterie.select.advice import METHODS, Advice
from coterie.select.advise import advise
from coterie.theory import filters, learned_centre

NOISES = 24  # noise draws that estimate a variance
COVARIANCES = ("identity", "ar", "power")
THREE = ("local", "fedavg", "ftfa")  # without a penalty to choose


@dataclass(frozen=True)
class TrueWorld:
    """A federation with known truth: rows, true parameters and noise of every client, covariance of the features."""

    xs: list[Tensor]
    ys: list[Tensor]
    truth: list[Tensor]
    noise: list[float]
    covariance: Tensor
    best_lambda: Tensor  # [n], for ridge around the shared model these clients can estimate
    settings: dict[str, float | str]

    def federation(self, seed: int = 0) -> Federation:
        """Return the federation with a linear model."""
        return Federation.from_arrays(self.xs, self.ys, linear(), dtype=torch.float64, seed=seed)


def random_world(seed: int, kind: str = "middling") -> TrueWorld:
    """Draw clients, features, rows, noise, heterogeneity, centre and covariance at random.

    Parameters
    ----------
    seed
        Seed of all draws.
    kind
        "middling": 10 to 70 clients, 20 to 120 features, 0.3 to 5 features per row.
        "wide": 5 to 70 clients, 8 to 120 features, 8 to 160 rows, each log-uniform.
        "even": homogeneous clients, numbers drawn uniformly.
        "few": 5 to 15 clients with 5 to 40 features, where little can be known.
        "reference": as "middling" with more noise and weaker centres, so that always using rtfa or ridge-local has a
        mean log excess of about 0.16 or 0.29.

    Returns
    -------
    TrueWorld
    """
    draw = np.random.default_rng(seed if kind == "middling" else [seed, 77])

    def between(low: float, high: float) -> float:
        return float(np.exp(draw.uniform(math.log(low), math.log(high))))

    def any_of(*values: float) -> float:
        return float(draw.choice(values))

    if kind in ("middling", "reference"):
        middling = kind == "middling"
        return make_world(
            draw,
            clients=int(draw.integers(10, 71)),
            features=int(draw.integers(20, 121)),
            gamma=between(0.3, 5),
            sigma2=between(0.1, 4 if middling else 10),
            r2=between(0.1 if middling else 0.03, 4),
            centre2=between(0.05, 4) if middling else between(0.01, 1.5),
            spread=any_of(0.0, 0.5, 1.0),
            row_spread=any_of(0.0, 0.5),
            covariance=str(draw.choice(COVARIANCES)),
        )
    covariance = str(draw.choice(COVARIANCES))
    if kind == "wide":
        clients, features, rows = round(between(5, 70)), round(between(8, 120)), between(8, 160)
        return make_world(
            draw,
            clients=clients,
            features=features,
            gamma=features / rows,
            sigma2=between(0.05, 5),
            r2=between(0.02, 5),
            centre2=between(0.02, 5),
            spread=any_of(0.0, 0.5, 1.0),
            row_spread=any_of(0.0, 0.5),
            covariance=covariance,
        )
    if kind == "even":
        clients, features = int(draw.integers(20, 61)), int(draw.integers(30, 101))
        rows = int(draw.integers(15, 121))
        return make_world(
            draw,
            clients=clients,
            features=features,
            gamma=features / rows,
            r2=draw.uniform(0.1, 1.5) ** 2,
            sigma2=draw.uniform(0.2, 2.0) ** 2,
            centre2=draw.uniform(0.1, 2.0) ** 2,
            covariance=covariance,
        )
    if kind == "few":
        clients, features, rows = int(draw.integers(5, 16)), int(draw.integers(5, 41)), between(6, 60)
        return make_world(
            draw,
            clients=clients,
            features=features,
            gamma=features / rows,
            sigma2=between(0.1, 3),
            r2=between(0.05, 3),
            centre2=between(0.1, 3),
            spread=draw.uniform(0, 0.8),
            row_spread=draw.uniform(0, 0.8),
            covariance=covariance,
        )
    raise SettingError(f"no worlds {kind!r}; choose reference, middling, wide, even or few")


def make_world(
    draw: np.random.Generator,
    *,
    clients: int,
    features: int,
    gamma: float,
    sigma2: float,
    r2: float,
    centre2: float,
    spread: float = 0.0,
    row_spread: float = 0.0,
    covariance: str = "identity",
    aligned: bool = False,
) -> TrueWorld:
    """Draw a federation of linear clients.

    Clients differ by log-normal factors: of deviation `spread` in r2 and sigma2, of `row_spread` in rows. `aligned`
    deviations lie along the directions in which features vary most.
    """
    sigma = _covariance(draw, covariance, features)
    root = np.linalg.cholesky(sigma)
    centre = draw.normal(size=features)
    centre *= math.sqrt(centre2) / np.linalg.norm(centre)
    xs, ys, truth, noise = [], [], [], []
    for _ in range(clients):
        rows = max(3, round(features / gamma * math.exp(row_spread * draw.normal())))
        own = draw.normal(size=features)
        own = root @ own if aligned else own
        own *= math.sqrt(r2 * math.exp(spread * draw.normal())) / np.linalg.norm(own)
        level = math.sqrt(sigma2 * math.exp(spread * draw.normal()))
        x = draw.normal(size=(rows, features)) @ root.T
        xs.append(torch.from_numpy(x))
        ys.append(torch.from_numpy(x @ (centre + own) + level * draw.normal(size=rows)))
        truth.append(torch.from_numpy(centre + own))
        noise.append(level)
    settings: dict[str, float | str] = {
        "clients": clients,
        "features": features,
        "gamma": gamma,
        "spread": spread,
    }
    settings |= {"sigma2": sigma2, "r2": r2, "centre2": centre2, "covariance": covariance}
    missing = learned_centre.centre_error(gamma=gamma, r2=r2, sigma2=sigma2, clients=clients).risk
    ratio = torch.tensor([features / len(x) for x in xs])
    apart = torch.tensor([float((t - torch.from_numpy(centre)).square().sum()) for t in truth])
    best = torch.tensor(noise) ** 2 * ratio / (apart + missing)
    return TrueWorld(xs, ys, truth, noise, torch.from_numpy(sigma), best, settings)


def true_risks(world: TrueWorld, advice: Advice) -> Tensor:
    """Return bias plus variance of every method at the advised penalties, given the inputs, [n, methods]."""
    noise = torch.Generator().manual_seed(0)
    ys = [
        torch.cat([(x @ t)[:, None], s * torch.randn(len(x), NOISES, generator=noise, dtype=x.dtype)], 1)
        for x, t, s in zip(world.xs, world.truth, world.noise, strict=True)
    ]
    shared = filters.centre(world.xs, ys, filters.average())
    alone = torch.zeros_like(shared)
    risks = []
    for k, (x, y, truth) in enumerate(zip(world.xs, ys, world.truth, strict=True)):
        models = [
            filters.personal(x, y, alone, filters.interpolate),
            _ridge(x, y, alone, float(advice.lam_alone[k])),
            shared,
            filters.personal(x, y, shared, filters.interpolate),
            _ridge(x, y, shared, float(advice.lam_shared[k])),
        ]
        risks.append([_risk(model, truth, world.covariance) for model in models])
    return torch.tensor(risks)


def best_risks(world: TrueWorld, advice: Advice) -> Tensor:
    """Return `true_risks` at the best penalties of every client, [n, methods]."""
    best = true_risks(world, advice)
    alone = torch.tensor(
        [
            s**2 * len(t) / len(x) / float(t @ t)
            for x, t, s in zip(world.xs, world.truth, world.noise, strict=True)
        ]
    )
    for factor in 10.0 ** np.linspace(-1.5, 1.5, 9):
        lams = {"lam_shared": factor * world.best_lambda, "lam_alone": factor * alone}
        trial = dataclasses.replace(advice, own=dataclasses.replace(advice.clients, **lams))
        best = torch.minimum(best, true_risks(world, trial))
    return best


def regret(world: TrueWorld, advice: Advice) -> float:
    """Return the relative excess of rtfa's mean risk at the advised penalties over that at the best ones."""
    column = METHODS.index("rtfa")
    found, best = true_risks(world, advice)[:, column], best_risks(world, advice)[:, column]
    return float(found.mean() / best.mean() - 1)


def _ridge(x: Tensor, y: Tensor, middle: Tensor, lam: float) -> Tensor:
    """Fit ridge regression around `middle`."""
    return middle if math.isinf(lam) else filters.personal(x, y, middle, filters.ridge(lam))


@dataclass(frozen=True)
class AdviceScore:
    """How good the advice was, per client and for the federation."""

    exact: Tensor  # [n], 1 where the best method was recommended
    within: Tensor  # [n], 1 where a method within 10 % of the lowest risk was recommended
    log_excess: Tensor  # [n], of the risk over the lowest risk
    federation: bool  # the method with the lowest mean risk was recommended
    majority: bool  # the method best for most clients is the one recommended for most
    sure: bool
    excess: float  # relative excess of the recommended method's mean risk over the lowest
    three: Tensor  # [n], 1 where the best of local, fedavg and ftfa was predicted to be best
    lead: Tensor  # [n], relative lead of the best of these three over the next


def judge(world: TrueWorld) -> tuple[AdviceScore, Advice]:
    """Ask the advisor, and compare its advice with the true risks."""
    advice = advise(world.federation())
    risks = true_risks(world, advice)
    picks = torch.tensor([METHODS.index(name) for name in advice.methods])
    best, lowest = risks.argmin(1), risks.min(1).values
    got = risks.gather(1, picks[:, None]).squeeze(1)
    score = AdviceScore(
        (picks == best).double(),
        (got <= 1.1 * lowest).double(),
        torch.log(got / lowest),
        METHODS.index(advice.method) == int(risks.mean(0).argmin()),
        int(picks.mode().values) == int(best.mode().values),
        advice.sure,
        float(risks.mean(0)[METHODS.index(advice.method)] / risks.mean(0).min()) - 1,
        *_three_way(risks, advice),
    )
    return score, advice


def _three_way(risks: Tensor, advice: Advice) -> tuple[Tensor, Tensor]:
    """Return whether the best method without a penalty is predicted to be best, and its lead.

    With more rows than features local and ftfa give the same model, and either is right.
    """
    columns = [METHODS.index(name) for name in THREE]
    named = torch.stack([advice.risks[name] for name in THREE], 1).argmin(1, keepdim=True)
    ordered = risks[:, columns].sort(1).values
    right = risks[:, columns].gather(1, named).squeeze(1) <= (1 + 1e-6) * ordered[:, 0]
    return right.double(), ordered[:, 1] / ordered[:, 0] - 1


def _risk(model: Tensor, truth: Tensor, covariance: Tensor) -> float:
    """Return the squared prediction error: bias of the first column plus mean variance of the others."""
    gap = torch.cat([model[:, :1] - truth[:, None], model[:, 1:]], 1)
    sizes = (gap * (covariance @ gap)).sum(0)
    return float(sizes[0] + sizes[1:].mean())


def _covariance(draw: np.random.Generator, kind: str, d: int) -> np.ndarray:
    """Draw a covariance: identity, AR(0.3 to 0.8), or eigenvalues that decay as a power; mean eigenvalue 1."""
    if kind == "identity":
        return np.eye(d)
    if kind == "ar":
        lag = np.abs(np.subtract.outer(np.arange(d), np.arange(d)))
        return np.asarray(draw.uniform(0.3, 0.8) ** lag)
    values = np.arange(1, d + 1) ** -draw.uniform(0.3, 1.0)
    axes = np.linalg.qr(draw.normal(size=(d, d)))[0]
    matrix: np.ndarray = (axes * (values * d / values.sum())) @ axes.T
    return matrix
