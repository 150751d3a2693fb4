"""Cells of a client: the rows that share their levels in all grouping columns, and sums over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.replies import Replies
from coterie.models.extended_glm import ExtendedGlm
from coterie.models.glm import Glm
from coterie.theory.crossed import CellSums

# kinds of coefficients beside those of grouping columns 0, 1, ...
FIXED, UNUSED, EXTRA = -1, -2, -3


@dataclass(frozen=True)
class CrossedLayout:
    """Which coefficients belong to which grouping column of a table.

    Parameters
    ----------
    names
        Grouping columns with levels.
    kinds
        Number of the grouping column of each coefficient, [d]; FIXED, UNUSED for pooled and missing levels, or EXTRA
        for a parameter beside the predictor, such as a dispersion or a cut point.
    """

    names: tuple[str, ...]
    kinds: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of levels of each grouping column."""
        return tuple(int((self.kinds == k).sum()) for k in range(len(self.names)))

    @property
    def fixed(self) -> Tensor:
        """Places of the common coefficients, [p]."""
        return (self.kinds == FIXED).nonzero().squeeze(-1)

    @property
    def extras(self) -> Tensor:
        """Places of the parameters beside the predictor, [E]."""
        return (self.kinds == EXTRA).nonzero().squeeze(-1)

    @property
    def grouped(self) -> Tensor:
        """Places of the levels' effects in the order of the grouping columns, [L]."""
        return torch.cat([(self.kinds == k).nonzero().squeeze(-1) for k in range(len(self.names))])


def layout(fed: Federation) -> CrossedLayout | None:
    """Return the grouping columns of a federation from a table, or None if it has none."""
    if fed.table is None or not fed.table.preprocessor.spec.groups:
        return None
    encoding = fed.table.preprocessor
    varying = {choice.name for choice in encoding.choices}
    names = tuple(name for name in encoding.spec.groups if name in varying)
    kinds = torch.full((fed.d,), FIXED)
    if isinstance(fed.model, ExtendedGlm):
        kinds[fed.model.groups["extras"].cpu()] = EXTRA
    place = len(encoding.feature_names) - sum(choice.width for choice in encoding.choices)
    for choice in encoding.choices:
        if choice.name in names:
            kinds[place : place + choice.width] = UNUSED
            kinds[place : place + len(choice.levels)] = names.index(choice.name)
        place += choice.width
    return CrossedLayout(names, kinds) if names else None


def cell_sums(replies: Replies, at: CrossedLayout) -> CellSums:
    """Return what clients sent from `cells`."""
    p, k, values = len(at.fixed), len(at.names), replies.values.double().cpu()
    xx, xy, rest, cells = values.split([p * p, p, 4, values.shape[1] - p * p - p - 4], 1)
    cells = cells.unflatten(1, (-1, k + p + 2))
    client, cell = (cells[..., -2] > 0).nonzero(as_tuple=True)
    table = cells[client, cell]
    sizes = torch.tensor(at.sizes)
    first, levels = sizes.cumsum(0) - sizes, table[:, :k].round().long()
    return CellSums(
        xx.unflatten(1, (p, p)),
        xy,
        rest[:, 0],
        rest[:, 1],
        client,
        torch.where((levels >= 0) & (levels < sizes), levels + first, -1),
        table[:, -2],
        table[:, k : k + p],
        table[:, -1],
        at.sizes,
    )


def plain_model(client: Client) -> Glm:
    """Return the model without its penalty, which the server adds."""
    assert isinstance(client.model, Glm)
    return replace(client.model, l2=0.0)


def working_rows(model: Glm, t: Tensor, x: Tensor, y: Tensor, on: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, second derivatives h, and h z - g of rows with predictors z and first derivatives g; 0 on padding.

    Parameters beside the predictor stay as they are in t.
    """
    z, extras = (x @ t[..., : x.shape[-1]].unsqueeze(-1)).squeeze(-1), t[..., x.shape[-1] :].unsqueeze(-1)
    if isinstance(model, ExtendedGlm):
        losses, g, h = model.predictor_derivatives(z, extras, y)
    else:
        losses, first, second = model.row_derivatives(z.unsqueeze(-2), y)
        g, h = first.squeeze(-2), second.squeeze(-2).squeeze(-2)
    return losses * on, h * on, (h * z - g) * on


def settled_effects(client: Client, model: Tensor, centre: Tensor, spread: Tensor, noise: float) -> Tensor:
    """Return centre plus the client's effects that minimise the quadratic around its model."""
    d, plain = centre.shape[-1], plain_model(client)
    spread = spread.reshape(-1, d)[0]
    varies = (spread > 0).nonzero().squeeze(-1)
    if not len(varies):
        return centre.expand_as(model).clone()
    centre = centre.expand_as(model)
    packed = torch.cat([model.double(), centre.double(), client.size.double()], -1)

    def part(packed: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        t, w, size = packed.split([d, d, 1], -1)
        x = x.double()
        _, h, v = working_rows(plain, t, x, y, weight.double() * size)
        inside = x[..., varies]
        left = v - h * (x @ w[..., : x.shape[-1]].unsqueeze(-1)).squeeze(-1)
        a = (h.unsqueeze(-1) * inside).mT @ inside + noise * torch.diag(1 / spread[varies].double())
        own = torch.linalg.solve(a, (inside.mT @ left.unsqueeze(-1)).squeeze(-1))
        return torch.zeros_like(w).index_copy(-1, varies, own)

    return centre + client.over_rows(part, packed, reduce=False).to(centre.dtype)


def sums_by_cell(at: CrossedLayout, x: Tensor, on: Tensor, sums: Tensor, width: int) -> Tensor:
    """Return levels and sums [..., width, K + s] of the cells of each client, flat; a row without a level has -1."""
    key, codes = torch.zeros(on.shape, dtype=torch.long, device=x.device), []
    for k, size in enumerate(at.sizes):
        block = x[..., (at.kinds == k).nonzero().squeeze(-1).to(x.device)]
        code = torch.where(block.amax(-1) > 0.5, block.argmax(-1), -1)
        codes.append(code)
        key = key * (size + 1) + code + 1
    key = torch.where(on > 0, key, torch.iinfo(torch.long).max)
    key, order = key.sort(-1)
    cell = torch.cat([torch.zeros_like(key[..., :1]), (key[..., 1:] != key[..., :-1]).long()], -1).cumsum(-1)
    cell = torch.zeros_like(cell).scatter(-1, order, cell.clamp(max=width - 1))  # of each row
    code = torch.where(on.unsqueeze(-1) > 0, torch.stack(codes, -1).double(), -1.0)
    index = cell.unsqueeze(-1)
    none = x.new_zeros(*on.shape[:-1], width, 1)
    levels = none.expand(*none.shape[:-1], len(codes)).clone() - 1
    levels = levels.scatter_reduce(-2, index.expand_as(code), code, "amax")
    added = none.expand(*none.shape[:-1], sums.shape[-1]).scatter_add(-2, index.expand_as(sums), sums)
    return torch.cat([levels, added], -1).flatten(-2)
