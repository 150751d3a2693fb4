"""How sure the links of a run are: for every pair in a group the probability that both gain by collaborating."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms import Algorithm
from coterie.engine.client import Client
from coterie.theory.consensus import group_medians
from coterie.theory.link_confidence import gain_probability
from coterie.theory.pair_tests import link_distances

if TYPE_CHECKING:
    import polars

    from coterie.train.run import Run


@dataclass(frozen=True)
class _Look(Algorithm):
    """What a client tells at the model of its group."""

    def probe(self, client: Client, z: Tensor) -> dict[str, Tensor]:
        grad, noise, dimensions = client.grad_with_noise(z)
        return {"grad": grad, "noise": noise, "dimensions": dimensions}


def link_table(run: Run) -> polars.DataFrame:
    """Return for every pair in a group how probable it is that both gain by pooling their rows.

    Every client computes one gradient, at the median model of its group.

    Parameters
    ----------
    run
        A run whose method finds groups or weights between clients, or has known clusters.

    Returns
    -------
    polars.DataFrame
        Columns client, other, weight (null where the method has none) and confidence; the least sure first.
    """
    import polars

    fed = run.fed.fresh()
    groups = found_groups(run)
    pairs, weights = _linked(run, groups)
    models = group_medians(run.personal, groups.to(run.personal.device))
    r = fed.map(_Look().probe, each={"z": models})
    here = torch.zeros(fed.n, dtype=torch.bool).index_fill_(0, r.ids.cpu(), True)
    both = here[pairs[0]] & here[pairs[1]]
    pairs, weights = pairs[:, both], None if weights is None else weights[both]
    grads = torch.zeros(fed.n, fed.d, dtype=torch.float64).index_copy_(
        0, r.ids.cpu(), r["grad"].cpu().double()
    )
    (i, j), rows = pairs, fed.sizes.cpu().double().flatten().clamp(min=1)
    of_a_row = torch.zeros(fed.n, 1, dtype=torch.float64)
    of_a_row[r.ids.cpu()] = r["noise"].cpu().double() * rows[r.ids.cpu()].unsqueeze(1)
    usual = group_medians(of_a_row[here], groups[here]).flatten()
    chance = torch.zeros(fed.n, dtype=torch.float64).masked_scatter(here, usual)[i] * (
        1 / rows[i] + 1 / rows[j]
    )
    ratio = link_distances(grads, pairs) / chance.clamp(min=torch.finfo(torch.float64).tiny)
    found = gain_probability(ratio, float(r["dimensions"].median()))
    return polars.DataFrame(
        {
            "client": [fed.names[k] for k in i.tolist()],
            "other": [fed.names[k] for k in j.tolist()],
            "weight": [None] * len(i) if weights is None else weights.tolist(),
            "confidence": found.tolist(),
        },
        schema_overrides={"weight": polars.Float64},
    ).sort("confidence", maintain_order=True)


def found_groups(run: Run) -> Tensor:
    """Return the group of every client, [n]; one that is alone has a group of its own."""
    seen = run.algorithm.observe(run.fed, run.state).get("cluster")
    if seen is None and run.fed.clusters is not None:
        seen = run.fed.clusters.double()
    if seen is None:
        raise SettingError(
            f"{run.algorithm.name} finds no groups and no clusters are known: take cobo, pfl-tc or ifca, "
            "or name a column of clusters"
        )
    alone = -1 - torch.arange(run.fed.n, dtype=torch.float64)
    groups: Tensor = torch.where(seen.cpu().isnan(), alone, seen.cpu().double()).unique(return_inverse=True)[
        1
    ]
    return groups


def _linked(run: Run, groups: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return pairs [2, P] that are linked, and their weights where the method has weights."""
    weights = run.state.weights.cpu().double() if "weights" in run.state else None
    if weights is not None and "links" in run.state:
        once = run.state.links[0].cpu() < run.state.links[1].cpu()
        return run.state.links.cpu()[:, once], weights[once]
    i, j = torch.triu_indices(run.fed.n, run.fed.n, 1)
    if weights is not None and weights.shape == (run.fed.n, run.fed.n):
        linked = (groups[i] == groups[j]) & (torch.maximum(weights[i, j], weights[j, i]) > 0)
        return torch.stack([i, j])[:, linked], torch.maximum(weights[i, j], weights[j, i])[linked]
    return torch.stack([i, j])[:, groups[i] == groups[j]], None
