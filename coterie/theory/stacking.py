"""Weights of models whose predictions are averaged: greedy selection, and weights of each client near the shared ones.

A model k has for row b a value v_kb: its prediction of a number, or the probability it gives to the right class. The
ensemble's value is the weighted mean, and its loss 1/2 (v_b - y_b)^2 or -log v_b.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 30  # models that are added, with replacement
LEAST = 0.05  # smaller weights are not worth a model
OWN_ROWS = 20.0  # rows of a client that count as much as what all clients say
STRENGTHS = (0.0, 1.0, 3.0, 10.0, 30.0)  # of a client's own evidence, from none to most of it
FEWEST = 1e-12  # smallest probability


def row_losses(values: Tensor, y: Tensor | None) -> Tensor:
    """Return the losses of averaged values [..., rows]: squared errors of numbers y, or -log of probabilities.

    Examples
    --------
    >>> row_losses(torch.tensor([0.5, 1.0]), None)
    tensor([0.6931, -0.0000])
    """
    return -values.clamp_min(FEWEST).log() if y is None else 0.5 * (values - y).square()


def greedy_weights(values: Tensor, y: Tensor | None) -> Tensor:
    """Return weights [K] by forward selection with replacement (Caruana et al., ICML 2004).

    Begin with the best model and add, step by step, the one whose addition to the plain mean lowers the loss most; the
    weights are the shares of the models in the best mean on the way. Few steps keep weights from fitting noise.

    Parameters
    ----------
    values
        Values [K, rows] of models on rows held out.
    y
        Numbers [rows], or None if the values are probabilities of the right class.

    Returns
    -------
    Tensor
        Weights that sum to one; those below 0.05 are left out.

    Examples
    --------
    >>> y = torch.tensor([1.0, -1.0, 1.0, -1.0])
    >>> greedy_weights(torch.stack([y + 0.5, y - 0.5, y + 9]), y)
    tensor([0.5000, 0.5000, 0.0000])
    """
    total, counts = torch.zeros_like(values[0]), torch.zeros(len(values), dtype=values.dtype)
    best, lowest = counts, float("inf")
    for step in range(1, STEPS + 1):
        losses = row_losses((total + values) / step, y).mean(-1)
        k = int(losses.argmin())
        total, counts = total + values[k], counts.clone()
        counts[k] += 1
        if float(losses[k]) < lowest:
            best, lowest = counts / step, float(losses[k])
    kept = torch.where(best >= LEAST, best, 0.0)
    return kept / kept.sum()


def client_weights(
    shared: Tensor, values: Tensor, y: Tensor | None, client: Tensor, n: int, strength: float
) -> Tensor:
    """Return weights [n, K] of the clients: the shared ones, tilted by how well models did on each client's own rows.

    w_ik is proportional to w_k exp(-strength m_i/(m_i + 20) (l_ik - l_i)/l), for the mean losses l_ik of model k on the
    m_i rows of client i, their mean l_i over models, and the mean l over all: few rows change little.

    Parameters
    ----------
    shared
        Shared weights [K].
    values, y
        As for `greedy_weights`.
    client
        Client of each row, [rows].
    n
        Number of clients.
    strength
        Strength of a client's own evidence; 0 returns the shared weights for all.

    Examples
    --------
    >>> y, client = torch.zeros(40), torch.arange(2).repeat_interleave(20)
    >>> values = torch.stack([(client == 0).float(), (client == 1).float()])
    >>> client_weights(torch.tensor([0.5, 0.5]), values, y, client, 2, 3.0).round(decimals=2)
    tensor([[0.0500, 0.9500],
            [0.9500, 0.0500]])
    """
    losses = row_losses(values, y)
    rows = torch.bincount(client, minlength=n).to(values.dtype)
    sums = torch.zeros(len(values), n, dtype=values.dtype).index_add_(1, client, losses)
    means = (sums / rows.clamp_min(1)).mT
    typical = (shared * losses.mean(-1)).sum().clamp_min(FEWEST)
    centred = means - (means * shared).sum(-1, keepdim=True)
    trust = (rows / (rows + OWN_ROWS)).unsqueeze(-1)
    tilted = shared.log() - strength * trust * centred / typical
    return torch.softmax(tilted, -1)


def best_strength(
    shared: Tensor, values: Tensor, y: Tensor | None, client: Tensor, part: Tensor, n: int
) -> float:
    """Return the strength of clients' own evidence with the lowest loss: weights from other parts, judged on each part.

    Parameters
    ----------
    shared, values, y, client, n
        As for `client_weights`.
    part
        Part of each row, [rows]: weights for the rows of a part come from the rows of the others.

    Examples
    --------
    >>> y, client = torch.zeros(40), torch.arange(2).repeat_interleave(20)
    >>> values = torch.stack([(client == 0).float(), (client == 1).float()])
    >>> best_strength(torch.tensor([0.5, 0.5]), values, y, client, torch.arange(40) % 2, 2)
    30.0
    """
    found = []
    for strength in STRENGTHS:
        total = 0.0
        for k in part.unique().tolist():
            others, mine = part != k, part == k
            own = None if y is None else y[others]
            weights = client_weights(shared, values[:, others], own, client[others], n, strength)
            mixed = (weights[client[mine]].mT * values[:, mine]).sum(0)
            total += float(row_losses(mixed, None if y is None else y[mine]).sum())
        found.append(total)
    return STRENGTHS[min(range(len(found)), key=found.__getitem__)]
