"""How much clients and clusters differ: variances of the hierarchical linear model, estimated from sums.

y_i = X_i t_i + N(0, sigma^2),  t_i ~ N(c_j, diag s_j^2),  c_j ~ N(common, diag s0^2). All that is needed of a
client are X'X, X'y, y'y and its number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import DataError, SettingError
from coterie.theory.hierarchical import centres, group_sum, lift, pseudo_solve, settle, times

EFFECTS = ("same", "each", "intercept")
_SMALLEST = 1e-9  # variances are sought down to this share of their scale
_INDIFFERENT = 1e-3  # a variance that lowers the deviance by less than this is called zero


@dataclass(frozen=True)
class Sums:
    """X'X [n, d, d], X'y [n, d], y'y [n, 1], rows [n, 1] of the clients, and their clusters [n]."""

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
        """In float64."""
        xx, xy, yy, rows = (part.double() for part in (self.xx, self.xy, self.yy, self.rows))
        return Sums(xx, xy, yy, rows, self.clusters, self.count)

    @classmethod
    def of(cls, xs: list[Tensor], ys: list[Tensor], clusters: Tensor) -> Sums:
        """From the rows of every client."""
        return cls(
            torch.stack([x.mT @ x for x in xs]),
            torch.stack([x.mT @ y for x, y in zip(xs, ys, strict=True)]),
            torch.stack([(y @ y).reshape(1) for y in ys]),
            torch.tensor([[float(len(y))] for y in ys], dtype=xs[0].dtype),
            clusters,
        )


@dataclass(frozen=True)
class Components:
    """sigma^2, s_j^2 [k, d] and s0^2 [d]; a zero ties a coordinate to the centre above it."""

    noise: float
    within: Tensor
    between: Tensor

    def models(self, sums: Sums) -> Tensor:
        """The best linear unbiased predictors of the clients' parameters, [n, d]."""
        a, b, within = sums.xx / self.noise, sums.xy / self.noise, self.within[sums.clusters]
        middle, _ = centres(*lift(a, b, within), sums.clusters, self.between.expand(self.within.shape))
        return settle(a, b, middle[sums.clusters], within)


def pattern(effects: str, d: int) -> Tensor:
    """Which variance each coordinate has, int64 [d]; -1 where clients do not differ.

    'same': one for all; 'each': its own; 'intercept': only the last coordinate varies, slopes are common.
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
    """Method of moments: residual sums of squares of local, cluster and single fits (Henderson 1953, method 3).

    Their expectations are linear in the variances, whatever the ranks; negative solutions become zero.
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
    """The variances with the largest (restricted) likelihood; `noise` is estimated unless given.

    The search starts from those of `near`, where there are such.
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
    """-2 log likelihood, the common centre at its best; `within` [k, d], `between` [d]. Differentiable."""
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
    """log det(I + S A), [n]."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.slogdet(identity + a * spread.unsqueeze(-2))[1]


def _scales(sums: Sums, groups: Tensor, noise: float | None) -> Tensor:
    """Sizes to begin with: for the noise, then for the variance of each group of coordinates."""
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
    """Residual sum of squares of the least-squares fit, [...]."""
    return (yy.squeeze(-1) - (xy * pseudo_solve(xx, xy)).sum(-1)).clamp(min=0.0)


def _rank(xx: Tensor) -> Tensor:
    values = torch.linalg.eigvalsh(xx)
    return (values > 10 * xx.shape[-1] * torch.finfo(xx.dtype).eps * values[..., -1:]).sum(-1)


def _room(part: Tensor, whole: Tensor, varies: Tensor) -> Tensor:
    """trace of A_i - A_i A^+ A_i over the coordinates that vary, [n]: what their variance adds to residuals."""
    left = part - part @ torch.linalg.pinv(whole, hermitian=True) @ part
    return left.diagonal(dim1=-2, dim2=-1)[..., varies].sum(-1)
