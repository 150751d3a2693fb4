"""How sure the advisor is: probabilities of its recommendations and intervals around predicted errors.

What the survey knows of its own uncertainty leaves out what all clients have in common. These functions add it. Their
constants were fitted on 240 worlds of six kinds (normal, heavy-tailed, grouped, covariate-shifted, sparse, unequal
noise) by `python -m benchmarks.advisor_calibration fit`, and are judged on others (`docs/advisor.md`). Those of classes
were fitted on 40 logistic worlds (`fit --kind logistic`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from coterie.select.prospects import Prospects
    from coterie.select.survey import Findings

# quantiles of log(true / predicted error): intercept, and slopes of `features`
BOUNDS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "local": ((-0.437, -0.152, -0.083, -0.179, -0.625, 0.141), (1.059, 0.061, -0.123, 0.021, -0.28, 0.18)),
    "ridge-local": (
        (-0.373, -0.074, -0.12, -0.195, -0.33, 0.078),
        (1.346, 0.014, -0.233, -0.048, -0.183, 0.265),
    ),
    "fedavg": ((-0.578, -0.128, -0.21, -0.218, -0.131, 0.15), (1.168, 0.087, -0.059, -0.143, -0.085, 0.061)),
    "ftfa": ((-0.391, -0.147, -0.109, -0.212, -0.575, 0.151), (1.408, 0.075, -0.224, -0.002, -0.274, 0.203)),
    "rtfa": ((0.043, -0.047, -0.287, -0.217, -0.208, 0.139), (1.549, 0.115, -0.235, -0.193, -0.186, 0.332)),
}
# the same in logistic worlds, where errors are those of the linearised problem: intercept, and the slope of the
# logarithm of the error in units of the noise
CLASSES_BOUNDS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "local": ((-0.209, 0.054), (4.015, -1.007)),
    "ridge-local": ((-0.123, 0.132), (0.694, -0.278)),
    "fedavg": ((-0.825, -0.326), (0.312, -0.707)),
    "ftfa": ((-2.145, -0.609), (3.66, -0.695)),
    "rtfa": ((-1.143, -0.401), (-0.288, -0.862)),
}
# logistic models: intercept and slope
SHARE = (0.375, 1.558)  # of `evidence`, that a shared model is better
CLASSES_SHARE = (-0.466, 0.408)  # the same in logistic worlds
WITHIN = (
    3.439,
    0.615,
)  # of `lead`, that the method with the lowest predicted error is the best of its family
CLIENT = (0.405, 0.202, 0.212, 0.049)  # of `client_evidence`, that what is named for a client is its best
FURTHEST = 2.0  # log ratio of errors that counts
ERROR = 2  # place of the error in units of the noise among `features`
MOST = 6.0  # standard errors of evidence that count
WIDEST_SHIFT = 3.0
KINDS = {"local": 1, "ridge-local": 1, "fedavg": 0, "ftfa": 0, "rtfa": 0}  # index of the centre in `Findings`
DRAWS = 200  # of mean errors, for the penalty


def evidence(found: Findings) -> float:
    """Return by how many standard errors a model of the others lowers the error, within -6 and 6."""
    return max(-MOST, min(MOST, found.support / max(found.doubt, 1e-300)))


def sharing(found: Findings) -> float:
    """Return the probability that a shared model is better than training alone; NaN if nothing is calibrated."""
    model = {"linear": SHARE, "classes": CLASSES_SHARE}.get(found.calibrated)
    return math.nan if model is None else _logistic(model, evidence(found))


def lead(predicted: np.ndarray | Tensor) -> float:
    """Return the logarithm of the relative lead of the lowest predicted error over the next."""
    first, second = sorted(float(value) for value in predicted)[:2]
    return math.log(min(3.0, math.log((second + 1e-9) / (first + 1e-9))) + 0.01)


def best_of_family(predicted: Tensor) -> float:
    """Return the probability that the lowest of these predicted errors belongs to the best method."""
    return _logistic(WITHIN, lead(predicted))


def client_evidence(predicted: Tensor, allowed: Tensor, family: float) -> tuple[float, float, float]:
    """Return the client's lead inside the family, the log-odds of the family, and its lead over the other one.

    Parameters
    ----------
    predicted
        Predicted errors of one client, [methods].
    allowed
        Which methods share a model or not, as is recommended to all, [methods].
    family
        Probability that this is right.

    Returns
    -------
    tuple of float
    """
    inside, outside = (float(predicted[part].min()) + 1e-9 for part in (allowed, ~allowed))
    ahead = max(-FURTHEST, min(FURTHEST, math.log(outside / inside)))
    sure = min(max(family, 1e-4), 1 - 1e-4)
    return lead(predicted[allowed]), math.log(sure / (1 - sure)), ahead


def client_probability(predicted: Tensor, allowed: Tensor, family: float) -> float:
    """Return the probability that the best method of the family is the client's best, from its `client_evidence`."""
    constant, *slopes = CLIENT
    score = sum(a * b for a, b in zip(slopes, client_evidence(predicted, allowed, family), strict=True))
    return 1 / (1 + math.exp(-(constant + score)))


def features(own: Prospects, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the width of intervals depends on [..., methods, 5], and the resolution of errors [..., methods].

    Parameters
    ----------
    own
        What is predicted for some clients.
    predicted
        Predicted errors beyond the noise, [..., methods].

    Returns
    -------
    tuple of Tensor
        Logarithms of the survey's own relative deviation, the clients, the error in units of the noise, and features
        per row; and the covariate shift. The resolution is the noise times features per row of all clients.
    """
    noise = own.noise[..., list(KINDS.values())]
    resolution = noise * (own.columns / own.total)
    scale = predicted + resolution
    parts = [
        torch.log(torch.stack(list(deviations(own).values()), -1) / scale + 0.03),
        torch.full_like(scale, math.log(own.clients)),
        torch.log(scale / noise.clamp_min(1e-300)),
        torch.full_like(scale, min(own.shift, WIDEST_SHIFT)),
        torch.log(own.columns / own.rows).unsqueeze(-1).expand_as(scale),
    ]
    return torch.stack(parts, -1), resolution


def deviations(own: Prospects) -> dict[str, Tensor]:
    """Return the survey's own standard deviation of each predicted error [...], by method."""
    best = own.curve.argmin(-1, keepdim=True)
    lowest = own.error.gather(-1, best).squeeze(-1)
    return {
        "local": own.error[..., 1, 0],
        "ridge-local": lowest[..., 1],
        "fedavg": own.error[..., 0, -1],
        "ftfa": own.error[..., 0, 0],
        "rtfa": lowest[..., 0],
    }


def intervals(own: Prospects, predicted: Tensor) -> dict[str, Tensor]:
    """Return the 90 % interval of every client's error [..., 2], by method.

    Parameters
    ----------
    own
        What is predicted for some clients.
    predicted
        Predicted errors beyond the noise, [..., methods].

    Returns
    -------
    dict of Tensor
    """
    given, resolution = features(own, predicted)
    if not own.calibrated:
        return dict.fromkeys(BOUNDS, torch.full((*own.rows.shape, 2), math.nan, dtype=predicted.dtype))
    fitted, ends = BOUNDS, {}
    if own.calibrated == "classes":
        given, fitted = given[..., ERROR : ERROR + 1], CLASSES_BOUNDS
    for k, (name, bounds) in enumerate(fitted.items()):
        scale, sides = predicted[..., k] + resolution[..., k], []
        for (constant, *slopes), sign in zip(bounds, (-1, 1), strict=True):
            width = constant + given[..., k, :] @ torch.tensor(slopes, dtype=given.dtype)
            width = (sign * width).clamp_min(0.02) * sign  # never empty
            sides.append((scale * torch.exp(width) - resolution[..., k]).clamp_min(0.0))
        ends[name] = torch.stack(sides, -1)
    return ends


def penalty_interval(lam: Tensor, curve: Tensor, covariance: Tensor, seed: int = 0) -> tuple[float, float]:
    """Return a 90 % interval of the penalty that is best for all clients, from draws of their mean error.

    Parameters
    ----------
    lam
        Penalties, [L].
    curve
        Mean error by penalty, [L]; its logarithm is drawn, because errors are positive and few clients may make most.
    covariance
        Covariance of the mean error between penalties, [L, L].
    seed
        Seed of the draws.

    Returns
    -------
    tuple of float
        Lower and upper end; they may be 0 and infinite.

    Examples
    --------
    >>> import torch
    >>> from coterie.select.calibration import penalty_interval
    >>> penalty_interval(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([3.0, 1.0, 2.0]), torch.zeros(3, 3))
    (1.0, 1.0)
    """
    values, vectors = torch.linalg.eigh(covariance / (curve[:, None] * curve))
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randn(DRAWS, len(lam), generator=draw, dtype=curve.dtype)
    curves = curve.log() + drawn @ (vectors * values.clamp_min(0.0).sqrt()).mT
    best = lam[curves.argmin(-1)].sort().values
    return float(best[round(0.05 * DRAWS)]), float(best[round(0.95 * DRAWS) - 1])


def flat_range(found: Findings, share: bool, tolerance: float = 0.01) -> tuple[float, float]:
    """Return the penalties whose predicted error, mean over clients, is within a share of the lowest.

    Parameters
    ----------
    found
        What the survey found.
    share
        Whether the penalty is around the shared model, or around zero.
    tolerance
        The share.

    Returns
    -------
    tuple of float
        Smallest and largest of them; they may be 0 and infinite.
    """
    curve = found.curve[0 if share else 1]
    inside = found.lam[curve <= (1 + tolerance) * curve.min()]
    return float(inside.min()), float(inside.max())


def _logistic(model: tuple[float, float], x: float) -> float:
    return 1 / (1 + math.exp(-(model[0] + model[1] * x)))
