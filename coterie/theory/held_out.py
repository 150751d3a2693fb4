"""Predict the held-out error of ridge around a centre from the training rows of a client alone.

A client's residuals e at a centre c, in the eigenbasis of XX', have E u_j^2 = h(k_j): heterogeneity raises h with k,
noise is h(0). With an estimate of h, smoothed generalised cross-validation gives the error of every ridge penalty, from
interpolation (lam = 0) to the centre itself (lam infinite), also where a client has fewer rows than features. Every
function works on the last axis, for any number of clients before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

POWERS = 4  # h(k) = a0 + a1 k + a2 k^2 + a3 k^3
SPREADS = (0.02, 0.3, 0.7, 1.2)  # of log c_i and log s2_i between clients
_REACH, _POINTS = 4.0, 25
LAMBDAS = 10.0 ** torch.linspace(-5, 5, 61, dtype=torch.float64)  # times the mean eigenvalue of X'X/n


@dataclass(frozen=True)
class Profile:
    """Spectrum of a client's rows and its residuals along it.

    Parameters
    ----------
    k
        Eigenvalues, [..., r].
    square
        Squared residuals u^2 along them, [..., r].
    count
        How often each counts, [..., r].
    """

    k: Tensor
    square: Tensor
    count: Tensor

    def scaled(self, unit: float | Tensor) -> Profile:
        """Return the profile with k in other units."""
        return Profile(self.k / unit, self.square, self.count)


def profile(features: Tensor, residual: Tensor, rows: Tensor) -> Profile:
    """Return the profile of a client's rows.

    Parameters
    ----------
    features
        Features, [..., B, d], zero on padding.
    residual
        Residuals at the centre, [..., B], zero on padding.
    rows
        Rows that are not padding, [..., 1].

    Returns
    -------
    Profile
        d + 1 entries: the directions that the rows span (count 1), and one for all others together.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import held_out
    >>> seen = held_out.profile(2 * torch.eye(2), torch.tensor([1.0, 3.0]), torch.tensor([2.0]))
    >>> seen.k.tolist(), seen.square.tolist()
    ([4.0, 4.0, 0.0], [1.0, 9.0, 0.0])
    """
    b, d = features.shape[-2:]
    if b > d:
        slope = (features.mT @ residual.unsqueeze(-1)).squeeze(-1)
        return profile_of_sums(
            features.mT @ features, slope, residual.square().sum(-1, keepdim=True), rows, torch.zeros(())
        )
    k, basis = torch.linalg.eigh(features @ features.mT)
    alive = _alive(k)
    square = torch.where(alive, (basis.mT @ residual.unsqueeze(-1)).squeeze(-1).square(), 0.0)
    return _with_the_rest(
        torch.where(alive, k, 0.0), square, residual.square().sum(-1, keepdim=True), rows, d
    )


def profile_of_sums(matrix: Tensor, slope: Tensor, square: Tensor, rows: Tensor, blur: Tensor) -> Profile:
    """Return the profile of a client's rows from sums over them.

    Parameters
    ----------
    matrix
        X'X, [..., d, d].
    slope
        X'e of the residuals e at the centre, [..., d].
    square
        e'e, [..., 1].
    rows
        Number of rows, [..., 1].
    blur
        Variance of noise in the slope along each eigenvector of the matrix, [..., d], or 0; it is taken off.

    Returns
    -------
    Profile
        d + 1 entries, as in `profile`.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import held_out
    >>> sums = 4 * torch.eye(2), torch.tensor([2.0, 6.0]), torch.tensor([10.0]), torch.tensor([2.0])
    >>> seen = held_out.profile_of_sums(*sums, torch.zeros(2))
    >>> seen.k.tolist(), seen.square.tolist()
    ([4.0, 4.0, 0.0], [1.0, 9.0, 0.0])
    """
    k, basis = torch.linalg.eigh(matrix)
    alive = _alive(k)
    along = (basis.mT @ slope.unsqueeze(-1)).squeeze(-1)
    found = (along.square() - blur) / k.clamp_min(torch.finfo(k.dtype).tiny)
    return _with_the_rest(
        torch.where(alive, k, 0.0), torch.where(alive, found, 0.0), square, rows, matrix.shape[-1]
    )


def _alive(k: Tensor) -> Tensor:
    """Return which eigenvalues [..., r], in ascending order, are not zero."""
    return k > 1e-10 * k[..., -1:].clamp_min(torch.finfo(k.dtype).tiny)


def _with_the_rest(k: Tensor, square: Tensor, total: Tensor, rows: Tensor, d: int) -> Profile:
    """Return a profile of d + 1 entries: directions that rows span, and one for what is left of the residuals."""
    count = (k > 0).to(k.dtype)
    others = (rows - count.sum(-1, keepdim=True)).clamp_min(0.0)
    rest = (total - square.sum(-1, keepdim=True)).clamp_min(0.0)
    rest = torch.where(others > 0, rest / others.clamp_min(1.0), 0.0)
    pad = k.new_zeros(*k.shape[:-1], d - k.shape[-1])
    return Profile(
        torch.cat([k, pad, torch.zeros_like(rest)], -1),
        torch.cat([square, pad, rest], -1),
        torch.cat([count, pad, others], -1),
    )


def height(a: Tensor, k: Tensor) -> Tensor:
    """Return h(k) for coefficients a [..., 4]."""
    value = torch.zeros_like(k)
    for p in reversed(range(POWERS)):
        value = value * k + a[..., p : p + 1]
    return value


def regression_sums(seen: Profile, a: Tensor) -> Tensor:
    """Return the sums that the server adds up to improve h, [..., 12].

    Sums of k^p/h^2 (7), of u^2 k^p/h^2 (4), and of log h + u^2/h.

    Parameters
    ----------
    seen
        Profile of each client.
    a
        Coefficients of h, [..., 4].

    Returns
    -------
    Tensor
        [..., 12].
    """
    h = height(a, seen.k)
    weight = seen.count / h.square()
    powers = [weight]
    for _ in range(2 * POWERS - 2):
        powers.append(powers[-1] * seen.k)
    cross = [power * seen.square for power in powers[:POWERS]]
    misfit = seen.count * (torch.log(h) + seen.square / h)
    return torch.stack([part.sum(-1) for part in (*powers, *cross, misfit)], -1)


def improved(total: Tensor, a: Tensor, terms: int, floor: float) -> Tensor:
    """Make one step of iteratively reweighted least squares with non-negative coefficients, half way from `a`.

    Parameters
    ----------
    total
        `regression_sums` of all clients, [12].
    a
        Coefficients so far, [4].
    terms
        How many coefficients to fit.
    floor
        Smallest a0.

    Returns
    -------
    Tensor
        New coefficients, [4].
    """
    from scipy.optimize import nnls

    matrix = torch.stack([total[p : p + terms] for p in range(terms)])
    side = total[2 * POWERS - 1 :][:terms]
    scale = matrix.diagonal().clamp_min(1e-300).sqrt()
    values, vectors = torch.linalg.eigh(matrix / scale / scale[:, None])
    root = values.clamp_min(1e-12 * float(values[-1])).sqrt()
    target = (vectors.T @ (side / scale)) / root
    found = torch.zeros_like(a)
    found[:terms] = torch.from_numpy(nnls((root[:, None] * vectors.T).numpy(), target.numpy())[0]) / scale
    found[0] = found[0].clamp_min(floor)
    return 0.5 * (a + found)


def grid(like: Tensor) -> Tensor:
    """Return the deviations of log c_i, or of log s2_i, that are considered."""
    return torch.linspace(-_REACH, _REACH, _POINTS, dtype=like.dtype, device=like.device)


def likelihoods(seen: Profile, a: Tensor, shift: Tensor) -> Tensor:
    """Return log p(u | c, s2) for all c = exp(shift_0 + grid) and s2 = a0 exp(shift_1 + grid), [..., points, points].

    Parameters
    ----------
    seen
        Profile of each client.
    a
        Coefficients of h, [..., 4].
    shift
        Shifts of log c and log s2, [..., 2].

    Returns
    -------
    Tensor
        [..., points, points].
    """
    points = grid(seen.k)
    shape = height(torch.cat([torch.zeros_like(a[..., :1]), a[..., 1:]], -1), seen.k)
    c = torch.exp(shift[..., :1] + points)[..., :, None, None]
    s2 = (a[..., :1] * torch.exp(shift[..., 1:] + points))[..., None, :, None]
    h = c * shape[..., None, None, :] + s2
    return -0.5 * (seen.count[..., None, None, :] * (torch.log(h) + seen.square[..., None, None, :] / h)).sum(
        -1
    )


def log_prior(spread_c: float, spread_s: float, like: Tensor) -> Tensor:
    """Return independent normal log priors of log c_i and log s2_i on the grid, [points, points]."""
    points = grid(like)

    def one(spread: float) -> Tensor:
        return torch.log_softmax(-0.5 * (points / spread).square(), 0)

    return one(spread_c)[:, None] + one(spread_s)


def marginals(table: Tensor) -> Tensor:
    """Return log p(u) under each pair of spreads, [..., 16]."""
    pairs = [log_prior(c, s, table) for c in SPREADS for s in SPREADS]
    return torch.stack([torch.logsumexp((table + prior).flatten(-2), -1) for prior in pairs], -1)


def posterior(table: Tensor, choice: int) -> Tensor:
    """Return the weights of the grid points given the rows, under the chosen pair of spreads."""
    prior = log_prior(SPREADS[choice // len(SPREADS)], SPREADS[choice % len(SPREADS)], table)
    flat = torch.softmax((table + prior).flatten(-2), -1)
    return flat.view(*flat.shape[:-1], _POINTS, _POINTS)


def errors(seen: Profile, h: Tensor, lam: Tensor) -> Tensor:
    """Return the held-out squared error for each penalty of a client with E u^2 = h, [..., L].

    mean(h/(s + lam)^2) / mean(1/(s + lam))^2 over the eigenvalues s of XX'/n; 0 and infinity are limits.

    Parameters
    ----------
    seen
        Profile of each client.
    h
        Expected squared residuals, [..., r].
    lam
        Penalties, [..., L].

    Returns
    -------
    Tensor
        [..., L].
    """
    rows = seen.count.sum(-1, keepdim=True).clamp_min(1.0)
    s, h, weight = ((part / rows).unsqueeze(-2) for part in (seen.k, h * rows, seen.count))
    smallest = 1e-9 * s.amax(-1, keepdim=True).clamp_min(1e-300)
    kept = 1 / (1 + s / torch.maximum(lam.unsqueeze(-1), smallest))
    return (weight * h * kept.square()).sum(-1) / (weight * kept).sum(-1).square()


def penalties(scale: float) -> Tensor:
    """Return the penalties to consider, [63]: 0, a grid around `scale` (the mean eigenvalue of X'X/n), infinity."""
    ends = torch.tensor([0.0]), torch.tensor([math.inf])
    return torch.cat([ends[0], scale * LAMBDAS, ends[1]])


def lowest(curve: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best penalty and its error [...], interpolated between grid points by a parabola in log lam.

    Parameters
    ----------
    curve
        Errors, [..., L].
    lam
        Penalties, [L].

    Returns
    -------
    tuple of Tensor
        Penalty and error of each client.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import held_out
    >>> lam = held_out.penalties(1.0)
    >>> best, _ = held_out.lowest((lam.clamp(1e-9, 1e9).log() - 1).square(), lam)
    >>> round(best.log().item(), 4)
    1.0
    """
    at = curve.argmin(-1, keepdim=True)
    value = curve.gather(-1, at)
    inside = (at > 1) & (at < curve.shape[-1] - 2)
    middle = at.clamp(2, curve.shape[-1] - 3)
    left, right = curve.gather(-1, middle - 1), curve.gather(-1, middle + 1)
    bend = (left - 2 * value + right).clamp_min(1e-300)
    step = torch.where(inside, 0.5 * (left - right) / bend, 0.0).clamp(-0.5, 0.5)
    width = math.log(float(LAMBDAS[1] / LAMBDAS[0]))
    found = lam[at] * torch.exp(step * width)
    return found.squeeze(-1), torch.where(inside, value - 0.25 * (left - right) * step, value).squeeze(-1)
