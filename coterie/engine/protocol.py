"""The seam between server and clients: a call of a phase, its answer, and the `Runtime` that carries both."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from coterie._core import randomness
from coterie._core.errors import CoterieError
from coterie.data.rows import Rows
from coterie.engine.compressors import Compressor
from coterie.engine.encoding import Encoded
from coterie.engine.late import Lateness
from coterie.engine.state import State, Value
from coterie.models.metrics import Metric

if TYPE_CHECKING:
    from coterie.engine.client import Client
    from coterie.engine.federation import Federation
    from coterie.engine.sums import Away, Held
    from coterie.models.base import Model


Disclosure = Literal["nothing", "aggregate", "gradient", "model", "personal", "values", "peers"]
Reveals = dict[str, Disclosure]
Method = TypeVar("Method")
Sent = Value | None  # what a call sends to all its clients alike


class FederatedAlgorithm(Protocol):
    """What the engine needs of an algorithm; `coterie.Algorithm` has it.

    Phases are further methods. The engine finds them by name. `reveals` says what each of them sends, `starts_from` of
    which argument its reply is a moved copy, `stays` which of them (or of their streams) send nothing to the server,
    `tolerates_late` which of them may be answered in a later round: their one reply is then a step from `starts_from`.
    """

    reveals: ClassVar[Reveals]
    varying: ClassVar[frozenset[str]]
    starts_from: ClassVar[Mapping[str, str]]
    stays: ClassVar[frozenset[str]]
    tolerates_late: ClassVar[frozenset[str]]

    @property
    def name(self) -> str:
        """Name by which messages and files refer to the algorithm."""

    @property
    def batch(self) -> int:
        """Rows per stochastic gradient; 0 means all rows."""

    @property
    def optimizer(self) -> str:
        """Optimiser of the steps of `client.sgd`."""

    @property
    def begin(self) -> Callable[..., None] | None:
        """Phase that every client runs before its first other phase, or None."""

    @property
    def deploy(self) -> Callable[..., Tensor]:
        """Phase that returns the model a client uses."""

    def deploy_inputs(self, fed: Federation, s: State, /) -> tuple[dict[str, Sent], dict[str, Tensor]]:
        """Return what `deploy` is sent: values for all clients, and values with a row per client."""

    def traffic_of(self, model: Model, /) -> dict[str, tuple[int, int]]:
        """Return the declared floats down and up per visit, by phase."""


@dataclass(frozen=True)
class Call:
    """One call of a phase: what to run, when, and what was sent. Tensors in `each` have a row per visit.

    With `late` the call ends when enough answers are there, and others may come with a later call of the phase.
    """

    algorithm: FederatedAlgorithm
    phase: str
    round: int
    call: int
    shared: dict[str, Sent]
    each: dict[str, Tensor]
    compress: Compressor | None = None
    late: Lateness | None = None


@dataclass(frozen=True)
class Visits:
    """Who is visited: positions in the runtime (None: everybody, once), and which visit of the call it is.

    `repeats` is `nth` or counts it when somebody asks; `coming` tells who will be visited in a later round, as far as
    that can be known. `cohort` (round, count) says that these are so many clients drawn for a round, so that whoever
    knows the seed can draw them again.
    """

    at: Tensor | None
    repeats: Tensor | Callable[[], Tensor | None] | None = None
    coming: Callable[[int], Tensor] | None = None
    cohort: tuple[int, int] | None = None

    @functools.cached_property
    def nth(self) -> Tensor | None:
        """How many visits of the call to the same client are before each; None where nobody is visited twice."""
        return self.repeats() if callable(self.repeats) else self.repeats


@dataclass(frozen=True)
class Answer:
    """Named values with a row per visit, which visits were good (None: all), and what was sent compressed.

    Values are tensors; those of one stack that is not sent anywhere may be models that are `LazyModels`.

    Across a network some visits are not answered at all: `came` [visits] marks those that are (None: all), the
    other fields have rows for them only, `why` tells what kept the other clients, and `forgot` are clients that
    have lost what they kept and must begin again. Where only sums leave a node, `held` is where the values are. Where
    they are in another process of a simulation, `away` fetches them, and `named` has their shapes only. `late` are
    answers to earlier calls of the phase that have come meanwhile, and `pending` [visits] marks visits of this call
    that may still be answered.
    """

    named: dict[str, Tensor]
    good: Tensor | None = None
    encoded: dict[str, Encoded] = field(default_factory=dict)
    came: Tensor | None = None
    why: dict[int, str] = field(default_factory=dict)
    forgot: Tensor | None = None
    held: Held | None = None
    away: Away | None = None
    late: tuple[LateReply, ...] = ()
    pending: Tensor | None = None


@dataclass(frozen=True)
class LateReply:
    """What some clients `ids` [k] answer to an earlier call: finite values with a row for each."""

    call: Call
    ids: Tensor
    named: dict[str, Tensor]
    encoded: dict[str, Encoded] = field(default_factory=dict)


@dataclass(frozen=True)
class Capabilities:
    """What a runtime can do beyond running phases. A runtime has none of these unless it says so.

    Attributes
    ----------
    rows_visible : bool
        The rows of all clients are in this process: `rows` and `with_rows` work.
    state_visible : bool
        The state that clients keep is in this process: `kept` and `keep` work.
    memory_limit : bool
        The state that clients keep may live on disk: `limit_memory` works.
    fast_forward : bool
        Several rounds may be computed at once: `stack` works.
    deferred_checks : bool
        Answers may be checked for NaN and infinity later: `unchecked` and `hold` work.
    models_stay : bool
        Deployed models stay with the clients: `deploy` answers with the round [n, 1] under which they are stored,
        `score` takes that, and `finish` works.
    reopens : bool
        Clients can be opened anew with more of their rows in training, where they agree: `reopened` works.
    """

    rows_visible: bool = False
    state_visible: bool = False
    memory_limit: bool = False
    fast_forward: bool = False
    deferred_checks: bool = False
    models_stay: bool = False
    reopens: bool = False


class Runtime(Protocol):
    """Where clients live and how their phases are run.

    Implementations inherit from this class. Methods that belong to a capability raise `CoterieError` unless the
    runtime overrides them. `RUNTIMES` in `coterie.conformance.runtimes` lists those that the conformance suite checks.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    workers: int = 1  # threads that compute clients side by side; they decide the last bits of sums
    processes: int | str = (
        1  # that share the clients; they decide the last bits too, unless it is "any number"
    )

    def adapted(self, algorithm: Method) -> Method:
        """Return an algorithm as it is run here: itself, unless its server's side runs elsewhere."""
        return algorithm

    def fresh(self, seed: int | None = None) -> Runtime:
        """Return the same clients and rows with no state kept; `seed` replaces the seed of random draws."""

    def run(self, call: Call, visits: Visits) -> Answer:
        """Run a phase for these visits and keep the state that clients put into `keep`."""

    def deploy(self, call: Call, visits: Visits, welcome: dict[str, Sent] | None = None) -> Answer:
        """Run `deploy` without keeping state.

        Parameters
        ----------
        call, visits
            The call of `deploy`, and who is visited.
        welcome
            Arguments of `begin`, which these clients run first; None if they have begun.

        Returns
        -------
        Answer
            The models, or the rounds under which they are stored (`Capabilities.models_stay`).
        """

    def evaluate(
        self,
        call: Call,
        visits: Visits,
        split: str,
        metrics: Sequence[Metric],
        welcome: dict[str, Sent] | None = None,
    ) -> Answer:
        """Return the metrics' sums of the deployed models on one split, without keeping state; see `deploy`."""

    def score(self, weights: Tensor, split: str, metrics: Sequence[Metric]) -> dict[str, Tensor]:
        """Return the metrics' sums of given models, one row per client, on one split."""

    def begin_round(self, t: int, state: State | None) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Prepare for a round; return the clients that joined since the last, with their numbers of rows by split."""
        return []

    def paths_used(self) -> Counter[str]:
        """Return how often each way to compute was taken; empty where that happens elsewhere."""
        return Counter()

    def snapshot(self) -> dict[str, Tensor]:
        """Return the state that clients keep, for a checkpoint."""

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Replace the state that clients keep by a snapshot."""

    def stack_size(self, batch: int) -> int:
        """Return how many clients are computed in one tensor operation; 0 if that happens elsewhere."""

    def threads(self, batch: int, participation: float = 1.0) -> int:
        """Set `workers` and return how many threads torch should use for rounds of this size."""

    def data_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that identify the data of a run."""

    def close(self) -> None:
        """Release processes and connections, of which most runtimes have none; no call may follow."""
        return

    def rows(self, split: str) -> Rows:
        """Return the rows of all clients in one split. Needs `rows_visible`."""
        self._lacks("rows_visible")

    def with_rows(self, splits: dict[str, Rows], clusters: Tensor | None) -> Runtime:
        """Return a runtime with the same clients, other rows and no state kept. Needs `rows_visible`."""
        self._lacks("rows_visible")

    def kept(self, name: str) -> Tensor:
        """Return what all clients keep under a name, [n, ...]. Needs `state_visible`."""
        self._lacks("state_visible")

    def keep(self, name: str, values: Tensor) -> None:
        """Let all clients keep these values, [n, ...]. Needs `state_visible`."""
        self._lacks("state_visible")

    def limit_memory(self, size: int) -> None:
        """Keep at most this many bytes of state in memory and the rest on disk. Needs `memory_limit`."""
        self._lacks("memory_limit")

    def stack(self, batch: int) -> Client | None:
        """Return all clients as one stack that draws nothing, or None if they do not fit. Needs `fast_forward`."""
        self._lacks("fast_forward")

    def unchecked(self) -> AbstractContextManager[list[Tensor]]:
        """Take all answers inside the block as finite. Needs `deferred_checks`.

        The list that the block receives is filled with sums that are finite only if the answers were.
        """
        self._lacks("deferred_checks")

    def hold(self) -> Callable[[], None]:
        """Return a function that puts back the state that clients keep now. Needs `deferred_checks`."""
        self._lacks("deferred_checks")

    def finish(self, t: int, common: Tensor | None) -> list[str]:
        """Let clients store the models of round t for use, and return who did. Needs `models_stay`."""
        self._lacks("models_stay")

    def reopened(self, which: str) -> tuple[Runtime, dict[str, Tensor]]:
        """Return clients that train on 'validation' or 'all' rows too, and their rows by split. Needs `reopens`."""
        self._lacks("reopens")

    def _lacks(self, capability: str) -> NoReturn:
        raise CoterieError(
            f"{type(self).__name__} does not have the capability {capability!r}; look at `runtime.capabilities` first"
        )


def visit_keys(seed: int, call: Call, ids: Tensor, nth: Tensor | None) -> Tensor:
    """Return the coordinates of every visit of a call as hash keys, which client and server can both compute."""
    keys = randomness.key(seed, call.phase, call.round, call.call, ids)
    return keys if nth is None else torch.where(nth > 0, randomness.key(keys, nth), keys)
