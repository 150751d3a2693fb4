"""Generated data against what theory says of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.data.clients import Clients
from coterie.data.generate import clustered_regression, hierarchical_linear, random_effects


def _truth(clients: Clients) -> Tensor:
    assert clients.truth is not None
    return clients.truth


def _clusters(clients: Clients) -> Tensor:
    assert clients.clusters is not None
    return clients.clusters


def _residuals(clients: Clients) -> Tensor:
    truth = _truth(clients)
    return torch.cat([y - x @ theta for x, y, theta in zip(clients.xs, clients.ys, truth, strict=True)])


def _local_error(clients: Clients) -> Tensor:
    """Squared distance of local least squares (least norm) from the truth, one per client."""
    x, y = torch.stack(clients.xs), torch.stack(clients.ys)
    wide = x.shape[1] < x.shape[2]
    estimate = x.mT @ torch.linalg.solve(x @ x.mT, y.unsqueeze(-1)) if wide else _normal_equations(x, y)
    return (estimate.squeeze(-1) - _truth(clients)).square().sum(1)


def _normal_equations(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.solve(x.mT @ x, x.mT @ y.unsqueeze(-1))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(10, 2 * 20 * (1 - 10 / 20) + 10 / (20 - 10 - 1)), (100, 20 / (100 - 20 - 1))],
)
def test_hierarchical_local_least_squares(rows: int, expected: float) -> None:
    """The exact expectations 21.11 and .2532, within 4 standard errors over independent clusters."""
    assert expected == pytest.approx({10: 21.11, 100: 0.2532}[rows], abs=0.005)
    clients = hierarchical_linear(clusters=120, clients=6, rows=rows, seed=1)
    by_cluster = _local_error(clients).reshape(120, 6).mean(1)
    standard_error = float(by_cluster.std()) / 120**0.5
    assert standard_error < 0.03 * expected
    assert float(by_cluster.mean()) == pytest.approx(expected, abs=4 * standard_error)


def test_hierarchical_spreads() -> None:
    clients = hierarchical_linear(
        clusters=80, clients=50, features=20, rows=5, between=2.0, within=0.5, noise=3.0, centre=4.0, seed=2
    )
    truth = _truth(clients).reshape(80, 50, 20)
    assert _clusters(clients).tolist() == [k for k in range(80) for _ in range(50)]
    assert float(truth.var(1).mean()) == pytest.approx(0.25, rel=0.02)
    assert float(truth.mean(1).var(0).mean()) == pytest.approx(4.0 + 0.25 / 50, rel=0.12)
    assert float(truth.mean()) == pytest.approx(4.0, abs=4 * 2.0 / (80 * 20) ** 0.5)
    assert float(_residuals(clients).std()) == pytest.approx(3.0, rel=0.02)
    x = torch.cat(clients.xs)
    assert torch.allclose(x.T @ x / len(x), torch.eye(20, dtype=x.dtype), atol=5 / len(x) ** 0.5 * 1.5)


def test_hierarchical_sizes_and_centre() -> None:
    clients = hierarchical_linear(
        clusters=2, clients=[1, 2], features=3, rows=[4, 5, 6], between=0, within=0, noise=0,
        centre=torch.tensor([1.0, 2.0, 3.0]),
    )  # fmt: skip
    assert clients.sizes.tolist() == [4, 5, 6] and _clusters(clients).tolist() == [0, 1, 1]
    assert _truth(clients).tolist() == [[1, 2, 3]] * 3
    assert float(_residuals(clients).abs().max()) < 1e-12


def test_a_client_does_not_depend_on_the_size_of_others() -> None:
    one = hierarchical_linear(clusters=2, clients=2, rows=[3, 3, 3, 3], seed=7)
    other = hierarchical_linear(clusters=2, clients=2, rows=[9, 1, 3, 5], seed=7)
    assert torch.equal(one.xs[2], other.xs[2]) and torch.equal(one.ys[2], other.ys[2])
    assert torch.equal(one.xs[0], other.xs[0][:3])


def test_clustered_regression_structure() -> None:
    clients = clustered_regression(seed=4)
    assert len(clients) == 36 and all(x.shape == (9, 10) for x in clients.xs)
    assert _clusters(clients).bincount().tolist() == [9] * 4
    truth = _truth(clients)
    assert set(truth.flatten().tolist()) == {0.0, 100.0}
    assert torch.equal(truth, truth[_clusters(clients) * 9])
    assert len(truth.unique(dim=0)) == 4
    assert float(_residuals(clients).abs().max()) < 1e-10
    many = _truth(clustered_regression(clusters=2000, clients=1, rows=1, seed=4))
    assert float(many.mean()) == pytest.approx(50.0, abs=4 * 50 / (2000 * 10) ** 0.5)


def test_clustered_regression_needs_the_cluster() -> None:
    """Nine rows of ten unknowns miss a tenth of |x*|^2; the rows of a cluster together find x*."""
    clients = clustered_regression(clusters=40, seed=5)
    lost = _local_error(clients) / _truth(clients).square().sum(1)
    assert float(lost.mean()) == pytest.approx(0.1, abs=4 * float(lost.std()) / len(lost) ** 0.5)
    pooled = torch.linalg.lstsq(torch.cat(clients.xs[:9]), torch.cat(clients.ys[:9]).unsqueeze(1)).solution
    assert torch.allclose(pooled[:, 0], _truth(clients)[0], atol=1e-8)


@pytest.mark.parametrize(("r2", "rho2"), [(0.3, 2.0), (1.0, 1.0), (0.0, 2.0), (0.0, 0.0)])
def test_random_effects_norms_are_exact(r2: float, rho2: float) -> None:
    truth = _truth(random_effects(30, 8, 2, r2=r2, rho2=rho2, sigma2=1.0, seed=6))
    middle = _truth(random_effects(1, 8, 2, r2=0.0, rho2=rho2 - r2, sigma2=1.0, seed=6))[0]
    assert float(middle.square().sum()) == pytest.approx(rho2 - r2, rel=1e-12)
    assert (truth - middle).square().sum(1).tolist() == pytest.approx([r2] * 30, rel=1e-12, abs=1e-15)
    assert truth.square().sum(1).tolist() == pytest.approx([rho2] * 30, rel=1e-12)


def test_random_effects_noise_and_mean() -> None:
    clients = random_effects(2000, 6, 3, r2=1.0, rho2=2.0, sigma2=4.0, seed=7)
    assert _clusters(clients).unique().tolist() == [0]
    assert float(_residuals(clients).var()) == pytest.approx(4.0, rel=0.1)
    middle = _truth(random_effects(1, 6, 1, r2=0.0, rho2=1.0, sigma2=1.0, seed=7))[0]
    assert torch.allclose(_truth(clients).mean(0), middle, atol=4 / (2000 * 5) ** 0.5)


def test_random_effects_local_risk() -> None:
    """The least-norm interpolator with fewer rows than features: rho2 (1 - n/d) + sigma2 n / (d - n - 1)."""
    clients = random_effects(400, 40, 20, r2=0.5, rho2=3.0, sigma2=0.4, seed=8)
    risk = _local_error(clients)
    expected = 3.0 * (1 - 20 / 40) + 0.4 * 20 / (40 - 20 - 1)
    assert float(risk.mean()) == pytest.approx(expected, abs=4 * float(risk.std()) / 400**0.5)


_MATRIX = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 0.0]]).double()


@pytest.mark.parametrize(
    ("covariance", "expected"),
    [
        ("identity", torch.eye(3).double()),
        (("ar", -0.6), torch.tensor([[1, -0.6, 0.36], [-0.6, 1, -0.6], [0.36, -0.6, 1]]).double()),
        (_MATRIX, _MATRIX),
    ],
)
def test_random_effects_covariance(covariance: str | tuple[str, float] | Tensor, expected: Tensor) -> None:
    clients = random_effects(40, 3, 1000, r2=1.0, rho2=2.0, sigma2=1.0, covariance=covariance, seed=9)
    x = torch.cat(clients.xs)
    assert torch.allclose(x.T @ x / len(x), expected, atol=4 * 2 * 2**0.5 / len(x) ** 0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: hierarchical_linear(clusters=2, clients=2, seed=seed),
        lambda seed: clustered_regression(seed=seed),
        lambda seed: random_effects(3, 4, 5, 1.0, 2.0, 1.0, seed=seed),
    ],
)
def test_only_the_seed_decides(make: Callable[[int], Clients]) -> None:
    one, again, other = make(1), make(1), make(2)
    assert torch.equal(torch.cat(one.xs), torch.cat(again.xs)) and torch.equal(
        torch.cat(one.ys), torch.cat(again.ys)
    )
    assert not torch.equal(torch.cat(one.xs), torch.cat(other.xs))
    assert not torch.equal(_truth(one), _truth(other))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hierarchical_linear(clusters=0), "clusters=0"),
        (lambda: hierarchical_linear(clients=[1, 2]), "clients has 2 entries.*cluster"),
        (lambda: hierarchical_linear(rows=0), "rows=0"),
        (lambda: hierarchical_linear(noise=-1.0), "noise=-1.0"),
        (lambda: hierarchical_linear(features=3, centre=torch.ones(4)), r"centre.*got shape \[4\]"),
        (lambda: clustered_regression(features=0), "features=0"),
        (
            lambda: random_effects(2, 3, 4, r2=2.0, rho2=1.0, sigma2=1.0),
            "rho2=1.0; it must be finite and at least 2",
        ),
        (lambda: random_effects(2, 1, 4, r2=1.0, rho2=2.0, sigma2=1.0), "features=1"),
        (lambda: random_effects(2, 3, 4, 1.0, 2.0, 1.0, covariance="ar"), "covariance='ar'; choose"),
        (lambda: random_effects(2, 3, 4, 1.0, 2.0, 1.0, covariance=("ar", 1.0)), "strictly between -1 and 1"),
        (lambda: random_effects(2, 3, 4, 1.0, 2.0, 1.0, covariance=-torch.eye(3)), "negative eigenvalue -1"),
        (lambda: random_effects(2, 3, 4, 1.0, 2.0, 1.0, covariance=torch.ones(2, 2)), r"symmetric \[3, 3\]"),
    ],
)
def test_impossible_settings(make: Callable[[], Clients], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()
