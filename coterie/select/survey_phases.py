"""Phases of the advisor's survey: what a client computes of its own rows, and what it sends of that.

All replies are made to be averaged over clients. What is predicted for a client stays in `client.keep`; `outlook` sends
it where single answers may be read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals
from coterie.engine.client import Client
from coterie.models.base import Model, dot
from coterie.models.heads import linearised
from coterie.select.prospects import METHODS, Prospects
from coterie.select.survey_rows import (
    blurred,
    facts,
    gram_of,
    prediction,
    require_head,
    row_features,
    row_profile,
    unpacked,
)
from coterie.theory import held_out, left_out
from coterie.theory.held_out import Profile

MOST_ERROR = 512.0  # times the mean squared target: larger errors count as this much in sums over clients
NEAR = 4.0  # times its lowest error: larger ones of a client say nothing about where the lowest is
COARSE = 3  # every third penalty is enough for the spread of the best one
TERMS = (2, held_out.POWERS)  # coefficients of the curves that are fitted: a line and a cubic


@dataclass(frozen=True)
class SurveyPhases(Algorithm):
    """What clients do in a survey; `coterie.select.survey.Survey` is the server's side."""

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
        "gains": "aggregate",
        "choose": "aggregate",
        "outlook": "aggregate",
    }
    optional: ClassVar[frozenset[str]] = frozenset({"slope", "look", "predict", "outlook"})

    def traffic_of(self, model: Model) -> dict[str, tuple[int, int]]:
        """Declare the communication of every phase."""
        d, kinds, fits, powers = require_head(model).d, 2, len(TERMS), held_out.POWERS
        size, few = len(held_out.LAMBDAS) + 2, len(coarse(held_out.penalties(1.0)))
        sums, known = d * (d + 1) // 2 + d + 1, kinds * powers + kinds  # a and unit
        told = known + 2 * kinds + 4  # shift, scale, level and two choices
        means = kinds * size + 2 * len(METHODS) + 2 * kinds
        return {
            "moments": (0, sums),
            "look_without_me": (sums + 2, 8),
            "slope": (d, d + 1),
            "look": (2 * d, 10),
            "sums": (kinds * fits * (powers + 12) + kinds, kinds * fits * 12),
            "weigh": (known + 2 * kinds, kinds * len(held_out.SPREADS) ** 2),
            "lean": (known + 2 * kinds + 2, 2 * kinds),
            "predict": (told + kinds, means),
            "predict_exactly": (told, means),
            "predict_left_out": (told, means),
            "gains": (2, 2),
            "choose": (8, 1 + few + few * (few + 1) // 2),
            "outlook": (0, 2 * kinds * size + 2 * kinds),
        }

    def moments(self, client: Client) -> Tensor:
        """Store X'X, X'y and y'y; return their means over rows, with noise where rows are kept private."""
        if client.private is not None:
            gram, blur = client.private.gram(client)
        else:
            gram, blur = client.over_rows(gram_of, client.initial_model()), torch.zeros_like(client.size)
        d = gram.shape[-1] - 1
        row, column = torch.triu_indices(d, d, device=gram.device)
        sums = torch.cat([gram[..., row, column], gram[..., d, :]], -1)
        client.keep.sums, client.keep.blur = sums, blur
        return sums / client.size.to(sums)

    def look_without_me(
        self, client: Client, means: Tensor, thousands: float, scale: float
    ) -> dict[str, Tensor]:
        """Store residual profiles at the model of the others and at zero, and error curves over the penalties.

        `means` are those of `moments` over all rows, of which there are so many `thousands`; penalties are times
        `scale`.
        """
        d, size = client.model.d, client.size.to(means.dtype)
        rows = torch.full_like(size.view(-1)[0], 1000 * thousands)
        matrix, side, _ = unpacked(rows * means.reshape(-1, means.shape[-1])[0], d)
        lam = held_out.penalties(scale).to(means)
        own, own_side, square = unpacked(client.keep.sums, d)
        theirs = left_out.model(matrix, side, own, own_side)
        blur = blurred(client.keep.blur.to(own), own, own_side)
        parts, lost = [], torch.zeros_like(size)
        for c in (theirs, torch.zeros_like(theirs)):
            slope = own_side - (own @ c.unsqueeze(-1)).squeeze(-1)
            total = square - dot(c, own_side + slope)
            found = held_out.profile_of_sums(own, slope, total, size, blur)
            parts += [found.k, found.square, found.count]
            if c is theirs:
                sampling = found.k[..., :d] * total.clamp_min(0.0) / size
                lost = (blur / (blur + sampling).clamp_min(1e-300)).mean(-1, keepdim=True)
        profiles = torch.stack(parts, -2)
        client.keep.profiles, client.keep.curves = profiles, left_out.curves(matrix, own, size, rows, lam)
        shift = left_out.shift(matrix, own, size)
        return {"facts": torch.cat([facts(profiles), shift, lost], -1) / size}

    def receive(self, client: Client, pretrained: Tensor) -> None:
        """Store the parameters that give the features."""
        client.keep.pretrained = pretrained

    def slope(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        """Return gradient and loss of the surveyed model at x."""
        head = require_head(client.model)
        if head is client.model and client.initial_model().dtype == x.dtype:
            return {"grad": client.full_grad(x), "loss": client.loss(x)}

        def both(x: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            rows = (row_features(client, inputs, weight), targets, weight.to(x.dtype))
            return torch.cat([head.grad(x, *rows), head.loss(x, *rows)], -1)

        found = client.over_rows(both, x)
        return {"grad": found[..., :-1], "loss": found[..., -1:]}

    def look(self, client: Client, own: Tensor, other: Tensor) -> dict[str, Tensor]:
        """Store residual profiles at the other half's model and at zero; return sums on curvature and predictions."""
        model, rows = require_head(client.model), client.size.to(own.dtype)
        pairs = torch.cat([own, other], -1)

        def both(at: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            mine, theirs = at.chunk(2, -1)
            inputs, weight = row_features(client, inputs, weight), weight.to(at.dtype)
            count = (weight > 0).to(weight.dtype).sum(-1, keepdim=True)
            parts = []
            for c in (theirs, torch.zeros_like(theirs)):
                features, residual = linearised(model, c, inputs, targets, weight)
                found = row_profile(features, residual, count)
                parts += [found.k, found.square, found.count]
            gap, product = (
                prediction(model, mine, theirs, inputs, weight, kind) for kind in ("gap", "product")
            )
            return torch.stack([*parts, *(value.expand_as(parts[0]) for value in (gap, product))], -2)

        found = client.over_rows(both, pairs)
        client.keep.profiles = found[..., :6, :]
        none = torch.zeros_like(rows)
        parts = [facts(found), none, none, found[..., 7, :1], found[..., 6, :1]]
        return {"facts": torch.cat(parts, -1) / rows}

    def sums(self, client: Client, a: Tensor, unit: Tensor, bits: Tensor) -> Tensor:
        """Return the client's part in a step of Fisher scoring for both curves around both centres, [..., 2, 2, 12].

        Division by 2^bits keeps numbers in the range of secure sums.
        """
        found = [
            held_out.regression_sums(_kept(client, kind, unit), a[..., kind, which, :])
            for kind in (0, 1)
            for which in range(len(TERMS))
        ]
        sums: Tensor = torch.stack(found, -2).unflatten(-2, (2, len(TERMS))) / torch.exp2(bits)
        return sums

    def weigh(self, client: Client, a: Tensor, shift: Tensor, unit: Tensor) -> Tensor:
        """Return the log-likelihood per row of each pair of spreads, around the shared model and zero."""
        tables = [self._table(client, kind, a, shift, unit) for kind in (0, 1)]
        return torch.stack([held_out.marginals(table) for table in tables], -2) / client.size.unsqueeze(-1)

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
        scale: float,
        level: float,
        excess: Tensor,
        first: int,
        second: int,
    ) -> dict[str, Tensor]:
        """Store the predicted error of every penalty, its deviation, noise and distances; return what is averaged."""
        lam = held_out.penalties(scale).to(a)
        found = self._predicted(client, a, shift, unit, lam, excess, first, second)
        return self._summarised(client, found, torch.zeros_like(client.size), lam, level)

    def _predicted(
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
        """Return the predicted error of every penalty, its standard deviation, the noise and the distances."""
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
        self,
        client: Client,
        a: Tensor,
        shift: Tensor,
        unit: Tensor,
        scale: float,
        level: float,
        first: int,
        second: int,
    ) -> dict[str, Tensor]:
        """Do `predict` for models that leave the client out, and add how much they reduce the error."""
        lam = held_out.penalties(scale).to(a)
        found = self._predicted(client, a, shift, unit, lam, torch.zeros_like(unit), first, second)
        at = found["curve"][..., 1, :].argmin(-1, keepdim=True)
        return self._summarised(client, found, _taken_off(client, unit, lam).gather(-1, at), lam, level)

    def predict_exactly(
        self,
        client: Client,
        a: Tensor,
        shift: Tensor,
        unit: Tensor,
        scale: float,
        level: float,
        first: int,
        second: int,
    ) -> dict[str, Tensor]:
        """Do the same from the curves of `look_without_me`, if deviations have no preferred direction.

        The reduction of the error includes the client's own part in the shared model.
        """
        lam = held_out.penalties(scale).to(a)
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
        gain = (_taken_off(client, unit, lam) + own).gather(-1, at)
        return self._summarised(client, found, gain, lam, level)

    def _summarised(
        self, client: Client, found: dict[str, Tensor], gain: Tensor, lam: Tensor, level: float
    ) -> dict[str, Tensor]:
        """Store what was predicted, and return what the server averages, in units of `level`."""
        for name, value in found.items():
            setattr(client.keep, name, value)
        own = Prospects.of(lam, found, client.size.squeeze(-1))
        numbers = [found["curve"].flatten(-2), own.excess(), own.errors()]
        capped = [(value / level).clamp(max=MOST_ERROR) for value in numbers]
        client.keep.gain = gain
        logs = [found[name].clamp_min(1e-12 * level).log() for name in ("noise", "distance")]
        return {"means": torch.cat([*capped, *logs], -1)}

    def gains(self, client: Client, bits: Tensor) -> Tensor:
        """Return how much a model of the others reduces the error, and its square, divided by 2^bits."""
        gain = client.keep.gain
        return torch.cat([gain, gain.square()], -1) / torch.exp2(bits)

    def choose(
        self,
        client: Client,
        share: int,
        sharing: float,
        far: float,
        level: float,
        scale: float,
        shift: float,
        clients: int,
        thousands: float,
    ) -> Tensor:
        """Store what is recommended to all; return whether the client is far, and its errors and their products."""
        told = torch.tensor([share, sharing, scale, shift, clients, 1000 * thousands], dtype=torch.float64)
        client.keep.told = told.expand(*client.lead, -1)
        curve = client.keep.curve[..., 1 - share, :] / level
        curve = torch.minimum(curve, NEAR * curve.amin(-1, keepdim=True)).clamp(max=MOST_ERROR)
        curve = curve[..., coarse(curve)]
        upper = torch.triu_indices(curve.shape[-1], curve.shape[-1], device=curve.device)
        is_far = (client.keep.distance[..., :1] > far).to(curve)
        return torch.cat([is_far, curve, curve[..., upper[0]] * curve[..., upper[1]]], -1)

    def outlook(self, client: Client) -> dict[str, Tensor]:
        """Return what is predicted for the client."""
        return {name: getattr(client.keep, name) for name in ("curve", "error", "noise", "distance")}

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

    def _table(self, client: Client, kind: int, a: Tensor, shift: Tensor, unit: Tensor) -> Tensor:
        """Return the log-likelihood of the client's profile on the grid of c and s2."""
        return held_out.likelihoods(_kept(client, kind, unit), a[..., kind, :], shift[..., kind, :])


def coarse(lam: Tensor) -> list[int]:
    """Return places of the first, the last and every third penalty."""
    last = lam.shape[-1] - 1
    return [0, *range(1, last, COARSE), last]


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
