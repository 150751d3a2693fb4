"""Crossed and nested grouping columns: clients send sums over cells, the server fits the effects of the levels."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.crossed_cells import (
    CrossedLayout,
    cell_sums,
    layout,
    plain_model,
    settled_effects,
    sums_by_cell,
    working_rows,
)
from coterie.algorithms.crossed_modes import ModeSearch, filled, ridge
from coterie.algorithms.effect_groups import called, named_columns
from coterie.algorithms.marginal_effects import of_all
from coterie.algorithms.quadratics import digits
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.models.extended_glm import ExtendedGlm
from coterie.models.glm import Glm
from coterie.theory.crossed import INDIFFERENT, CellSums, Crossed
from coterie.theory.hierarchical import pulled_share
from coterie.theory.laplace import minimum
from coterie.theory.variance_components import pattern

_NEWCOMER_STEPS = 25
_NOTHING = -25.0  # logarithm of a variance that stands for zero while effects are on their way there


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
        one_score = isinstance(model, Glm) and (model.d == model.columns or isinstance(model, ExtendedGlm))
        if not one_score:
            raise SettingError(
                "hierarchical: grouping columns need a model with one predictor per row: least squares, logistic, "
                "Poisson, negative binomial or ordinal (--model ordinal for classes in an order). Else leave the "
                "columns out with --drop, or name one --cluster in which every client has one value"
            )
        usual = {"covariance": "diagonal", "variances": "shared", "noise": "one"}
        wrong = [
            f"{name} = {getattr(self, name)!r}"
            for name, value in usual.items()
            if getattr(self, name) != value
        ]
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

    def _least_squares(self, fed: Federation, s: State, at: CrossedLayout) -> State:
        """Maximise the exact likelihood from one message of every client, and send the effects back."""
        replies = self.ask(fed, s, at)
        if not len(replies):
            return s
        model, point = self._best_model(fed, at, cell_sums(replies, at))
        values = digits(model.variances(model.without(point, float(model.deviance(point)))))
        common, effect, _ = model.effects(values)
        x = filled(fed, at, common, effect, s.x)
        spread = torch.zeros(fed.d, dtype=torch.float64).index_copy(0, at.fixed, model.at(values)[1])
        s = s.replace(
            x=x,
            centres=x[None],
            within=spread.to(fed.device, fed.dtype)[None],
            noise=float(values[0]),
            variances=values,
            information=model.information(point),
            client_groups=model.groups,
            shrinkage=_shares(fed, replies, model, values),
            deviance=float(model.deviance(point)),
        )
        placed = fed.map(self.adjust, centre=s.x, spread=s.within[0], noise=s.noise)
        return s.replace(done=len(replies) == len(placed) == fed.n)

    def _best_model(self, fed: Federation, at: CrossedLayout, sums: CellSums) -> tuple[Crossed, Tensor]:
        """Return the likelihood and its best point; effects = "auto" takes what has the smallest AIC."""
        scores = []
        for groups in self._candidates(fed, at):
            model = Crossed(sums, groups, at.names, self.choose == "reml", ridge=ridge(fed, at, sums.rows))
            point, deviance = model.fit(model.start())
            scores.append((deviance + 2 * len(point), model, point))
        _, model, point = min(scores, key=lambda one: one[0])
        return model, model.sharpened(point)

    def _candidates(self, fed: Federation, at: CrossedLayout) -> list[Tensor]:
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

    def _laplace(self, fed: Federation, s: State, at: CrossedLayout) -> State:
        """Maximise Laplace's approximation of the likelihood; every evaluation finds the mode of all effects."""
        groups = self._candidates(fed, at)[0]
        search = ModeSearch(self, fed, s, at, groups)
        if search.first is None:
            return s
        point, height, information = minimum(search.deviance, search.start())
        for k in range(len(point) - len(at.extras)):
            trial = point.index_fill(0, torch.tensor(k), _NOTHING)
            if search.deviance(trial) < height + INDIFFERENT:
                point = trial
        height = search.deviance(point)  # clients and server move to the best point
        return search.s.replace(
            variances=search.values(point.masked_fill(point <= _NOTHING, -torch.inf)),
            information=_without_last(information, len(at.extras)),
            client_groups=groups,
            shrinkage=_shares(fed, search.replies, search.model(), search.values(point)),
            deviance=height,
            done=len(search.replies) == fed.n,
        )

    def ask(self, fed: Federation, s: State, at: CrossedLayout) -> Replies:
        """Ask clients for their sums over cells, around their present models."""
        width = min(int(fed.rows["train"].max()), prod(size + 1 for size in at.sizes))
        kinds = at.kinds.to(fed.device, fed.dtype)
        return fed.map(self.cells, centre=s.x, spread=s.within[0], kinds=kinds, width=width)

    def cells(self, client: Client, centre: Tensor, spread: Tensor, kinds: Tensor, width: int) -> Tensor:
        """Return sums over all rows and over the cells in which rows share their levels, as one vector.

        Weights and targets are those of the quadratic around the client's model: one and y for least squares.
        """
        d, kinds = centre.shape[-1], kinds.reshape(-1, kinds.shape[-1])[0].long()
        at = CrossedLayout(tuple(map(str, range(int(kinds.max()) + 1))), kinds)
        model = plain_model(client)
        away = client.keep.model - centre
        pull = torch.where(spread > 0, away.square() / spread.where(spread > 0, 1.0), 0.0).sum(
            -1, keepdim=True
        )
        packed = torch.cat([client.keep.model.double(), client.size.double(), pull.double()], -1)

        def part(packed: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            t, size, pull = packed.split([d, 1, 1], -1)
            x, on = x.double(), weight.double() * size
            losses, h, v = working_rows(model, t, x, y, on)
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
            return torch.cat(
                [
                    whole,
                    sums_by_cell(
                        at, x, on, torch.cat([weighted, h.unsqueeze(-1), v.unsqueeze(-1)], -1), width
                    ),
                ],
                -1,
            )

        return client.over_rows(part, packed, reduce=False)

    def adjust(self, client: Client, centre: Tensor, spread: Tensor, noise: float) -> None:
        """Move the client's model to the new centre plus its own effects, by the quadratic around its present model."""
        client.keep.base = client.keep.model
        client.keep.model = client.keep.aim = settled_effects(
            client, client.keep.model, centre, spread, noise
        )

    def retreat(self, client: Client, share: float) -> None:
        """Go a part of the way of the last `adjust` only."""
        client.keep.model = client.keep.base + share * (client.keep.aim - client.keep.base)

    def greet(self, client: Client, centre: Tensor, spread: Tensor, noise: float) -> Tensor:
        """Return the model of a client that was not in training: its effects given those of the levels."""
        x = centre.expand(*client.size.shape[:-1], -1)
        for _ in range(1 if client.model.has_statistics else _NEWCOMER_STEPS):
            x = settled_effects(client, x, centre, spread, noise)
        return x

    def crossed_adapt(self, fed: Federation, s: State) -> Tensor:
        """Return models of new clients; the levels' effects stay as they are."""
        fed = fed.fresh()
        return fed.map(self.greet, centre=s.x, spread=s.within[0], noise=s.noise).put(s.x.expand(fed.n, -1))

    def variance_names(self, fed: Federation, s: State) -> list[str]:
        """Return what each of the variances is: noise, clients (by group of coefficients), grouping columns."""
        found, count = layout(fed), int(s.client_groups.max()) + 1
        assert found is not None
        clients = ["clients"]
        if count > 1:
            each = [found.fixed[s.client_groups.cpu() == k].tolist() for k in range(count)]
            clients = [f"clients: {called(fed, places)}" for places in each]
        return ["noise", *clients, *found.names]

    def crossed_sds(self, fed: Federation, s: State) -> dict[str, Tensor]:
        """Return the standard deviations by name, in units of the target; of the noise for least squares only."""
        if "client_groups" not in s:
            return {}
        scale = fed.table.target_scale if fed.table is not None else 1.0
        pairs = list(zip(self.variance_names(fed, s), scale * s.variances.sqrt(), strict=True))
        pairs = pairs[0 if fed.model.has_statistics else 1 :]
        shrinkage = {"shrinkage": s.shrinkage} if "shrinkage" in s else {}
        return {f"sd {name}": value for name, value in pairs} | shrinkage

    def laplace_without(self, fed: Federation, s: State, parts: dict[str, list[int]]) -> dict[str, float]:
        """Return the smallest deviance without each part of the variances (by place, the noise not counted)."""
        at = layout(fed)
        assert at is not None
        search, found = ModeSearch(self, fed, s, at, s.client_groups), {}
        here = search.start(s.variances)
        point = here.clamp(min=-6.0)
        for name, places in parts.items():
            kept = torch.tensor([k for k in range(len(point)) if k not in places], dtype=torch.long)
            base = torch.full_like(point, _NOTHING)

            def deviance(some: Tensor, base: Tensor = base, kept: Tensor = kept) -> float:
                return search.deviance(base.index_copy(0, kept, some))

            found[name] = minimum(deviance, point[kept])[1] if len(kept) else search.deviance(base)
        search.deviance(here)  # clients and server are where they were
        return found

    def crossed_likelihood(
        self, fed: Federation, s: State, *, restricted: bool = False
    ) -> tuple[Crossed, Tensor, float]:
        """Return the likelihood of least squares, its best point and the deviance there."""
        at = layout(fed)
        assert at is not None
        sums = cell_sums(self.ask(fed, s, at), at)
        model = Crossed(sums, s.client_groups, at.names, restricted, ridge=ridge(fed, at, sums.rows))
        return model, *model.fit(model.start(s.variances))


def _shares(fed: Federation, replies: Replies, model: Crossed, values: Tensor) -> Tensor:
    """Return the share of each client's coefficients that comes from the common ones, [n]."""
    noise, inside, _ = model.at(values)
    return of_all(fed, replies, pulled_share(model.sums.xx / noise, inside.expand_as(model.sums.xy)))


def _without_last(information: Tensor, count: int) -> Tensor:
    """Return the information about all numbers but the last, which are not known either."""
    if not count:
        return information
    kept, across, last = (
        information[:-count, :-count],
        information[:-count, -count:],
        information[-count:, -count:],
    )
    left: Tensor = kept - across @ torch.linalg.pinv(last, hermitian=True) @ across.mT
    return left


def _numbered(groups: Tensor) -> Tensor:
    """Return groups with the numbers 0, 1, ... without gaps, and -1 as it is."""
    found: Tensor = groups.unique(return_inverse=True)[1]
    return found - int(bool((groups < 0).any()))
