"""Relayed runs: the models of a plain run, of which the server sees nothing; what it changes is rejected by name."""

import polars
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from safetensors.torch import load_file

from coterie._core.errors import CoterieError, SettingError
from coterie.algorithms import make
from coterie.conformance.runtimes import L2, RUN, SIZES, table
from coterie.data.federated import Roles
from coterie.deploy import federation_folder, wire
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.identity import Identity
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.node_service import NodeService
from coterie.deploy.relay import RelayKeys
from coterie.deploy.transport import NodeCaller
from coterie.engine.federation import Federation
from coterie.engine.ledger import PEERS
from coterie.train.fit import fit, resume

ROUNDS = 5
SPLIT = (0.6, 0.2, 0.2)
NODES = 3
METHODS = {
    "pdl-tc": {},
    "pdl-tc at own points": {"at": "own", "clusters": 2},
    "fc": {},
    "cobo": {},
    "cobo at midpoints": {"test": "midpoint"},
}


class Recorder(InProcessTransport):
    """A transport that keeps all that the server received and may change what it sends."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.received, self.change = [], lambda name, message: message

    def send(self, envelopes, lasts):
        return super().send({name: self.change(name, message) for name, message in envelopes.items()}, lasts)

    def fetch(self, tickets, wait):
        found = super().fetch(tickets, wait)
        self.received += list(found.values())
        return found


def method(name):
    return make(name.split()[0], **METHODS[name])


def opened(folder, algorithm, relay=True):
    frame, nodes = table(), {}
    for k in range(NODES):
        mine = [f"client {i}" for i in range(k, len(SIZES), NODES)]
        rows = frame.filter(polars.col("client").is_in(mine))
        nodes[f"node {k}"] = NodeService(rows, folder / str(k))
    transport, notes = Recorder(nodes), []
    caller = NodeCaller(transport, 60.0, notes.append)
    request = RunRequest(Roles("client", "y", cluster="group"), split=SPLIT, l2=L2)
    plan = survey(caller, {name: [] for name in nodes}, request, RUN)
    return connect(caller, plan, algorithm, relay=relay), transport, nodes, plan, notes


def personal(nodes, plan, run):
    found = torch.full((len(plan.names), run.fed.d), torch.nan, dtype=torch.float64)
    for name, ids in plan.nodes.items():
        found[ids] = nodes[name].runs[RUN].models(run.deployed_round)
    return found


def plain(name, rounds=ROUNDS):
    fed = Federation.from_table(table(), "client", "y", cluster="group", l2=L2, split=SPLIT)
    return fit(fed, method(name), rounds, evaluate_every=1)


@pytest.mark.parametrize("name", METHODS)
def test_models_and_scores_are_those_of_a_plain_run(name, tmp_path):
    fed, _, nodes, plan, notes = opened(tmp_path, method(name))
    run, expected = fit(fed, method(name), ROUNDS, evaluate_every=1), plain(name)
    assert float((personal(nodes, plan, run) - expected.personal).abs().max()) < 1e-12
    for split, metric in (("validation", "loss"), ("test", "rmse"), ("train", "loss")):
        one, other = (r.history.at(ROUNDS, split, metric) for r in (run, expected))
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.allclose(one, other, atol=1e-12, rtol=0, equal_nan=True)
    assert not notes and run.lost_rounds == 0


@pytest.mark.parametrize("name", METHODS)
def test_the_server_sees_no_model_and_counts_every_copy(name, tmp_path):
    """No eight bytes of a model or an answer are in what the server received; in a plain run on nodes they are."""
    fed, transport, nodes, _, _ = opened(tmp_path / "relay", method(name))
    run = fit(fed, method(name), ROUNDS, evaluate_every=1)
    everything = b"".join(message for message in transport.received)
    secret = [nodes[node].runs[RUN].replica.state.tensors() for node in nodes]
    models = {float(v) for state in secret for k in ("models",) for v in state[k].flatten()} - {0.0}
    seen = [
        value
        for value in models
        if torch.tensor([value], dtype=torch.float64).numpy().tobytes() in everything
    ]
    assert len(models) >= fed.n and not seen
    assert "models" not in run.state.fields()
    other, clear, _, _, _ = opened(tmp_path / "clear", method(name), relay=False)
    clear_run = fit(other, method(name), ROUNDS, evaluate_every=1)
    plain_values = {float(v) for v in clear_run.state.models.flatten()} - {0.0}
    sent = b"".join(clear.received)
    if name.startswith("pdl-tc") and "own" not in name:  # its clients return models as they are
        assert any(torch.tensor([v], dtype=torch.float64).numpy().tobytes() in sent for v in plain_values)
    peers = {e: c for e, c in run.fed.ledger.entries.items() if e.link == PEERS and e.kind != "evaluate"}
    assert peers and all(counts[3] % (NODES * (NODES - 1)) == 0 for counts in peers.values())
    carried = sum(counts[5] for counts in peers.values())
    wires = [wire.decode(message)[1] for message in transport.received]
    copies = sum(v.numel() for tensors in wires for k, v in tensors.items() if k.startswith("to."))
    assert carried == copies and all(counts[5] >= 8 * counts[4] for counts in peers.values())


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_with_the_same_bits(tmp_path):
    class Stopped(Exception):
        pass

    def watch(t, rounds):
        if t == 3:
            raise Stopped

    name = "pdl-tc"
    fed, _, nodes, plan, _ = opened(tmp_path / "whole", method(name))
    whole = personal(nodes, plan, fit(fed, method(name), ROUNDS, evaluate_every=1))
    fed, _, nodes, plan, _ = opened(tmp_path / "nodes", method(name))
    with pytest.raises(Stopped):
        fit(fed, method(name), ROUNDS, tmp_path / "run", evaluate_every=1, checkpoint_every=1, watch=watch)
    for node in nodes.values():
        node.runs.clear()  # as if they had been restarted
    fed = connect(fed.runtime.caller, plan, method(name), relay=True)
    assert torch.equal(personal(nodes, plan, resume(tmp_path / "run", fed)), whole)


def test_a_node_that_vanishes_costs_itself(tmp_path):
    """The others begin the round again with new keys; the one that missed it is out and named."""
    fed, transport, nodes, _, notes = opened(tmp_path, method("fc"))
    asked = []

    def change(name, message):
        header = wire.decode(message)[0]
        if name == "node 2" and header["kind"] == "relay" and header["round"] == 3 and header["step"] == 1:
            asked.append(header)
            return b"noise" if len(asked) == 1 else message
        return message

    transport.change = change
    run = fit(fed, method("fc"), ROUNDS, evaluate_every=0)
    assert run.lost_rounds == 0 and len(asked) == 1
    assert any("node 2 has missed round 3" in note for note in notes)
    models = [nodes[name].runs[RUN].replica.state.models for name in ("node 0", "node 1")]
    assert torch.equal(*models) and torch.isfinite(models[0]).all()


def relayed(message):
    header, tensors = wire.decode(message)
    return header, tensors, header["kind"] == "relay" and header["round"] == 2 and header["step"] == 1


def attack_tamper(header, tensors, memory):
    value = tensors["from.node 1"].clone()
    value[-1] ^= 1
    return {**tensors, "from.node 1": value}


def attack_swap(header, tensors, memory):
    return {**tensors, "from.node 1": tensors["from.node 2"]}


def attack_replay(header, tensors, memory):
    return {**tensors, "from.node 1": memory["old"]}


def attack_redirect(header, tensors, memory):
    return {**tensors, "from.node 1": memory["to node 2"]}


def attack_reflect(header, tensors, memory):
    """Give a node its own message back."""
    return {**tensors, "from.node 1": memory["by node 0"]}


def attack_withhold(header, tensors, memory):
    return {k: v for k, v in tensors.items() if k != "from.node 1"}


@pytest.mark.parametrize(
    "attack", [attack_tamper, attack_swap, attack_replay, attack_redirect, attack_reflect, attack_withhold]
)
def test_what_the_server_changes_is_rejected_by_name(attack, tmp_path):
    fed, transport, _, _, notes = opened(tmp_path, method("fc"))
    memory, done = {}, []

    def change(name, message):
        header, tensors, now = relayed(message)
        if header["kind"] == "relay" and header["round"] == 1 and header["step"] == 1 and name == "node 0":
            memory["old"] = tensors["from.node 1"]
        if now and name == "node 2":
            memory["to node 2"] = tensors["from.node 1"]
        if now and name == "node 0" and not done:
            done.append(True)
            if attack is attack_redirect:  # what node 1 wrote for node 2 in this exchange
                sent = [wire.decode(m)[1] for m in transport.received[-NODES:]]
                memory["to node 2"] = next(
                    t["to.node 2"] for t in sent if "to.node 2" in t and "to.node 1" not in t
                )
            sent = [wire.decode(m)[1] for m in transport.received[-NODES:]]
            memory["by node 0"] = next(
                t["to.node 1"] for t in sent if "to.node 1" in t and "to.node 0" not in t
            )
            return wire.encode(header, attack(header, tensors, memory))
        return message

    transport.change = change
    fit(fed, method("fc"), 3, evaluate_every=0)
    text = (
        "nothing of node 1"
        if attack is attack_withhold
        else "what node 1 is said to have sent was changed, is old"
    )
    assert any(f"node 0 is left out: message rejected: {text}" in note for note in notes)


def test_a_server_in_the_middle_cannot_read(tmp_path):
    """A server that gives nodes its own key is told that the key is not theirs; with signatures it is refused."""
    alice, bob = (RelayKeys("r", name, None) for name in ("alice", "bob"))
    mallory = RelayKeys("r", "bob", None)
    roster = {"alice": alice.public(), "bob": bob.public()}
    alice.join(roster, {})
    mallory.join({"alice": alice.public(), "bob": mallory.public()}, {})
    with pytest.raises(wire.WireError, match="said to have sent"):
        mallory.opened("alice", alice.seal("bob", b"model"))
    bob.join(roster, {})
    assert bob.opened("alice", alice.seal("bob", b"model")) == b"model"
    with pytest.raises(wire.WireError, match="has its group"):
        bob.join(roster, {})


def test_answers_cannot_be_asked_for_in_the_clear(tmp_path):
    fed, _, _, _, _ = opened(tmp_path, method("pdl-tc"))
    fit(fed, method("pdl-tc"), 1, evaluate_every=0)
    runtime = fed.runtime
    header = {
        "kind": "call",
        "run": RUN,
        "algorithm": "pdl-tc",
        "phase": "warm",
        "round": 1,
        "call": 0,
        "numbers": {},
        "begins": False,
        "welcome_numbers": {},
        "lasting": True,
        "split": "",
        "metrics": [],
        "compress": "",
        "since": None,
    }
    tensors = {"at": torch.tensor([0]), "each.x": torch.zeros(1, fed.d, dtype=torch.float64)}
    reply = runtime.caller.ask({"node 0": (header, tensors)})["node 0"]
    assert "in a relayed run answers go to other nodes only" in str(reply)


def test_nodes_write_their_models_and_train_again(tmp_path):
    """A run that is refitted is relayed again; at the end nodes have models for `coterie predict`."""
    fed, transport, nodes, plan, _ = opened(tmp_path, method("fc"))
    run = fit(fed, method("fc"), 2, evaluate_every=0, refit="validation")
    assert run.trained_on == ("train", "validation")
    assert set(run.fed.runtime.finish(run.deployed_round, None)) == set(nodes)
    assert set(run.refitted.runtime.finish(run.deployed_round, None)) == set(nodes)
    written = [load_file(path) for path in tmp_path.rglob("run/models/models.safetensors")]
    assert sum(len(tensors["personal"]) for tensors in written) == len(plan.names)
    secret = torch.cat([tensors["personal"].flatten() for tensors in written])
    everything = b"".join(transport.received)
    assert not any(value.numpy().tobytes() in everything for value in secret if float(value))


def test_a_listener_with_a_certificate_is_not_among_the_members(tmp_path):
    """An authority that certifies a node of its own gains nothing where owners have compared certificates."""
    folders = {}
    federation_folder.init(
        tmp_path / "fed", {name: [name] for name in ("a", "b", "spy")}, Roles("client", "y")
    )
    folders = {name: tmp_path / "fed" / "nodes" / name for name in ("a", "b", "spy")}
    certificates = {name: Identity.read(folder) for name, folder in folders.items()}
    prints = {
        name: x509.load_pem_x509_certificate(one.certificate.encode()).fingerprint(hashes.SHA256()).hex()
        for name, one in certificates.items()
    }
    members = {name: prints[name] for name in ("a", "b")}
    careful = RelayKeys(RUN, "a", Identity.read(folders["a"], members))
    others = {name: RelayKeys(RUN, name, certificates[name]).public() for name in ("b", "spy")}
    with pytest.raises(CoterieError, match="spy is not among the members"):
        careful.join({"a": careful.public(), **others}, {})
    forged = {**others["b"], "key": others["spy"]["key"]}
    with pytest.raises(wire.WireError, match="what b is said to have sent is not signed by a node"):
        careful.join({"a": careful.public(), "b": forged}, {})
    careful.join({"a": careful.public(), "b": others["b"]}, {})


def test_other_methods_are_refused(tmp_path):
    fed, _, _, _, _ = opened(tmp_path, make("fedavg"))
    with pytest.raises(SettingError, match="fedavg cannot run among nodes"):
        fit(fed, make("fedavg"), 1)
