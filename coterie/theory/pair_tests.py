"""Should two clients pool their rows? A test of their gradients at one point, free of units.

Let g_i be the gradient of client i's rows at a point z that both share, v_i the part of |g_i|^2 that the choice of its
rows explains, and D the squared distance between the gradients of the two distributions. Pooling trades the variance v
against the bias D: for two alike clients it pays if D < v_i + v_j. The squared distance of the gradients that are seen
has expectation D + v_i + v_j, so that a pair is better off together while it is below 2 (v_i + v_j).
"""

from __future__ import annotations

import torch
from torch import Tensor

BAR = 2.0  # times the noise: squared distance of two gradients from which pooling harms


def shared_noise(noise: Tensor, rows: Tensor, other: Tensor, other_rows: Tensor) -> Tensor:
    """Return the noise of the difference of two gradients if both clients draw their rows from one distribution.

    Then a row of either has the same noise. The smaller of the two estimates is taken: far from its optimum a client's
    gradient is noisier, which would hide just the differences that are looked for; and nobody agrees with everybody by
    claiming to know nothing.

    Parameters
    ----------
    noise
        Noise of one client's gradient.
    rows
        Its number of rows.
    other
        Noise of the other's gradient.
    other_rows
        Its number of rows.

    Returns
    -------
    Tensor
        min(noise rows, other other_rows) (1/rows + 1/other_rows), at least 0.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pair_tests import shared_noise
    >>> shared_noise(torch.tensor(1.0), torch.tensor(4.0), torch.tensor(9.0), torch.tensor(4.0)).item()
    2.0
    """
    of_a_row = torch.minimum(noise * rows, other * other_rows).clamp(min=0)
    return of_a_row * (1 / rows.clamp(min=1) + 1 / other_rows.clamp(min=1))


def distances(grads: Tensor, batch: Tensor) -> Tensor:
    """Return squared distances between the gradients of all rows of every two clients, [n, n].

    Parameters
    ----------
    grads
        Gradients of minibatches at one point, [n, d].
    batch
        Noise that the choice of the minibatch brought, [n, 1]; it is taken off.

    Returns
    -------
    Tensor
        Unbiased; may be negative where a minibatch is not all rows.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pair_tests import distances
    >>> distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0], [1.0]])).tolist()
    [[0.0, 24.0], [24.0, 0.0]]
    """
    centred = grads - grads.mean(0)
    squares = centred.square().sum(-1, keepdim=True)
    apart = (squares + squares.T - 2 * centred @ centred.T).clamp(min=0) - batch - batch.T
    return apart.fill_diagonal_(0.0)


def link_distances(grads: Tensor, batch: Tensor, links: Tensor, piece: int = 1 << 22) -> Tensor:
    """Return what `distances` does, for the pairs `links` [2, E] only, [E].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pair_tests import link_distances
    >>> grads, batch = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.zeros(2, 1)
    >>> link_distances(grads, batch, torch.tensor([[0], [1]])).tolist()
    [25.0]
    """
    step = max(1, piece // max(1, grads.shape[1]))
    found = [(grads[i] - grads[j]).square().sum(-1) for i, j in (part for part in links.split(step, 1))]
    apart = torch.cat(found) if found else grads.new_zeros(0)
    return apart - batch[links[0], 0] - batch[links[1], 0]


def evidence(apart: Tensor, noise: Tensor, doubt: Tensor) -> Tensor:
    """Return how clearly pairs are better off together, positive if they are: (2 noise - apart) noise/(noise + doubt)^2.

    Parameters
    ----------
    apart
        Squared distance between the gradients of all rows of a pair.
    noise
        Sum of the noise of their rows, v_i + v_j.
    doubt
        Noise of `apart` itself, from minibatches: a look through a noisy glass counts for less.

    Returns
    -------
    Tensor
        1 is expected of clients whose rows come from one distribution if `doubt` is 0.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pair_tests import evidence
    >>> evidence(torch.tensor([1.0, 6.0]), torch.tensor(1.0), torch.tensor(0.0)).tolist()
    [1.0, -4.0]
    """
    scale = (noise + doubt).clamp(min=torch.finfo(apart.dtype).tiny)
    return (BAR * noise - apart) / scale * (noise / scale)
