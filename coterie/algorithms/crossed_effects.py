"""Crossed and nested grouping columns: clients send sums over cells, the server fits the effects of the levels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.effect_groups import named_columns
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.models.glm import Glm
from coterie.theory.crossed import INDIFFERENT, CellSums, Crossed
from coterie.theory.laplace import minimum
from coterie.theory.variance_components import pattern

FIXED, UNUSED = -1, -2  # kinds of coefficients beside those of grouping columns 0, 1, ...
_NEWTON_STEPS = 30  # for the effects at given variances; three are usual
_SETTLED = 1e-9  # relative change of the objective that ends them
_SHORTEST = 1e-3  # share of a step that is tried
_DIGITS = 6  # of variances, so that machines whose last bits differ give the same
_NEWCOMER_STEPS = 25
_NOTHING = -25.0  # logarithm of a variance that stands for zero while effects are on their way there


@dataclass(frozen=True)
class Layout:
    """Which coefficients belong to which grouping column of a table.

    Parameters
    ----------
    names
        Grouping columns with levels.
    kinds
        Number of the grouping column of each coefficient, [d]; FIXED, or UNUSED for pooled and missing levels.
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
    def grouped(self) -> Tensor:
        """Places of the levels' effects in the order of the grouping columns, [L]."""
        return torch.cat([(self.kinds == k).nonzero().squeeze(-1) for k in range(len(self.names))])


def layout(fed: Federation) -> Layout | None:
    """Return the grouping columns of a federation from a table, or None if it has none."""
    if fed.table is None or not fed.table.preprocessor.spec.groups:
        return None
    encoding = fed.table.preprocessor
    varying = {choice.name for choice in encoding.choices}
    names = tuple(name for name in encoding.spec.groups if name in varying)
    kinds = torch.full((fed.d,), FIXED)
    place = len(encoding.feature_names) - sum(choice.width for choice in encoding.choices)
    for choice in encoding.choices:
        if choice.name in names:
            kinds[place : place + choice.width] = UNUSED
            kinds[place : place + len(choice.levels)] = names.index(choice.name)
        place += choice.width
    return Layout(names, kinds) if names else None


class CrossedEffects:
    """Phases and rounds of `Hierarchical` for tables with grouping columns."""

    choose: str
    effects: str
    slopes: str
    covariance: str
    variances: str
    noise: str
    tails: str

    def crossed_start(self, fed: Federation) -> State:
        """Return the state before the first round; raise `SettingError` for what these models cannot do."""
        model = fed.model
        if not isinstance(model, Glm) or model.outputs != 1 or model.d != model.columns:
            raise SettingError(
                "hierarchical: grouping columns need a model with one score per row: least squares, logistic or "
                "Poisson. Leave them out with --drop, or name one --cluster in which every client has one value"
            )
        usual = {"covariance": "diagonal", "variances": "shared", "noise": "one"}
        wrong = [f"{name} = {getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value]
        wrong += [f"tails = {self.tails!r}"] if self.tails == "t" else []
        wrong += [f"choose = {self.choose!r}"] if self.choose not in ("auto", "ml", "reml") else []
        if self.choose == "reml" and not model.has_statistics:
            wrong.append("choose = 'reml' of classes and counts")
        if wrong:
            raise SettingError(f"hierarchical: {wrong[0]} is not offered with several grouping columns")
        found = layout(fed)
        assert found is not None
        x = fed.initial_model()
        none = torch.zeros(1, fed.d, dtype=fed.dtype, device=fed.device)
        return State(x=x, centres=x[None], within=none, between=none[0], noise=1.0, done=False)

    def crossed_round(self, fed: Federation, s: State) -> State:
        """Fit all variances and effects; later rounds find nothing more to do."""
        found = layout(fed)
        assert found is not None
        fit = self._least_squares if fed.model.has_statistics else self._laplace
        return fit(fed, s, found)

    def _least_squares(self, fed: Federation, s: State, at: Layout) -> State:
        """Maximise the exact likelihood from one message of every client, and send the effects back."""
        replies = self._ask(fed, s, at)
        if not len(replies):
            return s
        model, point = self._best_model(fed, at, cell_sums(replies, at))
        values = _rounded(model.variances(model.without(point, float(model.deviance(point)))))
        common, effect, _ = model.effects(values)
        x = _filled(fed, at, common, effect)
        spread = torch.zeros(fed.d, dtype=torch.float64).index_copy(0, at.fixed, model.at(values)[1])
        s = s.replace(
            x=x,
            centres=x[None],
            within=spread.to(fed.device, fed.dtype)[None],
            noise=float(values[0]),
            variances=values,
            information=model.information(point),
            client_groups=model.groups,
            deviance=float(model.deviance(point)),
        )
        placed = fed.map(self.adjust, centre=s.x, spread=s.within[0], noise=s.noise)
        return s.replace(done=len(replies) == len(placed) == fed.n)

    def _best_model(self, fed: Federation, at: Layout, sums: CellSums) -> tuple[Crossed, Tensor]:
        """Return the likelihood and its best point; effects = "auto" takes what has the smallest AIC."""
        scores = []
        for groups in self._candidates(fed, at):
            model = Crossed(sums, groups, at.names, self.choose == "reml", ridge=_ridge(fed, at, sums.rows))
            point, deviance = model.fit(model.start())
            scores.append((deviance + 2 * len(point), model, point))
        _, model, point = min(scores, key=lambda one: one[0])
        return model, model.sharpened(point)

    def _candidates(self, fed: Federation, at: Layout) -> list[Tensor]:
        """Return which variance each common coefficient may have between clients, [p] for each possibility."""
        mask = fed.model.groups["intercept"].cpu()
        intercept = mask if bool(mask.any()) else None
        if self.slopes:
            groups = pattern("intercept", fed.d, intercept)
            for number, place in enumerate(named_columns(self.slopes, fed), int(groups.max()) + 1):
                groups[place] = number
            return [_numbered(groups[at.fixed])]
        names = [self.effects]
        if self.effects == "auto":
            names = ["same"] if intercept is None else ["intercept", "split"]
        found = [_numbered(pattern(name, fed.d, intercept)[at.fixed]) for name in names]
        return found[:1] if len(at.fixed) == 1 else found

    def _laplace(self, fed: Federation, s: State, at: Layout) -> State:
        """Maximise Laplace's approximation of the likelihood; every evaluation finds the mode of all effects."""
        groups = self._candidates(fed, at)[0]
        search = _ModeSearch(self, fed, s, at, groups)
        if search.first is None:
            return s
        point, height, information = minimum(search.deviance, search.first.start()[1:])
        for k in range(len(point)):
            trial = point.index_fill(0, torch.tensor(k), _NOTHING)
            if search.deviance(trial) < height + INDIFFERENT:
                point = trial
        height = search.deviance(point)  # clients and server move to the best point
        return search.s.replace(
            variances=search.values(point.masked_fill(point <= _NOTHING, -torch.inf)),
            information=information,
            client_groups=groups,
            deviance=height,
            done=len(search.replies) == fed.n,
        )

    def _ask(self, fed: Federation, s: State, at: Layout) -> Replies:
        """Ask clients for their sums over cells, around their present models."""
        width = min(int(fed.rows["train"].max()), prod(size + 1 for size in at.sizes))
        kinds = at.kinds.to(fed.device, fed.dtype)
        return fed.map(self.cells, centre=s.x, spread=s.within[0], kinds=kinds, width=width)

    def cells(self, client: Client, centre: Tensor, spread: Tensor, kinds: Tensor, width: int) -> Tensor:
        """Return sums over all rows and over the cells in which rows share their levels, as one vector.

        Weights and targets are those of the quadratic around the client's model: one and y for least squares.
        """
        d, kinds = centre.shape[-1], kinds.reshape(-1, kinds.shape[-1])[0].long()
        at = Layout(tuple(map(str, range(int(kinds.max()) + 1))), kinds)
        model = _plain(client)
        away = client.keep.model - centre
        pull = torch.where(spread > 0, away.square() / spread.where(spread > 0, 1.0), 0.0).sum(-1, keepdim=True)
        packed = torch.cat([client.keep.model.double(), client.size.double(), pull.double()], -1)

        def part(packed: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            t, size, pull = packed.split([d, 1, 1], -1)
            x, on = x.double(), weight.double() * size
            losses, h, v = _working(model, t, x, y, on)
            inside = x[..., at.fixed.to(x.device)]
            weighted = h.unsqueeze(-1) * inside
            whole = torch.cat(
                [
                    (weighted.mT @ inside).flatten(-2),
                    (inside.mT @ v.unsqueeze(-1)).squeeze(-1),
                    torch.where(h > 0, v.square() / h.where(h > 0, 1.0), 0.0).sum(-1, keepdim=True),
                    on.sum(-1, keepdim=True),
                    losses.sum(-1, keepdim=True),
                    pull,
                ],
                -1,
            )
            return torch.cat([whole, _by_cell(at, x, on, torch.cat([weighted, h.unsqueeze(-1), v.unsqueeze(-1)], -1), width)], -1)

        return client.over_rows(part, packed, reduce=False)

    def adjust(self, client: Client, centre: Tensor, spread: Tensor, noise: float) -> None:
        """Move the client's model to the new centre plus its own effects, by the quadratic around its present model."""
        client.keep.base = client.keep.model
        client.keep.model = client.keep.aim = _settled(client, client.keep.model, centre, spread, noise)

    def retreat(self, client: Client, share: float) -> None:
        """Go a part of the way of the last `adjust` only."""
        client.keep.model = client.keep.base + share * (client.keep.aim - client.keep.base)

    def greet(self, client: Client, centre: Tensor, spread: Tensor, noise: float) -> Tensor:
        """Return the model of a client that was not in training: its effects given those of the levels."""
        x = centre.expand(*client.size.shape[:-1], -1)
        for _ in range(1 if client.model.has_statistics else _NEWCOMER_STEPS):
            x = _settled(client, x, centre, spread, noise)
        return x

    def crossed_adapt(self, fed: Federation, s: State) -> Tensor:
        """Return models of new clients; the levels' effects stay as they are."""
        fed = fed.fresh()
        return fed.map(self.greet, centre=s.x, spread=s.within[0], noise=s.noise).put(s.x.expand(fed.n, -1))


    def variance_names(self, fed: Federation, s: State) -> list[str]:
        """Return what each of the variances is: noise, clients (by group of coefficients), grouping columns."""
        found, count = layout(fed), int(s.client_groups.max()) + 1
        assert found is not None
        clients = ["clients"] if count == 1 else [f"clients {k}" for k in range(count)]
        return ["noise", *clients, *found.names]

    def crossed_sds(self, fed: Federation, s: State) -> dict[str, Tensor]:
        """Return the standard deviations by name, in units of the target; of the noise for least squares only."""
        if "client_groups" not in s:
            return {}
        scale = fed.table.target_scale if fed.table is not None else 1.0
        pairs = list(zip(self.variance_names(fed, s), scale * s.variances.sqrt(), strict=True))
        return {f"sd {name}": value for name, value in pairs[0 if fed.model.has_statistics else 1 :]}

    def crossed_likelihood(self, fed: Federation, s: State) -> tuple[Crossed, Tensor, float]:
        """Return the likelihood of least squares, its best point and the deviance there."""
        at = layout(fed)
        assert at is not None
        if not fed.model.has_statistics:
            raise SettingError(
                "hierarchical: tests with several grouping columns are for least squares; run.variances() has "
                "intervals for classes and counts"
            )
        sums = cell_sums(self._ask(fed, s, at), at)
        model = Crossed(sums, s.client_groups, at.names, ridge=_ridge(fed, at, sums.rows))
        return model, *model.fit(model.start(s.variances))


class _ModeSearch:
    """Laplace's approximation at given variances, by Newton rounds of all clients."""

    def __init__(self, method: CrossedEffects, fed: Federation, s: State, at: Layout, groups: Tensor) -> None:
        self.method, self.fed, self.s, self.at, self.groups = method, fed, s, at, groups
        self.replies = method._ask(fed, s, at)
        self.first = self._model() if len(self.replies) else None

    def _model(self) -> Crossed:
        """Return the working model of the last answers."""
        sums = cell_sums(self.replies, self.at)
        return Crossed(sums, self.groups, self.at.names, noise=1.0, ridge=_ridge(self.fed, self.at, sums.rows))

    def values(self, point: Tensor) -> Tensor:
        """Return the variances at a point, in the units of the first model."""
        assert self.first is not None
        return self.first.variances(torch.cat([torch.zeros(1, dtype=torch.float64), point]))

    def deviance(self, point: Tensor) -> float:
        """Return -2 log likelihood by Laplace's approximation, and leave everybody at the mode of the effects."""
        assert self.first is not None
        values, method, fed = self.values(point), self.method, self.fed
        _, inside, levels = self.first.at(values)
        spread = torch.zeros(fed.d, dtype=torch.float64).index_copy(0, self.at.fixed, inside)
        self.s = self.s.replace(within=spread.to(fed.device, fed.dtype)[None])
        base = aim = self.s.x
        before, share, volume = torch.inf, 1.0, torch.zeros(())
        for _ in range(_NEWTON_STEPS):
            self.replies = method._ask(fed, self.s, self.at)
            model = self._model()
            height = self._height(model, levels)
            if height > before + _SETTLED * (1 + abs(before)) and share > _SHORTEST:
                share *= 0.5
                fed.map(method.retreat, share=share)
                self._move(base + share * (aim - base))
                continue
            common, effect, volume = model.effects(values)
            if abs(before - height) < _SETTLED * (1 + abs(height)):
                break
            base, aim, before, share = self.s.x, _filled(fed, self.at, common, effect), height, 1.0
            fed.map(method.adjust, centre=aim, spread=self.s.within[0], noise=1.0)
            self._move(aim)
        return height + float(volume)

    def _move(self, x: Tensor) -> None:
        self.s = self.s.replace(x=x, centres=x[None])

    def _height(self, model: Crossed, levels: Tensor) -> float:
        """Return twice the penalised loss of all clients at their present models."""
        p, x = len(self.at.fixed), self.s.x.double().cpu()
        losses, pulls = self.replies.values.double()[:, p * p + p + 2 : p * p + p + 4].sum(0)
        effect = x[self.at.grouped].square()
        own = torch.where(levels > 0, effect / levels.where(levels > 0, 1.0), 0.0).sum()
        assert model.ridge is not None
        return float(2 * losses + pulls + own + (model.ridge * x[self.at.fixed].square()).sum())


def cell_sums(replies: Replies, at: Layout) -> CellSums:
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


def _plain(client: Client) -> Glm:
    """Return the model without its penalty, which the server adds."""
    assert isinstance(client.model, Glm)
    return replace(client.model, l2=0.0)


def _working(model: Glm, t: Tensor, x: Tensor, y: Tensor, on: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, second derivatives h, and h z - g of rows with scores z and first derivatives g; 0 on padding."""
    scores = t.unsqueeze(-2) @ x.mT
    losses, first, second = model.row_derivatives(scores, y)
    h, z = second.squeeze(-2).squeeze(-2), scores.squeeze(-2)
    return losses * on, h * on, (h * z - first.squeeze(-2)) * on


def _settled(client: Client, model: Tensor, centre: Tensor, spread: Tensor, noise: float) -> Tensor:
    """Return centre plus the client's effects that minimise the quadratic around its model."""
    d, plain = centre.shape[-1], _plain(client)
    spread = spread.reshape(-1, d)[0]
    varies = (spread > 0).nonzero().squeeze(-1)
    if not len(varies):
        return centre.expand_as(model).clone()
    centre = centre.expand_as(model)
    packed = torch.cat([model.double(), centre.double(), client.size.double()], -1)

    def part(packed: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        t, w, size = packed.split([d, d, 1], -1)
        x = x.double()
        _, h, v = _working(plain, t, x, y, weight.double() * size)
        inside = x[..., varies]
        left = v - h * (x @ w.unsqueeze(-1)).squeeze(-1)
        a = (h.unsqueeze(-1) * inside).mT @ inside + noise * torch.diag(1 / spread[varies].double())
        own = torch.linalg.solve(a, (inside.mT @ left.unsqueeze(-1)).squeeze(-1))
        return torch.zeros_like(w).index_copy(-1, varies, own)

    return centre + client.over_rows(part, packed, reduce=False).to(centre.dtype)


def _by_cell(at: Layout, x: Tensor, on: Tensor, sums: Tensor, width: int) -> Tensor:
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


def _filled(fed: Federation, at: Layout, common: Tensor, effect: Tensor) -> Tensor:
    """Return the model of common coefficients and effects of levels, [d]."""
    x = torch.zeros(fed.d, dtype=torch.float64).index_copy(0, at.fixed, common)
    return x.index_copy(0, at.grouped, effect).to(fed.device, fed.dtype)


def _ridge(fed: Federation, at: Layout, rows: Tensor) -> Tensor:
    """Return the model's penalty on the common coefficients, summed over rows, [p]."""
    assert isinstance(fed.model, Glm)
    strength = fed.model.l2 * float(rows.sum() if fed.model.reduction == "mean" else len(rows))
    return strength * fed.model.groups["weights"].cpu().double()[at.fixed]


def _numbered(groups: Tensor) -> Tensor:
    """Return groups with the numbers 0, 1, ... without gaps, and -1 as it is."""
    found = groups.unique(return_inverse=True)[1]
    return found - int(bool((groups < 0).any()))


def _rounded(values: Tensor) -> Tensor:
    """Return variances with six digits."""
    step = 10.0 ** (values.clamp(min=1e-300).log10().floor() - (_DIGITS - 1))
    return torch.where(values > 0, (values / step).round() * step, 0.0)
