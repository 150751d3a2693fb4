"""Mixed models with several grouping factors, crossed or nested, from sums over the rows of each client."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.theory.deviance_search import information_of, lowest, sharpened
from coterie.theory.hierarchical import pseudo_solve
from coterie.theory.mixed_likelihood import HIGHEST, LOWEST

MOST_LEVELS = 8000  # of all factors together; the server factors a dense matrix of this size
INDIFFERENT = 1e-3  # a variance that lowers the deviance by less than this is called zero
_START = -1.0  # logarithm of variances in units of their scale, where a search begins


@dataclass(frozen=True)
class CellSums:
    """Sums over the rows of n clients, and over the cells in which their rows share all levels.

    Parameters
    ----------
    xx, xy, yy, rows
        X'X [n, p, p], X'y [n, p], y'y [n] and numbers of rows [n] of the clients.
    owner
        Client of each cell, [c].
    levels
        Level of each cell in each of the K factors, [c, K], counted over all factors; -1 where it has no effect.
    count, x, y
        Rows of each cell [c], and sums of their features [c, p] and targets [c].
    sizes
        Number of levels of each factor.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.crossed import CellSums
    >>> x, y, levels = torch.ones(3, 1), torch.tensor([1.0, 2.0, 4.0]), torch.tensor([[0], [0], [1]])
    >>> sums = CellSums.of([x], [y], [levels], sizes=(2,))
    >>> sums.count.tolist(), sums.y.tolist()
    ([2.0, 1.0], [3.0, 4.0])
    """

    xx: Tensor
    xy: Tensor
    yy: Tensor
    rows: Tensor
    owner: Tensor
    levels: Tensor
    count: Tensor
    x: Tensor
    y: Tensor
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, xs: list[Tensor], ys: list[Tensor], levels: list[Tensor], sizes: tuple[int, ...]) -> CellSums:
        """Return the sums of rows that are at hand."""
        parts = []
        for client, (x, y, at) in enumerate(zip(xs, ys, levels, strict=True)):
            cells, place = at.unique(dim=0, return_inverse=True)
            none = torch.zeros(len(cells), dtype=torch.float64)
            parts.append(
                (
                    torch.full((len(cells),), client),
                    cells,
                    none.index_add(0, place, torch.ones_like(y, dtype=torch.float64)),
                    none.new_zeros(len(cells), x.shape[1]).index_add(0, place, x.double()),
                    none.index_add(0, place, y.double()),
                )
            )
        owner, cells, count, x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        pairs = [(x.double(), y.double()) for x, y in zip(xs, ys, strict=True)]
        return cls(
            torch.stack([a.mT @ a for a, _ in pairs]),
            torch.stack([a.mT @ b for a, b in pairs]),
            torch.stack([b @ b for _, b in pairs]),
            torch.tensor([len(b) for _, b in pairs], dtype=torch.float64),
            owner,
            cells,
            count,
            x,
            y,
            sizes,
        )

    @property
    def total(self) -> int:
        """Number of levels of all factors."""
        return sum(self.sizes)

    @cached_property
    def between_levels(self) -> Tensor:
        """Z'Z of all rows, [L, L]."""
        found = self.count.new_zeros(self.total * self.total)
        for one in self.levels.unbind(1):
            for other in self.levels.unbind(1):
                both = (one >= 0) & (other >= 0)
                found.index_add_(0, (one * self.total + other)[both], self.count[both])
        return found.view(self.total, self.total)

    @cached_property
    def touched(self) -> tuple[Tensor, Tensor, Tensor]:
        """Client and level wherever a client has rows of a level [m], and the sums of their features, [m, p]."""
        at = (self.levels >= 0).nonzero()
        key = self.owner[at[:, 0]] * self.total + self.levels[at[:, 0], at[:, 1]]
        found, place = key.unique(return_inverse=True)
        sums = self.x.new_zeros(len(found), self.x.shape[1]).index_add(0, place, self.x[at[:, 0]])
        return found // self.total, found % self.total, sums

    @cached_property
    def level_x(self) -> Tensor:
        """Z'X of all rows, [L, p]."""
        _, level, sums = self.touched
        return sums.new_zeros(self.total, sums.shape[1]).index_add(0, level, sums)

    @cached_property
    def level_y(self) -> Tensor:
        """Z'y of all rows, [L]."""
        found = self.y.new_zeros(self.total)
        for one in self.levels.unbind(1):
            found = found.index_add(0, one.clamp(min=0), torch.where(one >= 0, self.y, 0.0))
        return found

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor] | None:
        """Places in `touched` of each two levels of one client, or None where a dense product is cheaper."""
        client, _, _ = self.touched
        sizes = torch.bincount(client, minlength=len(self.rows))
        if int((sizes * sizes).sum()) * 16 > len(self.rows) * self.total**2:
            return None
        first = (sizes.cumsum(0) - sizes)[client]
        each = sizes[client]
        one = torch.arange(len(client)).repeat_interleave(each)
        start = (each.cumsum(0) - each).repeat_interleave(each)
        other = torch.arange(len(one)) - start + first.repeat_interleave(each)
        return one, other


@dataclass(frozen=True)
class _Eliminated:
    """What is left of the sums without the clients' own effects: those of levels and of common coefficients.

    Parameters
    ----------
    zz, zx, zy, xx, xy, yy
        Sums over rows weighted by the inverse covariance of a client's rows, times the noise variance.
    volume
        Sum over clients of log det(I + X S X' / noise).
    """

    zz: Tensor
    zx: Tensor
    zy: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor
    volume: Tensor


@dataclass(frozen=True)
class Crossed:
    """-2 log likelihood of y = X (w + b_i) + sum_k u^k + noise as a function of the logarithms of its variances.

    b_i are effects of clients and u^k of the levels of factor k; all are independent and normal. Numbers are: the
    noise, a variance of each group of coefficients that differ between clients, a variance of each factor; logarithms
    in units of their scale.

    Parameters
    ----------
    sums
        Sums of the clients.
    groups
        Which variance each coefficient has between clients, [p]; -1: it is the same for all.
    factors
        Names of the factors.
    restricted
        Whether the likelihood is the restricted one (REML).
    noise
        sigma^2 if it is known.
    ridge
        Penalty on the squares of the common coefficients, [p], in units of the noise variance.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.crossed import CellSums, Crossed
    >>> draw = torch.Generator().manual_seed(0)
    >>> normal = lambda *size: torch.randn(*size, generator=draw, dtype=torch.float64)
    >>> u = normal(30)
    >>> at = [torch.randint(30, (20, 1), generator=draw) for _ in range(40)]
    >>> ys = [normal(1) + u[one[:, 0]] + normal(20) for one in at]
    >>> sums = CellSums.of([torch.ones(20, 1)] * 40, ys, at, sizes=(30,))
    >>> model = Crossed(sums, torch.tensor([0]), ("lecturer",))
    >>> point, _ = model.fit(model.start())
    >>> model.names, [round(value, 1) for value in model.variances(point).tolist()]
    (['noise', 'client 0', 'lecturer'], [1.0, 0.8, 1.2])
    """

    sums: CellSums
    groups: Tensor
    factors: tuple[str, ...]
    restricted: bool = False
    noise: float | None = None
    ridge: Tensor | None = None
    scale: Tensor = field(init=False)

    def __post_init__(self) -> None:
        if self.sums.total > MOST_LEVELS:
            raise SettingError(
                f"the grouping columns have {self.sums.total:,} levels; {MOST_LEVELS:,} can be fitted. Make the column "
                "with the most levels the client"
            )
        object.__setattr__(self, "scale", self._scales())

    def _scales(self) -> Tensor:
        """Return sizes to begin with, of the noise and of every variance."""
        sums = self.sums
        count = float(sums.rows.sum())
        a, b = sums.xx.sum(0), sums.xy.sum(0)
        left = float(sums.yy.sum() - b @ pseudo_solve(a, b))
        noise = max(left / count, 1e-30) if self.noise is None else 1.0
        information = a.diagonal() / count
        sizes = [noise]
        for group in range(self.client_variances):
            sizes.append(noise / max(float(information[self.groups == group].mean()), 1e-12))
        weight = float(sums.count.sum()) / count  # of a row; 1 for least squares
        return torch.tensor([*sizes, *[noise / max(weight, 1e-12)] * len(self.factors)], dtype=torch.float64)

    @property
    def client_variances(self) -> int:
        """Number of variances between clients."""
        return int(self.groups.max()) + 1 if len(self.groups) else 0

    @property
    def names(self) -> list[str]:
        """What each number is."""
        return ["noise", *(f"client {k}" for k in range(self.client_variances)), *self.factors]

    def start(self, near: Tensor | None = None) -> Tensor:
        """Return where a search begins, near known variances if there are some."""
        if near is None:
            return torch.cat([torch.zeros(1), torch.full((len(self.names) - 1,), _START)]).double()
        return (near / self.scale).log().clamp(-12.0, HIGHEST - 1)

    def variances(self, point: Tensor) -> Tensor:
        """Return the variances at a point: of the noise, between clients, of the factors."""
        found = point.exp() * self.scale
        return found if self.noise is None else torch.cat([torch.full_like(found[:1], self.noise), found[1:]])

    def at(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the noise [], the variances of coefficients between clients [p], and of levels [L]."""
        clients = self.client_variances
        own = torch.cat([values[1 : 1 + clients], torch.zeros(1, dtype=torch.float64)])
        inside = own[torch.where(self.groups >= 0, self.groups, clients)]
        sizes = torch.tensor(self.sums.sizes)
        return values[0], inside, values[1 + clients :].repeat_interleave(sizes)

    def eliminated(self, root: Tensor) -> _Eliminated:
        """Return the sums without the clients' effects, given their standard deviations over that of the noise, [p]."""
        sums, varies = self.sums, self.groups >= 0
        xx, xy = sums.xx.sum(0), sums.xy.sum(0)
        if self.ridge is not None:
            xx = xx + torch.diag(self.ridge)
        zz, zx, zy, yy = sums.between_levels, sums.level_x, sums.level_y, sums.yy.sum()
        if not bool(varies.any()):
            return _Eliminated(zz, zx, zy, xx, xy, yy, torch.zeros_like(yy))
        root = root[varies]
        inner = root.unsqueeze(-1) * sums.xx[:, varies][:, :, varies] * root
        factor = torch.linalg.cholesky(inner + torch.eye(len(root), dtype=inner.dtype))
        volume = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum()

        def halved(part: Tensor, owners: Tensor | None = None) -> Tensor:
            """Return R^-1 S^1/2 X'. for columns [., r, k]."""
            own = factor if owners is None else factor[owners]
            found: Tensor = torch.linalg.solve_triangular(own, root.unsqueeze(-1) * part, upper=False)
            return found

        client, level, touched = sums.touched
        hx = halved(sums.xx[:, varies])  # [n, r, p]
        hy = halved(sums.xy[:, varies].unsqueeze(-1)).squeeze(-1)  # [n, r]
        hz = halved(touched[:, varies].unsqueeze(-1), client).squeeze(-1)  # [m, r]
        flat = hx.flatten(0, 1)
        xx, xy, yy = xx - flat.mT @ flat, xy - flat.mT @ hy.flatten(), yy - hy.square().sum()
        zx = zx - torch.zeros_like(zx).index_add(0, level, (hx[client] * hz.unsqueeze(-1)).sum(1))
        zy = zy - torch.zeros_like(zy).index_add(0, level, (hy[client] * hz).sum(1))
        if sums.pairs is None:
            dense = zz.new_zeros(len(sums.rows) * len(zz), len(root)).index_add(
                0, client * len(zz) + level, hz
            )
            dense = dense.view(len(sums.rows), len(zz), -1).mT.flatten(0, 1)
            zz = zz - dense.mT @ dense
        else:
            one, other = sums.pairs
            products = (hz[one] * hz[other]).sum(1)
            zz = zz - zz.new_zeros(zz.numel()).index_add(
                0, level[one] * len(zz) + level[other], products
            ).view_as(zz)
        return _Eliminated(zz, zx, zy, xx, xy, yy, volume)

    def deviance(self, point: Tensor) -> Tensor:
        """Return the deviance at a point, differentiable, with the common coefficients at their best."""
        values = self.variances(point)
        noise, inside, levels = self.at(values)
        count = self.sums.rows.sum()
        left = self.eliminated(_root(inside, noise))
        _, zx, zy, size = _levels_eliminated(left, _root(levels, noise))
        xx, xy = left.xx - zx.mT @ zx, left.xy - zx.mT @ zy
        common = pseudo_solve(xx.detach(), xy.detach())
        rest = left.yy - zy @ zy - 2 * xy @ common + common @ xx @ common
        total = left.volume + size + count * (noise.log() + math.log(2 * math.pi)) + rest / noise
        if self.restricted:
            seen = torch.linalg.eigvalsh(xx / noise)
            kept = seen > 1e-10 * seen[-1].detach()
            total = total + seen[kept].log().sum() - int(kept.sum()) * math.log(2 * math.pi)
        return total

    def effects(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return common coefficients [p], effects of the levels [L], and the sum of the volumes at some variances."""
        noise, inside, levels = self.at(values)
        left, root = self.eliminated(_root(inside, noise)), _root(levels, noise)
        factor, zx, zy, size = _levels_eliminated(left, root)
        common = pseudo_solve(left.xx - zx.mT @ zx, left.xy - zx.mT @ zy)
        half = (zy - zx @ common).unsqueeze(-1)
        effect = root * torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(-1)
        return common, effect, left.volume + size

    def fit(
        self, start: Tensor, fixed: dict[int, float] | None = None, *, tolerance: float = 1e-10
    ) -> tuple[Tensor, float]:
        """Return the point with the smallest deviance, and that; some numbers may be kept as they are given."""
        fixed = dict(fixed or {}) | ({} if self.noise is None else {0: 0.0})
        return lowest(self.deviance, start, fixed, [(LOWEST, HIGHEST)] * len(start), tolerance=tolerance)

    def information(self, point: Tensor) -> Tensor:
        """Return half the second derivative of the deviance; 0 at variances of zero."""
        return information_of(self.deviance, point, self.free(point))

    def free(self, point: Tensor) -> list[int]:
        """Return which numbers are estimated and not at an end of their range."""
        return [k for k in range(int(self.noise is not None), len(point)) if float(point[k]) > LOWEST + 3]

    def sharpened(self, point: Tensor) -> Tensor:
        """Return the best point with its last digits right."""
        return sharpened(self.deviance, point, self.free(point))

    def without(self, point: Tensor, best: float) -> Tensor:
        """Return the point with variances set to zero that do not matter."""
        for at in range(1, len(point)):
            trial = point.clone()
            trial[at] = -torch.inf
            if float(self.deviance(trial)) < best + INDIFFERENT:
                point = trial
        return point


def _root(variance: Tensor, noise: Tensor) -> Tensor:
    """Return standard deviations over that of the noise; zero has the slope zero."""
    some = variance > 0
    return torch.where(some, (variance.where(some, 1.0) / noise).sqrt(), 0.0)


def _levels_eliminated(left: _Eliminated, root: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the factor of I + T^1/2 Z'Z T^1/2, its inverse times T^1/2 Z'X and T^1/2 Z'y, and its log determinant."""
    inner = root.unsqueeze(-1) * left.zz * root + torch.eye(len(root), dtype=root.dtype)
    factor = torch.linalg.cholesky(inner)
    right = root.unsqueeze(-1) * torch.cat([left.zx, left.zy.unsqueeze(-1)], 1)
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return factor, half[:, :-1], half[:, -1], 2 * factor.diagonal().log().sum()
