"""Statistics before training as secure sums: the same encoding, nothing of one node alone, and paid for."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import polars
import pytest
import torch

from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.data.preprocess import Preprocessor
from coterie.deploy import wire
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.node_service import NodeService
from coterie.deploy.node_table import NodeTable
from coterie.deploy.policy import TRUSTING, Policy
from coterie.deploy.transport import NodeCaller
from coterie.engine.privacy import Privacy
from coterie.train import private
from coterie.train.fit import fit
from tests.deploy.test_secure_aggregation import uniform

RUN = "a0b1c2d3"
ROLES = Roles("site", "sick")
NODES = ("n0", "n1", "n2", "n3", "n4")


def table(rows: int = 60) -> polars.DataFrame:
    g = torch.Generator().manual_seed(8)
    total = rows * len(NODES)
    pressure = 120 + 15 * torch.randn(total, generator=g, dtype=torch.float64)
    return polars.DataFrame(
        {
            "site": [f"s{k // rows}" for k in range(total)],
            "pressure": [None if k % 9 == 0 else value for k, value in enumerate(pressure.tolist())],
            "year": (2000 + torch.rand(total, generator=g, dtype=torch.float64)).tolist(),
            "tiny": (1e-6 * torch.randn(total, generator=g, dtype=torch.float64)).tolist(),
            "kind": [("a", "b", "c")[k % 3] for k in range(total)],
            "sick": (pressure > 125).long().tolist(),
        }
    )


class Post:
    """Carries messages at once and keeps what the server received; nodes in `mute` do not answer."""

    def __init__(self, folder, policy: Policy = TRUSTING, frame: polars.DataFrame | None = None):
        frame = table() if frame is None else frame
        self.nodes = {
            name: NodeService(frame.filter(polars.col("site") == f"s{k}"), folder / name, policy=policy)
            for k, name in enumerate(NODES)
        }
        self.received, self.mute, self.box, self.notes = [], lambda name, header: False, {}, []

    def send(self, envelopes, lasts):
        for name, message in envelopes.items():
            header = wire.decode(message)[0]
            if not self.mute(name, header):
                self.box[name] = self.nodes[name].answer(message)
                self.received.append((name, header, *wire.decode(self.box[name])))
        return {name: name for name in envelopes}

    def fetch(self, tickets, wait):
        return {ticket: self.box.pop(ticket) for ticket in tickets if ticket in self.box}

    def plan(self, **request):
        self.caller = NodeCaller(self, 0.05, self.notes.append)
        return survey(self.caller, {name: [] for name in NODES}, RunRequest(ROLES, **request), RUN, 0.05)


def test_the_encoding_is_that_of_plain_statistics(tmp_path):
    plain, hidden = Post(tmp_path / "plain").plan(), Post(tmp_path / "secure").plan(secure=True)
    one, other = (Preprocessor.from_json(plan.preprocessor) for plan in (plain, hidden))
    assert one.feature_names == other.feature_names and len(one.scales) == 3
    for left, right in zip(one.scales, other.scales, strict=True):
        assert left.name == right.name and left.missing == right.missing
        assert abs(left.mean - right.mean) <= 1e-6 * left.sd, left.name
        assert right.sd == pytest.approx(left.sd, rel=1e-6), left.name
    assert one.choices == other.choices


def test_columns_are_read_as_they_are_written(tmp_path):
    pressure = [None if value is None else f"{value:.1f} %" for value in table()["pressure"]]
    frame = table().with_columns(polars.Series("pressure", pressure))
    plain, hidden = (
        Preprocessor.from_json(Post(tmp_path / str(secure), frame=frame).plan(secure=secure).preprocessor)
        for secure in (False, True)
    )
    assert hidden.spec.formats == plain.spec.formats == {"pressure": "number %"}
    left, right = (next(one for one in found.scales if one.name == "pressure") for found in (plain, hidden))
    assert right.mean == pytest.approx(left.mean, abs=1e-6 * left.sd) and right.sd == pytest.approx(left.sd)


@pytest.mark.parametrize("secure", [False, True])
def test_a_target_is_read_as_it_is_written(tmp_path, monkeypatch, secure):
    monkeypatch.setitem(globals(), "ROLES", Roles("site", "cost"))
    cost = [1000 + 3.5 * k for k in range(300)]
    frame = table().drop("sick").with_columns(cost=polars.Series([f"$ {value:,.2f}" for value in cost]))
    found = Preprocessor.from_json(Post(tmp_path, frame=frame).plan(secure=secure).preprocessor)
    assert found.spec.task == "regression" and found.spec.formats == {"cost": "number $"}
    encoded = found.encode_target(frame).numpy()
    assert encoded * found.target_sd + found.target_mean == pytest.approx(cost)
    assert 1400 < found.target_mean < 1650 and 270 < found.target_sd < 340


def test_nothing_of_a_single_node_arrives(tmp_path):
    post = Post(tmp_path)
    post.plan(secure=True)
    for _, asked, header, tensors in post.received:
        if asked["kind"] == "hello":
            told = header["told"]
            counts = {
                key
                for one in told["facts"].values()
                for key, value in one.items()
                if value not in (0, 0.0, {})
            }
            assert counts <= {"kind", "rows"} and all(one["rows"] in (0, 1) for one in told["facts"].values())
        if asked["kind"] == "statistics":
            assert set(header) == {"nonce"} and set(tensors) == {"total"}
            assert uniform(tensors["total"]) > 1e-6
    assert sum(asked["kind"] == "statistics" for _, asked, _, _ in post.received) == 2 * len(NODES)


def test_a_node_that_vanishes_is_left_out(tmp_path):
    post = Post(tmp_path)
    post.mute = lambda name, header: name == "n2" and header["kind"] in ("statistics", "sum_shares")
    found = Preprocessor.from_json(post.plan(secure=True).preprocessor)
    rest = table().filter(polars.col("site") != "s2")
    assert abs({one.name: one for one in found.scales}["year"].mean - rest["year"].mean()) < 0.05
    assert any(note.startswith("n2") for note in post.notes)


def test_an_owner_who_wants_secure_sums_gets_them(tmp_path):
    frame = table()
    strict = Policy.strict(frame, ROLES, secure=True)
    post = Post(tmp_path, strict)
    with pytest.raises(Exception, match="no node sent"):
        post.plan()
    assert all(
        "secure sums only" in h["error"] for _, asked, h, _ in post.received if asked["kind"] == "statistics"
    )
    fresh = Post(tmp_path / "again", strict)
    plan, method = fresh.plan(secure=True), make("fedavg")
    with pytest.raises(Exception, match="no node could open"):
        connect(fresh.caller, plan, method)
    run = fit(connect(fresh.caller, plan, method, secure=True), method, 2, evaluate_every=0)
    assert run.lost_rounds == 0 and run.left_out == []


@pytest.mark.parametrize(("unit", "secure"), [("client", True), ("row", True), ("row", False)])
def test_statistics_are_paid_for(tmp_path, unit, secure):
    pytest.importorskip("dp_accounting")
    budget = Privacy(30.0, 1e-2, unit, rounds=2)
    post, method = Post(tmp_path), make("fedavg", batch=0)
    plan = post.plan(secure=secure, privacy=budget.to_json())
    fed = connect(post.caller, plan, method, secure=secure, privacy=budget)
    assert private.paid(fed) == pytest.approx((6.0, 2e-3))
    for node in post.nodes.values():
        left = node.runs[RUN].privacy.settings
        assert (left.epsilon, left.delta) == pytest.approx((24.0, 8e-3))
    run = fit(fed, method, 2, evaluate_every=0, privacy=budget)
    assert run.lost_rounds == 0
    assert float(private.spent(run.fed).max()) <= 30.0
    text = json.dumps([header for _, _, header, _ in post.received])
    assert '"squares": 0.0' in text and '"counts"' not in text


def test_noise_cannot_be_averaged_away(tmp_path):
    """The same question has the same answer, and another one is refused."""
    pytest.importorskip("dp_accounting")
    budget = Privacy(4.0, 1e-3, "row", rounds=2)
    post = Post(tmp_path)
    post.plan(privacy=budget.to_json())
    name, asked, _, values = next(one for one in post.received if one[1]["kind"] == "statistics")

    def ask(nonce, **about):
        header = {**asked, "nonce": nonce, "about": {**asked["about"], **about}}
        return wire.decode(post.nodes[name].answer(wire.encode(header, {"ids": torch.tensor([0])})))

    _, again = ask("one")
    assert torch.equal(again["total"], values["total"])
    exact = dataclasses.replace(budget, epsilon=1e6)
    for change in ({"privacy": exact.to_json()}, {"columns": ["year"]}, {"privacy": None}):
        header, tensors = ask(f"two {len(change)} {change}", **change)
        assert header["code"] == "refused" and tensors == {}


@pytest.mark.parametrize(
    "asked",
    [
        {"columns": ["sick"]},
        {"columns": ["site"]},
        {"levels": {"pressure": ["120.5"]}},
        {"levels": {"site": ["s0"]}},
        {"levels": {"sick": ["1"]}},
        {"centres": {"site": (0.0, 1.0)}, "step": "moments", "levels": {}},
    ],
)
def test_sums_are_of_columns_that_the_run_uses(tmp_path, asked):
    """Counts of values of the server's choice would say whether somebody with such a value is here."""
    post = Post(tmp_path)
    about = {"step": "histogram", "columns": [], "levels": {}, "privacy": None, "secure": True, "weight": 1.0}
    spec = {"client": "site", "target": "sick", "cluster": None, "task": "binary", "classes": ["0", "1"]}
    spec |= {"numeric": ["pressure", "year"], "categories": ["kind"], "warnings": []}
    header = {"kind": "statistics", "nonce": "n1", "run": RUN, "roles": ROLES.to_json(), "spec": spec}
    header |= {"split": [0.6, 0.2, 0.2], "seed": 0, "about": {**about, **asked}}
    answer = wire.decode(post.nodes["n0"].answer(wire.encode(header, {"ids": torch.tensor([0])})))[0]
    assert answer["code"] == "refused" and "does not use" in answer["error"]


def test_levels_of_few_rows_are_not_counted(tmp_path):
    frame = table().filter(polars.col("site") == "s0")
    rare = frame.with_columns(kind=polars.Series(["secret", *frame["kind"][1:]]))
    seen = {}

    def masked(header, total, weight):
        seen["total"] = total
        return total

    data = NodeTable(rare, None, dataclasses.replace(TRUSTING, min_rows_per_statistic=4), print)
    spec = {"client": "site", "target": "sick", "cluster": None, "task": "binary", "classes": ["0", "1"]}
    spec |= {"numeric": [], "categories": ["kind"], "warnings": []}
    levels = {"kind": ["a", "b", "c", "secret"]}
    about = {"step": "histogram", "columns": [], "levels": levels, "privacy": None, "secure": True}
    header = {"roles": ROLES.to_json(), "spec": spec, "split": [1.0, 0.0, 0.0], "seed": 0, "about": about}
    data.statistics(header, {"ids": torch.tensor([0])}, tmp_path, SimpleNamespace(masked=masked))
    assert seen["total"].view(-1, 2)[:, 0].tolist() == [19.0, 20.0, 20.0, 0.0]
