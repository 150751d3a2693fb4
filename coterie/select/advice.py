"""Turn the estimates of the survey into advice: which method, which penalty, and how sure.

The survey (`coterie.select.survey`) estimates each client's noise and its distance to the shared model and to zero.
From these follows the held-out error of local training, local ridge, the shared model, and the shared model fine-tuned
with and without a ridge penalty. For linear models the estimates are exact. Logistic and softmax models are linearised
at the shared model and checked by a short probe. For networks the last layer is surveyed, on the features of a briefly
trained shared model, and checked the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms import Algorithm, make
from coterie.engine.federation import Federation
from coterie.models.glm import Glm
from coterie.models.linear import Linear
from coterie.select import calibration
from coterie.select.prospects import FAMILY as FAMILY
from coterie.select.prospects import METHODS as METHODS
from coterie.select.prospects import SHARED as SHARED
from coterie.select.prospects import ClientAdvice, largest, number
from coterie.select.survey import FAR, Findings, Survey
from coterie.select.survey_phases import coarse
from coterie.theory import held_out, learned_centre, risk
from coterie.train.divergence import largest_curvature

EXPLANATIONS = {
    "local": "each client trains alone",
    "ridge-local": "each client trains alone with a ridge penalty",
    "fedavg": "one model for everybody",
    "ftfa": "the shared model, fine-tuned by each client",
    "rtfa": "the shared model, fine-tuned by each client and kept near it",
}
CLEAR = 1.0  # standard errors from zero beyond which the gain from sharing is clear
SURE = 0.9  # probability that sharing helps, or does not, from which on the advice is given without reserve
FLAT = 100.0  # ratio of penalties with about the same error that is worth a warning
SHIFTED = 1.0  # difference between the clients' covariances that is worth a warning
BLURRED = 0.7  # share of noise for privacy in what is known of clients from which on nothing can be told
MATTERS = 0.05  # differences below this share of the error do not matter
FEWEST_CLIENTS = 4


@dataclass(frozen=True)
class Advice:
    """Recommendation of `coterie.advise`, for the federation and for every client.

    Attributes
    ----------
    method, lam
        Recommended method (see `METHODS`) and penalty, one for all clients.
    sure
        Whether sharing is better, or training alone, with a probability of at least 0.9, or the choice matters little.
    why, change
        Reasons, and what would change the recommendation, one sentence each.
    names, own
        Clients that were asked, and the advice for each of them; None where only sums left the clients.
    risk
        Predicted squared error beyond the noise by method, mean over clients.
    floats_up, floats_down
        Numbers sent per client to get the advice.
    sharing
        Probability that a shared model is better than training alone; NaN where it is not known: for models other than
        linear and logistic regression, and where a probe overruled the survey.
    probability
        Probability that the recommended method is the best of the five; for linear regression.
    lam_interval, lam_flat
        90 % interval of the best penalty, and the penalties whose predicted error is within 1 % of the lowest.
    """

    method: str
    lam: float | None
    sure: bool
    why: list[str]
    change: list[str]
    names: list[str] = field(repr=False)
    own: ClientAdvice | None = field(repr=False)
    risk: dict[str, float] = field(repr=False)
    floats_up: float = field(repr=False)
    floats_down: float = field(repr=False)
    sharing: float = math.nan
    probability: float = math.nan
    lam_interval: tuple[float, float] = field(default=(math.nan, math.nan), repr=False)
    lam_flat: tuple[float, float] = field(default=(math.nan, math.nan), repr=False)

    @property
    def clients(self) -> ClientAdvice:
        """The advice for each client; raises `SettingError` where the clients keep it to themselves."""
        if self.own is None:
            raise SettingError(
                "each client has its own advice, and only sums were sent: see advice.json at its node"
            )
        return self.own

    @property
    def methods(self) -> list[str]:
        """Best method of each client."""
        return self.clients.methods

    @property
    def lams(self) -> Tensor:
        """Penalty of each client's best method [n]; NaN if it has none."""
        return self.clients.lams

    @property
    def risks(self) -> dict[str, Tensor]:
        """Predicted squared error beyond the noise [n], by method."""
        return self.clients.risks

    @property
    def intervals(self) -> dict[str, Tensor]:
        """90 % intervals of the errors [n, 2], by method."""
        return self.clients.intervals

    @property
    def client_probabilities(self) -> Tensor:
        """Probability that the method named for a client is its best, [n]."""
        return self.clients.probabilities

    @property
    def sigma2(self) -> Tensor:
        """Noise variance of each client, [n]."""
        return self.clients.sigma2

    @property
    def r2(self) -> Tensor:
        """Squared distance of each client to the shared model, [n]."""
        return self.clients.r2

    @property
    def rho2(self) -> Tensor:
        """Squared distance of each client to zero, [n]."""
        return self.clients.rho2

    @property
    def gamma(self) -> Tensor:
        """Features per row of each client, [n]."""
        return self.clients.gamma

    @property
    def lam_alone(self) -> Tensor:
        """Best penalty of each client around zero, [n]."""
        return self.clients.lam_alone

    @property
    def lam_shared(self) -> Tensor:
        """Best penalty of each client around the shared model, [n]."""
        return self.clients.lam_shared

    def algorithm(self, fed: Federation) -> Algorithm:
        """Return the recommended method, ready for `coterie.fit` with a few hundred rounds."""
        return algorithm(self.method, self.lam, fed)

    def verdict(self) -> str:
        """Return the recommendation in one sentence."""
        penalty = f" with lambda = {self.lam:.3g}" if self.lam is not None else ""
        choice = f"{self.method}{penalty}: {EXPLANATIONS[self.method]}"
        sentence = f"Use {choice}." if self.sure else f"I cannot tell. If you must choose: {choice}."
        if math.isnan(self.sharing):
            return sentence
        known = (
            f"{sentence} Sharing a model is better than training alone with probability {self.sharing:.2f}"
        )
        if math.isnan(self.probability):
            return f"{known}."
        return f"{known}, {self.method} the best of the five methods with probability {self.probability:.2f}."

    def text(self) -> str:
        """Return the recommendation, its reasons, and what would change it."""
        lines = [self.verdict(), *(f"- {reason}" for reason in self.why)]
        if self.change:
            lines += ["What would change this:", *(f"- {line}" for line in self.change)]
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """Return the advice as JSON values, with a row for every client."""
        return {
            "method": self.method,
            "lam": self.lam,
            "sure": self.sure,
            "sharing": number(self.sharing),
            "probability": number(self.probability),
            "lam_interval": [number(value) for value in self.lam_interval],
            "lam_flat": [number(value) for value in self.lam_flat],
            "verdict": self.verdict(),
            "why": self.why,
            "change": self.change,
            "floats_up_per_client": self.floats_up,
            "floats_down_per_client": self.floats_down,
            "risk": {name: number(value) for name, value in self.risk.items()},
            "clients": [] if self.own is None else self.own.json(self.names),
        }


def algorithm(method: str, lam: float | None, fed: Federation) -> Algorithm:
    """Return a method with its penalty; exact solvers where the model has them, else a step size from the curvature."""
    exact = isinstance(fed.model, Glm)
    if method in ("local", "ridge-local"):
        settings: dict[str, Any] = {"ridge": lam or 0.0}
        if isinstance(fed.model, Linear) or (exact and (lam or fed.model.l2)):  # type: ignore[attr-defined]
            settings["exact"] = True
        return make("local", **settings)
    settings = {} if not exact else {"lr": 1.0 / largest_curvature(fed), "steps": 5, "batch": 0}
    if method == "rtfa":
        settings |= {"lam": lam, "tuning": "exact" if exact else "epochs"}
    elif method == "ftfa":
        settings |= {"tuning": "exact" if isinstance(fed.model, Linear) else "epochs"}
        if exact:
            settings |= {"tuning_lr": settings["lr"], "tuning_epochs": 50}
    return make(method, **settings)


def conclude(fed: Federation, found: Findings) -> Advice:
    """Turn the findings of the survey into advice, and tell the clients what is recommended to all."""
    means = found.errors
    share, clear = _centre_helps(found, float(means[~FAMILY].min() - means[FAMILY].min()))
    allowed = FAMILY == share
    method, lam = _for_everybody(torch.where(allowed, means, math.inf), found, share)
    sharing = calibration.sharing(found)
    far, covariance = Survey().settle(fed, found, share, sharing)
    own = None if found.prospects is None else found.prospects.advised(share, sharing)
    flat, places = calibration.flat_range(found, share), coarse(found.lam)
    little = _matters_little(found, float(means[FAMILY].min()), float(means[~FAMILY].min()))
    convinced = max(sharing, 1 - sharing) >= SURE if found.calibrated else clear
    drowned = found.blur > BLURRED
    family = sharing if share else 1 - sharing
    within = calibration.best_of_family(found.excess[allowed])
    risk = {name: float(value) for name, value in zip(METHODS, found.excess, strict=True)}
    return Advice(
        method=method,
        lam=lam,
        sure=(convinced or little) and found.clients >= FEWEST_CLIENTS and not drowned,
        why=[*_reasons(found, risk, share, clear, little), *_warnings(found, far, flat)],
        change=_changes(found, share, clear),
        names=found.names,
        own=own,
        risk=risk,
        floats_up=fed.ledger.total("floats_up") / max(1, found.clients),
        floats_down=fed.ledger.total("floats_down") / max(1, found.clients),
        sharing=math.nan if drowned else sharing,
        probability=math.nan if drowned or not found.exact else family * within,
        lam_interval=calibration.penalty_interval(
            found.lam[places], found.curve[0 if share else 1][places], covariance
        ),
        lam_flat=flat,
    )


def _warnings(found: Findings, far: int, flat: tuple[float, float]) -> list[str]:
    """Return notes on what the estimates rest on and the data do not fulfil."""
    parts = []
    if flat[1] > FLAT * max(flat[0], 1e-12):
        ends = (
            "no penalty" if flat[0] == 0 else f"{flat[0]:.2g}",
            "infinity" if math.isinf(flat[1]) else f"{flat[1]:.2g}",
        )
        parts.append(
            f"The penalty is hardly determined: from {ends[0]} to {ends[1]} the predicted error changes by under 1 %."
        )
    if found.shift > SHIFTED:
        parts.append(
            "The features vary differently from client to client, so predicted errors are less certain."
        )
    if far:
        parts.append(
            f"{far} of {found.clients} clients are more than {FAR:g} times as far from the shared model as is usual: "
            "distances are not normal, and groups or outliers are likely."
        )
    if found.blur > BLURRED:
        parts.append(
            f"Noise for privacy makes up {found.blur:.0%} of what is known of the clients, so the rest says little: "
            "spend more (--epsilon), or ask clients with more rows or fewer columns."
        )
    return parts


def _centre_helps(found: Findings, predicted: float) -> tuple[bool, bool]:
    """Decide for all clients together whether sharing a model helps, and whether the decision is clear.

    The measured reduction of the error decides. If it is within a standard error of zero, its sum with the
    `predicted` reduction decides.
    """
    clear = abs(found.support) > CLEAR * found.doubt
    return found.support + (0.0 if clear or not found.exact else predicted) > 0, clear


def _matters_little(found: Findings, shared: float, alone: float) -> bool:
    """Return True if the error is about the same with and without sharing."""
    largest = abs(found.support) + 2 * found.doubt if found.exact else abs(shared - alone)
    return largest <= MATTERS * alone


def _for_everybody(mean: Tensor, found: Findings, share: bool) -> tuple[str, float | None]:
    """Return the method with the lowest mean error and the penalty that is best for all clients together."""
    method = METHODS[int(mean.argmin())]
    if method not in ("ridge-local", "rtfa"):
        return method, None
    curve = found.curve[0 if share else 1]
    lam, _ = held_out.lowest(curve, found.lam)
    if lam == 0:
        return ("ftfa" if share else "local"), None
    if share and math.isinf(lam):
        return "fedavg", None
    return method, min(float(lam), largest(found.lam))


def _reasons(found: Findings, mean: dict[str, float], share: bool, clear: bool, little: bool) -> list[str]:
    """Return the reasons for the recommendation."""
    rows, columns = float(found.rows.median()), found.columns
    parts = [
        f"There are {found.clients} clients with {rows:.0f} rows each (median) and {columns} features: "
        f"{rows / columns:.2g} rows per feature.",
        _evidence(found, share, clear),
    ]
    listed = ", ".join(f"{name} {value:.3g}" for name, value in mean.items())
    parts.append(f"Predicted squared error beyond the noise, mean over clients: {listed}.")
    if not clear and little:
        parts.append("Sharing changes the error by less than 5 % here, so either choice is fine.")
    elif not clear:
        parts.append("So these rows do not show whether a shared model helps, and the choice may matter.")
    if found.clients < FEWEST_CLIENTS:
        parts.append(f"{found.clients} clients are too few to estimate what clients have in common.")
    if float(found.rows.sum()) < 2 * columns and share:
        parts.append(
            "All clients together have fewer than two rows per feature, so the shared model is imprecise."
        )
    return parts


def _evidence(found: Findings, share: bool, clear: bool) -> str:
    """Say whether a model of the other clients helps."""
    helps = "helps" if share else "does not help"
    if found.exact:
        change = "lowers" if found.support > 0 else "raises"
        sure = f"so sharing {helps}" if clear else "which may be chance"
        return (
            f"Starting from a model of the other clients {change} the squared error on held-out rows by "
            f"{abs(found.support):.3g} (standard error {found.doubt:.2g}), {sure}."
        )
    more = "more" if share else "less"
    sure = f"so sharing {helps}" if clear else "but not by a clear margin"
    return (
        f"On the rows of one half of the clients, a model of the other half explains {more} than its own estimation "
        f"error adds (by {abs(found.support):.3g} per row), {sure}."
    )


def _changes(found: Findings, share: bool, clear: bool) -> list[str]:
    """Say how many more rows or clients would change the advice, by the asymptotic risks at a typical client."""
    columns, n = found.columns, float(found.rows.median())
    near, far = (found.distance * columns).tolist()
    s2 = float(found.noise[0 if share else 1])
    lines = []
    if not clear and not found.exact:
        lines.append("More clients, or more rows each, would show whether sharing helps.")
    elif not clear:
        needed = found.clients * (CLEAR * found.doubt / max(abs(found.support), 1e-300)) ** 2
        lines.append(
            f"About {2 * needed:.0f} clients like these would show whether sharing helps."
            if needed < 20 * found.clients
            else "Both choices are so close that more clients like these would hardly settle it."
        )
    if share:
        for factor in (2, 3, 5, 10, 20, 50, 100):
            gamma = columns / (factor * n)
            alone = risk.ridge_local(gamma=gamma, rho2=far, sigma2=s2).risk
            shared = risk.rtfa(gamma=gamma, r2=near, sigma2=s2).risk
            if alone <= (1 + MATTERS) * shared + MATTERS * s2:
                lines.append(
                    f"With about {factor} times the rows per client ({factor * n:.0f}), or {factor} times fewer "
                    "features, training alone would be as good."
                )
                break
        else:
            lines.append("Even a hundred times the rows per client would not make training alone as good.")
        return lines
    own_error = learned_centre.centre_error(gamma=columns / n, r2=near, sigma2=s2, clients=found.clients).risk
    common = far - near + own_error
    if common > 0.1 * own_error:
        needed = math.ceil(max(1.5, 2 * own_error / common) * found.clients)
        lines.append(
            f"With about {needed} clients like these the shared model would be precise enough to help."
        )
    else:
        lines.append(
            "Nothing suggests a common model: more clients would not help; other features, or groups of similar "
            "clients, might."
        )
    return lines
