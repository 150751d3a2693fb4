"""Differential privacy of clients: clipped differences, noise in every sum, and what that has cost.

A client's answer enters a mean as its difference to what the client was sent, shortened to a clip norm; the sum gets
Gaussian noise. The clip norm follows the median length of the differences, which is itself learned from noisy counts
(Andrew, Thakkar, McMahan, Ramaswamy, NeurIPS 2021). What stays with a client costs nothing. `row_privacy` protects
single rows instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.engine import accounting
from coterie.engine.noise import Noise, fingerprint
from coterie.engine.protocol import Call
from coterie.engine.sums import Held, HeldByClients, SumRequest, SumsOnly, Total

UNITS = ("client", "row")
CLIP = 1.0  # first clip norm
SPEED = 0.2  # how fast the clip norm follows the median
QUANTILE = 0.5  # share of the differences that should be shorter than the clip norm


class BudgetSpent(SettingError):
    """A method asks for more noisy sums than were planned."""


@dataclass(frozen=True)
class Privacy:
    """What a run may cost.

    Parameters
    ----------
    epsilon, delta
        The guarantee of every unit.
    unit
        'client' protects all rows of a client together, 'row' single rows.
    clip
        First clip norm of a client's difference, which is adapted, or largest gradient of a row, which is not.
    rounds
        Number of rounds the budget is for; `fit` sets it.

    Examples
    --------
    >>> from coterie.engine.privacy import Privacy
    >>> Privacy(epsilon=4, delta=1e-5, unit="row")
    Privacy(epsilon=4, delta=1e-05, unit='row', clip=1.0, rounds=0)
    """

    epsilon: float
    delta: float = 1e-5
    unit: str = "client"
    clip: float = CLIP
    rounds: int = 0

    def after(self, share: float) -> Privacy:
        """Return what is left after a share of the budget was spent."""
        return replace(self, epsilon=self.epsilon * (1 - share), delta=self.delta * (1 - share))

    def __post_init__(self) -> None:
        accounting.check(self.epsilon, self.delta)
        if self.unit not in UNITS:
            raise SettingError(f"unit is {self.unit!r}; it is 'client' or 'row'")
        if not (self.clip > 0 and math.isfinite(self.clip)):
            raise SettingError(f"clip is {self.clip}; it must be a positive number")

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return dataclasses.asdict(self)


@dataclass
class ClientPrivacy:
    """Noise for the sums of one run, the clip norm of every phase, and the sums that each client was in.

    Parameters
    ----------
    settings
        What the run may cost.
    n
        Number of clients.
    """

    settings: Privacy
    n: int
    clips: dict[str, float] = field(default_factory=dict)
    used: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        self.used = torch.zeros(self.n, dtype=torch.long)

    @property
    def noise(self) -> NoiseScale:
        """How much noise a sum gets."""
        return NoiseScale.of(self.settings, self.n)

    def request(self, phase: str, request: SumRequest) -> SumRequest:
        """Return a request with the clip norm of a phase; clients have equal weights."""
        if isinstance(request.groups, str):
            raise SumsOnly(
                "a cluster that clients choose themselves cannot be kept private; name known clusters"
            )
        if int(self.used.max()) >= self.settings.rounds:
            raise BudgetSpent(
                f"{phase} asks for another noisy sum, and the {self.settings.rounds} that were planned are used up: "
                "the method asks more than once in a round. Take one that asks once, such as fedavg or ditto."
            )
        return replace(request, uniform=True, clip=self.clips.get(phase, self.settings.clip))

    def finish(self, phase: str, request: SumRequest, total: Total, origins: Tensor) -> Total:
        """Return a sum with what clients started from added back, and adapt the clip norm.

        Parameters
        ----------
        phase, request
            The sum that was asked for.
        total
            The noisy sum of clipped differences.
        origins
            Sums of what the clients started from, [K, length].
        """
        short = total.short / len(total.ids) + 0.5
        self.clips[phase] = request.clip * math.exp(-SPEED * (min(max(short, 0.0), 1.0) - QUANTILE))
        self.used[total.ids] += 1
        return replace(total, values=total.values + origins.view(total.values.shape))

    def spent(self) -> Tensor:
        """Return epsilon of every client so far, [n]."""
        scale = self.noise
        return torch.tensor(
            [accounting.epsilon(scale.whole, int(times), self.settings.delta) for times in self.used.tolist()]
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs to hold."""
        return {"clips": self.clips, "used": self.used.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.clips, self.used = dict(state["clips"]), torch.tensor(state["used"], dtype=torch.long)


@dataclass(frozen=True)
class NoiseScale:
    """Standard deviations of the noise of a sum.

    Attributes
    ----------
    whole : float
        In units of the clip norm, of differences and count together; what the budget pays for.
    values : float
        Of the differences, in units of the clip norm.
    count : float
        Of the number of differences that were not clipped.
    """

    whole: float
    values: float
    count: float

    @classmethod
    def of(cls, settings: Privacy, n: int) -> NoiseScale:
        """Return the noise for `rounds` sums over n clients (Theorem 1 of Andrew et al.)."""
        whole = accounting.noise_for(settings.epsilon, settings.delta, settings.rounds)
        count = max(n / 20, whole)
        return cls(whole, (whole**-2 - (2 * count) ** -2) ** -0.5, count)


def private_sum(
    place: HeldByClients, request: SumRequest, scale: NoiseScale, noise: Noise, among: float = 1.0
) -> Tensor:
    """Return the noisy sum of the clipped differences of the clients of one place, as one vector.

    Parameters
    ----------
    place
        The clients and their answers.
    request
        Which sum, with its clip norm.
    scale
        Noise of the whole sum.
    noise
        The place's own secret noise.
    among
        Number of places that share the noise: each adds one part of its variance.

    Returns
    -------
    Tensor
        [K length + 1]: the sums, and how many differences were not clipped, less half of them.
    """
    differences = place.values(request) - place.origin(request)
    length = torch.linalg.vector_norm(differences, dim=1, keepdim=True)
    member = place.members(request) * place.weights(request).t()
    clipped = differences * (request.clip / length.clamp(min=1e-300)).clamp(max=1.0)
    short = ((length <= request.clip).double() - 0.5) * place.weights(request)
    flat = torch.cat([(member @ clipped).flatten(), short.sum().view(1)])
    call = place.call
    sent = [value for value in (*call.shared.values(), *call.each.values()) if isinstance(value, Tensor)]
    use = fingerprint("sum", call.phase, call.round, call.call, request.name, request.clip, *sent)
    drawn = noise.normal(use, len(flat)) / math.sqrt(among)
    drawn[:-1] *= scale.values * request.clip
    drawn[-1] *= scale.count
    return flat + drawn


def origins(place: HeldByClients, request: SumRequest) -> Tensor:
    """Return the sums of what clients started from, [K, length], which the server knows."""
    return (place.members(request) * place.weights(request).t()) @ place.origin(request)


@dataclass(frozen=True)
class PrivateHeld:
    """Answers of clients in this process, of which only noisy sums are given out.

    Attributes
    ----------
    place : Clients
        The answers.
    privacy : ClientPrivacy
        The budget of the run.
    noise : Noise
        Secret noise of the run.
    """

    place: HeldByClients
    privacy: ClientPrivacy
    noise: Noise

    def total(self, request: SumRequest) -> Total:
        """Return a noisy sum of the answers."""
        place, phase = self.place, self.place.call.phase
        request = self.privacy.request(phase, request)
        noisy = private_sum(place, request, self.privacy.noise, self.noise)
        weights = (place.members(request) * place.weights(request).t()).sum(-1, keepdim=True)
        values = noisy[:-1].view(request.count, *place.shape(request))
        ids = place.ids if place.good is None else place.ids[place.good]
        total = Total(values, weights, ids, float(noisy[-1]))
        return self.privacy.finish(phase, request, total, origins(place, request))


@dataclass(frozen=True)
class NoisyNodes:
    """Answers that nodes hold, of which they give out noisy sums.

    Attributes
    ----------
    held : Held
        Where the answers are.
    privacy : ClientPrivacy
        The budget of the run.
    call : Call
        The call that was answered, with a row of `each` for every client in `asked`.
    asked : Tensor
        The clients that were asked, [k].
    """

    held: Held
    privacy: ClientPrivacy
    call: Call
    asked: Tensor

    def total(self, request: SumRequest) -> Total:
        """Return a noisy sum of the answers."""
        phase = self.call.phase
        request = self.privacy.request(phase, request)
        total = self.held.total(request)
        where = torch.isin(self.asked, total.ids).nonzero().squeeze(-1)
        call = replace(self.call, each={name: value[where] for name, value in self.call.each.items()})
        empty = torch.zeros(len(where), *total.values.shape[1:], dtype=torch.float64)
        named = {} if request.name is None else {request.name: empty}
        place = HeldByClients(named, self.asked[where], torch.ones(len(where), 1), call)
        return self.privacy.finish(phase, request, total, origins(place, request))
