"""Clusters that nobody named: the server makes a tree of clients, by their fits or sums, held-out rows choose in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered
from coterie.algorithms.base import Algorithm, Reveals
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.replies import Replies
from coterie.models.blocks import drawn_rows
from coterie.models.glm import Glm
from coterie.models.heads import last_layer
from coterie.models.linear import Linear
from coterie.theory.cluster_tree import LARGEST, chosen, coarse, credible, cut, numbered, ward
from coterie.theory.pooled_sums import pooled_clusters
from coterie.theory.pooled_tree import credible_sums
from coterie.theory.sketch import clustered_part
from coterie.theory.threshold_starts import group_weights

FOLDS = 5  # parts of a client's rows, each held out once
FIT_STEPS, FIT_LR = 100, 0.05  # of a client alone; 1/L is the step size of models that know their curvature L
FIT_ROWS = 512  # of a client that are used for it
TOP = 32  # merges, from the root down, whose clusters are judged
HEAVIEST = 10.0  # times the median weight: nobody weighs more, whatever number of rows it claims
MOST_SUMS = 64  # parameters up to which clients of linear models send sums instead of fits
MOST_WORK = 3e8  # operations of the tree up to which they do


@dataclass(frozen=True)
class Found:
    """Clusters that were found: the label of every client, -1 if it did not answer, and a model for each cluster.

    `excess` is the variance of members in units of that of a client's fit, by cluster; None if it is not known.
    `own` is how far from its cluster's model each client's own one is, [n, d]; None if members share it.
    """

    labels: Tensor
    models: Tensor
    excess: Tensor | None = None
    own: Tensor | None = None

    @property
    def memory(self) -> dict[str, Tensor]:
        """Return the field of a state that keeps `own`, if there is any."""
        return {} if self.own is None else {"own": self.own}


def together(labels: Tensor) -> Tensor:
    """Return which pairs may be in one cluster, bool [n, n]: those that are, and all with who did not answer (-1)."""
    absent = labels < 0
    return (labels.unsqueeze(1) == labels) | absent | absent.unsqueeze(1)


class Finder(Algorithm):
    """An algorithm that can find clusters before it trains; its clients have the phases below.

    Linear models with few parameters: clients send curvature and slope of their losses, summed over the rows of each
    fold, from which the server computes what any group would fit (`coterie.theory.pooled_sums`).

    Other models, held-out loss of client i in cluster A: its rows are dealt to folds; the model is the mean of the fits
    of A, with the fit of i on its other folds in place of its own, weighted by rows; alone, that fit itself. A set of
    nodes of the tree with the least sum of these losses is taken: any number of clusters, from one to everybody alone.
    """

    name = ""
    reveals: ClassVar[Reveals] = {"fit_alone": "personal", "try_shared": "aggregate", "sum_folds": "values"}
    optional: ClassVar[frozenset[str]] = frozenset(reveals)

    pulls: ClassVar[bool] = False  # members of a cluster have models of their own, pulled together

    @property
    def fit_steps(self) -> int:
        """Return the number of steps of a client that fits alone."""
        return FIT_STEPS

    def find_clusters(
        self,
        fed: Federation,
        ids: Tensor | None,
        k: int = 0,
        on: str = "all",
        width: int = 256,
        whole: Tensor | None = None,
    ) -> Found:
        """Find k clusters of the clients `ids` (None: all), or with k = 0 as many as held-out rows ask for.

        `whole` is a model that all have fitted together; the cluster of all is judged by it instead of the mean of
        their fits, since networks that were fitted apart lose by averaging, and random splits of them would win.
        """
        if not k and on == "all" and sends_sums(fed):
            return self._from_sums(fed, ids)
        r = self.ask_all(fed, self.fit_alone, x=fed.initial_model(), to=ids)
        if len(r) == 0:
            raise NobodyAnswered("no client answered, so there is nothing to cluster")
        rows = r.weights.double().flatten().clamp(min=1)
        weights = rows.minimum(HEAVIEST * rows.median()).cpu()
        points = clustered_part(r["fit"], on, last_layer(fed.model), width, fed.seed)
        fine = coarse(points, weights, LARGEST, fed.seed)
        member = torch.nn.functional.one_hot(fine).double().T
        mass = member @ weights
        places = (member * weights) @ points.double().cpu() / mass.unsqueeze(1)
        tree = ward(places, mass)
        if k:
            labels = cut(tree, places, k)[fine]
        else:
            nodes = tree.top(TOP)
            below = tree.members[nodes][:, fine]
            losses = self._judged(fed, r.ids, r["fit"], r["loss"], weights, below, whole)
            labels = chosen(tree, nodes, losses, fine)
        everyone = torch.full((fed.n,), -1, dtype=torch.long, device=fed.device)
        return self._centred(everyone.index_copy(0, r.ids, labels.to(fed.device)), r)

    def with_models(self, fed: Federation, labels: Tensor) -> Found:
        """Return these clusters, each with the mean of its members' fits; who does not answer has none (-1)."""
        r = self.ask_all(fed, self.fit_alone, x=fed.initial_model(), to=(labels >= 0).nonzero().squeeze(1))
        if len(r) == 0:
            raise NobodyAnswered("no client answered, so there is nothing to cluster")
        here = torch.full_like(labels, -1)
        here[r.ids] = numbered(labels[r.ids]).to(fed.device)
        return self._centred(here, r)

    def _centred(self, labels: Tensor, r: Replies) -> Found:
        """Return clusters whose models are the means of fits."""
        starts = group_weights(r["fit"], labels[r.ids], int(labels.max()) + 1)
        return Found(labels, starts.to(r["fit"]) @ r["fit"])

    def use_found(self, fed: Federation) -> dict[str, Tensor]:
        """Find clusters and let `fed.known_clusters` return them; return the state field that keeps them.

        A client that did not answer is put into the largest cluster; if nobody did, there is one for all.
        """
        try:
            labels = self.find_clusters(fed, None).labels
        except NobodyAnswered:
            labels = torch.zeros_like(fed.everyone)
        largest = torch.bincount(labels[labels >= 0]).argmax()
        fed.found = torch.where(labels < 0, largest, labels)
        return {"found_clusters": fed.found}

    def ask_all(self, fed: Federation, phase: Callable[..., Any], **given: Any) -> Replies:
        """Run a phase by which clusters are found; methods without a server send the answers to all clients."""
        return fed.map(phase, **given)

    def finding_traffic(self, d: int) -> dict[str, tuple[int, int]]:
        """Return the communication of the phases below."""
        return {
            "fit_alone": (d, d + FOLDS),
            "try_shared": (d + 1, FOLDS),
            "sum_folds": (d, FOLDS * (d * d + d)),
        }

    def _from_sums(self, fed: Federation, ids: Tensor | None) -> Found:
        """Find clusters from curvature and slope of the clients' losses; who sends what no rows have is alone."""
        r = self.ask_all(fed, self.sum_folds, x=fed.initial_model(), to=ids)
        if len(r) == 0:
            raise NobodyAnswered("no client answered, so there is nothing to cluster")
        hessians = r["hessians"].view(len(r), FOLDS, fed.d, fed.d)
        slopes, rows = r["slopes"].view(len(r), FOLDS, fed.d), r.weights.flatten().cpu()
        good, hessians, slopes = credible_sums(hessians, slopes, rows)
        labels, excess = torch.full((len(r),), -1, dtype=torch.long), torch.zeros(0, dtype=torch.float64)
        models = fed.initial_model().unsqueeze(0)[:0]
        own = torch.zeros(fed.n, fed.d, dtype=fed.dtype, device=fed.device)
        if good.any():
            labels[good], found, excess, apart = pooled_clusters(
                hessians, slopes, rows[good], self.pulls, 0.0 if isinstance(fed.model, Linear) else 1.0
            )
            models = found.to(models)
            own[r.ids[good.to(fed.device)]] = apart.to(own)
        alone = (~good).nonzero().squeeze(1)
        labels[alone] = len(models) + torch.arange(len(alone))
        models = torch.cat([models, fed.initial_model().expand(len(alone), -1)])
        excess = torch.cat([excess, torch.zeros(len(alone), dtype=torch.float64)])
        everyone = torch.full((fed.n,), -1, dtype=torch.long, device=fed.device)
        labels = everyone.index_copy(0, r.ids, labels.to(fed.device))
        return Found(labels, models, excess.to(fed.device), own if bool(own.any()) else None)

    def _judged(
        self,
        fed: Federation,
        ids: Tensor,
        fits: Tensor,
        alone: Tensor,
        weights: Tensor,
        below: Tensor,
        whole: Tensor | None = None,
    ) -> Tensor:
        """Return what each client loses in each group, fold by fold, compared with alone, [groups, clients, folds]."""
        found = torch.zeros(*below.shape, FOLDS, dtype=torch.float64)
        place = torch.full((fed.n,), -1, dtype=torch.long)
        place[ids.cpu()] = torch.arange(len(ids))
        for group, inside in enumerate(below):
            if int(inside.sum()) < 2:
                continue
            who = inside.nonzero().squeeze(1)
            own = weights[who].unsqueeze(1).to(fits)
            total = own.sum()
            rest = ((own.T @ fits[who]) - own * fits[who]) / (total - own)
            share = own / total
            if whole is not None and bool(inside.all()):
                rest, share = whole.expand_as(rest), torch.zeros_like(share)
            r = self.ask_all(fed, self.try_shared, each={"x": rest, "share": share}, to=ids[who])
            if len(r):
                at = place[r.ids.cpu()]
                found[group, at] = (r.values.cpu() - alone[at].cpu()).double() * weights[at].unsqueeze(1)
        return credible(found)

    def fit_alone(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        """Return the client's own fit and its losses on held-out folds; keep the fits without them."""
        model = client.model

        def fitted(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            inputs, targets, weight, fold = _some_rows(inputs, targets, weight)
            curvature = model.smoothness(w, inputs, targets, weight) if model.has_hessian else None
            lr = FIT_LR if curvature is None else 1 / curvature.clamp(min=1e-12)
            ends = []
            for held in range(-1, FOLDS):
                used, end = _renormalised(weight, fold != held), w
                for _ in range(self.fit_steps):
                    end = end - lr * model.grad(end, inputs, targets, used)
                ends.append(end)
            losses = _held_out(client, ends[1:], inputs, targets, weight, fold)
            return torch.cat([*ends, losses], -1)

        found = client.over_rows(fitted, x.expand(*client.lead, -1))
        d = x.shape[-1]
        client.keep.folds = found[..., d:-FOLDS]
        return {"fit": found[..., :d], "loss": found[..., -FOLDS:]}

    def sum_folds(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        """Return curvature H and slope b of w'H w/2 - b'w, the loss near the client's own fit, summed over each fold.

        A fold has two rows or more; a client with fewer than four has one fold.
        """
        model, d = client.model, x.shape[-1]
        assert isinstance(model, Glm)
        plain = replace(model, l2=0.0)

        def summed(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            inputs, targets, weight = drawn_rows(inputs, targets, weight, FIT_ROWS)
            rows = (weight > 0).sum(-1, keepdim=True)
            fold = torch.arange(weight.shape[-1], device=weight.device) % (rows // 2).clamp(1, FOLDS)
            if not isinstance(model, Linear):  # whose loss is the same quadratic everywhere
                lr = 1 / model.smoothness(w, inputs, targets, weight).clamp(min=1e-12)
                for _ in range(self.fit_steps):
                    w = w - lr * model.grad(w, inputs, targets, weight)
            curves, slopes = [], []
            for held in range(FOLDS):
                used = weight * (fold == held) * rows
                curve = plain.hessian(w, inputs, targets, used)
                slope = (curve @ w.unsqueeze(-1)).squeeze(-1) - plain.grad(w, inputs, targets, used)
                curves.append(curve.flatten(-2))
                slopes.append(slope)
            return torch.cat([*curves, *slopes], -1)

        found = client.over_rows(summed, x.expand(*client.lead, -1), reduce=False)
        return {"hessians": found[..., : FOLDS * d * d], "slopes": found[..., FOLDS * d * d :]}

    def try_shared(self, client: Client, x: Tensor, share: Tensor) -> Tensor:
        """Return the losses on held-out folds of the mixture of x with the client's own fit, which has this share."""
        d = x.shape[-1]
        all_of = torch.cat([x, share, client.keep.folds], -1)

        def tried(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            inputs, targets, weight, fold = _some_rows(inputs, targets, weight)
            others, own = w[..., :d], w[..., d : d + 1]
            mixed = [torch.lerp(others, end, own) for end in w[..., d + 1 :].split(d, -1)]
            return _held_out(client, mixed, inputs, targets, weight, fold)

        return client.over_rows(tried, all_of)


def sends_sums(fed: Federation) -> bool:
    """Return True if clients of this model can send sums over their rows, and the server can make a tree of them."""
    able = isinstance(fed.model, Glm) and fed.model.closed_form and not fed.model.whole_clients
    return able and fed.d <= MOST_SUMS and fed.n <= LARGEST and fed.n**2 * fed.d**3 <= MOST_WORK


def _some_rows(inputs: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return at most FIT_ROWS rows, their weights, and the fold of each."""
    inputs, targets, weight = drawn_rows(inputs, targets, weight, FIT_ROWS)
    return inputs, targets, weight, torch.arange(weight.shape[-1], device=weight.device) % FOLDS


def _renormalised(weight: Tensor, used: Tensor) -> Tensor:
    """Return weights of the rows in use, with the same sum as those of all rows."""
    kept = weight * used
    return kept * (weight.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1e-30))


def _held_out(
    client: Client, ends: list[Tensor], inputs: Tensor, targets: Tensor, weight: Tensor, fold: Tensor
) -> Tensor:
    """Return the loss of each fold by the model that was made without it, [..., FOLDS]; all add up to the mean loss."""
    losses = [
        client.model.loss(end, inputs, targets, weight * (fold == held)) for held, end in enumerate(ends)
    ]
    return torch.cat(losses, -1)
