"""Which method, and which penalty: advice from local statistics and a few federated sums.

The survey (`coterie.theory.survey`) estimates each client's noise and its distance to the shared model and to zero,
and from them the held-out error of training alone, ridge alone, the shared model, and the shared model tuned at home
with and without a ridge. Linear models are exact; logistic and softmax models are linearised at the shared model and
checked by a short probe; of networks the last layer is surveyed, on the features of a shortly trained shared model, and
checked likewise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.errors import SettingError
from coterie.models.glm import Glm
from coterie.models.linear import Linear
from coterie.theory import held_out, risk
from coterie.theory.survey import Findings, Survey, require_head

if TYPE_CHECKING:
    from coterie.algorithms.base import Algorithm
    from coterie.federation.federation import Federation

METHODS = ("local", "ridge-local", "fedavg", "ftfa", "rtfa")
WORDS = {
    "local": "each client trains alone",
    "ridge-local": "each client trains alone with a ridge penalty",
    "fedavg": "one model for everybody",
    "ftfa": "the shared model, tuned at home",
    "rtfa": "the shared model, tuned at home and held near it",
}
SHARED = ("fedavg", "ftfa", "rtfa")
CLEAR = 1.0  # standard errors beyond which a centre is useful, or useless: right in 98 % of random worlds
MATTERS = 0.05  # differences below this share of the error do not matter
FEWEST_CLIENTS = 4


@dataclass(frozen=True)
class Advice:
    """What `coterie.advise` found. Risks are squared errors of prediction beyond the noise, [n] by method."""

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
    floats_up: float = field(repr=False)  # per client
    floats_down: float = field(repr=False)
    lam_alone: Tensor = field(repr=False)
    lam_shared: Tensor = field(repr=False)

    def algorithm(self, fed: Federation) -> Algorithm:
        """The recommended method, ready for `coterie.fit` with a few hundred rounds."""
        return algorithm(self.method, self.lam, fed)

    def verdict(self) -> str:
        """The recommendation in one sentence."""
        penalty = f" with lambda = {self.lam:.3g}" if self.lam is not None else ""
        choice = f"{self.method}{penalty}: {WORDS[self.method]}"
        return f"Use {choice}." if self.sure else f"I cannot tell. If you must choose: {choice}."

    def text(self) -> str:
        """Verdict, reasons, and what would change it, in plain words."""
        lines = [self.verdict(), *(f"- {reason}" for reason in self.why)]
        if self.change:
            lines += ["What would change this:", *(f"- {line}" for line in self.change)]
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
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
            "verdict": self.verdict(),
            "why": self.why,
            "change": self.change,
            "floats_up_per_client": self.floats_up,
            "floats_down_per_client": self.floats_down,
            "clients": rows,
        }


def advise(fed: Federation, probe: int = 30) -> Advice:
    """Recommend a method and a penalty, for the federation and for every client; `fed` is left as it was.

    `probe` rounds of training check the advice against validation rows where the model is not least squares; 0
    leaves that out. What was sent is in `floats_up` and `floats_down`.
    """
    fed = fed.fresh()
    fed.enter_round(0, None)
    if fed.n < 2:
        raise SettingError("advice needs at least two clients: with one there is nobody to collaborate with")
    if not isinstance(fed.model, Glm):
        from coterie.theory.probe import from_last_layer

        return from_last_layer(fed, probe)
    advice = conclude(fed, Survey().carry_out(fed))
    if not isinstance(fed.model, Linear) and probe and fed.has_rows("validation"):
        from coterie.theory.probe import checked

        return checked(fed, advice, probe)
    return advice


def algorithm(method: str, lam: float | None, fed: Federation) -> Algorithm:
    """A method at its exact limit where the model has one; the step size follows from the curvature."""
    from coterie.algorithms import make

    exact = isinstance(fed.model, Glm)
    if method in ("local", "ridge-local"):
        settings: dict[str, Any] = {"ridge": lam or 0.0}
        if isinstance(fed.model, Linear) or (exact and (lam or fed.model.l2)):  # type: ignore[attr-defined]
            settings["exact"] = True
        return make("local", **settings)
    settings = {} if not exact else {"lr": 1.0 / _curvature(fed), "steps": 5, "batch": 0}
    if method == "rtfa":
        settings |= {"lam": lam, "tuning": "exact" if exact else "epochs"}
    elif method == "ftfa":
        settings |= {"tuning": "exact" if isinstance(fed.model, Linear) else "epochs"}
        if exact:
            settings |= {"tuning_lr": settings["lr"], "tuning_epochs": 50}
    return make(method, **settings)


def _curvature(fed: Federation) -> float:
    """The largest curvature among the clients: one number each."""
    trial = fed.fresh()
    trial.enter_round(0, None)
    return float(trial.map(Survey().curvature).values.max())


def conclude(fed: Federation, found: Findings) -> Advice:
    """From what the survey found to advice."""
    lam_shared, best_shared = held_out.lowest(found.curve[:, 0], found.lam)
    lam_alone, best_alone = held_out.lowest(found.curve[:, 1], found.lam)
    errors = torch.stack(
        [found.curve[:, 1, 0], best_alone, found.curve[:, 0, -1], found.curve[:, 0, 0], best_shared], 1
    )
    kinds = torch.tensor([0 if name in SHARED else 1 for name in METHODS])
    excess = (errors - found.noise[:, kinds]).clamp_min(0.0)
    means = excess.mean(0)
    share, clear = _centre_helps(found, float(means[kinds == 1].min() - means[kinds == 0].min()))
    allowed = torch.tensor([share == (method in SHARED) for method in METHODS])
    masked = torch.where(allowed, errors, math.inf)
    picks = masked.argmin(1)
    lams = torch.where(picks == METHODS.index("rtfa"), lam_shared, math.nan)
    lams = torch.where(picks == METHODS.index("ridge-local"), lam_alone, lams)
    method, lam = _for_everybody(masked.mean(0), found, share)
    noise = found.noise[:, 0] if share else found.noise[:, 1]
    spreads = _spreads(found)
    risks = {name: excess[:, k] for k, name in enumerate(METHODS)}
    intervals = {
        name: torch.stack(
            [(risks[name] + sign * 1.645 * spreads[name]).clamp_min(0.0) for sign in (-1, 1)], 1
        )
        for name in METHODS
    }
    columns = require_head(fed.model).columns
    gamma = columns / found.rows
    r2, rho2 = found.distance[:, 0] * columns, found.distance[:, 1] * columns
    mean = {name: float(value.mean()) for name, value in risks.items()}
    little = _matters_little(found, float(best_shared.mean()), float(best_alone.mean()))
    sure = (clear or little) and fed.n >= FEWEST_CLIENTS
    names = [fed.names[int(k)] for k in found.ids]
    visits = max(1, fed.n)
    return Advice(
        method=method,
        lam=lam,
        sure=sure,
        why=_reasons(fed, found, mean, share, clear, little),
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
    )


def _centre_helps(found: Findings, predicted: float) -> tuple[bool, bool]:
    """Whether a shared centre beats none, with one answer for all clients, and whether that is clear.

    What it was measured to take off the error decides; within a standard error of nothing, that and what it is
    `predicted` to take off decide together.
    """
    clear = abs(found.support) > CLEAR * found.doubt
    if clear or not found.exact:
        return found.support > 0, clear
    return found.support + predicted > 0, False


def _matters_little(found: Findings, shared: float, alone: float) -> bool:
    """Whether the error is about the same with and without sharing, whichever is better."""
    largest = abs(found.support) + 2 * found.doubt if found.exact else abs(shared - alone)
    return largest <= MATTERS * alone


def _for_everybody(mean: Tensor, found: Findings, share: bool) -> tuple[str, float | None]:
    """The method with the lowest mean error, and the penalty that is best for all clients together."""
    method = METHODS[int(mean.argmin())]
    if method not in ("ridge-local", "rtfa"):
        return method, None
    curve = found.curve[:, 0 if share else 1].mean(0)
    lam, _ = held_out.lowest(curve, found.lam)
    if lam == 0:
        return ("ftfa" if share else "local"), None
    return (method, float(lam)) if math.isfinite(lam) else ("fedavg", None)


def _spreads(found: Findings) -> dict[str, Tensor]:
    """Standard deviation of each predicted error."""
    best = {kind: found.curve[:, kind].argmin(-1, keepdim=True) for kind in (0, 1)}
    return {
        "local": found.error[:, 1, 0],
        "ridge-local": found.error[:, 1].gather(1, best[1]).squeeze(1),
        "fedavg": found.error[:, 0, -1],
        "ftfa": found.error[:, 0, 0],
        "rtfa": found.error[:, 0].gather(1, best[0]).squeeze(1),
    }


def _reasons(
    fed: Federation, found: Findings, mean: dict[str, float], share: bool, clear: bool, little: bool
) -> list[str]:
    rows, columns = float(found.rows.median()), require_head(fed.model).columns
    parts = [
        f"There are {fed.n} clients with {rows:.0f} rows each (median) and {columns} features: "
        f"{rows / columns:.2g} rows per feature.",
        _evidence(found, share, clear),
    ]
    listed = ", ".join(f"{name} {value:.3g}" for name, value in mean.items())
    parts.append(f"Predicted squared error beyond the noise, mean over clients: {listed}.")
    if not clear and little:
        parts.append(
            "Sharing or not makes less than 5 % difference to the error here; either choice is fine."
        )
    elif not clear:
        parts.append("So these rows do not show whether a shared model helps, and it may matter.")
    if fed.n < FEWEST_CLIENTS:
        parts.append(f"{fed.n} clients are too few to tell what clients have in common.")
    if float(found.rows.sum()) < 2 * columns and share:
        parts.append("All clients together have fewer than two rows per feature: the shared model is rough.")
    return parts


def _evidence(found: Findings, share: bool, clear: bool) -> str:
    """Whether a model of the others helps, in words."""
    helps = "helps" if share else "does not help"
    if found.exact:
        change = "lowers" if found.support > 0 else "raises"
        sure = f"so sharing {helps}" if clear else "which may be chance"
        return (
            f"Starting from a model of the other clients {change} the squared error on rows left out by "
            f"{abs(found.support):.3g} (standard error {found.doubt:.2g}), {sure}."
        )
    more = "more" if share else "less"
    sure = f"so sharing {helps}" if clear else "but not by a clear margin"
    return (
        f"A model learned by one half of the clients explains {more} on the other half than its own error adds "
        f"(by {abs(found.support):.3g} per row), {sure}."
    )


def _changes(
    fed: Federation, found: Findings, r2: Tensor, rho2: Tensor, noise: Tensor, share: bool, clear: bool
) -> list[str]:
    """What it would take: more rows, fewer features, more clients; by the asymptotic risks at the median client."""
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
            else "Sharing or not is so even that more clients like these would hardly settle it."
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
    own_error = risk.centre_error(gamma=columns / n, r2=near, sigma2=s2, clients=fed.n).risk
    common = far - near + own_error
    if common > 0.1 * own_error:
        needed = math.ceil(max(1.5, 2 * own_error / common) * fed.n)
        lines.append(
            f"With about {needed} clients like these the shared model would be known well enough to help."
        )
    else:
        lines.append(
            "Nothing points to a common model: more clients would not help, other features or groups of similar "
            "clients might."
        )
    return lines


def _number(value: Any) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None
