"""Generalised linear mixed models in rounds: clients integrate over their effects, the server takes Newton steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.models.glm import Glm
from coterie.theory.marginal import LikelihoodRows, Marginal, Structure, find_mode, marginal
from coterie.theory.marginal_newton import ModelPoint, NewtonStep, newton_step
from coterie.theory.mixed_likelihood import maximum_likelihood
from coterie.theory.quadrature import MOST_DIMENSIONS, rule
from coterie.theory.variance_components import Components, Sums

QUADRATIC_ROUNDS = 2  # of the quadratic model, whose variances the search starts from
_CHUNK = 2**18  # numbers of one row, point and score that are computed at once: what a core's cache holds
SETTLED = 1e-9  # gain of log likelihood that ends the search
WORSE = 1e-2  # loss of log likelihood that sends it back
_START = 0.1  # smallest variance to start from, as a share of its scale


class MarginalEffects:
    """Phases and rounds of `Hierarchical` for losses that are not quadratic."""

    covariance: str
    variances: str

    @property
    def link(self) -> str:
        """Link of the clients."""
        raise NotImplementedError

    def integrates(self, fed: Federation, groups: Tensor) -> bool:
        """Return True if clients can integrate over their effects."""
        count = int((groups >= 0).sum())
        return isinstance(fed.model, Glm) and not fed.model.has_statistics and 1 <= count <= MOST_DIMENSIONS

    def first_point(self, fed: Federation, s: State, found: Components, sums: Sums) -> dict[str, Any]:
        """Return the state fields from which the search starts: variances of the quadratic model, none of them zero."""
        structure = self.structure(s.groups)
        information = sums.xx.sum(0).diagonal() / fed.rows["train"].sum().clamp(min=1)
        scale = (0.5 / information.clamp(min=1e-12 * float(information.max().clamp(min=1e-300)))).cpu()
        within = found.within if found.within.dim() == 2 else found.within.diagonal(dim1=-2, dim2=-1)
        levels = len(within) if self.variances == "cluster" else 1
        sizes = torch.maximum(within[:levels].cpu(), _START * scale)[:, structure.at].sqrt()
        psi = torch.zeros(levels, structure.p, dtype=torch.float64)
        on = structure.row == structure.column
        psi[:, structure.parameter[on]] = sizes[:, structure.row[on]]
        largest = torch.zeros(structure.p, dtype=torch.float64)
        largest[structure.parameter] = scale.sqrt()[structure.at[structure.row]]
        return {"psi": psi.to(fed.device), "largest": largest.to(fed.device), "height": -torch.inf}

    def structure(self, groups: Tensor) -> Structure:
        """Return which entries of the effects' covariance may differ from zero."""
        return Structure.of(groups.long(), full=self.covariance == "full")

    def marginal_round(self, fed: Federation, s: State, clusters: Tensor, restricted: bool) -> State:
        """Ask clients for their marginal likelihoods, and move the centres and variances by a Newton step."""
        structure = self.structure(s.groups)
        here = ModelPoint(s.x.double(), s.centres.double(), s.psi, s.between.double())
        replies = fed.map(self.contribute, each=self.sent(s, clusters), groups=s.groups, link=self.link)
        if not len(replies):
            return s
        answers, mine = unpacked(replies, structure), clusters[replies.ids]
        found = weighted(answers, s, replies)
        largest = torch.maximum(s.largest, here.psi.abs().amax(0))
        step = newton_step(here, found, mine, structure, largest, restricted=restricted)
        whole = len(replies) == fed.n
        if whole and step.value < s.height - WORSE and "base_psi" in s:
            base = ModelPoint(s.base_x, s.base_centres, s.base_psi, here.between)
            return self._moved(fed, s, base.towards(here, 0.25), clusters)
        settled = whole and step.gain < SETTLED * (1 + abs(step.value) * 1e-3)
        s = s.replace(
            base_x=here.common,
            base_centres=here.centres,
            base_psi=here.psi,
            height=step.value if whole else s.height,
            shrinkage=of_all(fed, replies, _shares(structure, here.psi, answers.hessian, mine)),
            certainty=step.certainty.to(fed.dtype),
            information=step.information,
            done=settled,
        )
        if settled:
            return s
        target = step.target
        if len(here.centres) > 1:
            target = self.with_between(here, found, mine, step, s, restricted=restricted)
        return self._moved(fed, s, target, clusters)

    def with_between(
        self,
        here: ModelPoint,
        found: Marginal,
        clusters: Tensor,
        step: NewtonStep,
        s: State,
        *,
        restricted: bool,
    ) -> ModelPoint:
        """Return the step's target with variances of the centres that fit what clusters say about theirs."""
        near = Components(1.0, here.between.expand(1, -1), torch.zeros_like(here.between))
        sums = between_sums(here, found, clusters)
        got = maximum_likelihood(sums, s.groups.long(), noise=1.0, restricted=restricted, near=near)
        between = got.within[0].where(
            got.within[0] < torch.finfo(s.x.dtype).max, here.between
        )  # no end in sight
        return ModelPoint(step.target.common, step.target.centres, step.target.psi, between)

    def _moved(self, fed: Federation, s: State, point: ModelPoint, clusters: Tensor) -> State:
        """Move clients and server to a point."""
        structure = self.structure(s.groups)
        root = structure.factor(point.psi)
        within = (root @ root.mT).expand(len(point.centres), -1, -1)
        if self.covariance != "full":
            within = within.diagonal(dim1=-2, dim2=-1)
        s = s.replace(
            x=point.common.to(fed.dtype),
            centres=point.centres.to(fed.dtype),
            psi=point.psi,
            between=point.between.to(fed.dtype),
            within=within.contiguous().to(fed.dtype),
        )
        fed.map(self.follow, each=self.sent(s, clusters), groups=s.groups, link=self.link)
        return s

    def sent(self, s: State, clusters: Tensor) -> dict[str, Tensor]:
        """Return what each client is sent: its cluster's centre, and psi."""
        psi = s.psi[clusters] if len(s.psi) > 1 else s.psi.expand(len(clusters), -1)
        return {"centre": s.centres[clusters], "psi": psi}

    def follow(self, client: Client, centre: Tensor, psi: Tensor, groups: Tensor) -> None:
        """Move the client's model to the mode of its effects."""
        found = self._over_rows(client, centre, psi, groups, integrate=False)
        client.keep.model = found[..., -centre.shape[-1] :].to(centre.dtype)

    def contribute(self, client: Client, centre: Tensor, psi: Tensor, groups: Tensor) -> Tensor:
        """Return value, gradient and Hessian (its lower triangle) of the log marginal likelihood in (w, psi)."""
        found = self._over_rows(client, centre, psi, groups, integrate=True)
        client.keep.model = found[..., -centre.shape[-1] :].to(centre.dtype)
        return found[..., : -centre.shape[-1]]

    def _over_rows(
        self, client: Client, centre: Tensor, psi: Tensor, groups: Tensor, *, integrate: bool
    ) -> Tensor:
        """Return the mode of a client's model, after its marginal likelihood where that is asked for."""
        d, p = centre.shape[-1], psi.shape[-1]
        structure = self.structure(groups.reshape(-1, d)[0])  # the same for all clients
        assert isinstance(client.model, Glm)
        model = replace(client.model, l2=0.0)
        penalty = 0.0 if client.model.l2 == 0 else client.model.l2 * client.groups["weights"].double()
        packed = torch.cat(
            [centre.double(), psi.double(), client.keep.model.double(), client.size.double()], -1
        )

        def part(packed: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            w, psi, t, size = packed.split([d, p, d, 1], -1)
            rows = LikelihoodRows(
                model.design(x.double()),
                weight.double() * size,
                lambda z: model.row_derivatives(z, _like(y, z, x)),
            )
            factor = structure.factor(psi)
            start = (torch.linalg.pinv(factor) @ (t - w).unsqueeze(-1)).squeeze(-1).clamp(-4.0, 4.0)
            mode = find_mode(rows, w, factor, start)
            if not integrate:
                return mode.model
            got = marginal(rows, structure, mode, w, psi, rule(structure.q))
            strength = size if client.model.reduction == "mean" else torch.ones_like(size)
            drawn = torch.nn.functional.pad(strength * penalty * w, (0, p))
            value = got.value - 0.5 * (strength * penalty * w * w).sum(-1, keepdim=True)
            bend = torch.diag_embed(torch.nn.functional.pad(strength * penalty + 0 * w, (0, p)))
            lower = torch.tril_indices(d + p, d + p, device=w.device)
            hessian = (got.hessian - bend)[..., lower[0], lower[1]]
            return torch.cat([value, got.gradient - drawn, hessian, mode.model], -1)

        points = len(rule(structure.q).weights) if integrate else 1

        def in_chunks(packed: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            if packed.dim() == 1:
                return part(packed, x, y, weight)
            size = max(1, _CHUNK // max(1, points * x.shape[-2] * (client.model.outputs or 1) ** 2))
            pieces = zip(*(one.split(size) for one in (packed, x, y, weight)), strict=True)
            return torch.cat([part(*piece) for piece in pieces])

        return client.over_rows(in_chunks, packed, reduce=False)


def of_all(fed: Federation, replies: Replies, shares: Tensor) -> Tensor:
    """Return the share of every client's model that comes from its centre [n]; all of it if the client is away."""
    whole = torch.ones(fed.n, dtype=fed.dtype, device=fed.device)
    return whole.index_copy(0, replies.ids, shares.to(whole))


def _shares(structure: Structure, psi: Tensor, hessian: Tensor, clusters: Tensor) -> Tensor:
    """Return the share of each client's model that comes from its centre: the mean of diag (I - S H), [n]."""
    root = structure.factor(psi)
    spread = (root @ root.mT)[clusters if len(psi) > 1 else torch.zeros_like(clusters)]
    own = -(spread @ hessian[:, : structure.d, : structure.d]).diagonal(dim1=-2, dim2=-1)
    return (1 - own[:, structure.at]).clamp(0, 1).mean(-1)


def between_sums(here: ModelPoint, found: Marginal, clusters: Tensor) -> Sums:
    """Return what clusters say about their centres, as sums of a linear model with noise 1 and a client for each."""
    k, d = here.centres.shape
    h = torch.zeros(k, d, d, dtype=torch.float64, device=here.common.device)
    h = h.index_add(0, clusters, -found.hessian[:, :d, :d])
    g = torch.zeros_like(here.centres).index_add(0, clusters, found.gradient[:, :d])
    right = (h @ here.centres.unsqueeze(-1)).squeeze(-1) + g
    none, one = torch.zeros_like(right[:, :1]), torch.zeros(k, dtype=torch.long, device=h.device)
    return Sums(h, right, none, none, one, 1)


def _like(y: Tensor, scores: Tensor, x: Tensor) -> Tensor:
    """Return targets with the axis for points that scores have beyond those of the rows."""
    return y.unsqueeze(-2) if scores.dim() > x.dim() else y


def unpacked(replies: Replies, structure: Structure) -> Marginal:
    """Return what clients answered to `contribute`."""
    size, values = structure.d + structure.p, replies.values.double()
    lower = torch.tril_indices(size, size, device=values.device)
    hessian = values.new_zeros(len(values), size, size)
    hessian[:, lower[0], lower[1]] = values[:, 1 + size :]
    hessian[:, lower[1], lower[0]] = values[:, 1 + size :]
    return Marginal(values[:, :1], values[:, 1 : 1 + size], hessian)


def weighted(found: Marginal, s: State, replies: Replies) -> Marginal:
    """Return what clients answered times their weights, which are zero for those in other units."""
    if "trust" not in s:
        return found
    trust = s.trust[replies.ids].to(found.value)
    return Marginal(trust * found.value, trust * found.gradient, trust.unsqueeze(-1) * found.hessian)
