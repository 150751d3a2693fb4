"""The baseline hazard of every client's Cox regression, with which relative risks become survival probabilities.

Breslow's estimate over a client's own rows, drawn to the baseline over all clients. Where the clients together expect
dH(t) and client i has dN_i(t) events among rows whose exp(score) adds up to S_i(t),

    dH_i(t) = (dN_i(t) + a L_i dH(t)) / (S_i(t) + a),        L_i = (d_i + 1/v) / (E_i + 1/v).

L_i is the client's level: d_i events where E_i were expected, drawn to 1 by the variance v of levels between clients,
which is estimated by moments. The shape is that of a gamma process prior (Kalbfleisch, 1978) worth `a` rows at risk: a
client with many rows at risk keeps its own curve, one with few rows or none has the common curve at its own level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core import files
from coterie._core.errors import SettingError

if TYPE_CHECKING:
    from coterie.train.run import Run

FILE, SCORED = "baseline.safetensors", "baseline_scored.safetensors"
MOST_TIMES = 1000  # event times that are told apart; where there are more, some count at the next one kept
AT_RISK = 10.0  # rows at risk that the common curve is worth: chosen on six generated worlds


@dataclass(frozen=True)
class Baseline:
    """Cumulative baseline hazards of clients as step functions.

    Attributes
    ----------
    times : Tensor
        Times of events, ascending, [G].
    hazard : Tensor
        Cumulative hazard of a row with score 0 at these times, of every client and, last, of all together, [n + 1, G].
    centre : Tensor
        Mean score of the training rows of every client and, last, of all, [n + 1]: relative risks are relative to it.
    last : float
        The longest time that a row was seen.
    """

    times: Tensor
    hazard: Tensor
    centre: Tensor
    last: float

    @classmethod
    def estimate(
        cls, scores: Sequence[Tensor], targets: Sequence[Tensor], at_risk: float = AT_RISK
    ) -> Baseline:
        """Estimate the baselines from the scores and signed times of every client's rows.

        Parameters
        ----------
        scores, targets
            Scores [rows] and signed times [rows] of every client.
        at_risk
            Rows at risk that the common curve is worth; 0 gives clients their own curves.

        Returns
        -------
        Baseline
            The baselines.

        Examples
        --------
        >>> y = torch.tensor([1.0, 2.0, -3.0])
        >>> found = Baseline.estimate([torch.zeros(3)], [y], at_risk=0.0)
        >>> found.hazard[0]  # one of three at risk, then one of two
        tensor([0.3333, 0.8333], dtype=torch.float64)
        """
        whole = torch.cat(list(targets)).double()
        times = whole[whole > 0].unique()
        if len(times) > MOST_TIMES:
            chosen = torch.linspace(0, len(times) - 1, MOST_TIMES, dtype=torch.float64).round().long()
            times = times[chosen]
        counted = [_counts(z.double(), y.double(), times) for z, y in zip(scores, targets, strict=True)]
        events, risk = (torch.stack(part) for part in zip(*counted, strict=True))
        common = events.sum(0) / risk.sum(0).clamp_min(1e-300)
        seen, expected = events.sum(1), (risk * common).sum(1)
        level = _levels(seen, expected).unsqueeze(1)
        own = (events + at_risk * level * common) / (risk + at_risk).clamp_min(1e-300)
        everybody = torch.cat([z.double() for z in scores]).mean()
        means = [z.double().mean() if len(z) else everybody for z in scores]
        hazard = torch.cat([own, common.unsqueeze(0)]).cumsum(1)
        return cls(times, hazard, torch.stack([*means, everybody]), float(whole.abs().max()))

    @classmethod
    def of(cls, run: Run, *, scored: bool = False) -> Baseline | None:
        """Return the baseline of a run of Cox regression; None for other models, or where rows are elsewhere.

        `scored` asks for that of the models before they were refitted, which the scores are about.
        """
        if run.fed.model.task != "survival":
            return None
        if run.folder is not None and (run.folder / "models" / FILE).exists():
            return cls.load(run.folder / "models", scored)
        fed = run.fed
        if fed.models_stay or not fed.runtime.capabilities.rows_visible:
            return None
        splits, models = (("train",), run.scored) if scored else (run.trained_on, run.personal)
        if models is None:
            return None
        parts = [fed.runtime.rows(split).to("cpu") for split in splits]
        scores, targets = [], []
        for k in range(fed.n):
            mine = [part.of(k) for part in parts]
            x, y = (torch.cat([part[j] for part in mine]) for j in (0, 1))
            scores.append(fed.model.scores(models[k], x).squeeze(-1))
            targets.append(y)
        return cls.estimate(scores, targets)

    def save(self, folder: Path, scored: bool = False) -> None:
        """Write the baseline beside the models of a run."""
        tensors = {"times": self.times, "hazard": self.hazard, "centre": self.centre}
        files.write_tensors(folder / (SCORED if scored else FILE), tensors, {"last": self.last})

    @classmethod
    def load(cls, folder: Path, scored: bool = False) -> Baseline | None:
        """Return what `save` wrote, or None if there is nothing."""
        path = folder / (SCORED if scored else FILE)
        if not path.exists():
            return None
        tensors, note = files.read_tensors(path)
        return cls(tensors["times"], tensors["hazard"], tensors["centre"], float(note["last"]))

    def place(self, client: Tensor) -> Tensor:
        """Return the row of each client; clients without a baseline of their own have the common one."""
        return client.clamp(max=len(self.centre) - 1)

    def relative_risk(self, client: Tensor, scores: Tensor) -> Tensor:
        """Return hazards relative to that of the client's average row, for indices of clients [N] and scores [N]."""
        return (scores.double() - self.centre[self.place(client)]).exp()

    def survival(self, client: Tensor, scores: Tensor, time: float) -> Tensor:
        """Return the probability that nothing has happened by a time, for indices of clients [N] and scores [N].

        Parameters
        ----------
        client, scores
            Index of each row's client and its score.
        time
            The time, above 0 and not beyond the longest that a row was seen.

        Returns
        -------
        Tensor
            Probabilities, [N].

        Raises
        ------
        SettingError
            The time is outside.
        """
        if not 0 < time <= self.last:
            raise SettingError(
                f"survival at {time:g} cannot be told: rows were seen from 0 to {self.last:g}. Give a time between"
            )
        steps = int(torch.searchsorted(self.times, torch.tensor(time, dtype=torch.float64), right=True))
        if steps == 0:
            return torch.ones(len(client), dtype=torch.float64)
        return (-self.hazard[self.place(client), steps - 1] * scores.double().exp()).exp()

    def usual_times(self) -> list[float]:
        """Return three times to show survival at: by then about a quarter, half and three quarters of events happen."""
        found = torch.quantile(self.times, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        return list(dict.fromkeys(float(f"{time:.3g}") if f"{time:.3g}" != "0" else time for time in found))


def _counts(z: Tensor, y: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Return events, and the sum of exp(z) over rows at risk, at each of these times."""
    at = torch.searchsorted(times, y.abs()).clamp(max=len(times) - 1)
    events = torch.bincount(at[y > 0], minlength=len(times)).double()
    until, order = torch.where(y > 0, times[at], y.abs()).sort()
    force = z.exp()[order]
    left = torch.cat([force.flip(0).cumsum(0).flip(0), force.new_zeros(1)])
    return events, left[torch.searchsorted(until, times)]


def _levels(seen: Tensor, expected: Tensor) -> Tensor:
    """Return the level of every client: events seen to events expected, drawn to 1 where few are expected."""
    between = ((seen - expected).square() - expected).sum() / expected.square().sum().clamp_min(1e-300)
    if not float(between) > 0:
        return torch.ones_like(seen)
    return (seen + 1 / between) / (expected + 1 / between)
