"""How much clients and clusters differ: variances of the hierarchical linear model, estimated from sums.

y_i = X_i t_i + N(0, sigma^2),  t_i ~ N(c_j, diag s_j^2),  c_j ~ N(common, diag s0^2). All that is needed of a
client are X'X, X'y, y'y and its number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie._core.errors import DataError, SettingError
from coterie.theory.groups import group_sum
from coterie.theory.hierarchical import centres, lift, pseudo_solve, settle, times

EFFECTS = ("same", "each", "intercept")
_SMALLEST = 1e-9  # variances are sought down to this share of their scale
_INDIFFERENT = 1e-3  # a variance that lowers the deviance by less than this is called zero


@dataclass(frozen=True)
class Sums:
    """Sufficient sums of the clients.

    Parameters
    ----------
    xx
        X'X, [n, d, d].
    xy
        X'y, [n, d].
    yy
        y'y, [n, 1].
    rows
        Numbers of rows, [n, 1].
    clusters
        Cluster of each client, [n].
    count
        Number of clusters, if the last ones may have no client here.

    Examples
    --------
    >>> from coterie.data import generate
    >>> from coterie.theory.variance_components import Sums
    >>> data = generate.hierarchical_linear(clusters=2, clients=3, features=4)
    >>> sums = Sums.of(data.xs, data.ys, data.clusters)
    >>> list(sums.xx.shape), sums.k
    ([6, 4, 4], 2)
    """

    xx: Tensor
    xy: Tensor
    yy: Tensor
    rows: Tensor
    clusters: Tensor
    count: int | None = None  # of clusters, where the last ones may have no client here

    @property
    def k(self) -> int:
        """Number of clusters."""
        return int(self.clusters.max()) + 1 if self.count is None else self.count

    def double(self) -> Sums:
        """Return the sums in float64."""
        xx, xy, yy, rows = (part.double() for part in (self.xx, self.xy, self.yy, self.rows))
        return Sums(xx, xy, yy, rows, self.clusters, self.count)

    @classmethod
    def of(cls, xs: list[Tensor], ys: list[Tensor], clusters: Tensor) -> Sums:
        """Return the sums of the rows of every client.

        Parameters
        ----------
        xs
            Inputs of each client, [rows, d].
        ys
            Targets of each client, [rows].
        clusters
            Cluster of each client, [n].

        Returns
        -------
        Sums
            The sums.
        """
        return cls(
            torch.stack([x.mT @ x for x in xs]),
            torch.stack([x.mT @ y for x, y in zip(xs, ys, strict=True)]),
            torch.stack([(y @ y).reshape(1) for y in ys]),
            torch.tensor([[float(len(y))] for y in ys], dtype=xs[0].dtype),
            clusters,
        )


@dataclass(frozen=True)
class Components:
    """Variances of the model; a zero ties a coordinate to the centre above it.

    Parameters
    ----------
    noise
        sigma^2.
    within
        s_j^2, [k, d].
    between
        s0^2, [d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.variance_components import Components, Sums
    >>> rows = [torch.ones(1, 1), torch.ones(1, 1)]
    >>> sums = Sums.of(rows, [torch.tensor([0.0]), torch.tensor([4.0])], torch.tensor([0, 0]))
    >>> Components(noise=1.0, within=torch.ones(1, 1), between=torch.ones(1)).models(sums).tolist()
    [[1.0], [3.0]]
    """

    noise: float
    within: Tensor
    between: Tensor

    def models(self, sums: Sums) -> Tensor:
        """Return the best linear unbiased predictors of the clients' parameters, [n, d]."""
        a, b, within = sums.xx / self.noise, sums.xy / self.noise, self.within[sums.clusters]
        middle, _ = centres(*lift(a, b, within), sums.clusters, self.between.expand(self.within.shape))
        return settle(a, b, middle[sums.clusters], within)


def pattern(effects: str, d: int) -> Tensor:
    """Return which variance each coordinate has, int64 [d]; -1 where clients do not differ.

    Parameters
    ----------
    effects
        "same": one variance for all; "each": one per coordinate; "intercept": only the last coordinate varies.
    d
        Number of coordinates.

    Returns
    -------
    Tensor
        int64 [d].

    Examples
    --------
    >>> from coterie.theory.variance_components import pattern
    >>> pattern("intercept", 3).tolist()
    [-1, -1, 0]
    """
    if effects not in EFFECTS:
        raise SettingError(f"effects = {effects!r}; choose one of {', '.join(EFFECTS)}")
    if effects == "each":
        return torch.arange(d)
    groups = torch.full((d,), -1 if effects == "intercept" else 0)
    groups[-1] = 0
    return groups


def moments(
    sums: Sums, effects: str = "same", *, per_cluster: bool = False, noise: float | None = None
) -> Components:
    """Estimate variances by the method of moments (Henderson 1953, method 3).

    It uses the residual sums of squares of local, cluster and single fits, whose expectations are linear in the
    variances, whatever the ranks; negative solutions become zero.

    Parameters
    ----------
    sums
        Sums of the clients.
    effects
        As in `pattern`; "each" is for one coordinate only.
    per_cluster
        Whether each cluster has a variance of its own.
    noise
        sigma^2 if it is known.

    Returns
    -------
    Components
        The variances.

    Raises
    ------
    DataError
        If no client has more rows than parameters and the noise is not given.

    Examples
    --------
    >>> from coterie.data import generate
    >>> from coterie.theory.variance_components import Sums, moments
    >>> data = generate.hierarchical_linear(clusters=20, clients=20, features=5, rows=20)
    >>> found = moments(Sums.of(data.xs, data.ys, data.clusters))
    >>> round(found.noise, 1), round(found.within[0, 0].item(), 1), round(found.between[0].item(), 1)
    (1.0, 1.0, 0.9)
    """
    k, d = sums.k, sums.xy.shape[-1]
    varies = pattern(effects, d) >= 0
    if effects == "each" and d > 1:
        raise SettingError("the method of moments knows one variance; use effects='same' or method='ml'")
    if noise is None:
        free = (sums.rows.squeeze(-1) - _rank(sums.xx)).clamp(min=0)
        if float(free.sum()) == 0:
            raise DataError(
                "no client has more rows than parameters, so its residuals say nothing about the noise; "
                "use the maximum likelihood, or give the noise variance"
            )
        noise = float(_residual(sums.xx, sums.xy, sums.yy).sum() / free.sum())
    xx, xy, yy, rows = (group_sum(part, sums.clusters, k) for part in (sums.xx, sums.xy, sums.yy, sums.rows))
    free = (rows.squeeze(-1) - _rank(xx)).clamp(min=0)
    excess = _residual(xx, xy, yy) - noise * free
    room = group_sum(_room(sums.xx, xx[sums.clusters], varies), sums.clusters, k)
    if not per_cluster:
        excess, room = excess.sum().expand(k), room.sum().expand(k)
    within = torch.where(room > 0, excess / room.where(room > 0, 1.0), 0.0).clamp(min=0.0)
    whole = xx.sum(0)
    all_free = float(rows.sum()) - float(_rank(whole))
    used = float((within[sums.clusters] * _room(sums.xx, whole, varies)).sum())
    left = float(_residual(whole, xy.sum(0), yy.sum(0))) - noise * all_free - used
    span = float(_room(xx, whole, varies).sum())
    between = max(0.0, left / span) if span > 1e-12 * float(whole.diagonal().sum()) else 0.0
    return Components(noise, within.unsqueeze(-1) * varies, between * varies.to(sums.xx))


def maximum_likelihood(
    sums: Sums,
    effects: str = "same",
    *,
    per_cluster: bool = False,
    noise: float | None = None,
    restricted: bool = False,
    near: Components | None = None,
) -> Components:
    """Estimate variances by (restricted) maximum likelihood.

    Parameters
    ----------
    sums
        Sums of the clients.
    effects
        As in `pattern`.
    per_cluster
        Whether each cluster has a variance of its own.
    noise
        sigma^2 if it is known.
    restricted
        Whether to maximise the restricted likelihood.
    near
        Variances to start the search from.

    Returns
    -------
    Components
        The variances; one that does not matter is exactly zero.

    Examples
    --------
    >>> from coterie.data import generate
    >>> from coterie.theory.variance_components import Sums, maximum_likelihood
    >>> data = generate.hierarchical_linear(clusters=20, clients=20, features=5, rows=20)
    >>> found = maximum_likelihood(Sums.of(data.xs, data.ys, data.clusters))
    >>> round(found.noise, 1), round(found.within[0, 0].item(), 1), round(found.between[0].item(), 1)
    (1.0, 0.9, 0.9)
    """
    from scipy.optimize import minimize

    k, d = sums.k, sums.xy.shape[-1]
    groups = pattern(effects, d).to(sums.clusters.device)
    count, levels = int(groups.max()) + 1, k if per_cluster else 1
    sums = sums.double()
    scale = _scales(sums, groups, noise)

    def unpack(logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = logs.exp() * torch.cat([scale[:1], scale[1:].repeat(levels + 1)])
        spread = torch.where(groups >= 0, values[1:].view(levels + 1, count)[:, groups.clamp(min=0)], 0.0)
        sigma = values[0] if noise is None else torch.full_like(values[0], noise)
        return sigma, spread[:-1].expand(k, d), spread[-1]

    def objective(point: object) -> tuple[float, object]:
        logs = torch.tensor(point, dtype=torch.float64, requires_grad=True)
        value = deviance(sums, *unpack(logs), restricted=restricted)
        value.backward()
        assert logs.grad is not None
        return float(value.detach()), logs.grad.nan_to_num().numpy()

    start = torch.zeros(1 + (levels + 1) * count, dtype=torch.float64)
    low, high = math.log(_SMALLEST) - 1, 25.0
    if near is not None:
        first = torch.tensor([int((groups == group).nonzero()[0]) for group in range(count)])
        known = torch.cat([near.within[:levels, first], near.between[None, first]]).flatten()
        known = torch.cat([known.new_tensor([near.noise]), known])
        sizes = torch.cat([scale[:1], scale[1:].repeat(levels + 1)])
        start = (known / sizes).log().clamp(min=-5.0, max=high - 1)
    found = minimize(
        objective,
        start.numpy(),
        jac=True,
        method="L-BFGS-B",
        bounds=[(low, high)] * len(start),
        options={"ftol": 1e-13},
    )
    logs, best = torch.tensor(found.x), float(found.fun)
    for at in range(1, len(logs)):
        without = logs.clone()
        without[at] = -torch.inf
        if float(deviance(sums, *unpack(without), restricted=restricted)) < best + _INDIFFERENT:
            logs = without
    sigma, within, between = unpack(logs)
    return Components(float(sigma), within.clone(), between.clone())


def deviance(
    sums: Sums, noise: Tensor, within: Tensor, between: Tensor, *, restricted: bool = False
) -> Tensor:
    """Return -2 log likelihood, differentiable, with the common centre at its best.

    Parameters
    ----------
    sums
        Sums of the clients.
    noise
        sigma^2.
    within
        s_j^2, [k, d].
    between
        s0^2, [d].
    restricted
        Whether to return the restricted likelihood.

    Returns
    -------
    Tensor
        The deviance, a scalar.

    Examples
    --------
    >>> import math, torch
    >>> from coterie.theory.variance_components import Sums, deviance
    >>> sums = Sums.of([torch.ones(2, 1)], [torch.tensor([0.0, 2.0])], torch.tensor([0]))
    >>> none = torch.zeros(1)
    >>> round(deviance(sums, torch.tensor(1.0), none[None], none).item() - 2 * math.log(2 * math.pi), 3)
    2.0
    """
    a, b, q = sums.xx / noise, sums.xy / noise, sums.yy / noise
    total = sums.rows.sum() * (noise.log() + math.log(2 * math.pi))
    spread = within[sums.clusters]
    for clusters in (sums.clusters, torch.zeros_like(torch.arange(len(within)))):
        total = total + _log_determinant(a, spread).sum()
        h, g = lift(a, b, spread)
        q = q - (b * spread * g).sum(-1, keepdim=True)
        count = len(within) if clusters is sums.clusters else 1
        a, b, q = (group_sum(part, clusters, count) for part in (h, g, q))
        spread = between.expand(count, -1)
    a, b = a.squeeze(0), b.squeeze(0)
    common = pseudo_solve(a.detach(), b.detach())
    total = total + q.sum() - 2 * b @ common + common @ times(a, common)
    return total + torch.logdet(a) if restricted else total


def _log_determinant(a: Tensor, spread: Tensor) -> Tensor:
    """Return log det(I + S A), [n]."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    logarithm: Tensor = torch.linalg.slogdet(identity + a * spread.unsqueeze(-2))[1]
    return logarithm


def _scales(sums: Sums, groups: Tensor, noise: float | None) -> Tensor:
    """Return sizes to begin with: of the noise, then of the variance of each group of coordinates."""
    count = float(sums.rows.sum()) or float(len(sums.rows))
    if noise is None:
        residual = float(_residual(sums.xx.sum(0), sums.xy.sum(0), sums.yy.sum(0)))
        noise = max(residual / count, 1e-30)
    information = sums.xx.sum(0).diagonal() / count
    inside = groups[groups >= 0]
    size = information.new_zeros(int(groups.max()) + 1).index_add_(0, inside, information[groups >= 0])
    size = (size / torch.bincount(inside)).clamp(min=1e-12 * max(float(size.max()), 1e-300))
    return torch.cat([information.new_tensor([noise]), 0.5 * noise / size])


def _residual(xx: Tensor, xy: Tensor, yy: Tensor) -> Tensor:
    """Return the residual sum of squares of the least-squares fit, [...]."""
    return (yy.squeeze(-1) - (xy * pseudo_solve(xx, xy)).sum(-1)).clamp(min=0.0)


def _rank(xx: Tensor) -> Tensor:
    values: Tensor = torch.linalg.eigvalsh(xx)
    return (values > 10 * xx.shape[-1] * torch.finfo(xx.dtype).eps * values[..., -1:]).sum(-1)


def _room(part: Tensor, whole: Tensor, varies: Tensor) -> Tensor:
    """Return trace(A_i - A_i A^+ A_i) over the coordinates that vary, [n]: what their variance adds to residuals."""
    left: Tensor = part - part @ torch.linalg.pinv(whole, hermitian=True) @ part
    return left.diagonal(dim1=-2, dim2=-1)[..., varies].sum(-1)
