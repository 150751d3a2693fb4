"""Who belongs together, from what a linear model in place of a network would learn, before anybody trains."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from coterie._core import randomness
from coterie.algorithms.base import Reveals
from coterie.algorithms.finding import FIT_LR, FIT_ROWS, FOLDS, Finder, Found, sends_sums
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.models.base import Model
from coterie.models.blocks import drawn_rows
from coterie.models.heads import head_of
from coterie.models.network import Network
from coterie.theory.cluster_tree import numbered
from coterie.theory.consensus import group_medians
from coterie.theory.pooled_sums import clear_clusters, pooled_clusters
from coterie.theory.pooled_tree import credible_sums

WIDTH = 16  # inputs up to which these are used, and random combinations of the features of models with more
MOST_OUTPUTS = 128  # classes up to which it is done
SHARED_ROUNDS, SHARED_STEPS = 10, 30  # of the model for all, whose residuals tell clients apart


class HeadSums(Finder):
    """An algorithm whose networks can be told apart before they train: the phase `sum_head`.

    Least squares of the targets (classes: one and zero) on the inputs, or where there are many of these, on some
    features of the untrained network, which are random functions of them, has sums over rows like any linear model. So
    clusters that are far apart, such as those with other names for the same classes, are found at once
    (`coterie.theory.pooled_sums`). Numbers to predict from few inputs are first fitted by one model for all, and its
    residuals take their place: what no linear model explains would otherwise hide how clients differ. Clusters that
    differ in nothing linear are found by fits or gradients.
    """

    name = ""
    reveals: ClassVar[Reveals] = Finder.reveals | {"sum_head": "values", "fit_shared": "model"}
    optional: ClassVar[frozenset[str]] = Finder.optional | {"sum_head", "fit_shared"}

    def find_clusters(
        self,
        fed: Federation,
        ids: Tensor | None,
        k: int = 0,
        on: str = "all",
        width: int = 256,
        whole: Tensor | None = None,
    ) -> Found:
        if not k and on == "all" and sends_heads(fed.model) and not sends_sums(fed):
            whole = self.shared_model(fed, ids) if _uses_residuals(fed.model) else None
            labels = self.groups_by_heads(fed, ids, whole)
            if labels is not None and int(labels.max()) > 0:
                return self.with_models(fed, labels)
        return super().find_clusters(fed, ids, k, on, width, whole)

    def groups_by_heads(
        self, fed: Federation, ids: Tensor | None = None, x: Tensor | None = None
    ) -> Tensor | None:
        """Return the group of each of the clients `ids` (None: all), -1 if it did not answer; None if nobody did.

        `x` is the model whose residuals or features are used; None: `shared_model` or the untrained one.
        """
        if x is None:
            x = self.shared_model(fed, ids) if _uses_residuals(fed.model) else fed.initial_model()
        r = self.ask_all(fed, self.sum_head, x=x, to=ids)
        if len(r) == 0:
            return None
        width, outputs = _sizes(fed.model)
        hessians = r["hessians"].view(len(r), FOLDS, width, width)
        slopes, rows = r["slopes"].view(len(r), FOLDS, width, outputs), r.weights.flatten().cpu()
        good, hessians, slopes = credible_sums(hessians, slopes, rows)
        labels = len(r) + torch.arange(len(r))  # who sends what no rows have is alone
        if good.any() and _uses_residuals(fed.model):
            labels[good] = pooled_clusters(hessians, slopes.squeeze(-1), rows[good])[0]
        elif good.any():
            labels[good] = clear_clusters(hessians, slopes, rows[good])
        labels = numbered(labels)
        everyone = torch.full((fed.n,), -1, dtype=torch.long, device=fed.device)
        return everyone.index_copy(0, r.ids, labels.to(fed.device))

    def shared_model(self, fed: Federation, ids: Tensor | None) -> Tensor:
        """Return one model for all, the median of theirs after some steps, again and again; few cannot move it far."""
        x = fed.initial_model()
        for _ in range(SHARED_ROUNDS):
            r = self.ask_all(fed, self.fit_shared, x=x, to=ids)
            x = group_medians(r.values, torch.zeros_like(r.ids))[0] if len(r) else x
        return x

    def fit_shared(self, client: Client, x: Tensor) -> Tensor:
        """Return x after some steps on the client's rows."""

        def fitted(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            rows = drawn_rows(inputs, targets, weight, FIT_ROWS)
            for _ in range(SHARED_STEPS):
                w = w - FIT_LR * client.model.grad(w, *rows)
            return w

        return client.over_rows(fitted, x.expand(*client.lead, -1))

    def sum_head(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        """Return H and b of least squares on the inputs or features, summed over each fold of two rows or more."""
        model = client.model
        width, outputs = _sizes(model)

        def summed(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            inputs, targets, weight = drawn_rows(inputs, targets, weight, FIT_ROWS)
            seen = inputs.to(w.dtype) if _few_inputs(model) else model.hidden_features(w, inputs).to(w.dtype)
            if seen.shape[-1] >= width:
                seen = seen @ _mixture(seen)
            seen = torch.cat([seen, torch.ones_like(seen[..., :1])], -1)
            wanted = (
                targets.unsqueeze(-1).to(w.dtype) if outputs == 1 else model.hits(targets, weight).to(w.dtype)
            )
            if _uses_residuals(model):
                wanted = wanted - model.scores(w, inputs)
            rows = (weight > 0).sum(-1, keepdim=True)
            fold = torch.arange(weight.shape[-1], device=weight.device) % (rows // 2).clamp(1, FOLDS)
            parts = [seen * (weight * rows * (fold == held)).unsqueeze(-1) for held in range(FOLDS)]
            curves = [(part.mT @ seen).flatten(-2) for part in parts]
            return torch.cat([*curves, *((part.mT @ wanted).flatten(-2) for part in parts)], -1)

        found = client.over_rows(summed, x.expand(*client.lead, -1), reduce=False)
        cut = FOLDS * width * width
        return {"hessians": found[..., :cut], "slopes": found[..., cut:]}

    def traffic_of(self, model: Model) -> dict[str, tuple[int, int]]:
        declared = self.traffic(model.d)
        if sends_heads(model):
            width, outputs = _sizes(model)
            declared["sum_head"] = (model.d, FOLDS * width * (width + outputs))
        return declared

    def head_traffic(self, d: int) -> dict[str, tuple[int, int]]:
        """Return the communication of `sum_head` for one output; `traffic_of` knows the model."""
        return {"sum_head": (d, FOLDS * (WIDTH + 1) * (WIDTH + 2)), "fit_shared": (d, d)}


def sends_heads(model: Model) -> bool:
    """Return True if the model is a network whose last linear layer gives its outputs."""
    able = isinstance(model, Network) and not model.tokens and head_of(model) is not None
    return able and model.classes_known <= MOST_OUTPUTS


def _sizes(model: Model) -> tuple[int, int]:
    """Return the number of columns, the one for the intercept included, and of outputs."""
    head = head_of(model)
    assert head is not None and head.features is not None and isinstance(model, Network)
    columns = model.features[0] + 1 if model.features and _few_inputs(model) else head.features
    return min(columns, WIDTH + 1), model.classes_known


def _few_inputs(model: Model) -> bool:
    """Return True if rows are vectors of at most WIDTH numbers."""
    shape = model.features if isinstance(model, Network) else None
    return shape is not None and len(shape) == 1 and shape[0] <= WIDTH


def _uses_residuals(model: Model) -> bool:
    """Return True if a model for all is fitted first: numbers are predicted from few inputs."""
    return model.classes_known == 1 and _few_inputs(model)


def _mixture(features: Tensor) -> Tensor:
    """Return the random matrix by which many features become few, the same for everybody."""
    width = features.shape[-1]
    keys = randomness.slots(randomness.key("features of a head"), width * WIDTH)
    mixture: Tensor = randomness.normal(keys, torch.float64).view(width, WIDTH).to(features) / width**0.5
    return mixture
