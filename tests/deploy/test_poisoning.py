"""One bad node among twelve, or four, on the server's real code: the rule for nodes bounds what it does to others."""

from __future__ import annotations

import sys

import polars
import pytest
import torch

from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.deploy import wire
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.node_service import NodeService
from coterie.deploy.transport import NodeCaller
from coterie.engine.aggregate import Aggregate
from coterie.train.fit import fit

CLIENTS, ROWS, BAD = 12, 600, "c03"


class Post:
    """Carries messages at once; `evil` changes the answers of one node."""

    def __init__(self, nodes, evil=None):
        self.nodes, self.evil, self.box = nodes, evil, {}

    def send(self, envelopes, lasts):
        for name, message in envelopes.items():
            answer = self.nodes[name].answer(message)
            if self.evil is not None and name == BAD:
                header, tensors = wire.decode(answer)
                answer = wire.encode(*self.evil(wire.decode(message)[0], header, tensors))
            self.box[name] = answer
        return {name: name for name in envelopes}

    def fetch(self, tickets, wait):
        return {ticket: self.box.pop(ticket) for ticket in tickets}


def values(change):
    """An attack on the answers of phases."""

    def evil(asked, header, tensors):
        if asked["kind"] != "call" or asked["split"]:
            return header, tensors
        return header, {k: change(v) if k.startswith("value.") else v for k, v in tensors.items()}

    return evil


def many_rows(asked, header, tensors):
    """An attack on the weights, together with one on the values."""
    if asked["kind"] == "open":
        return header, {k: torch.full_like(v, 10**6) for k, v in tensors.items()}
    return values(lambda x: -10 * x)(asked, header, tensors)


ATTACKS = {
    "1e6": values(lambda x: torch.full_like(x, 1e6)),
    "1e150": values(lambda x: torch.full_like(x, 1e150)),
    "sign flip x 10": values(lambda x: -10 * x),
    "sign flip x 3": values(lambda x: -3 * x),
    "100": values(lambda x: torch.full_like(x, 100.0)),
    "a million rows": many_rows,
}


@pytest.fixture(scope="module")
def table():
    g = torch.Generator().manual_seed(5)
    owner = torch.arange(CLIENTS).repeat_interleave(ROWS)
    x = torch.randn(CLIENTS * ROWS, 5, generator=g)
    slopes = torch.randn(5, generator=g) + 0.2 * torch.randn(CLIENTS, 5, generator=g)
    y = ((x * slopes[owner]).sum(1) + 0.5 * torch.randn(len(x), generator=g) > 0).long()
    columns = {f"x{j}": x[:, j].numpy() for j in range(5)}
    return polars.DataFrame({"client": [f"c{k:02d}" for k in owner.tolist()], **columns, "y": y.numpy()})


def accuracy(table, folder, evil=None, rule=None):
    nodes = {
        name: NodeService(table.filter(polars.col("client") == name), folder / name)
        for name in table["client"].unique(maintain_order=True)
    }
    caller = NodeCaller(Post(nodes, evil), 5.0)
    request = RunRequest(Roles("client", "y"))
    method = make("fedavg")
    fed = connect(caller, survey(caller, {name: [] for name in nodes}, request, "poisoning1"), method)
    run = fit(fed, method, rounds=10, evaluate_every=0, aggregate=rule)
    others = torch.tensor([name != BAD for name in fed.names])
    return run.score("test", "accuracy")[others], run


@pytest.mark.quick("sign flip x 10")
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_honest_client_loses_two_points(table, tmp_path, attack):
    honest, _ = accuracy(table, tmp_path / "honest")
    found, run = accuracy(table, tmp_path / "found", ATTACKS[attack])
    assert float((found - honest).abs().max()) <= 0.02
    assert {name for _, name, _ in run.left_out + run.shortened} == {
        BAD
    }  # and it is said who was left out or shortened
    if attack == "100":
        lost, _ = accuracy(table, tmp_path / "lost", ATTACKS[attack], Aggregate())
        assert float((found - lost).max()) > 0.2  # what the attack does to a plain mean


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["cleveland", "hungarian", "switzerland", "va"])
def test_one_of_four_hospitals_poisons_nobody(tmp_path, monkeypatch, bad):
    """Real hospitals differ more than made-up clients; each in turn sends its model the other way, or a constant."""
    monkeypatch.setattr(sys.modules[__name__], "BAD", bad)
    names, method, found = ["cleveland", "hungarian", "switzerland", "va"], make("fedavg"), {}
    for evil in (None, *(ATTACKS[name] for name in ("sign flip x 10", "sign flip x 3", "100"))):
        place = tmp_path / str(len(found))
        nodes = {name: NodeService("heart_disease", place / name, name) for name in names}
        caller = NodeCaller(Post(nodes, evil), 5.0)
        request = RunRequest(Roles("hospital", "sick"))
        plan = survey(caller, {name: [name] for name in names}, request, "poisoning1")
        run = fit(connect(caller, plan, method), method, rounds=5, evaluate_every=0)
        scores, rows = run.score("test", "accuracy"), run.fed.sizes.flatten()
        others = torch.tensor([name != bad for name in run.fed.names])
        found[evil] = float((scores * rows)[others].sum() / rows[others].sum())
        assert {name for _, name, _ in run.left_out + run.shortened} == ({bad} if evil else set())
    assert all(abs(value - found[None]) <= 0.03 for value in found.values()), found
