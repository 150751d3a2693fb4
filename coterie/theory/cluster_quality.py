"""How good found clusters are where the true ones are known, and labels that keep their meaning between rounds."""

from __future__ import annotations

import torch
from torch import Tensor


def cluster_quality(labels: Tensor, truth: Tensor | None) -> dict[str, Tensor]:
    """Compare found clusters with the true ones.

    Parameters
    ----------
    labels
        Found cluster of each client, [n]; negative where there is none.
    truth
        True cluster of each client, [n], or None.

    Returns
    -------
    dict of Tensor
        `cluster` [n] (NaN where there is none), `clusters_found` and, if the truth is known, `ari`, the adjusted Rand
        index (1: the same partition, 0: no better than chance), and `purity`, the share of clients in the majority of
        their found cluster. Both ignore clients without a cluster.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_quality import cluster_quality
    >>> found = cluster_quality(torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 1, 0]))
    >>> found["clusters_found"].item(), found["purity"].item()
    (2.0, 0.75)
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
    """Rename found labels so that they agree with those of the round before as often as possible.

    Parameters
    ----------
    labels
        Found labels, [n], 0..k-1, or negative for none.
    before
        Labels of the round before, [n].
    k
        Number of labels.

    Returns
    -------
    Tensor
        Renamed labels, [n].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_quality import align_labels
    >>> align_labels(torch.tensor([1, 1, 0]), torch.tensor([0, 0, 1]), k=2).tolist()
    [0, 0, 1]
    """
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
    """Return the groups of clients that are linked both ways, as labels [n].

    Parameters
    ----------
    links
        links[i, j]: whether client i uses the model of client j, bool [n, n].

    Returns
    -------
    Tensor
        Group of each client, int64 [n].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_quality import linked_groups
    >>> linked_groups(torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 1]], dtype=torch.bool)).tolist()
    [0, 0, 1]
    """
    from scipy.sparse.csgraph import connected_components

    mutual = (links & links.T).cpu().numpy()
    return torch.as_tensor(connected_components(mutual, directed=False)[1], dtype=torch.long)
