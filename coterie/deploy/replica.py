"""A node's own copy of the server in a relayed run: the algorithm, its state, and clients that live on many nodes."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core.errors import CoterieError, NobodyAnswered
from coterie.deploy import wire
from coterie.deploy.answers import usable
from coterie.deploy.client_state import CallId, ClientStateFiles
from coterie.deploy.messages import under
from coterie.deploy.relay import RelayKeys
from coterie.engine.federation import Federation
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.protocol import Answer, Call, Capabilities, Runtime, Sent, Visits
from coterie.engine.state import State
from coterie.models.fast.lazy_models import materialize
from coterie.models.metrics import Metric

if TYPE_CHECKING:
    from coterie.algorithms.base import Algorithm

Message = tuple[dict[str, Any], dict[str, Tensor]]
PATIENCE = 3600.0  # seconds that a round may stand still


class Ended(Exception):
    """The round was given up, to begin again."""


class PeerRuntime(Runtime):
    """Clients of which some are here, and the answers of the others come from their nodes.

    Parameters
    ----------
    home
        The clients of this node.
    nodes
        Clients of each node of the group.
    n
        Number of clients of the federation.
    keys
        This node's keys.
    """

    capabilities = Capabilities()

    def __init__(
        self, home: LocalRuntime, nodes: Mapping[str, Sequence[int]], n: int, keys: RelayKeys
    ) -> None:
        self.home, self.n, self.keys = home, n, keys
        self.place = {name: torch.tensor(ids, dtype=torch.long) for name, ids in nodes.items()}
        self.position = torch.full((n,), -1)
        self.position[home.ids] = torch.arange(len(home.ids))
        self.outbox: queue.Queue[Any] = queue.Queue()
        self.inbox: queue.Queue[Any] = queue.Queue()

    def run(self, call: Call, visits: Visits) -> Answer:
        """Run a phase on the clients of this node, and exchange what they and all others answered."""
        asked = torch.arange(self.n) if visits.at is None else visits.at
        own, mine = self._mine(call, visits, asked)
        answer = self.home.run(own, mine) if len(self._at(mine)) else Answer({})
        parts = {f"value.{name}": materialize(value) for name, value in answer.named.items()}
        good = torch.ones(len(self._at(mine)), dtype=torch.bool) if answer.good is None else answer.good
        content = wire.encode({}, {**parts, "good": good})
        floats = sum(value.numel() for value in parts.values())
        self.keys.note(call.round, call.call, call.phase)
        sealed = {
            f"to.{other}": torch.frombuffer(bytearray(self.keys.seal(other, content)), dtype=torch.uint8)
            for other in self.keys.others
        }
        self.outbox.put(({"phase": call.phase, "done": False, "floats": floats}, sealed))
        received = self.inbox.get(timeout=PATIENCE)
        if received is None:
            raise Ended
        told = {self.keys.name: ({**parts, "good": good})}
        for other in self.keys.others:
            if f"from.{other}" not in received:
                raise wire.WireError(f"message rejected: nothing of {other}")
            told[other] = wire.decode(self.keys.opened(other, received[f"from.{other}"].numpy().tobytes()))[1]
        return self._joined(asked, told)

    def _joined(self, asked: Tensor, told: Mapping[str, dict[str, Tensor]]) -> Answer:
        """Return the answers of all nodes in the order of the visits."""
        came = torch.zeros(len(asked), dtype=torch.bool)
        rows: list[Tensor] = []
        parts: list[dict[str, Tensor]] = []
        goods: list[Tensor] = []
        for name in sorted(told):
            at = torch.isin(asked, self.place[name]).nonzero().squeeze(-1)
            named, good = under("value.", told[name]), told[name].get("good")
            if good is None or good.dtype != torch.bool or good.shape != (len(at),):
                raise wire.WireError(f"message rejected: {name} sent no mask of good visits")
            if any(value.dim() == 0 or len(value) != len(at) for value in named.values()):
                raise wire.WireError(
                    f"message rejected: {name} sent another number of answers than it was asked for"
                )
            came[at] = True
            if len(at):
                rows.append(at)
                parts.append(named)
                goods.append(good & usable(named, len(at)))
        if not rows:
            return Answer({}, came=came)
        shapes = [{name: (value.shape[1:], value.dtype) for name, value in part.items()} for part in parts]
        if any(shape != shapes[0] for shape in shapes):
            raise wire.WireError("message rejected: nodes sent answers of different shapes")
        order = torch.cat(rows).argsort()
        named = {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
        good = torch.cat(goods)[order]
        return Answer(named, None if good.all() else good, came=None if came.all() else came)

    def deploy(self, call: Call, visits: Visits, welcome: dict[str, Sent] | None = None) -> Answer:
        """Return the deployed models of this node's clients; NaN for the others."""
        asked = torch.arange(self.n) if visits.at is None else visits.at
        own, mine = self._mine(call, visits, asked)
        return self._filled(asked, self.home.deploy(own, mine, welcome) if len(self._at(mine)) else None)

    def evaluate(
        self,
        call: Call,
        visits: Visits,
        split: str,
        metrics: Sequence[Metric],
        welcome: dict[str, Sent] | None = None,
    ) -> Answer:
        """Return the metrics' sums of this node's clients; NaN for the others."""
        asked = torch.arange(self.n) if visits.at is None else visits.at
        own, mine = self._mine(call, visits, asked)
        found = self.home.evaluate(own, mine, split, metrics, welcome) if len(self._at(mine)) else None
        return self._filled(asked, found)

    def _filled(self, asked: Tensor, answer: Answer | None) -> Answer:
        if answer is None:
            return Answer({})
        here = self.position[asked] >= 0
        named = {}
        for name, value in answer.named.items():
            value = materialize(value)
            filled = torch.full((len(asked), *value.shape[1:]), torch.nan, dtype=value.dtype)
            filled[here] = value
            named[name] = filled
        return Answer(named)

    def _mine(self, call: Call, visits: Visits, asked: Tensor) -> tuple[Call, Visits]:
        """Return the part of a call that is for the clients of this node."""
        here = self.position[asked] >= 0
        each = {name: value[here] for name, value in call.each.items()}
        nth = None if visits.nth is None else visits.nth[here]
        return replace(call, each=each), Visits(self.position[asked[here]], nth)

    def _at(self, visits: Visits) -> Tensor:
        assert visits.at is not None
        return visits.at

    def fresh(self, seed: int | None = None) -> PeerRuntime:
        """Refuse: a copy would draw other messages from the other nodes."""
        raise CoterieError("a relayed run has one copy of its clients")

    def score(self, weights: Tensor, split: str, metrics: Sequence[Metric]) -> dict[str, Tensor]:
        """Refuse: models of other nodes are scored there."""
        raise CoterieError("models of a relayed run are scored by their own nodes")

    def data_tensors(self) -> tuple[Tensor, ...]:
        """Return the rows of this node's clients."""
        return self.home.data_tensors()

    def threads(self, batch: int, participation: float = 1.0) -> int:
        """Return 1: a node computes for itself."""
        return 1

    def stack_size(self, batch: int) -> int:
        """Return how many clients of this node are computed at once."""
        return self.home.stack_size(batch)

    def snapshot(self) -> dict[str, Tensor]:
        """Return what the clients of this node keep."""
        return self.home.snapshot()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Replace what the clients of this node keep."""
        self.home.restore(tensors)


class Replica:
    """The server's side of a relayed run, on one node. A round runs in a thread that waits for the other nodes.

    Parameters
    ----------
    algorithm, home
        What is run, and the clients of this node.
    files
        Where states are saved.
    keys
        This node's key, before the others' are known.
    """

    def __init__(
        self, algorithm: Algorithm, home: LocalRuntime, files: ClientStateFiles, keys: RelayKeys
    ) -> None:
        self.algorithm, self.home, self.files, self.keys = algorithm, home, files, keys
        self.fed: Federation | None = None
        self.state: State | None = None
        self.at: CallId | None = None  # the round whose end `state` is, and 0
        self._thread: threading.Thread | None = None

    def join(self, roster: Mapping[str, Mapping[str, str]], about: Mapping[str, Any]) -> None:
        """Take the keys of the other nodes, and who the clients of the federation are."""
        if (
            sorted(about["nodes"]) != sorted(roster)
            or about["nodes"][self.keys.name] != self.home.ids.tolist()
        ):
            raise wire.WireError("message rejected: the clients of this node are others")
        self.keys.join(roster, about)
        n, clusters = len(about["names"]), about["clusters"]
        self.fed = Federation(
            PeerRuntime(self.home, about["nodes"], n, self.keys),
            model=self.home.model,
            names=about["names"],
            rows={split: torch.tensor(count) for split, count in about["rows"].items()},
            clusters=None if clusters is None else torch.tensor(clusters),
            seed=self.home.seed,
            dtype=self.home.dtype,
        )

    def relay(self, header: Mapping[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Begin a round, or go on with it, up to its next exchange or its end."""
        t, runtime = int(header["round"]), self._runtime()
        if int(header["step"]) == 0:
            self.give_up()
            self.go_to(None if t == 0 else (t - 1, 0))
            runtime.outbox, runtime.inbox = queue.Queue(), queue.Queue()
            self._thread = threading.Thread(target=self._round, args=(t, header.get("floor")), daemon=True)
            self._thread.start()
        elif self._thread is None:
            raise wire.WireError("message rejected: no round is going on")
        else:
            runtime.inbox.put(tensors)
        found = runtime.outbox.get(timeout=PATIENCE)
        if isinstance(found, BaseException):
            raise found
        reply, sealed = found
        return reply, sealed

    def give_up(self) -> None:
        """End a round that is going on."""
        if self._thread is not None and self._thread.is_alive():
            self._runtime().inbox.put(None)
            self._thread.join(timeout=60.0)
        self._thread = None

    def go_to(self, stamp: CallId | None) -> None:
        """Restore the state of the end of a round; None: before the first."""
        if stamp is not None and stamp == self.at:
            return
        if self._thread is not None and self._thread.is_alive():
            raise wire.WireError("message rejected: a round is going on")
        tensors = {} if stamp is None else self.files.load(stamp)
        if tensors is None:
            raise CoterieError(f"no saved state of round {stamp and stamp[0]} on this node")
        self.home.restore(under("store.", tensors))
        fed = self._federation()
        fed.restore_begun(tensors.get("begun", torch.zeros(fed.n, dtype=torch.bool)))
        fed.found = None
        numbers = bytes(tensors["numbers"].tolist()).decode() if "numbers" in tensors else "{}"
        self.state = None if stamp is None else State(**under("state.", tensors), **json.loads(numbers))
        self.at = stamp

    def deployed(self, split: str = "", metrics: Sequence[Metric] = ()) -> dict[str, Tensor]:
        """Return the deployed models of this node's clients, or the metrics' sums of them on a split."""
        fed = self._federation()
        assert self.state is not None
        runtime = fed.runtime

        def run(call: Call, visits: Visits, welcome: dict[str, Any] | None) -> Answer:
            if split:
                return runtime.evaluate(call, visits, split, metrics, welcome)
            return runtime.deploy(call, visits, welcome)

        fed.enter_round(self.at[0] if self.at else 0, self.state)
        return {
            name: value[self.home.ids]
            for name, value in fed.deployed_by(self.algorithm, self.state, run).items()
        }

    def _round(self, t: int, floor: Any) -> None:
        runtime, fed = self._runtime(), self._federation()
        outbox = runtime.outbox
        try:
            with torch.no_grad():
                before, self.at = self.state, None
                fed.enter_round(t, before)
                if before is None:
                    self.state = self.algorithm.start(fed)
                else:
                    try:
                        self.state = self.algorithm.round(fed, before, t)
                    except NobodyAnswered:
                        self.state = before
                self._save((t, 0), floor)
            outbox.put(({"phase": "", "done": True}, {}))
        except Ended:
            return
        except BaseException as problem:
            outbox.put(problem)

    def _save(self, stamp: CallId, floor: Any) -> None:
        assert self.state is not None
        fed = self._federation()
        numbers = {
            name: value for name, value in self.state.fields().items() if not isinstance(value, Tensor)
        }
        tensors = {f"store.{name}": value for name, value in self.home.snapshot().items()}
        tensors |= {f"state.{name}": value for name, value in self.state.tensors().items()}
        tensors["begun"] = fed.begun
        tensors["numbers"] = torch.tensor(list(json.dumps(numbers).encode()), dtype=torch.uint8)
        self.files.save(stamp, tensors)
        self.files.prune((max(0, stamp[0] - 1), 0) if floor is None else (int(floor[0]), int(floor[1])))
        self.at = stamp

    def _federation(self) -> Federation:
        if self.fed is None:
            raise wire.WireError("message rejected: this node does not know the others' keys")
        return self.fed

    def _runtime(self) -> PeerRuntime:
        runtime = self._federation().runtime
        assert isinstance(runtime, PeerRuntime)
        return runtime
