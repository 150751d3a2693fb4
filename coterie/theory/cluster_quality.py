"""How good found clusters are where the true ones are known, and labels that mean the same in every round."""

from __future__ import annotations

import torch
from torch import Tensor


def cluster_quality(labels: Tensor, truth: Tensor | None) -> dict[str, Tensor]:
    """What `observe` records: cluster [n] (NaN where unknown), clusters_found, and against the truth ari, purity.

    ari is the adjusted Rand index (1: the same partition, 0: no better than chance); purity is the share of
    clients in the majority of their found cluster. Both look only at clients that have a cluster.
    """
    labels = labels.detach().cpu()
    known = labels >= 0
    found = {
        "cluster": torch.where(known, labels.double(), torch.nan),
        "clusters_found": torch.tensor(float(len(labels[known].unique()))),
    }
    if truth is None or not known.any():
        return found
    from sklearn.metrics import adjusted_rand_score

    own, real = labels[known], truth.detach().cpu()[known]
    found["ari"] = torch.tensor(float(adjusted_rand_score(real.numpy(), own.numpy())))
    majority = sum(int(torch.bincount(real[own == k]).max()) for k in own.unique())
    found["purity"] = torch.tensor(majority / len(own))
    return found


def align_labels(labels: Tensor, before: Tensor, k: int) -> Tensor:
    """Found labels 0..k-1 renamed so that they agree with those of the round before as often as possible."""
    from scipy.optimize import linear_sum_assignment

    both = (labels >= 0) & (before >= 0) & (before < k)
    if not both.any():
        return labels
    overlap = torch.zeros(k, k, dtype=torch.long)
    pairs = labels[both].cpu() * k + before[both].cpu()
    overlap += torch.bincount(pairs, minlength=k * k).view(k, k)
    rename = torch.as_tensor(linear_sum_assignment(overlap.numpy(), maximize=True)[1]).to(labels)
    return torch.where(labels >= 0, rename[labels.clamp(min=0)], labels)


def linked_groups(links: Tensor) -> Tensor:
    """Labels [n] of groups of clients that are linked both ways, links [n, n] saying who takes in whom."""
    from scipy.sparse.csgraph import connected_components

    mutual = (links & links.T).cpu().numpy()
    return torch.as_tensor(connected_components(mutual, directed=False)[1], dtype=torch.long)
