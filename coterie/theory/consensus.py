"""Steps of clients that pull each other by weights W: CoBo's arithmetic, without a federation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from coterie.theory.collaboration import mixed, pulled


def alignment(first: Tensor, second: Tensor, margin: float = 0.0, cosine: bool = False) -> Tensor:
    """Return how well pairs of gradients agree: <g, h> - margin |g| |h|, divided by |g| |h| if `cosine`.

    Parameters
    ----------
    first
        Gradients g, [P, d].
    second
        Gradients h, [P, d].
    margin
        Cosine from which a pair agrees.
    cosine
        Divide by the lengths.

    Returns
    -------
    Tensor
        [P], float64.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.consensus import alignment
    >>> g, h = torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 3.0]])
    >>> alignment(g, h).item(), round(alignment(g, h, margin=0.5, cosine=True).item(), 2)
    (24.0, 0.46)
    """
    product: Tensor = torch.linalg.vecdot(first, second).double()
    if not cosine and not margin:
        return product
    size = (torch.linalg.vector_norm(first, dim=-1) * torch.linalg.vector_norm(second, dim=-1)).double()
    product = product - margin * size
    return product / size.clamp(min=torch.finfo(first.dtype).tiny) if cosine else product


def running_size(before: float, products: Tensor, keep: float = 0.9) -> float:
    """Return the running mean size of products, a unit for the step of the weights.

    Parameters
    ----------
    before
        The mean so far; 0 if there is none.
    products
        Products of this round.
    keep
        Share of the mean so far.

    Returns
    -------
    float
        Above 0.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.consensus import running_size
    >>> running_size(0.0, torch.tensor([2.0, -4.0])), running_size(1.0, torch.tensor([2.0, -4.0]), keep=0.5)
    (3.0, 2.0)
    """
    size = float(products.abs().mean()) or torch.finfo(products.dtype).tiny
    return keep * before + (1 - keep) * size if before else size


def group_medians(models: Tensor, groups: Tensor) -> Tensor:
    """Return for each client the coordinate-wise median of the models of its group.

    Less than half of a group cannot drag it away. Of an even number of values it is halfway between the middle two.

    Parameters
    ----------
    models
        Models, [n, d].
    groups
        Group of each client, [n].

    Returns
    -------
    Tensor
        [n, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.consensus import group_medians
    >>> group_medians(torch.tensor([[1.0], [2.0], [9.0], [7.0]]), torch.tensor([0, 0, 0, 1])).flatten().tolist()
    [2.0, 2.0, 2.0, 7.0]
    >>> group_medians(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 0])).flatten().tolist()
    [1.5, 1.5]
    """
    if len(groups) and bool((groups == groups[0]).all()):
        return _median(models).expand_as(models)
    middle = models.clone()
    for group in groups.unique()[torch.bincount(groups)[groups.unique()] > 1]:
        inside = groups == group
        middle[inside] = _median(models[inside])
    return middle


def _median(models: Tensor) -> Tensor:
    """Return the median [d] of models [n, d]; numpy sorts many columns ten times as fast as torch finds medians."""
    ordered = np.sort(models.detach().numpy(), axis=0) if models.device.type == "cpu" else None
    if ordered is None or bool(np.isnan(ordered[-1]).any()):  # numpy puts them last
        return (models.median(0).values - (-models).median(0).values) / 2
    lower, upper = (ordered[k] for k in ((len(models) - 1) // 2, len(models) // 2))
    return torch.from_numpy(lower + upper) / 2


def recent_links(weights: Tensor, seen: Tensor, t: int, patience: int) -> Tensor:
    """Return W with zeros where client i is absent in round t, or client j has been for too long.

    Parameters
    ----------
    weights
        W, [n, n].
    seen
        Last round in which each client answered, [n]; 0 if it never did.
    t
        This round.
    patience
        Rounds for which the last model of an absent client counts.

    Returns
    -------
    Tensor
        [n, n].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.consensus import recent_links
    >>> recent_links(torch.ones(3, 3), torch.tensor([9, 7, 2]), t=9, patience=3).tolist()
    [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    near = (seen > 0) & (seen >= t - patience)
    return weights * near * (seen == t).unsqueeze(1)


def consensus_step(
    models: Tensor,
    grads: Tensor,
    weights: Tensor,
    degree: Tensor,
    lr: float,
    prox: Tensor | float,
    implicit: bool = False,
) -> Tensor:
    """Take the step x_i - lr g_i - prox sum_k w_ik (x_i - x_k) of every client.

    Parameters
    ----------
    models
        Models x, [n, d].
    grads
        Gradients g, [n, d].
    weights
        W, [n, n].
    degree
        Sums of its rows without the diagonal, [n].
    lr
        Step size.
    prox
        Strength of the pull between clients, the step size included.
    implicit
        Take differences at the new models (backward Euler), which is stable for every `prox`.

    Returns
    -------
    Tensor
        New models, [n, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.consensus import consensus_step
    >>> models, grads = torch.tensor([[0.0], [4.0]]), torch.tensor([[1.0], [0.0]])
    >>> weights, degree = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.ones(2)
    >>> consensus_step(models, grads, weights, degree, lr=0.5, prox=0.25).tolist()
    [[0.5], [3.0]]
    """
    if implicit:
        return mixed(torch.linalg.inv(pulled(weights, degree, -prox)), models - lr * grads)
    return mixed(pulled(weights, degree, prox), models, grads, lr)


def start_newcomers(models: Tensor, weights: Tensor, joined: Tensor) -> Tensor:
    """Move each client that has not joined to the mean of those that have, weighted by W.

    Parameters
    ----------
    models
        Models, [n, d].
    weights
        W, [n, n].
    joined
        True for clients that have answered at least once, [n].

    Returns
    -------
    Tensor
        [n, d]; a client without links to any that joined stays.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.consensus import start_newcomers
    >>> models, weights = torch.tensor([[1.0], [3.0], [0.0]]), torch.ones(3, 3)
    >>> start_newcomers(models, weights, torch.tensor([True, True, False])).tolist()
    [[1.0], [3.0], [2.0]]
    """
    links = weights * joined
    total = links.sum(-1, keepdim=True)
    start = mixed(links / total.clamp(min=1e-300), models)
    return torch.where(joined.unsqueeze(-1) | (total == 0), models, start)
