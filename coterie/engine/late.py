"""Late answers: which are waited for, how old ones count, and simulated delays of clients.

With `Lateness` a round ends when enough answers are there. A client that is still at work is not asked again; its
answer joins a later round as FedBuff's do (Nguyen et al., AISTATS 2022): its step counts 1/sqrt(1 + age) from where
the shared model is by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core import randomness
from coterie._core.errors import SettingError, nearest

if TYPE_CHECKING:
    from coterie.engine.protocol import Call, FederatedAlgorithm

Draw = Callable[
    [int, int, int, Tensor], Tensor
]  # seed, round, call and clients [k] to durations [k] in rounds
IN_PLAN = ("buffer", "staleness", "delays")
KINDS = ("exponential:MEAN", "slow:SHARE:ROUNDS", "fixed:R1,R2,...")


@dataclass(frozen=True)
class Lateness:
    """How long a round waits for answers, and how late an answer may come.

    Parameters
    ----------
    buffer
        Answers that end a round, counting those to earlier rounds; 0 waits for everybody who was asked in it. A round
        ends with the deadline of its nodes in any case.
    staleness
        Oldest answer that is used: the number of rounds between the one in which it was asked for and the one in which
        it arrives.
    delays
        Simulated durations of clients' visits, in rounds: 'exponential:MEAN'; 'slow:SHARE:ROUNDS', where a share
        of the clients always takes so many rounds and the others less than one; 'fixed:R1,R2,...', one number for
        each client. Empty: nobody is late by simulation.

    Examples
    --------
    >>> import torch
    >>> from coterie.engine.late import Lateness
    >>> Lateness(buffer=8, staleness=4).weight(torch.tensor([0, 3])).tolist()
    [1.0, 0.5]
    """

    buffer: int = 0
    staleness: int = 10
    delays: str = ""

    def __post_init__(self) -> None:
        if self.buffer < 0:
            raise SettingError(
                f"buffer is {self.buffer}; give a number of answers, or 0 to wait for all that were asked for"
            )
        if self.staleness < 0:
            raise SettingError(f"staleness is {self.staleness}; give a number of rounds, 0 or more")
        if self.delays:
            durations(self.delays)

    def weight(self, age: Tensor) -> Tensor:
        """Return how much a step counts that is `age` rounds old: 1/sqrt(1 + age)."""
        return (1 + age.double()).rsqrt()

    def to_plan(self) -> dict[str, int | str]:
        """Return what the plan of a run says of late answers."""
        return {name: getattr(self, name) for name in IN_PLAN}

    @classmethod
    def from_plan(cls, plan: Mapping[str, Any]) -> Lateness | None:
        """Return how late answers of a run may come by its plan; None if rounds wait for everybody."""
        return cls(**{name: plan[name] for name in IN_PLAN}) if "staleness" in plan else None

    def require(self, algorithm: FederatedAlgorithm) -> None:
        """Raise `SettingError` unless the algorithm says that it can use late answers."""
        if not algorithm.tolerates_late:
            raise SettingError(
                f"{algorithm.name} does not tolerate late answers (tolerates_late): leave out buffer, staleness and "
                "delays, or choose a method that moves a shared model, such as fedavg, fedadam, ditto or pfedme"
            )


def durations(text: str) -> Draw:
    """Return the function that draws how long visits take, in rounds, for one of `KINDS`."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "exponential":
            mean = _at_least_zero(rest)
            return lambda seed, t, call, ids: -mean * torch.log1p(-_drawn(seed, t, call, ids))
        if kind == "slow":
            share, rounds = (_at_least_zero(part) for part in rest.split(":"))
            return lambda seed, t, call, ids: torch.where(
                randomness.uniform(randomness.key(seed, "slow", ids)) < share,
                torch.full(ids.shape, rounds, dtype=torch.float64, device=ids.device),
                _drawn(seed, t, call, ids),
            )
        if kind == "fixed":
            each = torch.tensor([_at_least_zero(part) for part in rest.split(",")], dtype=torch.float64)
            return lambda seed, t, call, ids: _listed(each, ids)
    except ValueError:
        raise SettingError(
            f"delays {text!r}: write {' or '.join(KINDS)}, with numbers of 0 or more"
        ) from None
    names = [one.partition(":")[0] for one in KINDS]
    raise SettingError(f"no delays {kind!r}.{nearest(kind, names)} Write {' or '.join(KINDS)}")


def _at_least_zero(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _drawn(seed: int, t: int, call: int, ids: Tensor) -> Tensor:
    return randomness.uniform(randomness.key(seed, "delay", t, call, ids))


def _listed(each: Tensor, ids: Tensor) -> Tensor:
    if len(ids) and int(ids.max()) >= len(each):
        raise SettingError(
            f"delays 'fixed:...' has {len(each)} numbers, and there is a client {int(ids.max())}"
        )
    return each.to(ids.device)[ids]


@dataclass(frozen=True)
class Steps:
    """Answers of one phase that are on their way, or have come late.

    Attributes
    ----------
    ids : Tensor
        Clients, [m].
    asked : Tensor
        Rounds in which they were asked, [m].
    due : Tensor
        Times at which the answers arrive, in rounds, [m].
    values : Tensor
        How far each reply is from what the client was sent, [m, ...]; the reply itself, if it is no moved copy.
    floats, bytes : Tensor
        What each answer weighs on its way up, [m].
    """

    ids: Tensor
    asked: Tensor
    due: Tensor
    values: Tensor
    floats: Tensor
    bytes: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Tensor) -> Steps:
        return Steps(*(getattr(self, name)[rows] for name in FIELDS))

    def and_then(self, other: Steps) -> Steps:
        """Return these answers and others."""
        return Steps(*(torch.cat([getattr(self, name), getattr(other, name)]) for name in FIELDS))


FIELDS = ("ids", "asked", "due", "values", "floats", "bytes")


@dataclass
class LateAnswers:
    """The answers that are on their way in a simulation with delays, and a clock that counts rounds.

    Attributes
    ----------
    settings : Lateness
        How long a round waits.
    seed : int
        Seed of the delays.
    clock : float
        Time at which the last round ended.
    waiting : dict of str to Steps
        Answers on their way, by phase.
    """

    settings: Lateness
    seed: int
    clock: float = 0.0
    waiting: dict[str, Steps] = field(default_factory=dict)

    @property
    def simulated(self) -> bool:
        """Whether clients are late by simulation."""
        return bool(self.settings.delays)

    def idle(self, ids: Tensor) -> Tensor:
        """Return which of these clients [k] are not at work on an earlier call."""
        busy = [steps.ids for steps in self.waiting.values() if len(steps)]
        return ~torch.isin(ids, torch.cat(busy)) if busy else torch.ones_like(ids, dtype=torch.bool)

    def due(self, call: Call, asked: Tensor) -> Tensor | None:
        """Let the clock run to the end of a call and return when the clients asked are due, [k].

        The call ends after one round, or as soon as `buffer` answers are there. None: all are there in time, and nobody
        answers an earlier call.
        """
        if not self.settings.delays:
            return None
        due = self.clock + durations(self.settings.delays)(self.seed, call.round, call.call, asked)
        before = self.waiting[call.phase].due if call.phase in self.waiting else due[:0]
        end, times = self.clock + 1.0, torch.cat([due, before]).sort()[0]
        if 0 < self.settings.buffer <= len(times):
            end = min(end, max(self.clock, float(times[self.settings.buffer - 1])))
        self.clock = end
        return due if bool((due > end).any()) or bool((before <= end).any()) else None

    def post(self, phase: str, steps: Steps) -> None:
        """Hold answers back until they are due."""
        if len(steps):
            before = self.waiting.get(phase)
            self.waiting[phase] = steps if before is None else before.and_then(steps)

    def arrived(self, phase: str) -> Steps | None:
        """Remove and return the answers of a phase that are due by now, or None."""
        steps = self.waiting.get(phase)
        if steps is None:
            return None
        here = steps.due <= self.clock
        self.waiting[phase] = steps[~here]
        return steps[here] if bool(here.any()) else None

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint has to hold."""
        held = {
            f"{phase}.{name}": getattr(steps, name)
            for phase, steps in self.waiting.items()
            for name in FIELDS
        }
        return {"clock": torch.tensor(self.clock, dtype=torch.float64), **held}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what a checkpoint held."""
        if "clock" not in tensors:
            return
        self.clock = float(tensors["clock"])
        phases = {name.rpartition(".")[0] for name in tensors} - {""}
        self.waiting = {
            phase: Steps(*(tensors[f"{phase}.{name}"] for name in FIELDS)) for phase in sorted(phases)
        }
