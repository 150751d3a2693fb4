"""How much clients and clusters differ: variances of the hierarchical linear model, estimated from sums.

y_i = X_i t_i + N(0, sigma^2),  t_i ~ N(c_j, diag s_j^2),  c_j ~ N(common, diag s0^2). All that is needed of a
client are X'X, X'y, y'y and its number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie._core.errors import DataError, SettingError
from coterie.theory.groups import group_sum
from coterie.theory.hierarchical import centres, lift, pseudo_solve, settle

EFFECTS = ("same", "each", "intercept", "split")


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
    trust
        Weight of each client, [n, 1]: its covariance is divided by it (`robust`). None: 1 for all.

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
    trust: Tensor | None = None

    @property
    def k(self) -> int:
        """Number of clusters."""
        return int(self.clusters.max()) + 1 if self.count is None else self.count

    def double(self) -> Sums:
        """Return the sums in float64."""
        xx, xy, yy, rows = (part.double() for part in (self.xx, self.xy, self.yy, self.rows))
        return Sums(xx, xy, yy, rows, self.clusters, self.count, self.trust)

    def trusted(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return what clients say about their centres, each with the weight of its client."""
        if self.trust is None:
            return values
        return tuple(self.trust.view(-1, *[1] * (one.dim() - 1)) * one for one in values)

    def kept(self, clients: Tensor) -> Sums:
        """Return the sums of some clients, bool [n, 1]; the others have no rows."""
        share = clients.double()
        xx, xy, yy, rows = (
            share.view(-1, *[1] * (one.dim() - 1)) * one.double()
            for one in (self.xx, self.xy, self.yy, self.rows)
        )
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
        s_j^2, [k, d], or covariances [k, d, d].
    between
        s0^2, [d].
    noises
        sigma_i^2 of each client, [n, 1], where they differ; `noise` is then their geometric mean.

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
    noises: Tensor | None = None

    def noise_of(self, clients: Tensor | slice = slice(None)) -> Tensor | float:
        """Return sigma^2 of clients, [n, 1], or the one of all."""
        return self.noise if self.noises is None else self.noises[clients]

    def models(self, sums: Sums) -> Tensor:
        """Return the best linear unbiased predictors of the clients' parameters, [n, d]."""
        sigma, within = self.noise_of(), self.within[sums.clusters]
        b = sums.xy / sigma
        a = sums.xx / (sigma.unsqueeze(-1) if isinstance(sigma, Tensor) else sigma)
        h, g = sums.trusted(*lift(a, b, within))
        middle, _ = centres(h, g, sums.clusters, self.between.expand(self.within.shape[:2]))
        return settle(a, b, middle[sums.clusters], within)


def pattern(effects: str, d: int, intercept: Tensor | None = None) -> Tensor:
    """Return which variance each coordinate has, int64 [d]; -1 where clients do not differ.

    Parameters
    ----------
    effects
        "same": one variance for all; "each": one per coordinate; "intercept": only the intercept varies; "split": one
        variance for the intercept, one for all other coordinates.
    d
        Number of coordinates.
    intercept
        Which coordinates are intercepts, bool [d]; by default the last.

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
    if intercept is None:
        intercept = torch.arange(d) == d - 1
    if effects == "intercept":
        return torch.where(intercept, 0, -1)
    return (
        intercept.long()
        if effects == "split" and bool((~intercept).any())
        else torch.zeros(d, dtype=torch.long)
    )


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
    if effects in ("each", "split") and d > 1:
        raise SettingError("the method of moments knows one variance; use effects='same' or method='ml'")
    if noise is None:
        free = (sums.rows.squeeze(-1) - _rank(sums.xx)).clamp(min=0)
        if float(free.sum()) == 0:
            raise DataError(
                "no client has more rows than parameters, so its residuals say nothing about the noise; "
                "use the maximum likelihood, or give the noise variance"
            )
        noise = float(residual(sums.xx, sums.xy, sums.yy).sum() / free.sum())
    xx, xy, yy, rows = (group_sum(part, sums.clusters, k) for part in (sums.xx, sums.xy, sums.yy, sums.rows))
    free = (rows.squeeze(-1) - _rank(xx)).clamp(min=0)
    excess = residual(xx, xy, yy) - noise * free
    room = group_sum(_room(sums.xx, xx[sums.clusters], varies), sums.clusters, k)
    if not per_cluster:
        excess, room = excess.sum().expand(k), room.sum().expand(k)
    within = torch.where(room > 0, excess / room.where(room > 0, 1.0), 0.0).clamp(min=0.0)
    whole = xx.sum(0)
    all_free = float(rows.sum()) - float(_rank(whole))
    used = float((within[sums.clusters] * _room(sums.xx, whole, varies)).sum())
    left = float(residual(whole, xy.sum(0), yy.sum(0))) - noise * all_free - used
    span = float(_room(xx, whole, varies).sum())
    between = max(0.0, left / span) if span > 1e-12 * float(whole.diagonal().sum()) else 0.0
    return Components(noise, within.unsqueeze(-1) * varies, between * varies.to(sums.xx))


def residual(xx: Tensor, xy: Tensor, yy: Tensor) -> Tensor:
    """Return the residual sum of squares of the least-squares fit.

    Parameters
    ----------
    xx
        X'X, [..., d, d].
    xy
        X'y, [..., d].
    yy
        y'y, [..., 1].

    Returns
    -------
    Tensor
        [...].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.variance_components import residual
    >>> x, y = torch.ones(3, 1), torch.tensor([1.0, 2.0, 6.0])  # the fit is the mean, 3
    >>> round(residual(x.mT @ x, x.mT @ y, (y @ y).reshape(1)).item(), 4)
    14.0
    """
    return (yy.squeeze(-1) - (xy * pseudo_solve(xx, xy)).sum(-1)).clamp(min=0.0)


def _rank(xx: Tensor) -> Tensor:
    values: Tensor = torch.linalg.eigvalsh(xx)
    return (values > 10 * xx.shape[-1] * torch.finfo(xx.dtype).eps * values[..., -1:]).sum(-1)


def _room(part: Tensor, whole: Tensor, varies: Tensor) -> Tensor:
    """Return trace(A_i - A_i A^+ A_i) over the coordinates that vary, [n]: what their variance adds to residuals."""
    left: Tensor = part - part @ torch.linalg.pinv(whole, hermitian=True) @ part
    return left.diagonal(dim1=-2, dim2=-1)[..., varies].sum(-1)
