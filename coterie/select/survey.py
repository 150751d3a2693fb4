"""Estimate from a few federated sums how much clients differ and how noisy they are, for the advisor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie._core import randomness
from coterie._core.errors import SettingError
from coterie.algorithms.base import Algorithm, Reveals
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.replies import Replies
from coterie.models.base import Model, dot
from coterie.models.glm import Glm
from coterie.models.heads import features, head_of, linearised
from coterie.models.linear import Linear
from coterie.theory import held_out, left_out
from coterie.theory.held_out import Profile

SCORING_STEPS = 15  # of Fisher scoring for the common variance curve
SHIFTS = 3  # passes over the spreads between clients
SOLVER_STEPS = 200  # of L-BFGS
MOST_COLUMNS = 300  # send X'X up to this width; beyond it gradients are fewer numbers


@dataclass(frozen=True)
class Findings:
    """Estimates of the survey: held-out error by penalty [n, 2, L], around the shared model and zero, and the rest."""

    ids: Tensor
    lam: Tensor  # [L], with 0 and infinity
    curve: Tensor
    error: Tensor  # standard deviation of `curve`
    noise: Tensor  # [n, 2]
    distance: Tensor  # [n, 2], squared, to the shared model and to zero
    rows: Tensor  # [n]
    support: float  # squared prediction per row that a shared model explains, minus what its own error adds
    doubt: float  # standard error of `support`
    exact: bool  # True: shared models without one client each; False: models of two halves of the clients
    columns: int = 1  # features
    shift: float = 0.0  # how much the covariance of the features differs between clients, beyond chance


@dataclass(frozen=True)
class Survey(Algorithm):
    """Estimate variance components from residuals at models without the client (after Cheng, Chadha, Duchi 2022)."""

    batch: int = field(default=0, kw_only=True)

    reveals: ClassVar[Reveals] = {
        "moments": "gradient",
        "look_without_me": "aggregate",
        "look": "aggregate",
        "slope": "gradient",
        "sums": "aggregate",
        "weigh": "aggregate",
        "lean": "aggregate",
        "predict": "aggregate",
        "predict_exactly": "aggregate",
        "predict_left_out": "aggregate",
    }

    def carry_out(self, fed: Federation, pretrained: Tensor | None = None) -> Findings:
        """Run the survey: shared models, residuals at them, and sums of a few numbers per client.

        Parameters
        ----------
        fed
            The federation; its ledger counts what is sent.
        pretrained
            Parameters of a network, whose last layer is surveyed on the features they give.

        Returns
        -------
        Findings
        """
        head = require_head(fed.model)
        if pretrained is not None:
            fed.map(self.receive, pretrained=pretrained)
        exact = head is fed.model and isinstance(head, Linear) and head.d <= MOST_COLUMNS and fed.n > 2
        seen, lam = self._leave_out(fed, head.d) if exact else self._compare_halves(fed, head.d)
        totals = seen["facts"].sum(0)
        unit = (totals[:2] / totals[2:4].clamp_min(1.0)).clamp_min(1e-300)
        a = torch.stack([self._shape(fed, kind, unit, totals[4:6]) for kind in (0, 1)])
        shift, choice = self._spreads(fed, a, unit)
        common: dict[str, Any] = {
            "a": a,
            "shift": shift,
            "unit": unit,
            "lam": lam.to(a),
            "first": choice[0],
            "second": choice[1],
        }
        if exact:
            plain = not a[:, 2:].any()
            r = fed.map(self.predict_exactly if plain else self.predict_left_out, **common)
            gain = r["gain"].squeeze(-1)
            support, doubt = float(gain.mean()), float(gain.std() / len(gain) ** 0.5)
        else:
            agreement, gap, rows = (float(value) for value in totals[6:9])
            excess = gap / 4 / float(totals[0]) * float(unit[0]) if rows >= 4 * head.d else 0.0
            r = fed.map(self.predict, excess=torch.tensor([excess, 0.0]).to(a), **common)
            support = (agreement - gap / 4) / rows
            doubt = gap / rows / (4 if support > 0 else 8)
        curve, error, noise, distance = (
            r[name].cpu().double() for name in ("curve", "error", "noise", "distance")
        )
        rows_of = r.weights.squeeze(-1).cpu().double()
        apart = max(0.0, float(totals[6]) / len(seen)) if exact else 0.0
        return Findings(
            r.ids.cpu(),
            lam,
            curve,
            error,
            noise,
            distance,
            rows_of,
            support,
            doubt,
            exact,
            columns=head.columns,
            shift=apart,
        )

    def _leave_out(self, fed: Federation, d: int) -> tuple[Replies, Tensor]:
        """Survey least squares: every client subtracts its own part from the sums of X'X and X'y."""
        sums = fed.map(self.moments).values.sum(0)
        matrix = _unpacked(sums, d)[0]
        rows = fed.sizes.sum().to(matrix)
        scale = float(matrix.diagonal().sum() / rows) / min(d, float(rows) / fed.n)
        lam = held_out.penalties(scale)
        return fed.map(self.look_without_me, sums=sums, rows=rows, lam=lam.to(matrix)), lam

    def _compare_halves(self, fed: Federation, d: int) -> tuple[Replies, Tensor]:
        """Survey any other model: each half of the clients trains one, and the other half evaluates it."""
        half = randomness.permutation(randomness.key(fed.seed, "advisor"), fed.n).to(fed.device) % 2
        models = torch.stack([self._fit(fed, d, (half == k).nonzero().squeeze(-1)) for k in (0, 1)])
        seen = fed.map(self.look, each={"own": models[half], "other": models[1 - half]})
        totals = seen["facts"].sum(0)
        return seen, held_out.penalties(float(totals[0] / totals[2].clamp_min(1.0) * fed.n / totals[8]))

    def moments(self, client: Client) -> Tensor:
        """Return the upper triangle of X'X, and X'y."""

        def both(_: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            matrix, side = _moments(client, inputs, targets, weight)
            upper = torch.triu_indices(*matrix.shape[-2:], device=matrix.device)
            return torch.cat([matrix[..., upper[0], upper[1]], side], -1)

        return client.over_rows(both, client.initial_model())

    def look_without_me(self, client: Client, sums: Tensor, rows: Tensor, lam: Tensor) -> dict[str, Tensor]:
        """Store residual profiles at the model of the others and at zero, and error curves over the penalties."""
        d, size = client.model.d, client.size.to(sums.dtype)
        matrix, side = _unpacked(sums.reshape(-1, sums.shape[-1])[0], d)
        lam, rows = lam.reshape(-1, lam.shape[-1])[0], rows.reshape(-1)[0]

        def profiles_and_curves(count: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            own, own_side = _moments(client, inputs, targets, weight)
            theirs = left_out.model(matrix, side, own, own_side)
            parts = []
            for c in (theirs, torch.zeros_like(theirs)):
                found = held_out.profile(
                    *linearised(client.model, c, inputs.double(), targets, weight), count
                )
                parts += [found.k, found.square, found.count]
            curves = left_out.curves(matrix, own, count, rows, lam).flatten(-2)
            return torch.cat([*parts, curves, left_out.shift(matrix, own, count)], -1)

        found = client.over_rows(profiles_and_curves, size)
        profiles = torch.unflatten(found[..., : 6 * (d + 1)], -1, (6, d + 1))
        curves = torch.unflatten(found[..., 6 * (d + 1) : -1], -1, (4, len(lam)))
        client.keep.profiles, client.keep.curves = profiles, curves
        return {"facts": torch.cat([_facts(profiles), found[..., -1:]], -1)}

    def receive(self, client: Client, pretrained: Tensor) -> None:
        """Store the parameters that give the features."""
        client.keep.pretrained = pretrained

    def slope(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        """Return gradient and loss of the surveyed model at x."""
        head = require_head(client.model)
        if head is client.model and client.initial_model().dtype == x.dtype:
            return {"grad": client.full_grad(x), "loss": client.loss(x)}

        def both(x: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            rows = (_features(client, inputs, weight), targets, weight.to(x.dtype))
            return torch.cat([head.grad(x, *rows), head.loss(x, *rows)], -1)

        found = client.over_rows(both, x)
        return {"grad": found[..., :-1], "loss": found[..., -1:]}

    def look(self, client: Client, own: Tensor, other: Tensor) -> dict[str, Tensor]:
        """Store residual profiles at the other half's model and at zero; return sums on curvature and predictions."""
        model, rows = require_head(client.model), client.size.to(own.dtype)
        pairs = torch.cat([own, other], -1)

        def both(at: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            mine, theirs = at.chunk(2, -1)
            inputs, weight = _features(client, inputs, weight), weight.to(at.dtype)
            count = (weight > 0).to(weight.dtype).sum(-1, keepdim=True)
            parts = []
            for c in (theirs, torch.zeros_like(theirs)):
                features, residual = linearised(model, c, inputs, targets, weight)
                found = _profile(features, residual, count)
                parts += [found.k, found.square, found.count]
            gap, product = (
                _prediction(model, mine, theirs, inputs, weight, kind) for kind in ("gap", "product")
            )
            return torch.stack([*parts, *(value.expand_as(parts[0]) for value in (gap, product))], -2)

        found = client.over_rows(both, pairs)
        client.keep.profiles = found[..., :6, :]
        return {"facts": torch.cat([_facts(found), found[..., 7, :1], found[..., 6, :1], rows], -1)}

    def sums(self, client: Client, a: Tensor, unit: Tensor, kind: int) -> Tensor:
        """Return the client's part in a step of Fisher scoring for the coefficients a."""
        return held_out.regression_sums(_kept(client, kind, unit), a)

    def weigh(self, client: Client, a: Tensor, shift: Tensor, unit: Tensor) -> Tensor:
        """Return the log-likelihood of each pair of spreads between clients, around the shared model and zero."""
        tables = [self._table(client, kind, a, shift, unit) for kind in (0, 1)]
        return torch.stack([held_out.marginals(table) for table in tables], -2)

    def lean(self, client: Client, a: Tensor, shift: Tensor, unit: Tensor, first: int, second: int) -> Tensor:
        """Return the posterior mean difference of this client's log c and log s2 from the common ones."""
        parts = []
        for kind, choice in ((0, first), (1, second)):
            weight = held_out.posterior(self._table(client, kind, a, shift, unit), choice)
            points = held_out.grid(weight)
            parts.append(torch.stack([(weight.sum(axis) * points).sum(-1) for axis in (-1, -2)], -1))
        return torch.stack(parts, -2)

    def predict(
        self,
        client: Client,
        a: Tensor,
        shift: Tensor,
        unit: Tensor,
        lam: Tensor,
        excess: Tensor,
        first: int,
        second: int,
    ) -> dict[str, Tensor]:
        """Predict the held-out error of every penalty, its standard deviation, the noise and the distances."""
        replies: dict[str, list[Tensor]] = {"curve": [], "error": [], "noise": [], "distance": []}
        for kind, choice in ((0, first), (1, second)):
            seen, own = _kept(client, kind, unit), a[..., kind, :]
            mean_c, mean_s, spread_c, spread_s, cross = self._own_levels(client, kind, choice, a, shift, unit)
            shape = held_out.height(torch.cat([torch.zeros_like(own[..., :1]), own[..., 1:]], -1), seen.k)
            lifted = (mean_c * shape - excess[..., kind : kind + 1] * seen.k).clamp_min(0.0)
            raw = Profile(seen.k * unit[..., kind : kind + 1], seen.square, seen.count)
            signal = held_out.errors(raw, lifted, lam)
            flat = held_out.errors(raw, torch.ones_like(shape), lam)
            variance = (signal * spread_c).square() + (flat * spread_s).square() + 2 * signal * flat * cross
            replies["curve"].append(signal + mean_s * flat)
            replies["error"].append(variance.clamp_min(0.0).sqrt())
            replies["noise"].append(mean_s)
            total = (seen.count * raw.k).sum(-1, keepdim=True).clamp_min(1e-300)
            replies["distance"].append((seen.count * lifted).sum(-1, keepdim=True) / total)
        return _stacked(replies)

    def predict_left_out(
        self, client: Client, a: Tensor, shift: Tensor, unit: Tensor, lam: Tensor, first: int, second: int
    ) -> dict[str, Tensor]:
        """Do `predict` for models that leave the client out, and add how much they reduce the error."""
        found = self.predict(client, a, shift, unit, lam, torch.zeros_like(unit), first, second)
        at = found["curve"][..., 1, :].argmin(-1, keepdim=True)
        return {**found, "gain": _taken_off(client, unit, lam).gather(-1, at)}

    def predict_exactly(
        self, client: Client, a: Tensor, shift: Tensor, unit: Tensor, lam: Tensor, first: int, second: int
    ) -> dict[str, Tensor]:
        """Do the same from the curves of `look_without_me`, if deviations have no preferred direction.

        The reduction of the error includes the client's own part in the shared model.
        """
        replies: dict[str, list[Tensor]] = {"curve": [], "error": [], "noise": [], "distance": []}
        for kind, choice in ((0, first), (1, second)):
            mean_c, mean_s, spread_c, spread_s, cross = self._own_levels(client, kind, choice, a, shift, unit)
            each = a[..., kind, 1:2] / unit[..., kind : kind + 1]
            signal = client.keep.curves[..., 2 * kind, :] * each * mean_c
            flat = 1 + client.keep.curves[..., 2 * kind + 1, :]
            variance = (signal * spread_c).square() + (flat * spread_s).square() + 2 * signal * flat * cross
            replies["curve"].append(signal + mean_s * flat)
            replies["error"].append(variance.clamp_min(0.0).sqrt())
            replies["noise"].append(mean_s)
            replies["distance"].append(mean_c * each)
        found, curves = _stacked(replies), client.keep.curves
        distance, noise = found["distance"][..., :1], found["noise"][..., :1]
        own = distance * (curves[..., 2, :] - curves[..., 0, :]) + noise * (
            curves[..., 3, :] - curves[..., 1, :]
        )
        at = found["curve"][..., 1, :].argmin(-1, keepdim=True)
        return {**found, "gain": (_taken_off(client, unit, lam) + own).gather(-1, at)}

    def _own_levels(
        self, client: Client, kind: int, choice: int, a: Tensor, shift: Tensor, unit: Tensor
    ) -> tuple[Tensor, ...]:
        """Return posterior means of c and s2, relative deviation of c, deviation of s2, and their covariance."""
        weight = held_out.posterior(self._table(client, kind, a, shift, unit), choice)
        points = held_out.grid(weight)
        c = torch.exp(shift[..., kind, :1] + points)
        s2 = a[..., kind, :1] * torch.exp(shift[..., kind, 1:] + points)
        weight_c, weight_s = weight.sum(-1), weight.sum(-2)
        mean_c, mean_s = dot(weight_c, c), dot(weight_s, s2)
        spread_c = (dot(weight_c, c.square()) - mean_c.square()).clamp_min(0.0).sqrt() / mean_c
        spread_s = (dot(weight_s, s2.square()) - mean_s.square()).clamp_min(0.0).sqrt()
        both = (c[..., :, None] / mean_c[..., None] - 1) * (s2[..., None, :] - mean_s[..., None])
        return mean_c, mean_s, spread_c, spread_s, (weight * both).sum((-1, -2)).unsqueeze(-1)

    def _fit(self, fed: Federation, d: int, ids: Tensor) -> Tensor:
        """Fit the shared model of some clients by L-BFGS on their gradients."""
        from scipy.optimize import minimize

        def loss_and_grad(w: Any) -> tuple[float, Any]:
            r = fed.map(self.slope, to=ids, x=torch.as_tensor(w).to(fed.device))
            return float(r.mean("loss")), r.mean("grad").double().cpu().numpy()

        start = torch.zeros(d, dtype=torch.float64).numpy()
        options = {"maxiter": SOLVER_STEPS, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-7}
        found = minimize(loss_and_grad, start, jac=True, method="L-BFGS-B", options=options)
        return torch.from_numpy(found.x).to(fed.device)

    def _shape(self, fed: Federation, kind: int, unit: Tensor, squares: Tensor) -> Tensor:
        """Fit the coefficients of the common h(k): linear unless a cubic is better by BIC."""
        best, lowest = None, float("inf")
        for terms in (2, held_out.POWERS):
            r = fed.map(
                self.sums,
                a=_start(squares[kind] / fed.sizes.sum()),
                unit=unit[kind : kind + 1].expand(2),
                kind=kind,
            )
            a = _start(squares[kind] / fed.sizes.sum())
            floor = 1e-6 * float(a.sum())
            for _ in range(SCORING_STEPS):
                a = held_out.improved(r.values.sum(0).double().cpu(), a.cpu().double(), terms, floor).to(unit)
                r = fed.map(self.sums, a=a, unit=unit[kind : kind + 1].expand(2), kind=kind)
            total = r.values.sum(0)
            score = float(total[-1]) + terms * float(torch.log(fed.sizes.sum()))
            if score < lowest:
                best, lowest = a, score
        assert best is not None
        return best

    def _spreads(self, fed: Federation, a: Tensor, unit: Tensor) -> tuple[Tensor, list[int]]:
        """Estimate how much clients differ in c_i and s2_i: mean logarithms and the likeliest pair of spreads."""
        shift, choice = torch.zeros(2, 2).to(a), [0, 0]
        for _ in range(SHIFTS):
            choice = fed.map(self.weigh, a=a, shift=shift, unit=unit).values.sum(0).argmax(-1).tolist()
            r = fed.map(self.lean, a=a, shift=shift, unit=unit, first=choice[0], second=choice[1])
            shift = shift + r.mean(uniform=True)
        return shift, choice

    def _table(self, client: Client, kind: int, a: Tensor, shift: Tensor, unit: Tensor) -> Tensor:
        """Return the log-likelihood of the client's profile on the grid of c and s2."""
        return held_out.likelihoods(_kept(client, kind, unit), a[..., kind, :], shift[..., kind, :])


def require_head(model: Model) -> Glm:
    """Return the linear model that is surveyed: the model itself, or the last layer of a network."""
    head = head_of(model)
    if head is None:
        raise SettingError("the survey needs a linear model, or a network whose last layer is nn.Linear")
    return head


def _features(client: Client, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the inputs of the surveyed model in float64."""
    if require_head(client.model) is client.model:
        return inputs.double()
    pretrained = client.keep.pretrained
    return features(
        client.model, pretrained.reshape(-1, pretrained.shape[-1])[0], inputs, weight.dim()
    ).double()


def _profile(features: Tensor, residual: Tensor, rows: Tensor) -> Profile:
    """Return the residual profile of a client, with its classes joined if there are several."""
    if features.dim() == residual.dim() + 1 and residual.dim() == rows.dim():
        return held_out.profile(features, residual, rows)
    found = held_out.profile(features, residual, rows.unsqueeze(-2))
    return Profile(*(part.flatten(-2) for part in (found.k, found.square, found.count)))


def _prediction(model: Model, mine: Tensor, theirs: Tensor, x: Tensor, weight: Tensor, kind: str) -> Tensor:
    """Sum |X(a - b)|^2, or (Xa)'(Xb), over the rows, [..., 1]."""
    real = (weight > 0).to(mine.dtype).unsqueeze(-1)
    a, b = (model.scores(w, x) * real for w in (mine, theirs))
    value = (a - b).square() if kind == "gap" else a * b
    return value.sum((-1, -2)).unsqueeze(-1)


def _facts(profiles: Tensor) -> Tensor:
    """Return for both kinds of profile the sum and number of eigenvalues and the squared residuals, [..., 6]."""
    k, square, count = profiles[..., [0, 3], :], profiles[..., [1, 4], :], profiles[..., [2, 5], :]
    return torch.cat([(count * k).sum(-1), (count * (k > 0)).sum(-1), (count * square).sum(-1)], -1)


def _moments(client: Client, inputs: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return X'X and X'y of the client's rows."""
    x = inputs.double() * (weight > 0).unsqueeze(-1)
    return x.mT @ x, (x.mT @ targets.double().unsqueeze(-1)).squeeze(-1)


def _unpacked(sums: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Unpack X'X [d, d] and X'y [d] from the reply of `moments`."""
    matrix = sums.new_zeros(d, d)
    row, column = torch.triu_indices(d, d, device=sums.device)
    matrix[row, column] = sums[:-d]
    matrix[column, row] = sums[:-d]
    return matrix, sums[-d:]


def _taken_off(client: Client, unit: Tensor, lam: Tensor) -> Tensor:
    """Return by how much the measured held-out error of ridge falls around the others' model instead of zero."""
    seen = [_kept(client, kind, unit).scaled(1 / unit[..., kind : kind + 1]) for kind in (0, 1)]
    shared, alone = (held_out.errors(one, one.square, lam) for one in seen)
    return alone - shared


def _stacked(replies: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """Stack the values around the shared model and around zero."""
    stacked = {name: torch.stack(parts, -2) for name, parts in replies.items()}
    return {
        name: value.squeeze(-1) if name in ("noise", "distance") else value for name, value in stacked.items()
    }


def _kept(client: Client, kind: int, unit: Tensor) -> Profile:
    """Return the stored profile of one kind, with eigenvalues in units of their mean."""
    found = client.keep.profiles[..., 3 * kind : 3 * kind + 3, :]
    return Profile(found[..., 0, :] / unit[..., kind : kind + 1], found[..., 1, :], found[..., 2, :])


def _start(mean_square: Tensor) -> Tensor:
    """Return the coefficients from which Fisher scoring starts."""
    a = torch.zeros(held_out.POWERS).to(mean_square)
    a[:2] = 0.5 * mean_square
    return a
