"""Estimate from a few federated sums how much clients differ and how noisy they are, for the advisor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie._core import randomness
from coterie._core.errors import RunError
from coterie._core.threads import one_scipy_thread
from coterie.engine.federation import Federation
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.models.base import Model
from coterie.models.glm import Logistic
from coterie.models.linear import Linear
from coterie.select.prospects import METHODS, Prospects
from coterie.select.survey_phases import TERMS, SurveyPhases, coarse
from coterie.select.survey_rows import require_head, unpacked
from coterie.theory import held_out

SCORING_STEPS = 15  # of Fisher scoring for the common variance curve
SHIFTS = 3  # passes over the spreads between clients
SOLVER_STEPS = 200  # of L-BFGS
MOST_COLUMNS = 300  # send X'X up to this width; beyond it gradients are fewer numbers
FAR = 8.0  # times the typical distance to the shared model that is worth a warning


@dataclass(frozen=True)
class Findings:
    """Estimates of the survey, all of them sums over clients, and single clients' where these may be read.

    Attributes
    ----------
    clients, rows, columns
        Clients that answered, training rows of each [n], features.
    lam : Tensor
        Penalties, [L], with 0 and infinity.
    curve : Tensor
        Mean predicted error by penalty around the shared model and around zero, [2, L].
    excess : Tensor
        Mean predicted error beyond the noise of every method at each client's best penalty, [methods].
    errors : Tensor
        The same with the noise, [methods].
    noise, distance
        Geometric means over clients, [2].
    support, doubt
        Squared prediction per row that a shared model explains, minus what its own error adds, and its standard error.
    exact : bool
        True: shared models without one client each; False: models of two halves of the clients.
    shift : float
        How much the covariance of the features differs between clients, beyond chance.
    blur : float
        Share of noise that was added for privacy in what is known of a client's model, mean over directions.
    prospects : Prospects or None
        Predicted errors of every client; None where only sums are known.
    names : list of str
        Clients that answered.
    calibrated : str
        Worlds whose calibration applies: "linear", "classes", or "" where there is none.
    """

    clients: int
    rows: Tensor
    columns: int
    lam: Tensor
    curve: Tensor
    excess: Tensor
    errors: Tensor
    noise: Tensor
    distance: Tensor
    support: float
    doubt: float
    exact: bool
    shift: float
    blur: float
    prospects: Prospects | None
    names: list[str]
    calibrated: str = ""


@dataclass(frozen=True)
class Survey(SurveyPhases):
    """Estimate variance components from residuals at models without the client (after Cheng, Chadha, Duchi 2022)."""

    def start(self, fed: Federation) -> State:
        """Ask for the one thing that rows are read for; the rest follows from it (`row_privacy` counts it)."""
        fed.map(self.moments)
        return State()

    def round(self, fed: Federation, s: State, t: int) -> State:
        """Return the state as it is: a survey has no rounds."""
        return s

    def carry_out(self, fed: Federation, pretrained: Tensor | None = None) -> Findings:
        """Run the survey: shared models, residuals at them, and means of a few numbers per client.

        Parameters
        ----------
        fed
            The federation; its ledger counts what is sent.
        pretrained
            Parameters of a network, whose last layer is surveyed on the features they give.

        Returns
        -------
        Findings

        Raises
        ------
        RunError
            A client that took part at first does not answer.
        """
        head = require_head(fed.model)
        if pretrained is not None:
            fed.map(self.receive, pretrained=pretrained)
        exact = head is fed.model and isinstance(head, Linear) and head.d <= MOST_COLUMNS and fed.n > 2
        totals, lam, who = self._leave_out(fed, head.d) if exact else self._compare_halves(fed, head.d)
        rows = fed.sizes.squeeze(-1)[who].cpu().double()
        total, n = float(rows.sum()), len(who)
        unit = (totals[:2] / totals[2:4].clamp_min(1.0)).clamp_min(1e-300)
        a = self._shape(fed, unit, totals, total)
        shift, choice = self._spreads(fed, a, unit)
        level = float(totals[5] / total)
        common: dict[str, Any] = {
            "a": a,
            "shift": shift,
            "unit": unit,
            "scale": _scale(lam),
            "level": level,
            "first": choice[0],
            "second": choice[1],
        }
        if exact:
            plain = not a[:, 2:].any()
            r = fed.map(self.predict_exactly if plain else self.predict_left_out, **common)
        else:
            agreement, gap = (float(value) for value in totals[8:10])
            excess = gap / 4 / float(totals[0]) * float(unit[0]) if total >= 4 * head.d else 0.0
            r = fed.map(self.predict, excess=torch.tensor([excess, 0.0]).to(a), **common)
        _same(r, n)
        mean = level * r.mean("means", uniform=True).cpu().double()
        parts = mean.split([2 * len(lam), len(METHODS), len(METHODS), 2, 2])
        logs = [torch.exp(part / level) for part in parts[3:]]
        if exact:
            support, doubt = self._gain(fed, level, a)
        else:
            support = (agreement - gap / 4) / total
            doubt = gap / total / (4 if support > 0 else 8)
        apart = max(0.0, float(totals[6]) / n) if exact else 0.0
        calibrated, prospects = calibration_of(fed.model, exact), None
        if r.single:
            seen = fed.map(self.outlook)
            own = {name: seen[name].cpu().double() for name in ("curve", "error", "noise", "distance")}
            prospects = Prospects.of(lam, own, rows, head.columns, n, total, apart, calibrated)
        return Findings(
            n,
            rows,
            head.columns,
            lam,
            parts[0].view(2, -1),
            parts[1],
            parts[2],
            logs[0],
            logs[1],
            support,
            doubt,
            exact,
            apart,
            float(totals[7]) / n if exact else 0.0,
            prospects,
            [fed.names[int(k)] for k in who],
            calibrated,
        )

    def settle(self, fed: Federation, found: Findings, share: bool, sharing: float) -> tuple[int, Tensor]:
        """Tell clients what is recommended, from which they work out their own advice.

        Returns
        -------
        tuple of int and Tensor
            How many clients are far from the shared model, and the covariance of the mean error between penalties
            [L', L'], every third of them.
        """
        level, size = float(found.errors.max()), len(coarse(found.lam))
        r = fed.map(
            self.choose,
            share=int(share),
            sharing=-1.0 if math.isnan(sharing) else sharing,
            far=FAR * float(found.distance[0]),
            level=level,
            scale=_scale(found.lam),
            shift=found.shift,
            clients=found.clients,
            thousands=float(found.rows.sum()) / 1000,
        )
        _same(r, found.clients)
        mean = r.mean(uniform=True).cpu().double()
        upper = torch.triu_indices(size, size)
        square, middle = torch.zeros(size, size, dtype=torch.float64), mean[1 : 1 + size]
        square[upper[0], upper[1]] = square[upper[1], upper[0]] = mean[1 + size :]
        covariance = (square - middle[:, None] * middle) / max(1, found.clients - 1)
        return round(float(mean[0]) * found.clients), level**2 * covariance

    def _leave_out(self, fed: Federation, d: int) -> tuple[Tensor, Tensor, Tensor]:
        """Survey least squares: every client subtracts its own part from the sums of X'X and X'y."""
        r = fed.map(self.moments)
        rows, means = float(r.weights.sum()), r.mean().double()
        matrix = unpacked(means, d)[0]
        scale = float(matrix.diagonal().sum()) / min(d, rows / len(r))
        seen = fed.map(self.look_without_me, means=means, thousands=rows / 1000, scale=scale)
        _same(seen, len(r))
        return seen.mean("facts").double() * rows, held_out.penalties(scale), r.ids.cpu()

    def _compare_halves(self, fed: Federation, d: int) -> tuple[Tensor, Tensor, Tensor]:
        """Survey any other model: each half of the clients trains one, and the other half evaluates it."""
        half = randomness.permutation(randomness.key(fed.seed, "advisor"), fed.n).to(fed.device) % 2
        models = torch.stack([self._fit(fed, d, (half == k).nonzero().squeeze(-1)) for k in (0, 1)])
        seen = fed.map(self.look, each={"own": models[half], "other": models[1 - half]})
        rows = float(seen.weights.sum())
        totals = seen.mean("facts").double() * rows
        lam = held_out.penalties(float(totals[0] / totals[2].clamp_min(1.0) * len(seen) / rows))
        return totals, lam, seen.ids.cpu()

    def _fit(self, fed: Federation, d: int, ids: Tensor) -> Tensor:
        """Fit the shared model of some clients by L-BFGS on their gradients."""
        from scipy.optimize import minimize

        def loss_and_grad(w: Any) -> tuple[float, Any]:
            r = fed.map(self.slope, to=ids, x=torch.as_tensor(w).to(fed.device))
            return float(r.mean("loss")), r.mean("grad").double().cpu().numpy()

        start = torch.zeros(d, dtype=torch.float64).numpy()
        options = {"maxiter": SOLVER_STEPS, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-7}
        with one_scipy_thread():
            found = minimize(loss_and_grad, start, jac=True, method="L-BFGS-B", options=options)
        return torch.from_numpy(found.x).to(fed.device)

    def _shape(self, fed: Federation, unit: Tensor, totals: Tensor, rows: float) -> Tensor:
        """Fit the common h(k) around both centres: linear unless a cubic is better by BIC, [2, 4]."""
        a = torch.stack([torch.stack([_start(square / rows)] * len(TERMS)) for square in totals[4:6]])
        floors = 1e-6 * a.sum(-1)
        bits = _loose(a, totals, rows)
        total, bits = self._scoring(fed, a, unit, bits)
        total, bits = self._scoring(fed, a, unit, bits)  # the first pass found the size of the numbers
        for _ in range(SCORING_STEPS):
            sums, old = total.cpu(), a.cpu().double()
            better = [
                held_out.improved(sums[kind, which], old[kind, which], terms, float(floors[kind, which]))
                for kind in (0, 1)
                for which, terms in enumerate(TERMS)
            ]
            a = torch.stack(better).view_as(old).to(a)
            total, bits = self._scoring(fed, a, unit, bits)
        score = total[..., -1] + torch.tensor(TERMS).to(total) * math.log(rows)
        best = score.argmin(-1)
        return a[torch.arange(2, device=a.device), best]

    def _scoring(self, fed: Federation, a: Tensor, unit: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of a step of Fisher scoring, and bits of this size for the next."""
        total = fed.map(self.sums, a=a, unit=unit, bits=bits).sum().to(bits)
        return total * torch.exp2(bits), bits + _bits(total.abs().clamp_min(2.0**-30))

    def _gain(self, fed: Federation, level: float, like: Tensor) -> tuple[float, float]:
        """Return the mean over clients of what a model of the others takes off the error, and its standard error."""
        bits = torch.tensor([math.log2(level), 2 * math.log2(level)]).to(like).ceil()
        for _ in range(2):  # the first pass finds the size of the numbers
            r = fed.map(self.gains, bits=bits)
            total = r.sum().to(bits)
            found, bits = total * torch.exp2(bits) / len(r), bits + _bits(total.abs().clamp_min(2.0**-30))
        gain, square = found.tolist()
        return gain, math.sqrt(max(square - gain**2, 0.0) / (len(r) - 1))

    def _spreads(self, fed: Federation, a: Tensor, unit: Tensor) -> tuple[Tensor, list[int]]:
        """Estimate how much clients differ in c_i and s2_i: mean logarithms and the likeliest pair of spreads."""
        shift, choice = torch.zeros(2, 2).to(a), [0, 0]
        for _ in range(SHIFTS):
            choice = fed.map(self.weigh, a=a, shift=shift, unit=unit).mean().argmax(-1).tolist()
            r = fed.map(self.lean, a=a, shift=shift, unit=unit, first=choice[0], second=choice[1])
            shift = shift + r.mean(uniform=True)
        return shift, choice


def _same(r: Replies, n: int) -> None:
    """Raise `RunError` unless all n clients answered: sums over different clients do not fit together."""
    if len(r) != n:
        raise RunError(
            f"{n - len(r)} of {n} clients stopped answering during the survey; ask for advice again when all are there"
        )


def _loose(a: Tensor, totals: Tensor, rows: float) -> Tensor:
    """Return bounds of the sums of Fisher scoring, [2, 2, 12], as powers of two: their exponents."""
    low, most = a[..., :1], float(totals[2:4].max().clamp_min(1.0))
    squares = totals[4:6].view(2, 1, 1).clamp_min(1e-300)
    power = most ** torch.arange(2 * held_out.POWERS - 1).to(a)
    weights, cross = rows * power / low.square(), squares * power[: held_out.POWERS] / low.square()
    misfit = rows * (1 + low.log().abs() + held_out.height(a, torch.full_like(low, most)).log().abs())
    bounds = torch.cat([weights, cross.expand(2, len(TERMS), -1), misfit + squares / low], -1)
    return _bits(bounds)


def _bits(value: Tensor) -> Tensor:
    """Return the exponent of the next power of two, from -500 to 500."""
    return value.clamp(2.0**-500, 2.0**500).log2().ceil()


def calibration_of(model: Model, exact: bool) -> str:
    """Return on which worlds the certainty about a model was calibrated: "linear", "classes", or none."""
    return "linear" if exact else "classes" if isinstance(model, Logistic) else ""


def _scale(lam: Tensor) -> float:
    """Return the scale of penalties."""
    return float(lam[1] / held_out.LAMBDAS[0])


def _start(mean_square: Tensor) -> Tensor:
    """Return the coefficients from which Fisher scoring starts."""
    a = torch.zeros(held_out.POWERS).to(mean_square)
    a[:2] = 0.5 * mean_square
    return a
