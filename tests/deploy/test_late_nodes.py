"""Nodes that answer late: their answers are used in later rounds, as in a simulation with the same delays."""

from pathlib import Path

import polars
import pytest
import torch

from coterie.algorithms import make
from coterie.conformance.runtimes import L2, RUN, SIZES, table
from coterie.data.federated import Roles
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.node_service import NodeService
from coterie.deploy.transport import NodeCaller
from coterie.engine.aggregate import PLAIN
from coterie.engine.federation import Federation
from coterie.engine.late import Lateness
from coterie.train.fit import fit

ROUNDS = 9


class SlowTransport(InProcessTransport):
    """A transport on which one node answers a call of a phase only some rounds later."""

    def __init__(self, nodes, slow, rounds):
        super().__init__(nodes)
        self.slow, self.rounds, self.now, self.since = slow, rounds, 0, {}

    def send(self, envelopes, lasts):
        tickets = super().send(envelopes, lasts)
        if self.slow in tickets and b'"phase":"train"' in envelopes[self.slow].replace(b" ", b""):
            self.since[tickets[self.slow]] = self.now
        return tickets

    def fetch(self, tickets, wait):
        """Return what is due; the slow node's answer arrives in the middle of a round, beside those of others."""
        beside = any(ticket not in self.since for ticket in tickets)
        due = [
            t for t in tickets if t not in self.since or (beside and self.now - self.since[t] >= self.rounds)
        ]
        return super().fetch(due, wait)


def opened(folder, slow="node 2", rounds=2, deadline=60.0):
    frame, nodes = table(), {}
    for k in range(3):
        mine = [f"client {i}" for i in range(k, len(SIZES), 3)]
        rows = frame.filter(polars.col("client").is_in(mine))
        nodes[f"node {k}"] = NodeService(rows, Path(folder) / str(k))
    transport = SlowTransport(nodes, slow, rounds)
    notes = []
    caller = NodeCaller(transport, deadline, notes.append)
    request = RunRequest(Roles("client", "y", cluster="group"), split=(1.0, 0.0, 0.0), l2=L2)
    plan = survey(caller, {name: [] for name in nodes}, request, RUN)
    return transport, caller, plan, nodes, notes


def trained(name, late, folder, rounds=2, deadline=60.0):
    transport, caller, plan, nodes, notes = opened(folder, rounds=rounds, deadline=deadline)
    method = make(name)
    fed = connect(caller, plan, method, 0.0)
    fed.aggregate = PLAIN

    def watch(t, total):
        transport.now = t

    run = fit(fed, method, ROUNDS, evaluate_every=0, late=late, watch=watch)
    return run, notes, plan, nodes


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedadam"])
def test_late_answers_of_nodes_are_those_of_a_simulation(name, tmp_path):
    """Two nodes end a round; the third needs two rounds more. A simulation with such delays has the same models."""
    run, notes, plan, nodes = trained(name, Lateness(buffer=4), tmp_path)
    slow = [0.25 if int(k) in plan.nodes["node 2"] else 0.1 for k in range(len(SIZES))]
    delays = "fixed:" + ",".join(map(str, slow))
    local = Federation.from_table(table(), "client", "y", cluster="group", l2=L2, split=(1.0, 0.0, 0.0))
    expected = fit(local, make(name), ROUNDS, evaluate_every=0, late=Lateness(buffer=4, delays=delays))
    assert float((run.state.x - expected.state.x).abs().max()) < 1e-12
    assert not torch.equal(expected.state.x, fit(local, make(name), ROUNDS, evaluate_every=0).state.x)
    train = {e: c for e, c in run.fed.ledger.entries.items() if e.kind == "train"}
    assert train == {e: c for e, c in expected.fed.ledger.entries.items() if e.kind == "train"}
    assert not run.left_out and not [note for note in notes if "left out" in note]
    deployed = nodes["node 2"].runs[RUN].models(run.deployed_round)
    assert torch.isfinite(deployed).all()


def test_a_node_beyond_the_bound_is_away_and_comes_back(tmp_path):
    """A node that needs more rounds than may pass is left out by name; the others train on."""
    run, notes, _, _ = trained("fedavg", Lateness(buffer=4, staleness=1), tmp_path, rounds=50)
    assert any("node 2 is left out: no answer for 2 rounds" in note for note in notes)
    assert run.lost_rounds == 0 and torch.isfinite(run.state.x).all()


def test_without_a_buffer_a_round_waits_for_its_deadline_only(tmp_path):
    run, _, _, _ = trained("fedavg", Lateness(), tmp_path, rounds=1, deadline=0.3)
    assert run.lost_rounds == 0 and not run.left_out
    late = [c for e, c in run.fed.ledger.entries.items() if e.kind == "train"]
    assert [counts[3] for counts in late][:2] == [4, 6]
