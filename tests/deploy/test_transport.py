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


class Link:
    """What a SuperLink says to the job, with answers of nodes that are as they like."""

    def __init__(self, answers: list[tuple[Any, Any, dict[str, bytes]]]) -> None:
        self.answers, self.let_go, self.tried = answers, set[str](), list[str]()
        self._runtime_client, self.node = self, None

    def PullMessages(self, request: Any) -> Any:
        return SimpleNamespace(
            messages_list=[announced for announced, _, _ in self.answers],
            message_object_trees=[tree for _, tree, _ in self.answers],
        )

    def PullObject(self, request: Any) -> Any:
        self.tried.append(request.object_id)
        content = {name: part for *_, parts in self.answers for name, part in parts.items()}
        part = content.get(request.object_id, b"")
        return SimpleNamespace(object_found=True, object_available=bool(part), object_content=part)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.let_go.add(request.message_object_id)


class TestAnswersOverFlower:
    """Answers whose parts, or what they say of themselves, are lies."""

    flower = pytest.importorskip("coterie.deploy.flower", reason="a federation needs the extra 'flower'")

    def message(self, ticket: str, node: int, **more: Any) -> Any:
        from flwr.app import Metadata
        from flwr.app.message import make_message

        named = {"run_id": 1, "message_id": "", "src_node_id": node, "dst_node_id": 1, "group_id": ""}
        named |= {"created_at": time.time(), "ttl": 60.0, "message_type": "query"}
        about = Metadata(reply_to_message_id=ticket, **named)  # type: ignore[arg-type]
        return make_message(metadata=about, **(more or {"content": self.flower.records(b"an answer")}))

    def announced(self, message: Any, said: Any = None) -> tuple[Any, Any, dict[str, bytes]]:
        """What the SuperLink has: the message as its node announced it, and its parts."""
        said = message if said is None else said
        said.metadata.__dict__["_message_id"] = message.object_id
        whole = flower_private.message_to_proto(flower_private.remove_content_from_message(said))
        parts = {
            name: part.deflate() for name, part in flower_private.get_all_nested_objects(message).items()
        }
        return whole, flower_private.get_object_tree(message), parts

    def fetched(self, *answers: Any, wait: float = 0.5) -> tuple[dict[str, Any], Link]:
        link = Link(list(answers))
        transport = self.flower.FlowerTransport(link)
        transport._to = {"a": 7, "b": 8}
        return transport.fetch(["a", "b"], wait), link

    def test_an_answer_comes_and_is_let_go(self) -> None:
        answer = self.announced(self.message("a", 7))
        found, link = self.fetched(answer)
        assert found == {"a": b"an answer"} and link.let_go == {answer[0].metadata.message_id}

    def test_flower_does_not_wait_longer_for_parts_of_an_answer(self) -> None:
        """Two answers whose parts never come take as long as one."""
        answers = [
            (*self.announced(self.message(ticket, node))[:2], {}) for ticket, node in (("a", 7), ("b", 8))
        ]
        began = time.monotonic()
        found, link = self.fetched(*answers, wait=0.4)
        assert 0.4 <= time.monotonic() - began < 2.0 and set(found) == {"a", "b"}
        assert all(isinstance(answer, Undelivered) for answer in found.values())
        first = {part.object_id for part in flower_private.iterate_object_tree(answers[0][1])}
        assert sum(name in first for name in link.tried) > 6 and len(link.tried) - 3 <= sum(
            name in first for name in link.tried
        )

    def test_an_answer_cannot_speak_of_another(self) -> None:
        """A node writes into its message that it answers another, or nothing that was asked."""
        for forged in (self.message("b", 8), self.message("nothing", 3)):
            answer = self.announced(forged, said=self.message("a", 7))
            found, _ = self.fetched(answer, self.announced(self.message("b", 8)))
            assert found == {"a": b"an answer", "b": b"an answer"}

    def test_what_is_no_message_is_left_out_and_others_are_not(self) -> None:
        whole, tree, parts = self.announced(self.message("a", 7))
        name = whole.metadata.message_id
        records = next(part for part in parts.values() if part.startswith(b"RecordDict"))
        bodies = {
            "junk": b"Message  3\0abc",
            "another kind": records,
            "a part that is not there": b"Message " + b"f" * 64 + b" 0\0",
            "a part of itself": b"Message " + name.encode() + b" 0\0",
            "no kind": b"\0",
        }
        for kind, body in bodies.items():
            link = self.fetched((whole, tree, {**parts, name: body}), self.announced(self.message("b", 8)))[0]
            assert isinstance(link["a"], Undelivered) or link["a"] == b"", kind
            assert link["b"] == b"an answer", kind

    def test_a_message_of_very_many_parts_is_refused(self) -> None:
        whole, _, parts = self.announced(self.message("a", 7))
        from flwr.proto.message_pb2 import ObjectTree

        tree = ObjectTree(object_id=whole.metadata.message_id)
        tree.children.extend(ObjectTree(object_id=f"{k:064x}") for k in range(10_000))
        found, link = self.fetched((whole, tree, parts), self.announced(self.message("b", 8)))
        assert "10001 parts" in str(found["a"]) and found["b"] == b"an answer"
        assert len(link.tried) == 3 and whole.metadata.message_id in link.let_go

    def test_errors_of_the_superlink_are_said(self) -> None:
        from flwr.app import Error

        found, link = self.fetched(self.announced(self.message("a", 7, error=Error(3, "no such node"))))
        assert "no such node (Flower error 3)" in str(found["a"]) and len(link.let_go) == 1
        found, _ = self.fetched(self.announced(self.message("a", 9)))
        assert "another node" in str(found["a"])


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
