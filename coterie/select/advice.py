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

from coterie.algorithms import Algorithm, make
from coterie.engine.federation import Federation
from coterie.models.glm import Glm
from coterie.models.linear import Linear
from coterie.select import calibration
from coterie.select.survey import Findings, require_head
from coterie.theory import held_out, learned_centre, risk
from coterie.train.divergence import largest_curvature

METHODS = ("local", "ridge-local", "fedavg", "ftfa", "rtfa")
EXPLANATIONS = {
    "local": "each client trains alone",
    "ridge-local": "each client trains alone with a ridge penalty",
    "fedavg": "one model for everybody",
    "ftfa": "the shared model, fine-tuned by each client",
    "rtfa": "the shared model, fine-tuned by each client and kept near it",
}
SHARED = ("fedavg", "ftfa", "rtfa")
CLEAR = 1.0  # standard errors from zero beyond which the gain from sharing is clear
SURE = 0.9  # probability that sharing helps, or does not, from which on the advice is given without reserve
FLAT = 100.0  # ratio of penalties with about the same error that is worth a warning
SHIFTED = 1.0  # difference between the clients' covariances that is worth a warning
TAIL = 8.0  # distance over the median one that is worth a warning
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
    names, methods, lams
        Clients, and the best method and penalty for each.
    risks, intervals
        Predicted squared error beyond the noise [n] and its 90 % interval [n, 2], by method.
    sigma2, r2, rho2, gamma
        Estimates per client [n]: noise variance, squared distance to the shared model and to zero, features per row.
    floats_up, floats_down
        Numbers sent per client to get the advice.
    lam_alone, lam_shared
        Best penalty per client [n] around zero and around the shared model.
    sharing
        Probability that a shared model is better than training alone; NaN where it is not known: for models other than
        linear regression.
    probability, client_probabilities
        Probability that the recommended method is the best of the five, for the federation and for each client [n].
    lam_interval, lam_flat
        90 % interval of the best penalty, and the penalties whose predicted error is within 1 % of the lowest.

    Examples
    --------
    >>> import coterie
    >>> fed = coterie.Federation.from_table("heart_disease", "hospital", "sick")
    >>> advice = coterie.advise(fed, probe=0)
    >>> advice.method, advice.sure
    ('rtfa', False)
    >>> run = coterie.fit(fed, advice.algorithm(fed), rounds=2)
    """

    method: str
    lam: float | None
    sure: bool
    why: list[str]
    change: list[str]
    names: list[str] = field(repr=False)
    methods: list[str] = field(repr=False)
    lams: Tensor = field(repr=False)
    risks: dict[str, Tensor] = field(repr=False)
    intervals: dict[str, Tensor] = field(repr=False)
    sigma2: Tensor = field(repr=False)
    r2: Tensor = field(repr=False)
    rho2: Tensor = field(repr=False)
    gamma: Tensor = field(repr=False)
    floats_up: float = field(repr=False)
    floats_down: float = field(repr=False)
    lam_alone: Tensor = field(repr=False)
    lam_shared: Tensor = field(repr=False)
    sharing: float = math.nan
    probability: float = math.nan
    client_probabilities: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    lam_interval: tuple[float, float] = field(default=(math.nan, math.nan), repr=False)
    lam_flat: tuple[float, float] = field(default=(math.nan, math.nan), repr=False)

    def algorithm(self, fed: Federation) -> Algorithm:
        """Return the recommended method, ready for `coterie.fit` with a few hundred rounds."""
        return algorithm(self.method, self.lam, fed)

    def verdict(self) -> str:
        """Return the recommendation in one sentence."""
        penalty = f" with lambda = {self.lam:.3g}" if self.lam is not None else ""
        choice = f"{self.method}{penalty}: {EXPLANATIONS[self.method]}"
        sentence = f"Use {choice}." if self.sure else f"I cannot tell. If you must choose: {choice}."
        if math.isnan(self.probability):
            return sentence
        return (
            f"{sentence} Sharing a model is better than training alone with probability {self.sharing:.2f}, "
            f"{self.method} the best of the five methods with probability {self.probability:.2f}."
        )

    def text(self) -> str:
        """Return the recommendation, its reasons, and what would change it."""
        lines = [self.verdict(), *(f"- {reason}" for reason in self.why)]
        if self.change:
            lines += ["What would change this:", *(f"- {line}" for line in self.change)]
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """Return the advice as JSON values, with a row for every client."""
        rows = []
        for k, name in enumerate(self.names):
            row: dict[str, Any] = {"client": name, "method": self.methods[k]}
            row["lam"] = _number(self.lams[k])
            row |= {
                "sigma2": _number(self.sigma2[k]),
                "r2": _number(self.r2[k]),
                "rho2": _number(self.rho2[k]),
            }
            row["gamma"] = _number(self.gamma[k])
            row["risk"] = {method: _number(values[k]) for method, values in self.risks.items()}
            row["interval"] = {
                method: [_number(value) for value in values[k]] for method, values in self.intervals.items()
            }
            rows.append(row)
        return {
            "method": self.method,
            "lam": self.lam,
            "sure": self.sure,
            "sharing": _number(self.sharing),
            "probability": _number(self.probability),
            "lam_interval": [_number(value) for value in self.lam_interval],
            "lam_flat": [_number(value) for value in self.lam_flat],
            "verdict": self.verdict(),
            "why": self.why,
            "change": self.change,
            "floats_up_per_client": self.floats_up,
            "floats_down_per_client": self.floats_down,
            "clients": rows,
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
    """Turn the findings of the survey into advice."""
    lam_shared, best_shared = held_out.lowest(found.curve[:, 0], found.lam)
    lam_alone, best_alone = held_out.lowest(found.curve[:, 1], found.lam)
    lam_alone = lam_alone.clamp(max=_largest(found.lam))
    errors = torch.stack(
        [found.curve[:, 1, 0], best_alone, found.curve[:, 0, -1], found.curve[:, 0, 0], best_shared], 1
    )
    kinds = torch.tensor([0 if name in SHARED else 1 for name in METHODS])
    excess = (errors - found.noise[:, kinds]).clamp_min(0.0)
    means = errors.mean(0)
    share, clear = _centre_helps(found, float(means[kinds == 1].min() - means[kinds == 0].min()))
    allowed = torch.tensor([share == (method in SHARED) for method in METHODS])
    masked = torch.where(allowed, errors, math.inf)
    picks = masked.argmin(1)
    lams = torch.where(picks == METHODS.index("rtfa"), lam_shared, math.nan)
    lams = torch.where(picks == METHODS.index("ridge-local"), lam_alone, lams)
    method, lam = _for_everybody(masked.mean(0), found, share)
    noise = found.noise[:, 0] if share else found.noise[:, 1]
    risks = {name: excess[:, k] for k, name in enumerate(METHODS)}
    intervals = calibration.intervals(found, excess)
    probability, own_probabilities = _probabilities(found, excess, share, allowed)
    flat = calibration.flat_range(found, share)
    columns = require_head(fed.model).columns
    gamma = columns / found.rows
    r2, rho2 = found.distance[:, 0] * columns, found.distance[:, 1] * columns
    mean = {name: float(value.mean()) for name, value in risks.items()}
    little = _matters_little(found, float(best_shared.mean()), float(best_alone.mean()))
    sharing = calibration.sharing(found) if found.exact else math.nan
    convinced = max(sharing, 1 - sharing) >= SURE if found.exact else clear
    sure = (convinced or little) and fed.n >= FEWEST_CLIENTS
    names = [fed.names[int(k)] for k in found.ids]
    visits = max(1, fed.n)
    return Advice(
        method=method,
        lam=lam,
        sure=sure,
        why=[*_reasons(fed, found, mean, share, clear, little), *_warnings(found, r2, flat)],
        change=_changes(fed, found, r2, rho2, noise, share, clear),
        names=names,
        methods=[METHODS[int(k)] for k in picks],
        lams=lams,
        risks=risks,
        intervals=intervals,
        sigma2=noise,
        r2=r2,
        rho2=rho2,
        gamma=gamma,
        floats_up=fed.ledger.total("floats_up") / visits,
        floats_down=fed.ledger.total("floats_down") / visits,
        lam_alone=lam_alone,
        lam_shared=lam_shared,
        sharing=sharing,
        probability=probability,
        client_probabilities=own_probabilities,
        lam_interval=calibration.penalty_interval(found, share),
        lam_flat=flat,
    )


def _probabilities(found: Findings, excess: Tensor, share: bool, allowed: Tensor) -> tuple[float, Tensor]:
    """Return the probability that the best method is recommended, for all clients together and for each."""
    if not found.exact:
        return math.nan, torch.full((len(excess),), math.nan)
    family = calibration.sharing(found) if share else 1 - calibration.sharing(found)
    own = [calibration.client_probability(one, allowed, family) for one in excess]
    return family * calibration.best_of_family(excess.mean(0)[allowed]), torch.tensor(own)


def _warnings(found: Findings, r2: Tensor, flat: tuple[float, float]) -> list[str]:
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
    far = r2 > TAIL * r2.median()
    if r2.median() > 0 and far.any():
        parts.append(
            f"{int(far.sum())} of {len(r2)} clients are more than {TAIL:g} times as far from the shared model as the "
            "median client: distances are not normal, and groups or outliers are likely."
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
    curve = found.curve[:, 0 if share else 1].mean(0)
    lam, _ = held_out.lowest(curve, found.lam)
    if lam == 0:
        return ("ftfa" if share else "local"), None
    if share and math.isinf(lam):
        return "fedavg", None
    return method, min(float(lam), _largest(found.lam))


def _largest(lam: Tensor) -> float:
    """Return the largest finite penalty: a model of one's own that is pulled to zero without end is no method."""
    return float(lam[lam.isfinite()].max())


def _reasons(
    fed: Federation, found: Findings, mean: dict[str, float], share: bool, clear: bool, little: bool
) -> list[str]:
    """Return the reasons for the recommendation."""
    rows, columns = float(found.rows.median()), require_head(fed.model).columns
    parts = [
        f"There are {fed.n} clients with {rows:.0f} rows each (median) and {columns} features: "
        f"{rows / columns:.2g} rows per feature.",
        _evidence(found, share, clear),
    ]
    listed = ", ".join(f"{name} {value:.3g}" for name, value in mean.items())
    parts.append(f"Predicted squared error beyond the noise, mean over clients: {listed}.")
    if not clear and little:
        parts.append("Sharing changes the error by less than 5 % here, so either choice is fine.")
    elif not clear:
        parts.append("So these rows do not show whether a shared model helps, and the choice may matter.")
    if fed.n < FEWEST_CLIENTS:
        parts.append(f"{fed.n} clients are too few to estimate what clients have in common.")
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


def _changes(
    fed: Federation, found: Findings, r2: Tensor, rho2: Tensor, noise: Tensor, share: bool, clear: bool
) -> list[str]:
    """Say how many more rows or clients would change the advice, by the asymptotic risks at the median client."""
    columns = require_head(fed.model).columns
    n, near, far, s2 = (float(value.median()) for value in (found.rows, r2, rho2, noise))
    lines = []
    if not clear and not found.exact:
        lines.append("More clients, or more rows each, would show whether sharing helps.")
    elif not clear:
        needed = fed.n * (CLEAR * found.doubt / max(abs(found.support), 1e-300)) ** 2
        lines.append(
            f"About {2 * needed:.0f} clients like these would show whether sharing helps."
            if needed < 20 * fed.n
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
    own_error = learned_centre.centre_error(gamma=columns / n, r2=near, sigma2=s2, clients=fed.n).risk
    common = far - near + own_error
    if common > 0.1 * own_error:
        needed = math.ceil(max(1.5, 2 * own_error / common) * fed.n)
        lines.append(
            f"With about {needed} clients like these the shared model would be precise enough to help."
        )
    else:
        lines.append(
            "Nothing suggests a common model: more clients would not help; other features, or groups of similar "
            "clients, might."
        )
    return lines


def _number(value: Any) -> float | None:
    """Return a float, or None if it is not finite, for JSON."""
    value = float(value)
    return value if math.isfinite(value) else None
