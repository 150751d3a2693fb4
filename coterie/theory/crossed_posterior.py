"""How sure a mixed model with several grouping factors is of its clients, its levels and its predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from coterie.theory.crossed import Crossed

_STEP = 1e-3  # of differences in logarithms of variances


@dataclass(frozen=True)
class CrossedPosterior:
    """Coefficients of clients and effects of levels given all rows, with their uncertainty.

    Covariances are exact at known variances; that these are estimated adds the first-order term of Kass and Steffey
    (1989).

    Parameters
    ----------
    model
        The likelihood.
    values
        Its variances: noise, between clients, of the factors.
    doubt
        Covariance of the logarithms of these, noise included.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.crossed import CellSums, Crossed
    >>> from coterie.theory.crossed_posterior import CrossedPosterior
    >>> x, levels = [torch.ones(2, 1)] * 2, [torch.tensor([[0], [1]])] * 2
    >>> sums = CellSums.of(x, [torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0])], levels, sizes=(2,))
    >>> model = Crossed(sums, torch.tensor([0]), ("factor",))
    >>> found = CrossedPosterior(model, torch.tensor([1.0, 1.0, 1.0]).double(), torch.zeros(3, 3).double())
    >>> [round(value, 3) for value in found.clients.flatten().tolist()]
    [2.167, 2.833]
    >>> round(found.row_error(0, torch.ones(1, 1), torch.tensor([[1.0, 0.0]])).item(), 3)
    0.764
    """

    model: Crossed
    values: Tensor
    doubt: Tensor

    @cached_property
    def _settled(self) -> tuple[Tensor, Tensor]:
        return self._at(self.values)

    @property
    def clients(self) -> Tensor:
        """Coefficients of each client, [n, p]."""
        return self._settled[0]

    @property
    def levels(self) -> Tensor:
        """Effects of the levels, [L]."""
        return self._settled[1]

    def _own(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return which coefficients differ between clients [v], and their covariances given all others, [n, v, v]."""
        noise, inside, _ = self.model.at(values)
        varies = (inside > 0).nonzero().squeeze(-1)
        a = self.model.sums.xx[:, varies][:, :, varies] / noise + torch.diag(1 / inside[varies])
        return varies, torch.linalg.inv(a)

    def _at(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return coefficients of clients and effects of levels at some variances."""
        sums = self.model.sums
        common, effect, _ = self.model.effects(values)
        varies, cover = self._own(values)
        client, level, touched = sums.touched
        left = sums.xy - sums.xx @ common
        left = left - torch.zeros_like(left).index_add(0, client, touched * effect[level].unsqueeze(-1))
        own = (cover @ left[:, varies].unsqueeze(-1)).squeeze(-1) / values[0]
        return common + torch.zeros_like(left).index_copy(1, varies, own), effect

    @cached_property
    def slopes(self) -> tuple[Tensor, Tensor]:
        """Derivatives of `clients` [n, p, k] and `levels` [L, k] in the logarithms of the variances."""
        found = []
        for k in range(len(self.values)):
            if float(self.doubt[k, k]) == 0:
                found.append((torch.zeros_like(self.clients), torch.zeros_like(self.levels)))
                continue
            factor = torch.ones_like(self.values).index_fill(0, torch.tensor(k), math.exp(_STEP))
            there, back = self._at(self.values * factor), self._at(self.values / factor)
            found.append(((there[0] - back[0]) / (2 * _STEP), (there[1] - back[1]) / (2 * _STEP)))
        return torch.stack([one for one, _ in found], -1), torch.stack([one for _, one in found], -1)

    @cached_property
    def shared(self) -> Tensor:
        """Covariance of common coefficients and levels, the clients' own effects integrated out, [p + L, p + L]."""
        noise, inside, levels = self.model.at(self.values)
        left = self.model.eliminated((inside / noise).sqrt())
        root = levels.sqrt()
        inner = root.unsqueeze(-1) * left.zz * root / noise + torch.eye(len(root), dtype=root.dtype)
        cover = root.unsqueeze(-1) * torch.cholesky_inverse(torch.linalg.cholesky(inner)) * root  # [L, L]
        pull = cover @ left.zx / noise  # [L, p]
        common = torch.linalg.pinv(left.xx / noise - left.zx.mT @ pull / noise, hermitian=True)
        above = torch.cat([common, -common @ pull.mT], 1)
        below = torch.cat([-pull @ common, cover + pull @ common @ pull.mT], 1)
        return torch.cat([above, below])

    def _lever(self, client: int) -> Tensor:
        """Return the derivative of a client's coefficients in common coefficients and levels, [p, p + L]."""
        sums, p = self.model.sums, self.model.sums.xx.shape[-1]
        varies, cover = self._own_cached
        owner, level, touched = sums.touched
        mine = owner == client
        crossing = torch.zeros(p, sums.total, dtype=torch.float64)
        crossing[:, level[mine]] = touched[mine].mT
        pulled = torch.cat([sums.xx[client], crossing], 1)[varies]
        lever = torch.cat([torch.eye(p, dtype=torch.float64), torch.zeros_like(crossing)], 1)
        return lever.index_add(0, varies, -cover[client] @ pulled / self.values[0])

    @cached_property
    def _own_cached(self) -> tuple[Tensor, Tensor]:
        return self._own(self.values)

    def row_error(self, client: int, x: Tensor, z: Tensor) -> Tensor:
        """Return standard deviations of the scores of rows, noise left out.

        Parameters
        ----------
        client
            Number of the client.
        x
            Features of the rows, [rows, p].
        z
            Their levels, one-hot, [rows, L].

        Returns
        -------
        Tensor
            [rows].
        """
        varies, cover = self._own_cached
        x, z = x.double(), z.double()
        inside = x[:, varies]
        variance = ((inside @ cover[client]) * inside).sum(-1)
        lever = x @ self._lever(client)
        lever[:, x.shape[1] :] += z
        variance = variance + ((lever @ self.shared) * lever).sum(-1)
        own, levels = self.slopes
        along = x @ own[client] + z @ levels
        variance = variance + ((along @ self.doubt) * along).sum(-1)
        return variance.clamp(min=0).sqrt()

    def client_errors(self) -> Tensor:
        """Return standard deviations of the clients' coefficients, [n, p]."""
        n, p = self.clients.shape
        identity, none = torch.eye(p), torch.zeros(p, self.model.sums.total)
        return torch.stack([self.row_error(client, identity, none) for client in range(n)])

    def level_errors(self) -> Tensor:
        """Return standard deviations of the effects of levels, [L]."""
        p = self.clients.shape[1]
        _, slopes = self.slopes
        variance = self.shared.diagonal()[p:] + ((slopes @ self.doubt) * slopes).sum(-1)
        return variance.clamp(min=0).sqrt()

    def shrinkage(self) -> Tensor:
        """Return the share of each client's coefficient that comes from the common one, [n, p]."""
        varies, cover = self._own_cached
        _, inside, _ = self.model.at(self.values)
        share = cover.diagonal(dim1=-2, dim2=-1) / inside[varies]
        return torch.ones_like(self.clients).index_copy(1, varies, share.clamp(0, 1))
