"""Messages between the server of a sharded simulation and its workers: JSON and raw tensors, no pickle."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from coterie._core import broadcast, errors
from coterie._core.errors import CoterieError
from coterie._core.threads import helped
from coterie.engine.shard_worker import Message, ShardWorker

SMALL = 1 << 16  # bytes of a tensor that travels with the header


class WorkerLost(CoterieError):
    """A worker of a sharded simulation has died."""


class WorkerLink(Protocol):
    """The way to one worker."""

    def send(self, message: Message) -> int:
        """Send a message; return its bytes."""

    def receive(self) -> tuple[Message, int]:
        """Return the next message and its bytes; raise `WorkerLost` if none will come."""


def pack(message: Message) -> tuple[Tensor, list[Tensor]]:
    """Return a message as one block of bytes, uint8, and the large tensors that follow it.

    A stack whose rows are all the same is sent as one row.

    Examples
    --------
    >>> import torch
    >>> block, large = pack(({"kind": "call"}, {"x": torch.ones(1).expand(1000)}))
    >>> header, tensors = unpack(block, lambda size: large.pop(0))
    >>> len(block) < 200, header, int(tensors["x"].sum())
    (True, {'kind': 'call'}, 1000)
    """
    header, tensors = message
    schema: list[list[Any]] = []
    small: list[Tensor] = []
    large: list[Tensor] = []
    for name, value in tensors.items():
        repeated = len(value) if broadcast.is_broadcast(value) else 0
        plain = (value[:1] if repeated else value).detach().cpu()
        plain = (
            plain.clone(memory_format=torch.contiguous_format) if plain.numel() == 1 else plain.contiguous()
        )
        is_small = plain.nbytes < SMALL
        schema.append([name, str(plain.dtype).removeprefix("torch."), list(plain.shape), repeated, is_small])
        raw = plain.view(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
        (small if is_small else large).append(raw)
    text = json.dumps([header, schema]).encode()
    head = struct.pack("<Q", len(text)) + text
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *small]), large


def unpack(block: Tensor, follow: Callable[[int], Tensor]) -> Message:
    """Return the message of a block of bytes; `follow` returns the next large tensor, uint8 [its size]."""
    raw = block.numpy()
    (length,) = struct.unpack("<Q", raw[:8].tobytes())
    header, schema = json.loads(raw[8 : 8 + length].tobytes())
    tensors, at = {}, 8 + length
    for name, dtype_name, shape, repeated, is_small in schema:
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        flat = block[at : at + size].clone() if is_small else follow(size)
        at += size if is_small else 0
        value = flat.view(dtype).view(shape)
        tensors[name] = value.expand(repeated, *shape[1:]) if repeated else value
    return header, tensors


class DirectLink:
    """A worker in this process that sees packed messages only, to check a runtime without processes."""

    def __init__(self, worker: ShardWorker) -> None:
        self.worker = worker
        self._waiting: list[Message] = []

    def send(self, message: Message) -> int:
        """Keep a message until its answer is asked for."""
        copy, size = _copied(message)
        self._waiting.append(copy)
        return size

    def receive(self) -> tuple[Message, int]:
        """Return the worker's answer to the oldest message."""
        return _copied(answered(self.worker, self._waiting.pop(0)))


def _copied(message: Message) -> tuple[Message, int]:
    block, large = pack(message)
    size = len(block) + sum(map(len, large))
    return unpack(block, lambda _: large.pop(0).clone()), size


class ProcessLink:
    """A process of the same `torch.distributed` group.

    Parameters
    ----------
    rank
        Its rank.
    group
        The group; None is the default one.
    lost
        Returns what is known of a process that does not answer any more.
    """

    def __init__(self, rank: int, group: Any = None, lost: Callable[[], str] = str) -> None:
        self.rank, self.group, self.lost = rank, group, lost

    def send(self, message: Message) -> int:
        """Send a message; return its bytes."""
        block, large = pack(message)
        try:
            for part in (torch.tensor([len(block)]), block, *large):
                dist.send(part, self.rank, self.group)
        except RuntimeError as problem:
            raise self._gone() from problem
        return len(block) + sum(map(len, large))

    def receive(self) -> tuple[Message, int]:
        """Wait for a message; return it and its bytes."""
        received = 0

        def follow(size: int) -> Tensor:
            nonlocal received
            received += size
            return self._next(torch.empty(size, dtype=torch.uint8))

        length = self._next(torch.zeros(1, dtype=torch.int64))
        message = unpack(follow(int(length)), follow)
        return message, received

    def _next(self, buffer: Tensor) -> Tensor:
        try:
            dist.recv(buffer, self.rank, self.group)
        except RuntimeError as problem:
            raise self._gone() from problem
        return buffer

    def _gone(self) -> WorkerLost:
        return WorkerLost(f"worker {self.rank} has died{self.lost()}")


def answered(worker: ShardWorker, message: Message) -> Message:
    """Return a worker's answer; an error that the user can put right becomes one."""
    try:
        return worker.answer(*message)
    except CoterieError as problem:
        return {"error": [type(problem).__name__, str(problem)]}, {}


def serve(worker: ShardWorker, link: WorkerLink) -> None:
    """Answer messages until the server closes the link or dies."""
    while True:
        try:
            message, _ = link.receive()
            if message[0]["kind"] == "close":
                return
            if message[0]["kind"] == "threads":
                torch.set_num_threads(message[0]["most"])
            with helped(worker.hands):
                answer = answered(worker, message)
            torch.set_num_threads(worker.torch_threads)
            link.send(answer)
        except WorkerLost:  # the server: nobody is left to tell
            return


class Crew:
    """All workers of a sharded simulation: one in this process, the others at the end of a link.

    Parameters
    ----------
    own
        The worker in this process.
    links
        Ways to the others.
    exact
        Whether results must not depend on the number of workers.
    here
        How many of them share this machine.

    Attributes
    ----------
    sent, received : list of int
        Bytes sent to and received from each of the others.
    busy : list of float
        Seconds of processor time of each worker's phases, the one in this process first.
    """

    def __init__(
        self, own: ShardWorker, links: Sequence[WorkerLink], exact: bool = False, here: int = 1
    ) -> None:
        self.own, self.links, self.exact, self.here = own, list(links), exact, here
        self.idle = True  # nobody owes an answer
        self.sent, self.received = [0] * len(links), [0] * len(links)
        self.busy = [0.0] * (len(links) + 1)
        self.round = 0
        self.forgotten_answers: list[int] = []
        self.forgotten_shards: list[int] = []
        # what each worker has not been told of them, as it had no message since
        self._owed: list[dict[str, list[int]]] = [{"forget": [], "drop": []} for _ in range(len(links) + 1)]
        self._numbers: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.links) + 1

    def number(self, what: str) -> int:
        """Return a number that nothing of this kind has had."""
        self._numbers[what] += 1
        return self._numbers[what]

    def ask(self, messages: Sequence[Message | None]) -> list[Message | None]:
        """Send each worker its message (None: no message) and return the answers, computed side by side.

        All answers are awaited before the first error is raised, so that no answer is taken for another one.
        """
        answers, shards = _emptied(self.forgotten_answers), _emptied(self.forgotten_shards)
        told: list[Message | None] = []
        for owed, message in zip(self._owed, messages, strict=True):
            owed["forget"] += answers
            owed["drop"] += shards
            told.append(None if message is None else ({**message[0], **owed}, message[1]))
            if message is not None:
                owed.update(forget=[], drop=[])
        self.idle = False
        for k, (link, message) in enumerate(zip(self.links, told[1:], strict=True)):
            if message is not None:
                self.sent[k] += self._tried(k, link.send, message)
        found = [None if told[0] is None else answered(self.own, told[0])]
        for k, (link, message) in enumerate(zip(self.links, told[1:], strict=True)):
            found.append(None)
            if message is not None:
                found[-1], size = self._tried(k, link.receive)
                self.received[k] += size
        self.idle = True
        for k, answer in enumerate(found):
            if answer is not None and "error" in answer[0]:
                kind, text = answer[0]["error"]
                raise getattr(errors, kind, CoterieError)(text)
            if answer is not None:
                self.busy[k] += answer[0].get("seconds", 0.0)
        return found

    def _tried(self, k: int, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except WorkerLost as problem:
            raise WorkerLost(f"{problem}, in round {self.round}") from problem

    def close(self) -> None:
        """Let all workers go; those that still owe an answer notice by themselves when this process ends."""
        for link in self.links if self.idle else ():
            try:
                link.send(({"kind": "close"}, {}))
            except WorkerLost:
                continue  # it has gone already


def _emptied(values: list[int]) -> list[int]:
    """Return the values and remove them; more may be appended at any time, by the garbage collector."""
    found = list(values)
    del values[: len(found)]
    return found
