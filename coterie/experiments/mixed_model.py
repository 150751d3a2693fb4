"""Mixed model of statsmodels with random intercepts of clients in clusters, for comparison."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from coterie._core import extras


@dataclass(frozen=True)
class MixedModel:
    """Fitted models [n, d] (common coefficients, predicted intercepts in the last column) and the three variances."""

    models: Tensor
    noise: float
    within: float
    between: float


def mixed_model(x: Tensor, y: Tensor, client: Tensor, clusters: Tensor) -> MixedModel:
    """Fit MixedLM by maximum likelihood.

    Parameters
    ----------
    x, y
        Rows [rows, d], whose last column is the intercept, and targets [rows].
    client
        Client of every row [rows].
    clusters
        Cluster of every client [n].

    Returns
    -------
    MixedModel

    Notes
    -----
    Powell's method, since the optimisers with gradients stopped before the maximum on the school data.
    """
    extras.require("stats", "MixedLM")
    from statsmodels.regression.mixed_linear_model import MixedLM, VCSpec

    kept = independent_columns(x.double())
    owner, fixed, group = client.numpy(), x.double()[:, kept].numpy(), clusters[client].numpy()
    labels = np.unique(group)
    members = [np.unique(owner[group == label]) for label in labels]
    indicators = [
        csr_matrix((owner[group == label][:, None] == inside[None]).astype(float))
        for label, inside in zip(labels, members, strict=True)
    ]
    names = [[str(one) for one in inside] for inside in members]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MixedLM(
            y.double().numpy(),
            fixed,
            group,
            exog_re=fixed[:, -1:],
            exog_vc=VCSpec(["client"], [names], [indicators]),
        )
        fitted = model.fit(reml=False, method=["powell"])
        effects = fitted.random_effects
    found = torch.zeros(len(clusters), x.shape[1], dtype=torch.float64)
    found[:, kept] = torch.tensor(np.asarray(fitted.fe_params))
    for label, inside in zip(labels, members, strict=True):
        values = torch.tensor(np.asarray(effects[label]))
        found[torch.tensor(inside), -1] += values[0] + values[1:]
    between = float(np.asarray(fitted.cov_re)[0, 0])
    return MixedModel(found, float(fitted.scale), float(fitted.vcomp[0]), between)


def independent_columns(x: Tensor) -> list[int]:
    """Return the columns that are not linear combinations of columns after them, in order.

    Indicators for all categories are collinear with the intercept, which MixedLM does not allow.
    """
    kept: list[int] = []
    for column in reversed(range(x.shape[1])):
        if int(
            torch.linalg.matrix_rank(x[:, [column, *kept]].T @ x[:, [column, *kept]], hermitian=True)
        ) > len(kept):
            kept.insert(0, column)
    return kept
