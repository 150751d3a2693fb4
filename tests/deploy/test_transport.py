"""How messages and answers travel: how long they are waited for, and what is copied."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.deploy import flower_private, wire
from coterie.deploy.answers import Reply
from coterie.deploy.remote import RemoteRuntime
from coterie.deploy.transport import Late, NodeCaller, Undelivered
from coterie.engine.protocol import Visits


class Halting:
    """Two nodes: the answer of `first` stops on its way, that of `second` comes `after` so many seconds."""

    def __init__(self, after: float) -> None:
        self.after, self.envelopes, self.began, self.waits = after, {}, time.monotonic(), []

    def send(self, envelopes: Mapping[str, bytes], lasts: float) -> dict[str, str]:
        self.envelopes, self.began = dict(envelopes), time.monotonic()
        return {name: name for name in envelopes}

    def fetch(self, tickets: Collection[str], wait: float) -> dict[str, bytes | Undelivered]:
        self.waits.append(wait)
        found: dict[str, bytes | Undelivered] = {}
        if "second" in tickets and time.monotonic() - self.began >= self.after:
            nonce = wire.decode(self.envelopes["second"])[0]["nonce"]
            found["second"] = wire.encode({"nonce": nonce}, {})
        if "first" in tickets:
            time.sleep(wait)
            found["first"] = Undelivered("parts are missing")
        return found


@pytest.mark.parametrize("after", [0.0, 0.1])
def test_nobody_is_lost_because_another_halts(after: float) -> None:
    """Also if it answers while the halting one is waited for."""
    transport = Halting(after)
    answers = NodeCaller(transport, deadline=0.3).ask({"first": ({}, {}), "second": ({}, {})})
    assert isinstance(answers["first"], Late) and "no answer within 0.3 s" in str(answers["first"])
    assert not isinstance(answers["second"], wire.WireError)
    assert transport.waits[0] <= 0.3 and transport.waits[-1] == 0


def test_who_answers_too_late_is_left_out() -> None:
    answers = NodeCaller(Halting(after=5.0), deadline=0.2).ask({"first": ({}, {}), "second": ({}, {})})
    assert all("no answer within 0.2 s" in str(answer) for answer in answers.values())


def test_what_cannot_be_delivered_is_said_at_once() -> None:
    class Refusing(Halting):
        def fetch(self, tickets: Collection[str], wait: float) -> dict[str, bytes | Undelivered]:
            return {ticket: Undelivered("no such node") for ticket in tickets}

    began = time.monotonic()
    answers = NodeCaller(Refusing(0.0), deadline=20.0).ask({"first": ({}, {})})
    assert "no such node" in str(answers["first"]) and time.monotonic() - began < 5


def test_flower_does_not_wait_longer_for_parts_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers whose parts never come take as long as one."""
    pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")
    import flwr.superlink.grid.http_grid as http_grid
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

    from coterie.deploy.flower import FlowerTransport

    monkeypatch.setattr(http_grid, "pull_objects", http_grid.pull_objects)  # put back afterwards
    tried: list[str] = []

    def missing(part: str) -> bytes:
        tried.append(part)
        raise ObjectUnavailableError(part)

    class Grid:
        def pull_messages(self, tickets: list[str]) -> list[Any]:
            for ticket in tickets:
                with pytest.raises(ObjectPullError):
                    http_grid.pull_objects(object_ids=[ticket], pull_object_fn=missing)
            return []

    began = time.monotonic()
    assert FlowerTransport(Grid()).fetch(["a", "b"], 0.4) == {}  # type: ignore[arg-type]
    assert 0.4 <= time.monotonic() - began < 2.0
    assert tried.count("a") > 3 and tried.count("b") == 1


class Echo:
    """Nodes that answer with what they were sent, in the order of their names backwards."""

    def __init__(self) -> None:
        self.envelopes: dict[str, wire.Content] = {}

    def send(self, envelopes: Mapping[str, wire.Content], lasts: float) -> dict[str, str]:
        self.envelopes = dict(envelopes)
        return {name: name for name in envelopes}

    def fetch(self, tickets: Collection[str], wait: float) -> dict[str, wire.Content | Undelivered]:
        return {name: self.envelopes[name] for name in sorted(tickets, reverse=True)}


def test_a_broadcast_is_encoded_once_and_counted_for_every_node() -> None:
    model, transport = torch.arange(float(1 << 18)), Echo()
    caller = NodeCaller(transport)
    answers = caller.ask({name: ({"of": name}, {"at": torch.zeros(2), "x": model}) for name in "abc"})
    first, *others = transport.envelopes.values()
    assert all(first[1] is other[1] for other in others)  # the same bytes, not equal ones
    for name, content in transport.envelopes.items():
        header, tensors = answers[name]  # type: ignore[misc]
        assert header["of"] == name and torch.equal(tensors["x"], model)
        whole = len(wire.encode(header, tensors))
        assert wire.size(content) == whole
        assert (caller.activity[name].bytes_down, caller.activity[name].bytes_up) == (whole, whole)


def test_a_look_that_the_server_held_back_needs_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    class Holding(Halting):
        def fetch(self, tickets: Collection[str], wait: float) -> dict[str, bytes | Undelivered]:
            self.waits.append(wait)
            threading.Event().wait(0.3)
            return {}

    paused: list[float] = []
    monkeypatch.setattr(time, "sleep", paused.append)
    NodeCaller(Holding(0.0), deadline=1.0).ask({"first": ({}, {})})
    assert len(paused) >= 3 and not any(paused)


class TestPosting:
    """Messages to many nodes, and a SuperLink that is too busy to answer in time."""

    class Grid:
        """Refuse the first `refused` posts, as Flower does with a part that came twice."""

        def __init__(self, refused: int) -> None:
            self.refused, self.posts = refused, []

        def get_nodes(self) -> list[Any]:
            return [SimpleNamespace(name=f"n{k}", node_id=k) for k in range(50)]

        def push_messages(self, messages: Any) -> list[str]:
            self.posts.append([message.metadata.dst_node_id for message in messages])
            if len(self.posts) <= self.refused:
                raise flower_private.ObjectPushError("part", 1, "session")
            return [f"ticket {message.metadata.dst_node_id}" for message in messages]

    @pytest.fixture
    def flower(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        flower = pytest.importorskip("coterie.deploy.flower", reason="a federation needs the extra 'flower'")
        made = lambda records, dst_node_id, **more: SimpleNamespace(  # noqa: E731
            metadata=SimpleNamespace(dst_node_id=dst_node_id)
        )
        monkeypatch.setattr(flower, "Message", made)  # a real one needs a running task
        return flower

    def test_many_messages_are_posted_in_batches(self, flower: Any) -> None:
        grid = self.Grid(0)
        tickets = flower.FlowerTransport(grid).send({f"n{k}": b"m" for k in range(50)}, 5.0)
        assert [len(post) for post in grid.posts] == [20, 20, 10]
        assert tickets == {f"n{k}": f"ticket {k}" for k in range(50)}

    def test_what_was_refused_is_posted_again(self, flower: Any) -> None:
        grid = self.Grid(2)
        tickets = flower.FlowerTransport(grid).send({f"n{k}": b"m" for k in range(30)}, 5.0)
        assert len(tickets) == 30 and grid.posts[0] == grid.posts[1] == grid.posts[2] == list(range(20))

    def test_who_cannot_be_posted_to_is_not_waited_for(self, flower: Any) -> None:
        """And ends no run."""
        answers = NodeCaller(flower.FlowerTransport(self.Grid(10**9)), deadline=5.0).ask({"n1": ({}, {})})
        assert isinstance(answers["n1"], Late) and "not connected" in str(answers["n1"])


class TestFlowerMessages:
    """What travels as a Flower message."""

    flower = pytest.importorskip("coterie.deploy.flower_node")
    LARGE = bytes(range(256)) * 8192  # two mebibytes

    def carried(self, found: Any) -> wire.Content:
        return self.flower.content(SimpleNamespace(content=found))

    @pytest.mark.parametrize("message", [b"small", (b"head", LARGE), (b"head", LARGE, b"between", LARGE[1:])])
    def test_records_carry_a_message(self, message: wire.Content) -> None:
        pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")
        assert self.carried(self.flower.records(message)) == message

    def test_what_messages_share_is_one_object_of_flower(self) -> None:
        """Flower stores and sends objects of the same id once."""
        pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")
        arrays: dict[int, Any] = {}
        first, second = (self.flower.records((head, self.LARGE), arrays) for head in (b"one", b"two"))
        ids = [set(flower_private.get_all_nested_objects(found)) for found in (first, second)]
        assert len(arrays) == 1 and len(ids[0] & ids[1]) == 3  # record, array, chunk
        assert len(ids[0]) == 5  # and the head's record and the dictionary, which differ

    def test_a_large_part_is_hashed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        inflatable = pytest.importorskip("flwr.supercore.inflatable.inflatable_object")
        hashed: list[int] = []
        of = inflatable.get_object_id

        def counted(content: bytes) -> str:
            hashed.append(len(content))
            return str(of(content))

        monkeypatch.setattr(inflatable, "get_object_id", counted)
        found = self.flower.records((b"head", self.LARGE))
        with flower_private.no_object_id_recompute():
            flower_private.get_object_tree(found)
            flower_private.get_all_nested_objects(found)
        assert sum(size > len(self.LARGE) for size in hashed) == 1

    def test_strange_records_carry_nothing(self) -> None:
        flwr = pytest.importorskip("flwr.app", reason="a federation needs the extra 'flower'")
        head = flwr.ConfigRecord({self.flower.BYTES: b"head"})
        array = flwr.Array("uint8", (1,), "coterie", b"x")
        for strange in (
            flwr.RecordDict({}),
            flwr.RecordDict({self.flower.PARCEL: flwr.ConfigRecord({self.flower.BYTES: "text"})}),
            flwr.RecordDict({self.flower.PARCEL: flwr.ArrayRecord({self.flower.BYTES: array})}),
            flwr.RecordDict({self.flower.PARCEL: head, self.flower.LARGE: flwr.ConfigRecord({"0": b"x"})}),
            flwr.RecordDict({self.flower.PARCEL: head, self.flower.LARGE: flwr.ArrayRecord({"1": array})}),
        ):
            assert self.carried(strange) == b""


def test_answers_that_came_in_another_order_are_copied_once() -> None:
    mine = {name: torch.tensor([k]) for k, name in enumerate("abc")}
    good = {name: Reply(1, {"": torch.full((1, 5), float(mine[name]))}, None, {}, None) for name in "cab"}
    runtime: Any = SimpleNamespace(setup=SimpleNamespace(seed=0))
    call: Any = SimpleNamespace(compress=None)
    indexed: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten.index and args[0].is_floating_point():
                indexed.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        answer = RemoteRuntime.joined_up(
            runtime, call, Visits(None, None), torch.arange(3), mine, good, {}, [], True
        )
    assert answer.named[""].tolist() == [[float(k)] * 5 for k in range(3)] and not indexed
