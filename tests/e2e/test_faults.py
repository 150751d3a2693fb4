"""What goes wrong in a real federation: nodes and servers that die, are late, come later, or talk nonsense."""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import polars
import pytest
import torch

from coterie._core import files
from coterie._core.errors import RunError
from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.deploy import federation_folder
from coterie.train.fit import fit

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import Live

pytestmark = pytest.mark.e2e
EVERYBODY = tuple(f"n{k}" for k in range(8))
THREE = EVERYBODY[:3]


def same_models(live: Live, job: Any, here: Any, nodes: Any, tolerance: float = 1e-12) -> None:
    there = live.models(job, nodes)
    assert there.keys() == {name for node in nodes for name in live.folder.nodes[node]}
    for name, model in there.items():
        assert float((model - here.personal[here.fed.names.index(name)]).abs().max()) <= tolerance, name


class InOrder:
    """Does one thing after the other, each as soon as its condition holds; used as `watch`."""

    def __init__(self, *deeds: tuple[Callable[[dict[str, Any]], bool], Callable[[], None]]) -> None:
        self.deeds = list(deeds)

    def __call__(self, told: dict[str, Any]) -> None:
        if self.deeds and self.deeds[0][0](told):
            self.deeds.pop(0)[1]()


def reached(t: int) -> Callable[[dict[str, Any]], bool]:
    return lambda told: told.get("round", 0) >= t


def noted(job: Path, text: str) -> Callable[[dict[str, Any]], bool]:
    return lambda told: any(text in line for line in federation_folder.notes(job))


def test_eight_nodes_with_one_killed_in_mid_round_and_restarted(live: Live, absent_in: Any) -> None:
    """No round is lost, and all models are those of a local run with the same gaps."""

    def kill() -> None:
        live.kill("n3", signal.SIGSTOP)  # the server is sure to be waiting for it when it dies
        federation_folder.time.sleep(1.0)
        live.kill("n3")

    algorithm = make("ditto", lr=0.1, batch=4)
    job = live.job("killed", algorithm, 20, EVERYBODY, deadline=6.0, evaluate_every=0)
    live.run(job, watch=InOrder((reached(4), kill), (reached(6), lambda: live.start_node("n3"))))
    assert live.result(job)["lost_rounds"] == 0
    missed = live.missed(job)
    rounds = sorted({t for t, name in missed if name in live.folder.nodes["n3"]})
    assert 1 <= len(rounds) < 16 and rounds[-1] < 20, rounds
    here = fit(absent_in(live.local(EVERYBODY), missed), algorithm, 20, evaluate_every=0)
    same_models(live, job, here, EVERYBODY)
    ledger = polars.read_parquet(live.folder.path / "runs" / "killed" / "ledger.parquet")
    assert ledger.equals(here.ledger)
    assert any("n3 is back" in line for line in federation_folder.notes(job))


def test_a_server_that_is_killed_goes_on_bit_for_bit(live: Live) -> None:
    """The nodes are rounds ahead of the last checkpoint when everything on the server's side dies."""
    algorithm = make("ditto", lr=0.1, batch=4, participation=0.6)
    whole = live.job("whole", algorithm, 10)
    live.run(whole)

    def kill() -> None:
        live.kill("server")

    job = live.job("broken", algorithm, 10, checkpoint_every=4)
    with pytest.raises(RunError, match="--resume broken"):
        live.run(job, watch=InOrder((reached(6), kill)))
    assert (
        files.read_json(live.folder.path / "runs" / "broken" / "checkpoint" / "checkpoint.json")["round"] == 4
    )
    live.start_server()
    live.run(job)
    once, twice = live.models(whole), live.models(job)
    assert once.keys() == twice.keys() and all(torch.equal(once[name], twice[name]) for name in once)
    for name in ("metrics.parquet", "ledger.parquet"):
        folder = live.folder.path / "runs"
        assert files.sha256(folder / "whole" / name) == files.sha256(folder / "broken" / name)


def test_a_slow_node_is_not_waited_for_beyond_the_deadline(live: Live, absent_in: Any) -> None:
    algorithm = make("fedavg", lr=0.1, batch=4)
    job = live.job("slow", algorithm, 30, deadline=3.0)
    late = noted(job, "n1 is left out: no answer within 3 s")
    try:
        live.run(
            job,
            watch=InOrder(
                (reached(3), lambda: live.kill("n1", signal.SIGSTOP)),
                (late, lambda: live.kill("n1", signal.SIGCONT)),
            ),
        )
    finally:
        live.kill("n1", signal.SIGCONT)
    missed = live.missed(job)
    assert late({})
    own = set(live.folder.nodes["n1"])
    assert own <= {name for _, name in missed} and max(t for t, name in missed if name in own) < 30
    assert live.result(job)["lost_rounds"] == 0
    same_models(live, job, fit(absent_in(live.local(), missed), algorithm, 30, evaluate_every=0), THREE)


@contextmanager
def instead_of(live: Live, name: str, script: str) -> Iterator[None]:
    """A node whose process runs this instead of `coterie federate node`."""
    live.kill(name)
    address = f"127.0.0.1:{live.folder.port}"
    live.start(name, [sys.executable, "-c", textwrap.dedent(script), str(live.table(name).parent), address])
    try:
        yield
    finally:
        live.kill(name)
        live.start_node(name)


HALTING = """
    import sys, time
    from pathlib import Path
    from flwr.supercore.inflatable import inflatable_protobuf_utils as parts
    from coterie.deploy import federation_folder
    from coterie.deploy.node_service import NodeService
    from coterie.deploy import wire
    from coterie.deploy.flower_node import Link
    folder, address, asked = Path(sys.argv[1]), sys.argv[2], []
    site = NodeService(folder / "rows.parquet", federation_folder.keys.private_folder(folder / "halting"))
    def answer(message):
        asked.append(wire.decode(message)[0].get("phase"))
        return site.answer(message)
    make = parts.make_push_object_fn_protobuf
    def halting(*about):
        if asked[-1:] == ["train"] and asked.count("train") == 3:
            time.sleep(9)
        return make(*about)
    parts.make_push_object_fn_protobuf = halting
    Link(address, folder / "node.key", folder / "ca.crt", print).serve(answer)
"""


def test_a_node_that_halts_in_the_middle_of_an_answer_is_not_waited_for(live: Live, absent_in: Any) -> None:
    """Flower has the head of the answer and would wait three minutes for the rest; the others are not lost by that."""
    algorithm = make("fedavg", lr=0.1, batch=4)
    job = live.job("halting", algorithm, 20, deadline=3.0)
    with instead_of(live, "n1", HALTING):
        live.run(job)
    missed = live.missed(job)
    assert set(live.folder.nodes["n1"]) <= {name for _, name in missed}
    assert any("n1 is left out: no answer within 3 s" in line for line in federation_folder.notes(job))
    assert live.result(job)["lost_rounds"] == 0 and live.result(job)["seconds"] < 150
    same_models(
        live, job, fit(absent_in(live.local(), missed), algorithm, 20, evaluate_every=0), ("n0", "n2")
    )


def test_a_node_that_joins_late_takes_part(live: Live) -> None:
    live.kill("n2")
    algorithm = make("ditto", lr=0.1)
    roles = Roles("who", "y", drop=("group",)).to_json()
    job = live.job("late", algorithm, 200, deadline=5.0, patience=5.0, roles=roles)
    live.run(job, watch=InOrder((reached(2), lambda: live.start_node("n2"))))
    missed = live.missed(job)
    for name in live.folder.nodes["n2"]:
        rounds = {t for t, who in missed if who == name}
        assert 1 in rounds and set(range(2, 201)) - rounds, "it never took part"
    models = live.models(job)
    assert len(models) == 6 and all(torch.isfinite(model).all() for model in models.values())
    metrics = polars.read_parquet(live.folder.path / "runs" / "late" / "metrics.parquet")
    tested = set(metrics.filter(polars.col("split") == "test")["client"])
    assert set(live.folder.nodes["n2"]) <= tested


ROGUE = """
    import sys, torch
    from pathlib import Path
    from coterie.deploy import federation_folder
    from coterie.deploy.node_service import NodeService
    from coterie.deploy import wire
    from coterie.deploy.flower_node import Link
    folder, address, count = Path(sys.argv[1]), sys.argv[2], 0
    state = federation_folder.keys.private_folder(folder / "rogue")
    site = NodeService(folder / "rows.parquet", state)
    def lie(message):
        global count
        answer = site.answer(message)
        asked, (header, tensors) = wire.decode(message)[0], wire.decode(answer)
        if asked.get("phase") != "train":
            return answer
        count += 1
        value = tensors["value."]
        changed = {1: value * torch.nan, 2: torch.cat([value, value], -1), 3: torch.cat([value, value]),
                   4: value * 1e200, 5: torch.zeros(4 << 20), 6: value.float()}
        if count in changed:
            return wire.encode(header, {**tensors, "value.": changed[count]})
        return {7: answer[:-5], 8: b"", 9: bytes(range(256)), 10: b"\\x80\\x04N.",
                11: answer.replace(b'"version": 1', b'"version": 9'),
                12: wire.encode({**header, "nonce": "another"}, tensors),
                13: wire.encode({**header, "at": [1, 77]}, tensors),
                14: site.answer(wire.encode({**asked, "phase": "os.system", "nonce": "x"}, {}))}[count]
    Link(address, folder / "node.key", folder / "ca.crt", print).serve(lie)
"""


def test_a_node_that_answers_garbage_is_left_out_by_name(live: Live, absent_in: Any) -> None:
    """NaN, wrong shapes, huge numbers, megabytes, cut and foreign bytes, other versions, replays, unknown phases."""
    algorithm = make("fedavg", lr=0.1, batch=4)
    job = live.job("garbage", algorithm, 14)
    with instead_of(live, "n1", ROGUE):
        live.run(job)
    missed = live.missed(job)
    assert missed == {(t, name) for t in range(1, 15) for name in live.folder.nodes["n1"]}
    notes = [line for line in federation_folder.notes(job) if "n1 is left out" in line]
    assert len(notes) >= 11, notes
    same_models(
        live, job, fit(absent_in(live.local(), missed), algorithm, 14, evaluate_every=0), ("n0", "n2")
    )


PARTS = """
    import sys
    from pathlib import Path
    from flwr.proto.message_pb2 import ObjectTree
    from coterie.deploy import federation_folder, flower_node, wire
    from coterie.deploy import flower_private as private
    from coterie.deploy.node_service import NodeService
    from flwr.supercore.inflatable.inflatable_object import get_object_id
    folder, address, count = Path(sys.argv[1]), sys.argv[2], 0
    site = NodeService(folder / "rows.parquet", federation_folder.keys.private_folder(folder / "parts"))
    honest = flower_node.Fleet._send
    BODIES = (b"Message  3\\0abc", b"Message " + b"f" * 64 + b" 0\\0", b"RecordDict  2\\0{}")
    def send(fleet, message, answer):
        global count
        if wire.decode(flower_node.content(message))[0].get("phase") != "train":
            return honest(fleet, message, answer)
        body = BODIES[count % 3]
        count += 1
        reply, name = flower_node.reply_to(message, answer), get_object_id(body)
        reply.metadata.__dict__["_message_id"] = name
        said = private.message_to_proto(private.remove_content_from_message(reply))
        response = fleet.client.PushMessages(private.PushMessagesRequest(node=fleet.node, messages_list=[said],
            message_object_trees=[ObjectTree(object_id=name)], clientapp_runtime_list=[0.0]))
        private.make_push_object_fn_protobuf(fleet.client.PushObject, fleet.node, message.metadata.run_id,
            response.session_id)(name, body)
    flower_node.Fleet._send = send
    flower_node.Link(address, folder / "node.key", folder / "ca.crt", print).serve(site.answer)
"""


def test_a_node_whose_answers_are_no_messages_is_left_out_by_name(live: Live, absent_in: Any) -> None:
    """Below the messages that nodes and server understand: a server that believes such parts ends everybody's run."""
    algorithm = make("fedavg", lr=0.1, batch=4)
    job = live.job("parts", algorithm, 6)
    with instead_of(live, "n1", PARTS):
        live.run(job)
    missed = live.missed(job)
    assert missed == {(t, name) for t in range(1, 7) for name in live.folder.nodes["n1"]}
    assert any("n1 is left out" in line and "parts" in line for line in federation_folder.notes(job))
    same_models(live, job, fit(absent_in(live.local(), missed), algorithm, 6, evaluate_every=0), ("n0", "n2"))
