"""What every method would give a client, and what is advised to it; clients compute this themselves.

The survey (`coterie.select.survey`) leaves each client with its predicted errors. Which method is best for the client
follows from these and from two numbers for all clients: whether sharing is recommended, and how sure that is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.select import calibration
from coterie.theory import held_out

METHODS = ("local", "ridge-local", "fedavg", "ftfa", "rtfa")
SHARED = ("fedavg", "ftfa", "rtfa")
FAMILY = torch.tensor([name in SHARED for name in METHODS])
CENTRE = [0 if name in SHARED else 1 for name in METHODS]  # the shared model, or zero


@dataclass(frozen=True)
class Prospects:
    """Predicted errors of some clients: around the shared model (0) and around zero (1), by penalty.

    Attributes
    ----------
    lam : Tensor
        Penalties, [L], with 0 and infinity.
    curve, error
        Held-out squared error by penalty and its standard deviation, [..., 2, L].
    noise : Tensor
        Variance that no model explains, [..., 2].
    distance : Tensor
        Squared distance to the shared model and to zero, [..., 2].
    rows : Tensor
        Training rows, [...].
    columns, clients, total
        Features, clients of the federation, and their rows together.
    shift : float
        How much the covariance of the features differs between clients, beyond chance.
    calibrated : str
        Worlds whose calibration applies: "linear", "classes", or "" where there is none.
    """

    lam: Tensor
    curve: Tensor
    error: Tensor
    noise: Tensor
    distance: Tensor
    rows: Tensor
    columns: int = 1
    clients: int = 1
    total: float = 1.0
    shift: float = 0.0
    calibrated: str = ""

    @classmethod
    def of(cls, lam: Tensor, found: Mapping[str, Tensor], rows: Tensor, *common: Any) -> Prospects:
        """Return the prospects that a client stores, or sends, under these names, with what all have in common."""
        return cls(lam, found["curve"], found["error"], found["noise"], found["distance"], rows, *common)

    def errors(self) -> Tensor:
        """Return the error of every method at its best penalty, [..., methods]."""
        best = [held_out.lowest(self.curve[..., kind, :], self.lam)[1] for kind in (0, 1)]
        return torch.stack(
            [self.curve[..., 1, 0], best[1], self.curve[..., 0, -1], self.curve[..., 0, 0], best[0]], -1
        )

    def excess(self) -> Tensor:
        """Return the errors beyond the noise, [..., methods]."""
        return (self.errors() - self.noise[..., CENTRE]).clamp_min(0.0)

    def penalties(self) -> tuple[Tensor, Tensor]:
        """Return the best penalties [...] around the shared model and around zero."""
        shared, alone = (held_out.lowest(self.curve[..., kind, :], self.lam)[0] for kind in (0, 1))
        return shared, alone.clamp(max=largest(self.lam))

    def advised(self, share: bool, sharing: float) -> ClientAdvice:
        """Return what is advised to each client.

        Parameters
        ----------
        share
            Whether the federation is advised to share a model.
        sharing
            Probability that sharing is better; NaN where it is not known.

        Returns
        -------
        ClientAdvice
        """
        allowed, excess = FAMILY == share, self.excess()
        picks = torch.where(allowed, self.errors(), math.inf).argmin(-1)
        shared, alone = self.penalties()
        lams = torch.where(picks == METHODS.index("rtfa"), shared, math.nan)
        lams = torch.where(picks == METHODS.index("ridge-local"), alone, lams)
        family = sharing if share else 1 - sharing
        sure = [
            math.nan if self.calibrated != "linear" else calibration.client_probability(one, allowed, family)
            for one in excess.view(-1, len(METHODS))
        ]
        return ClientAdvice(
            [METHODS[int(k)] for k in picks.flatten()],
            lams,
            {name: excess[..., k] for k, name in enumerate(METHODS)},
            calibration.intervals(self, excess),
            torch.tensor(sure),
            alone,
            shared,
            self.noise[..., 0 if share else 1],
            self.distance[..., 0] * self.columns,
            self.distance[..., 1] * self.columns,
            self.columns / self.rows,
        )


@dataclass(frozen=True)
class ClientAdvice:
    """Recommendation for each of some clients, and the estimates behind it.

    Attributes
    ----------
    methods : list of str
        Best method of each.
    lams, lam_alone, lam_shared
        Penalty of the best method (NaN if it has none), and best penalties around zero and the shared model, [n].
    risks, intervals
        Predicted squared error beyond the noise [n] and its 90 % interval [n, 2], by method; NaN where it is not known.
    probabilities : Tensor
        Probability that the named method is the client's best, [n].
    sigma2, r2, rho2, gamma
        Noise variance, squared distance to the shared model and to zero, features per row, [n].
    """

    methods: list[str]
    lams: Tensor
    risks: dict[str, Tensor]
    intervals: dict[str, Tensor]
    probabilities: Tensor
    lam_alone: Tensor
    lam_shared: Tensor
    sigma2: Tensor
    r2: Tensor
    rho2: Tensor
    gamma: Tensor

    def json(self, names: list[str]) -> list[dict[str, Any]]:
        """Return the advice as JSON values, a row for each client."""
        rows = []
        for k, name in enumerate(names):
            row: dict[str, Any] = {"client": name, "method": self.methods[k]}
            row |= {
                key: number(getattr(self, source)[k])
                for key, source in (
                    ("lam", "lams"),
                    ("probability", "probabilities"),
                    ("sigma2", "sigma2"),
                    ("r2", "r2"),
                    ("rho2", "rho2"),
                    ("gamma", "gamma"),
                )
            }
            row["risk"] = {method: number(values[k]) for method, values in self.risks.items()}
            row["interval"] = {
                method: [number(value) for value in values[k]] for method, values in self.intervals.items()
            }
            rows.append(row)
        return rows


def largest(lam: Tensor) -> float:
    """Return the largest finite penalty: a model of one's own that is pulled to zero without end is no method."""
    return float(lam[lam.isfinite()].max())


def number(value: Any) -> float | None:
    """Return a float, or None if it is not finite, for JSON."""
    value = float(value)
    return value if math.isfinite(value) else None
