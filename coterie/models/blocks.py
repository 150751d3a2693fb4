"""Gradients of blocks of rows: how much of a gradient is chance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coterie._core import randomness

BLOCKS = 8  # blocks that the rows of a client are dealt to
ELEMENTS = 1 << 30  # numbers of the gradients of blocks that are in memory together


def mean_and_noise(
    grad: Callable[..., Tensor], w: Tensor, x: Tensor, y: Tensor, weight: Tensor, count: int = BLOCKS
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of all rows, and the size and the dimensions of the error that their choice brings.

    Rows, which should be in random order, are dealt to blocks in turn. With g_b the gradient of block b, p_b its share
    of the weight and g the mean, the noise is B/(B - 1) sum_b p_b^2 |g_b - g|^2, whose expectation is the variance of g
    for equal blocks of independent rows. Errors of covariance C fill (tr C)^2 / tr C^2 dimensions, estimated from the
    products of two blocks' errors.

    Parameters
    ----------
    grad
        Gradient of a stack of clients: grad(w, x, y, weight).
    w
        Parameters, [..., d].
    x
        Inputs, [..., rows, *].
    y
        Targets, [..., rows].
    weight
        Weight of each row, zero on padding, [..., rows].
    count
        Number of blocks.

    Returns
    -------
    tuple of Tensor
        Gradient [..., d], noise [..., 1] and dimensions [..., 1]; with rows in one block only, the noise is the
        gradient's squared length.

    Examples
    --------
    >>> import torch
    >>> from coterie.models.blocks import mean_and_noise
    >>> def grad(w, x, y, weight):
    ...     return ((w * x.squeeze(-1) - y) * weight).sum(-1, keepdim=True)
    >>> w, x, y = torch.zeros(1, 1), torch.ones(1, 2, 1), torch.tensor([[-1.0, -3.0]])
    >>> mean, noise, _ = mean_and_noise(grad, w, x, y, torch.full((1, 2), 0.5))
    >>> mean.item(), noise.item()
    (2.0, 1.0)
    """
    lead, rows = weight.shape[:-1], weight.shape[-1]
    count = min(count, rows)
    most = max(1, ELEMENTS // (count * w.shape[-1]))
    if len(lead) == 1 and lead[0] > most:
        spans = [slice(at, at + most) for at in range(0, lead[0], most)]
        parts = [mean_and_noise(grad, w[span], x[span], y[span], weight[span], count) for span in spans]
        mean, noise, filled = (torch.cat(found) for found in zip(*parts, strict=True))
        return mean, noise, filled
    missing = -rows % count
    blocks = [_dealt(part, len(lead), missing, count) for part in (x, y, weight)]
    total = weight.sum(-1, keepdim=True)
    inside = blocks[2].sum(-1)
    scaled = blocks[2] * (total / inside.clamp(min=torch.finfo(inside.dtype).tiny)).unsqueeze(-1)
    many = w.unsqueeze(-2).expand(*lead, count, w.shape[-1])
    flat = [part.flatten(0, len(lead)) for part in (many, blocks[0], blocks[1], scaled)]
    each = grad(*flat).view(*lead, count, -1)
    share = inside / total.clamp(min=torch.finfo(total.dtype).tiny)
    mean = (share.unsqueeze(-1) * each).sum(-2)
    used = (share > 0).sum(-1, keepdim=True).to(mean.dtype)
    errors = share.unsqueeze(-1) * (each - mean.unsqueeze(-2))
    alone = mean.square().sum(-1, keepdim=True)
    return mean, *spread_of(errors @ errors.mT, used, alone, w.shape[-1])


def spread_of(products: Tensor, used: Tensor, alone: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Return noise and dimensions, [..., 1], by the inner products [..., B, B] of the errors of blocks.

    Parameters
    ----------
    products
        Inner products of p_b (g_b - g).
    used
        Number of blocks that have rows, [..., 1].
    alone
        Noise if there is one such block, [..., 1].
    d
        Number of parameters.

    Returns
    -------
    tuple of Tensor
        Noise and dimensions.

    Examples
    --------
    >>> import torch
    >>> from coterie.models.blocks import spread_of
    >>> noise, _ = spread_of(torch.eye(2), torch.tensor([2.0]), torch.tensor([0.0]), d=3)
    >>> noise.item()
    4.0
    """
    total = products.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    across = products.square().sum((-2, -1)).unsqueeze(-1) - products.diagonal(dim1=-2, dim2=-1).square().sum(
        -1, keepdim=True
    )
    tiny = torch.finfo(total.dtype).tiny
    pairs = (used * (used - 1)).clamp(min=1)
    filled = (total / used.clamp(min=1)).square() / (across / pairs).clamp(min=tiny)
    noise = torch.where(used > 1, total * used / (used - 1).clamp(min=1), alone)
    return noise, torch.where(used > 2, filled, 1.0).clamp(1, d)


def dealt(place: Tensor, size: Tensor, client: Tensor) -> Tensor:
    """Return the block that each row of several clients is dealt to, once `drawn_rows` has put them in order.

    Parameters
    ----------
    place
        Place of each row among those of its client, [rows].
    size
        Rows of each client, [k], at least as many as blocks.
    client
        Client of each row, [rows].

    Returns
    -------
    Tensor
        Block, [rows].

    Examples
    --------
    >>> import torch
    >>> from coterie.models.blocks import dealt
    >>> dealt(torch.arange(16), torch.tensor([16]), torch.zeros(16, dtype=torch.long)).bincount().tolist()
    [2, 2, 2, 2, 2, 2, 2, 2]
    """
    lot = _lots(int(size.max()))
    earlier = (lot < lot.unsqueeze(-1)).cumsum(-1)  # of the first rows, how many come before a row
    return earlier[place, size[client] - 1] % BLOCKS


def _lots(count: int) -> Tensor:
    """Return random numbers in [0, 1) that depend on nothing but the position."""
    return randomness.uniform(randomness.slots(randomness.key("drawn rows"), count))


def drawn_rows(x: Tensor, y: Tensor, weight: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return at most so many rows of each client, drawn at random and in random order, with weights of the same sum.

    Files are often sorted, by class or by date: their first rows tell little of the rest, and blocks to which sorted
    rows are dealt in turn resemble each other more than chance allows. The draw depends on nothing but the positions.

    Parameters
    ----------
    x
        Inputs, [..., rows, *].
    y
        Targets, [..., rows].
    weight
        Weight of each row, zero on padding, [..., rows].
    most
        Largest number of rows.

    Returns
    -------
    tuple of Tensor
        Inputs, targets and weights.

    Examples
    --------
    >>> import torch
    >>> from coterie.models.blocks import drawn_rows
    >>> drawn_rows(torch.zeros(1, 4, 2), torch.zeros(1, 4), torch.full((1, 4), 0.25), most=2)[2].tolist()
    [[0.5, 0.5]]
    """
    axis, rows = weight.dim() - 1, weight.shape[-1]
    lot = _lots(rows).to(weight.device)
    order = torch.where(weight > 0, lot, 1 + lot).argsort(-1)[..., :most]
    few = weight.gather(axis, order)
    few = few * (weight.sum(-1, keepdim=True) / few.sum(-1, keepdim=True).clamp(min=1e-30))
    return _gathered(x, axis, order), _gathered(y, axis, order), few


def _gathered(part: Tensor, axis: int, order: Tensor) -> Tensor:
    """Return the rows of [..., rows, *] in this order [..., count]."""
    inner = part.shape[axis + 1 :]
    return part.gather(axis, order.view(*order.shape, *(1 for _ in inner)).expand(*order.shape, *inner))


def _dealt(part: Tensor, lead: int, missing: int, count: int) -> Tensor:
    """Return [..., rows, *] as [..., count, rows / count, *], row r in block r mod count, padded with zeros."""
    after = part.dim() - lead - 1
    padded = torch.nn.functional.pad(part, (0, 0) * after + (0, missing))
    cut = padded.view(*part.shape[:lead], -1, count, *part.shape[lead + 1 :])
    return cut.transpose(lead, lead + 1)
