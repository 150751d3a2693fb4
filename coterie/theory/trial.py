"""Random linear worlds on which the advisor is tried: what it says against what is true."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from coterie.errors import SettingError
from coterie.models.linear import linear
from coterie.theory import filters, risk
from coterie.theory.advisor import METHODS, Advice, advise

if TYPE_CHECKING:
    from coterie.federation.federation import Federation

NOISES = 24
COVARIANCES = ("identity", "ar", "power")
THREE = ("local", "fedavg", "ftfa")  # without a penalty to choose


@dataclass(frozen=True)
class TrueWorld:
    """Rows of every client, its parameters and noise level, and the covariance of the features."""

    xs: list[Tensor]
    ys: list[Tensor]
    truth: list[Tensor]
    noise: list[float]
    covariance: Tensor
    best_lambda: Tensor  # [n], around the shared model that so many clients can learn
    settings: dict[str, float | str]

    def federation(self, seed: int = 0) -> Federation:
        from coterie.federation.federation import Federation

        return Federation.from_arrays(self.xs, self.ys, linear(), dtype=torch.float64, seed=seed)


def random_world(seed: int, kind: str = "middling") -> TrueWorld:
    """Clients, features, rows, noise, heterogeneity, centre and covariance all at random.

    "middling": 10 to 70 clients, 20 to 120 features, 0.3 to 5 features per row. "wide": 5 to 70 clients, 8 to 120
    features, 8 to 160 rows, each spread evenly in its logarithm. "even": clients that are alike, numbers drawn evenly.
    "few": 5 to 15 clients with 5 to 40 features, where much cannot be known. "reference": as "middling" with more noise
    and weaker centres, so that rtfa or ridge-local for everybody costs about what it costs in the worlds of fact E11.
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
    """Clients differ by log-normal factors of this spread in r2 and sigma2, and of `row_spread` in rows.

    `aligned` deviations lie along the directions in which features vary most.
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
    missing = risk.centre_error(gamma=gamma, r2=r2, sigma2=sigma2, clients=clients).risk
    ratio = torch.tensor([features / len(x) for x in xs])
    apart = torch.tensor([float((t - torch.from_numpy(centre)).square().sum()) for t in truth])
    best = torch.tensor(noise) ** 2 * ratio / (apart + missing)
    return TrueWorld(xs, ys, truth, noise, torch.from_numpy(sigma), best, settings)


def true_risks(world: TrueWorld, advice: Advice) -> Tensor:
    """Bias given the inputs plus variance over the noise, of every method at the advised penalties, [n, methods]."""
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
    """`true_risks` where every client knows its best penalties, [n, methods]."""
    best = true_risks(world, advice)
    alone = torch.tensor(
        [
            s**2 * len(t) / len(x) / float(t @ t)
            for x, t, s in zip(world.xs, world.truth, world.noise, strict=True)
        ]
    )
    for factor in 10.0 ** np.linspace(-1.5, 1.5, 9):
        trial = dataclasses.replace(advice, lam_shared=factor * world.best_lambda, lam_alone=factor * alone)
        best = torch.minimum(best, true_risks(world, trial))
    return best


def regret(world: TrueWorld, advice: Advice) -> float:
    """By how much the mean risk of rtfa at the advised penalties exceeds that at each client's best, as a share."""
    column = METHODS.index("rtfa")
    found, best = true_risks(world, advice)[:, column], best_risks(world, advice)[:, column]
    return float(found.mean() / best.mean() - 1)


def _ridge(x: Tensor, y: Tensor, middle: Tensor, lam: float) -> Tensor:
    return middle if math.isinf(lam) else filters.personal(x, y, middle, filters.ridge(lam))


@dataclass(frozen=True)
class Score:
    """How the advice fared: per client, and for the federation."""

    exact: Tensor  # [n], the best method named
    within: Tensor  # [n], a method within 10 % of the best risk named
    log_excess: Tensor  # [n]
    federation: bool  # the method with the lowest mean risk named
    majority: bool  # the method best for most clients is the one named for most
    sure: bool
    excess: float  # of the federation's method, as a share of the lowest mean risk
    three: Tensor  # [n], the best of local, fedavg and ftfa named
    lead: Tensor  # [n], by how much the best of these three leads the next, as a share


def judge(world: TrueWorld) -> tuple[Score, Advice]:
    """Ask the advisor and compare with the truth."""
    advice = advise(world.federation())
    risks = true_risks(world, advice)
    picks = torch.tensor([METHODS.index(name) for name in advice.methods])
    best, lowest = risks.argmin(1), risks.min(1).values
    got = risks.gather(1, picks[:, None]).squeeze(1)
    score = Score(
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
    """Whether the best of the methods without a penalty is predicted to be, and its lead.

    With more rows than features local and ftfa are one model, and either is right.
    """
    columns = [METHODS.index(name) for name in THREE]
    named = torch.stack([advice.risks[name] for name in THREE], 1).argmin(1, keepdim=True)
    ordered = risks[:, columns].sort(1).values
    right = risks[:, columns].gather(1, named).squeeze(1) <= (1 + 1e-6) * ordered[:, 0]
    return right.double(), ordered[:, 1] / ordered[:, 0] - 1


def _risk(model: Tensor, truth: Tensor, covariance: Tensor) -> float:
    gap = torch.cat([model[:, :1] - truth[:, None], model[:, 1:]], 1)
    sizes = (gap * (covariance @ gap)).sum(0)
    return float(sizes[0] + sizes[1:].mean())


def _covariance(draw: np.random.Generator, kind: str, d: int) -> np.ndarray:
    """Identity, AR(0.3 to 0.8), or eigenvalues that fall as a power of their rank; mean eigenvalue 1."""
    if kind == "identity":
        return np.eye(d)
    if kind == "ar":
        lag = np.abs(np.subtract.outer(np.arange(d), np.arange(d)))
        return np.asarray(draw.uniform(0.3, 0.8) ** lag)
    values = np.arange(1, d + 1) ** -draw.uniform(0.3, 1.0)
    axes = np.linalg.qr(draw.normal(size=(d, d)))[0]
    return (axes * (values * d / values.sum())) @ axes.T
