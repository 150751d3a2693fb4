"""The server's side of a generalised linear mixed model: Newton steps from the clients' marginal likelihoods.

Clients vary around their cluster's centre w_j (variances psi, integrated by each client), centres around the common w
(variances s0^2, integrated here by Laplace's approximation). With one cluster there is nothing above it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.theory.groups import group_sum
from coterie.theory.hierarchical import certainty, pseudo_inverse, times
from coterie.theory.marginal import Marginal, Structure

_SHRINKS = 0.7  # share of a psi by which one step may shrink it
_FLAT = 1e-9  # curvatures below this share of the largest say nothing


@dataclass(frozen=True)
class ModelPoint:
    """Parameters of the model.

    Parameters
    ----------
    common
        w, [d].
    centres
        w_j, [k, d].
    psi
        Entries of the root of the clients' covariance, [k or 1, p].
    between
        s0^2, [d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.marginal_newton import ModelPoint
    >>> here = ModelPoint(torch.zeros(1), torch.tensor([[-2.0], [2.0]]), torch.ones(1, 1), torch.tensor([4.0]))
    >>> there = ModelPoint(torch.ones(1), torch.tensor([[0.0], [2.0]]), torch.ones(1, 1), torch.tensor([4.0]))
    >>> here.own.tolist(), here.towards(there, 0.5).centres.tolist()
    ([[-1.0], [1.0]], [[-1.0], [2.0]])
    """

    common: Tensor
    centres: Tensor
    psi: Tensor
    between: Tensor

    @property
    def own(self) -> Tensor:
        """v_j with w_j = w + s0 v_j, [k, d]."""
        root = self.between.sqrt()
        return torch.where(root > 0, (self.centres - self.common) / root.where(root > 0, 1.0), 0.0)

    def towards(self, other: ModelPoint, share: float) -> ModelPoint:
        """Return the point at a share of the way to another."""

        def mix(a: Tensor, b: Tensor) -> Tensor:
            return a + share * (b - a)

        return ModelPoint(
            mix(self.common, other.common),
            mix(self.centres, other.centres),
            mix(self.psi, other.psi),
            other.between,
        )


@dataclass(frozen=True)
class NewtonStep:
    """What the clients' answers at a point say.

    Parameters
    ----------
    value
        Log likelihood at the point.
    gain
        How much a Newton step promises.
    target
        Where it leads.
    certainty
        Inverse covariances of the centres given all rows, [k, d, d].
    information
        Second derivative of -log likelihood in (w, psi), centres eliminated, [d + (k or 1) p, ...].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.marginal_newton import ModelPoint, NewtonStep
    >>> target = ModelPoint(torch.ones(1), torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1))
    >>> step = NewtonStep(-3.0, 0.5, target, torch.eye(1).unsqueeze(0), torch.diag(torch.tensor([4.0, 16.0])))
    >>> step.information.inverse().diagonal().sqrt().tolist()  # standard errors of w and psi
    [0.5, 0.25]
    """

    value: float
    gain: float
    target: ModelPoint
    certainty: Tensor
    information: Tensor


def newton_step(
    point: ModelPoint,
    found: Marginal,
    clusters: Tensor,
    structure: Structure,
    largest: Tensor,
    *,
    restricted: bool = False,
    held: Tensor | None = None,
) -> NewtonStep:
    """Return the value at a point and the Newton step from it.

    Parameters
    ----------
    point
        Where clients were asked.
    found
        Their answers, a row for each.
    clusters
        Cluster of each of them, [n].
    structure
        Which coordinates vary.
    largest
        Largest change of each psi, [p].
    restricted
        Whether the likelihood is integrated over w too (restricted maximum likelihood).
    held
        Which psi stay as they are, [k or 1, p]; by default none.

    Returns
    -------
    Step
        Value and step.

    Examples
    --------
    Two clients with one row each, at 0 and at 4, and noise 1: the likelihood is largest at w = 2, 1 + psi^2 = 4.

    >>> import torch
    >>> from coterie.theory.marginal import LikelihoodRows, Structure, find_mode, marginal
    >>> from coterie.theory.marginal_newton import ModelPoint, newton_step
    >>> from coterie.theory.quadrature import rule
    >>> y = torch.tensor([0.0, 4.0]).double()
    >>> def squared(scores):
    ...     left = scores - y.view(2, *[1] * (scores.dim() - 1))
    ...     return left.square().sum(-2) / 2, left, torch.ones_like(left).unsqueeze(-3)
    >>> rows = LikelihoodRows(torch.ones(2, 1, 1, 1).double(), torch.ones(2, 1).double(), squared)
    >>> structure, one, none = Structure.of(torch.tensor([0])), torch.ones(1).double(), torch.zeros(1).double()
    >>> point = ModelPoint(none, none.view(1, 1), one.view(1, 1), none)
    >>> for _ in range(8):
    ...     centre, psi = point.centres.expand(2, 1), point.psi.expand(2, 1)
    ...     mode = find_mode(rows, centre, structure.factor(psi), torch.zeros(2, 1).double())
    ...     found = marginal(rows, structure, mode, centre, psi, rule(1))
    ...     point = newton_step(point, found, torch.tensor([0, 0]), structure, one).target
    >>> round(point.common.item(), 4), round(point.psi.item() ** 2, 4)
    (2.0, 3.0)
    """
    k, d, p = len(point.centres), structure.d, structure.p
    gradient = group_sum(found.gradient, clusters, k)
    matrix = -group_sum(found.hessian, clusters, k)
    levels = len(point.psi)
    if levels > 1:
        gradient, matrix = _widened(gradient, matrix, d, p)
    root, own = point.between.sqrt() * (k > 1), point.own
    lever = torch.zeros(matrix.shape[-1], d, dtype=matrix.dtype, device=matrix.device)
    lever[:d] = torch.diag(root)
    identity = torch.eye(d, dtype=matrix.dtype, device=matrix.device)
    inside = identity + lever.mT @ matrix @ lever  # of v_j
    tilt = gradient @ lever - own
    across = matrix @ lever
    solved = torch.linalg.solve(inside, torch.cat([across.mT, tilt.unsqueeze(-1)], -1))
    schur = (matrix - across @ solved[..., :-1]).sum(0)
    right = (gradient - times(across, solved[..., -1])).sum(0)
    curved = matrix[:, :d, :d]
    cover = root.unsqueeze(-1) * torch.linalg.solve(inside, torch.diag(root).expand(k, d, d))
    value = float(found.value.sum() - 0.5 * own.square().sum() - 0.5 * torch.linalg.slogdet(inside)[1].sum())
    above = schur[:d, :d]
    if restricted:
        value -= 0.5 * float(_log_volume(above))
        passed = identity - cover @ curved
        cover = cover + passed @ pseudo_inverse(above) @ passed.mT
    if restricted or k > 1:
        right = right + _correction(point, found, clusters, structure, cover)
    moving = torch.ones_like(right, dtype=torch.bool)
    if held is not None:
        moving[d:] = ~held.flatten()
    step = torch.zeros_like(right)
    step[moving], gain = ascent(schur[moving][:, moving], right[moving])
    change = step[d:].view(levels, p)
    room = room_for(change, point.psi, largest)
    limit = float((room / change.abs().clamp(min=1e-300)).min().clamp(max=1.0))
    step = limit * step
    saddle = (point.psi.abs() < 1e-3 * largest) & (schur.diagonal()[d:].view(levels, p) < 0)
    saddle = saddle & moving[d:].view(levels, p)
    if bool(saddle.any()):  # zero is always stationary; here the likelihood rises on both sides of it
        step[d:] = torch.where(saddle, 0.3 * largest - point.psi, step[d:].view(levels, p)).flatten()
        gain = torch.inf
    moved = solved[..., -1] - times(solved[..., :-1], step)
    common = point.common + step[:d]
    centres = common + root * (own + limit * moved)
    target = ModelPoint(common, centres, point.psi + step[d:].view(levels, p), point.between)
    sure = certainty(curved, torch.arange(k, device=curved.device), root.square().expand(k, d))
    return NewtonStep(value, gain, target, sure, schur)


def _widened(gradient: Tensor, matrix: Tensor, d: int, p: int) -> tuple[Tensor, Tensor]:
    """Give every cluster a psi of its own: [k, d + p] becomes [k, d + k p]."""
    k = len(gradient)
    wide = gradient.new_zeros(k, d + k * p)
    square = gradient.new_zeros(k, d + k * p, d + k * p)
    for j in range(k):
        at = torch.cat([torch.arange(d), d + j * p + torch.arange(p)]).to(gradient.device)
        wide[j, at] = gradient[j]
        square[j, at.unsqueeze(-1), at] = matrix[j]
    return wide, square


def _correction(
    point: ModelPoint, found: Marginal, clusters: Tensor, structure: Structure, cover: Tensor
) -> Tensor:
    """Return the derivative in (w, psi) of -1/2 log det of the precision of the centres.

    A client's information about its centre is H = (A^-1 + L L')^-1, so dH = -H d(L L') H.
    """
    d, levels = structure.d, len(point.psi)
    h = -found.hessian[:, :d, :d]
    covered = h @ cover[clusters] @ h  # [n, d, d]
    factor = structure.factor(point.psi)[clusters if levels > 1 else torch.zeros_like(clusters)]
    pulled = covered @ factor  # the derivative in L, [n, d, q]
    entries = pulled[:, structure.at[structure.row], structure.column]
    slopes = structure.gather(entries)
    slopes = group_sum(slopes, clusters, levels).flatten() if levels > 1 else slopes.sum(0)
    return torch.cat([slopes.new_zeros(d), slopes])


def room_for(change: Tensor, psi: Tensor, largest: Tensor) -> Tensor:
    """Return how far each psi may move in the direction of its change; towards zero only a part of the way.

    Parameters
    ----------
    change
        The step that is wanted, of the shape of psi.
    psi
        Present values.
    largest
        Largest change of each, [p].

    Returns
    -------
    Tensor
        Largest sizes of the change.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.marginal_newton import room_for
    >>> [round(most, 2) for most in room_for(torch.tensor([5.0, -5.0]), torch.ones(2), torch.ones(2)).tolist()]
    [1.0, 0.7]
    """
    return torch.where(change * psi < 0, _SHRINKS * psi.abs() + 1e-3 * largest, largest)


def ascent(matrix: Tensor, right: Tensor) -> tuple[Tensor, float]:
    """Return |H|^-1 g, an ascent direction whatever the signs of H's eigenvalues, and the gain that it promises.

    Parameters
    ----------
    matrix
        H, minus the second derivative.
    right
        g, the gradient.

    Returns
    -------
    tuple of Tensor and float
        Step and gain.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.marginal_newton import ascent
    >>> step, gain = ascent(torch.diag(torch.tensor([2.0, -4.0])), torch.tensor([1.0, 1.0]))
    >>> step.tolist(), gain
    ([0.5, 0.25], 0.375)
    """
    size = matrix.diagonal().abs().clamp(min=1e-12 * float(matrix.diagonal().abs().max())).sqrt()
    values, vectors = torch.linalg.eigh(matrix / size / size.unsqueeze(-1))
    most = float(values.abs().max())
    inverse = torch.where(values.abs() > _FLAT * most, 1 / values.abs().clamp(min=1e-6 * most), 0.0)
    step = times(vectors, inverse * times(vectors.mT, right / size)) / size
    return step, 0.5 * float(right @ step)


def _log_volume(a: Tensor) -> Tensor:
    values: Tensor = torch.linalg.eigvalsh(a)
    return values.clamp(min=1e-12 * float(values[-1].clamp(min=1e-300))).log().sum()
