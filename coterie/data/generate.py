"""Generators of linear-regression data whose true parameters are known, for tests, examples and theory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie._core.randomness import key, normal, slots, uniform
from coterie.data.clients import Clients

Count = int | Sequence[int]
Covariance = str | tuple[str, float] | Tensor


def hierarchical_linear(
    clusters: int = 20,
    clients: Count = 20,
    features: int = 20,
    rows: Count = 10,
    between: float = 1.0,
    within: float = 1.0,
    noise: float = 1.0,
    centre: float | Tensor = 0.0,
    seed: int = 0,
) -> Clients:
    """Generate clients that scatter around clusters, which scatter around a common centre.

    y = X theta_i + N(0, noise^2), theta_i ~ N(centre_j, within^2 I), centre_j ~ N(centre, between^2 I), X ~ N(0, I);
    Lyu, Hanzely, Kolar, "Personalized Federated Learning with Multiple Known Clusters" (2022).

    Parameters
    ----------
    clusters
        Number of clusters.
    clients
        Clients per cluster: one number, or one for each cluster.
    features
        Number of features.
    rows
        Rows per client: one number, or one for each client.
    between
        Standard deviation of the cluster centres.
    within
        Standard deviation of the clients' parameters around their cluster's centre.
    noise
        Standard deviation of the noise.
    centre
        The common centre: one number, or one for each feature.
    seed
        Seed of the draws.

    Returns
    -------
    Clients
        Float64 rows with known clusters and true parameters.

    Examples
    --------
    >>> from coterie.data import generate
    >>> clients = generate.hierarchical_linear(clusters=2, clients=[1, 3], features=5, rows=8)
    >>> clients.clusters.tolist(), list(clients.truth.shape)
    ([0, 1, 1, 1], [4, 5])
    """
    for name, spread in (("between", between), ("within", within), ("noise", noise)):
        _check_at_least(name, spread, 0.0)
    membership = _membership(clusters, clients)
    middle = _as_vector(centre, features)
    centres = middle + between * normal(
        slots(key(seed, "hierarchical centre", torch.arange(clusters)), features)
    )
    own = normal(slots(key(seed, "hierarchical client", torch.arange(len(membership))), features))
    truth = centres[membership] + within * own
    return _linear_clients(truth, membership, rows, noise, "hierarchical", seed)


def clustered_regression(
    clusters: int = 4,
    clients: Count = 9,
    features: int = 10,
    rows: Count = 9,
    seed: int = 0,
) -> Clients:
    """Generate clusters whose clients share their true parameters exactly, without noise.

    y = X x*_k, X ~ N(0, I), each coordinate of x*_k being 0 or 100 with probability 1/2; "Towards Provably Personalized
    Federated Learning via Threshold-Clustering of Similar Clients" (2022), section 4. With fewer rows than features no
    client can find its cluster's x*_k alone.

    Parameters
    ----------
    clusters
        Number of clusters.
    clients
        Clients per cluster: one number, or one for each cluster.
    features
        Number of features.
    rows
        Rows per client: one number, or one for each client.
    seed
        Seed of the draws.

    Returns
    -------
    Clients
        Float64 rows with known clusters and true parameters.

    Examples
    --------
    >>> from coterie.data import generate
    >>> clients = generate.clustered_regression(clusters=2, clients=[1, 2], features=4)
    >>> clients.truth.tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 100.0], [0.0, 0.0, 0.0, 100.0]]
    """
    membership = _membership(clusters, clients)
    coins = uniform(
        slots(key(seed, "clustered centre", torch.arange(clusters)), _positive("features", features))
    )
    truth = torch.where(coins < 0.5, 0.0, 100.0).double()[membership]
    return _linear_clients(truth, membership, rows, 0.0, "clustered", seed)


def random_effects(
    clients: int,
    features: int,
    rows: Count,
    r2: float,
    rho2: float,
    sigma2: float,
    covariance: Covariance = "identity",
    seed: int = 0,
) -> Clients:
    """Generate clients whose parameters lie at an exact distance from a common centre.

    y = X th_j + N(0, sigma2), X ~ N(0, covariance), th_j = th_0 + D_j, |D_j|^2 = r2, |th_j|^2 = rho2; Cheng, Chadha,
    Duchi, "Federated Asymptotics" (2022). D_j is uniform on the sphere orthogonal to th_0, so that |th_0|^2 = rho2 - r2
    holds exactly and not only for many features. All clients form one cluster.

    Parameters
    ----------
    clients
        Number of clients.
    features
        Number of features.
    rows
        Rows per client: one number, or one for each client.
    r2
        Squared distance of the clients' parameters from the centre.
    rho2
        Squared length of the clients' parameters, at least `r2`.
    sigma2
        Variance of the noise.
    covariance
        Covariance of the features: "identity", ("ar", correlation) or a symmetric matrix [features, features].
    seed
        Seed of the draws.

    Returns
    -------
    Clients
        Float64 rows with true parameters.

    Examples
    --------
    >>> from coterie.data import generate
    >>> clients = generate.random_effects(3, features=4, rows=2, r2=0.5, rho2=3.0, sigma2=1.0)
    >>> clients.truth.square().sum(1).round(decimals=6).tolist()
    [3.0, 3.0, 3.0]
    """
    for name, value in (("r2", r2), ("sigma2", sigma2)):
        _check_at_least(name, value, 0.0)
    _check_at_least("rho2", rho2, r2)
    if features == 1 and 0.0 < r2 < rho2:
        raise SettingError(
            "nothing is orthogonal to th_0 with features=1; use more features, r2=0 or r2=rho2"
        )
    root = _covariance_root(covariance, _positive("features", features))
    direction = _unit(normal(slots(key(seed, "effects centre"), features)))
    deviation = normal(
        slots(key(seed, "effects client", torch.arange(_positive("clients", clients))), features)
    )
    if rho2 > r2:
        deviation = deviation - (deviation @ direction).unsqueeze(1) * direction
    truth = math.sqrt(rho2 - r2) * direction + math.sqrt(r2) * _unit(deviation)
    return _linear_clients(
        truth, torch.zeros(clients, dtype=torch.int64), rows, math.sqrt(sigma2), "effects", seed, root
    )


def _linear_clients(
    truth: Tensor,
    membership: Tensor,
    rows: Count,
    noise: float,
    purpose: str,
    seed: int,
    root: Tensor | None = None,
) -> Clients:
    """Draw inputs and targets; a client's rows do not depend on how many rows the others have."""
    n, features = truth.shape
    sizes = _per_item("rows", rows, n, "client")
    client = torch.repeat_interleave(torch.arange(n), sizes)
    row = torch.arange(len(client)) - (sizes.cumsum(0) - sizes)[client]
    x = normal(slots(key(seed, purpose, "x", client, row), features))
    if root is not None:
        x = x @ root
    y = (x * truth[client]).sum(1)
    if noise > 0.0:
        y = y + noise * normal(key(seed, purpose, "noise", client, row))
    names = [f"client-{i}" for i in range(n)]
    cluster_names = [f"cluster-{k}" for k in range(int(membership.max()) + 1)]
    cuts = sizes.tolist()
    return Clients(list(x.split(cuts)), list(y.split(cuts)), names, membership, cluster_names, truth)


def _membership(clusters: int, clients: Count) -> Tensor:
    sizes = _per_item("clients", clients, _positive("clusters", clusters), "cluster")
    return torch.repeat_interleave(torch.arange(clusters), sizes)


def _per_item(name: str, count: Count, items: int, item: str) -> Tensor:
    if isinstance(count, int):
        return torch.full((items,), _positive(name, count))
    if len(count) != items:
        raise SettingError(
            f"{name} has {len(count)} entries; give one number or one for each of {items} {item}s"
        )
    return torch.tensor([_positive(name, one) for one in count])


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise SettingError(f"{name}={value}; it must be at least 1")
    return value


def _check_at_least(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise SettingError(f"{name}={value}; it must be finite and at least {least:g}")


def _as_vector(centre: float | Tensor, features: int) -> Tensor:
    vector = torch.as_tensor(centre, dtype=torch.float64)
    if vector.shape not in ((), (_positive("features", features),)) or not torch.isfinite(vector).all():
        raise SettingError(
            f"centre must be a number or {features} finite numbers; got shape {list(vector.shape)}"
        )
    return vector


def _unit(vectors: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / lengths


def _covariance_root(covariance: Covariance, features: int) -> Tensor | None:
    """Return the symmetric square root of the covariance, or None for the identity."""
    if isinstance(covariance, Tensor):
        matrix = covariance.double()
    elif covariance == "identity":
        return None
    elif isinstance(covariance, tuple) and len(covariance) == 2 and covariance[0] == "ar":
        if not -1.0 < covariance[1] < 1.0:
            raise SettingError(f"covariance={covariance}; the correlation must lie strictly between -1 and 1")
        lag = torch.arange(features).unsqueeze(1) - torch.arange(features)
        matrix = torch.tensor(covariance[1], dtype=torch.float64) ** lag.abs()
    else:
        raise SettingError(f"covariance={covariance!r}; choose 'identity', ('ar', rho) or a matrix")
    if matrix.shape != (features, features) or not torch.allclose(matrix, matrix.T):
        raise SettingError(f"covariance must be symmetric [{features}, {features}]; got {list(matrix.shape)}")
    spectrum: Tensor
    axes: Tensor
    spectrum, axes = torch.linalg.eigh(matrix)
    if not spectrum.min() >= -1e-10 * spectrum.abs().max():
        raise SettingError(f"covariance has the negative eigenvalue {float(spectrum.min()):g}")
    return (axes * spectrum.clamp(min=0.0).sqrt()) @ axes.T
