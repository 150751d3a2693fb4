"""Advice across nodes: that of one machine, from sums that hide single clients, with a budget where one is set."""

from __future__ import annotations

import json

import numpy as np
import polars
import pytest
import torch
from scipy import stats

from coterie._core.errors import RunError, SettingError
from coterie.data.federated import Roles
from coterie.deploy import advice_job, demo, wire
from coterie.deploy import policy as policies
from coterie.deploy.audit import AuditLog, verify
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.node_service import NodeService
from coterie.deploy.policy import Policy
from coterie.deploy.transport import NodeCaller
from coterie.engine.federation import Federation
from coterie.engine.privacy import Privacy
from coterie.select.advise import advise
from coterie.select.survey import Survey

RUN, CLIENTS, NODES = "a0b1c2d3", 12, 4
ROLES = Roles("who", "y")


def table(kind="regression", seed=0, rows=90, apart=0.5, features=4):
    """Clients whose coefficients differ by `apart`; y is a quantity or a class."""
    draw, parts = np.random.default_rng(seed), []
    centre = draw.normal(size=features)
    for k in range(CLIENTS):
        x = draw.normal(size=(rows, features))
        signal = x @ (centre + apart * draw.normal(size=features)) + draw.normal(size=rows)
        y = signal if kind == "regression" else (signal > 0).astype(int)
        parts.append(
            polars.DataFrame({"who": f"c{k:02d}", **{f"x{j}": x[:, j] for j in range(features)}, "y": y})
        )
    return polars.concat(parts)


class Post:
    """Carries messages at once and writes down all that the server receives."""

    def __init__(self, folder, frame, policy=None, nodes=NODES):
        self.folder, self.nodes, self.received, self.box = folder, {}, [], {}
        self.mute = lambda name, header: False
        for k in range(nodes):
            own = frame.filter(polars.col("who").is_in([f"c{i:02d}" for i in range(k, CLIENTS, nodes)]))
            (folder / f"n{k}").mkdir(parents=True)
            more = {} if policy is None else {"policy": policy(own)}
            log = AuditLog(folder / f"n{k}" / "audit.jsonl")
            self.nodes[f"n{k}"] = NodeService(own, folder / f"n{k}", audit=log, **more)

    def send(self, envelopes, lasts):
        for name, message in envelopes.items():
            header = wire.decode(message)[0]
            if not self.mute(name, header):
                self.box[name] = self.nodes[name].answer(message)
                self.received.append((name, header, *wire.decode(self.box[name])))
        return {name: name for name in envelopes}

    def fetch(self, tickets, wait):
        return {ticket: self.box.pop(ticket) for ticket in tickets if ticket in self.box}

    def advice(self, secure=False, privacy=None, notes=None):
        caller = NodeCaller(self, 0.05, (lambda text: None) if notes is None else notes.append)
        told = None if privacy is None else privacy.to_json()
        request = RunRequest(ROLES, secure=secure, privacy=told)
        plan = survey(caller, {name: [] for name in self.nodes}, request, RUN, patience=0.05)
        fed = connect(caller, plan, Survey(), secure=secure, privacy=privacy)
        found = advice_job.ask(fed, secure, privacy)
        fed.runtime.finish(0, None)
        return found


def here(frame, folder):
    """The advice of one process that has all rows."""
    frame.write_csv(folder / "all.csv")
    return advise(Federation.from_table(folder / "all.csv", "who", "y"), probe=0)


def close(one, other, rel):
    assert one.method == other.method and one.sure == other.sure
    assert one.lam == pytest.approx(other.lam, rel=rel)
    assert one.risk == pytest.approx(other.risk, rel=rel)
    assert (one.sharing, one.probability) == pytest.approx(
        (other.sharing, other.probability), rel=rel, nan_ok=True
    )
    assert one.lam_interval == pytest.approx(other.lam_interval, rel=rel)


@pytest.mark.quick("0.3")
@pytest.mark.parametrize("apart", [0.3, 3.0])
def test_the_advice_is_that_of_one_machine(tmp_path, apart):
    frame = table(apart=apart)
    alone = here(frame, tmp_path)
    plain, secure = (Post(tmp_path / str(k), frame).advice(secure=bool(k)) for k in (0, 1))
    close(plain, alone, 1e-9)
    if apart < 1:  # else an encoding from secure sums does not see that two clients seem to have y reversed
        close(secure, alone, 1e-6)
    assert plain.methods == alone.methods and plain.names == alone.names
    assert any("under masks" in line for line in secure.why)


@pytest.mark.slow
def test_advice_on_classes_is_that_of_one_machine(tmp_path):
    frame = table("classes")
    alone = here(frame, tmp_path)
    plain, secure = (Post(tmp_path / str(k), frame).advice(secure=bool(k)) for k in (0, 1))
    close(plain, alone, 1e-4)  # where L-BFGS ends depends on the last bits
    close(secure, alone, 1e-3)


@pytest.mark.slow
def test_each_node_writes_the_advice_of_its_clients_and_only_it_has_it(tmp_path):
    frame = table()
    alone, post = here(frame, tmp_path), Post(tmp_path / "nodes", frame)
    found = post.advice(secure=True)
    assert found.own is None and found.json()["clients"] == []
    with pytest.raises(SettingError, match="at its node"):
        found.clients.json([])
    rows = [
        row
        for place in sorted((tmp_path / "nodes").glob("*/*/advice.json"))
        for row in json.loads(place.read_text())["clients"]
    ]
    expected = {row["client"]: row for row in alone.json()["clients"]}
    assert len(rows) == CLIENTS
    for row in rows:
        mine = expected[row["client"]]
        assert row["method"] == mine["method"]
        for name in ("sigma2", "r2", "rho2", "gamma", "probability"):
            assert row[name] == pytest.approx(mine[name], rel=1e-6), name
        assert row["risk"] == pytest.approx(mine["risk"], rel=1e-6)


def test_under_secure_sums_only_masked_numbers_arrive(tmp_path):
    """No value of a phase arrives, what does is uniform, and one client's sums cannot be told from it."""
    post = Post(tmp_path, table(features=12))
    post.advice(secure=True)
    calls = [t for _, asked, _, t in post.received if asked["kind"] == "call"]
    assert calls and all(set(tensors) <= {"good"} for tensors in calls)
    totals = [t["total"] for _, asked, _, t in post.received if asked["kind"] == "sum"]
    masked = torch.cat([total for total in totals if total.dtype == torch.int64]).double() / 2.0**64 + 0.5
    assert len(totals) > 50 and all(total.dtype == torch.int64 for total in totals)
    assert stats.kstest(masked.numpy(), "uniform").pvalue > 1e-4
    phases = {asked["about"]["call"][2] for _, asked, _, _ in post.received if asked["kind"] == "sum"}
    assert "outlook" not in phases and {"moments", "sums", "predict_exactly", "choose"} <= phases


def test_in_a_plain_run_the_same_numbers_do_arrive(tmp_path):
    """The test above would fail without masks."""
    post = Post(tmp_path, table())
    post.advice()
    calls = [t for _, asked, _, t in post.received if asked["kind"] == "call" and asked["phase"] == "moments"]
    assert calls and all(t["value."].dtype == torch.float64 and t["value."].abs().max() < 100 for t in calls)


def strict(**more):
    return lambda own: Policy.strict(own, ROLES, **more)


@pytest.mark.slow
def test_a_strict_policy_allows_it_by_name_and_the_log_has_it(tmp_path):
    frame = table()
    post = Post(tmp_path / "strict", frame, strict())
    close(post.advice(secure=True), here(frame, tmp_path), 1e-6)
    entries = verify(tmp_path / "strict" / "n0" / "audit.jsonl")
    assert any(entry.get("algorithm") == "survey" for entry in entries)
    phases = [entry["phase"] for entry in entries if entry["kind"] == "call"]
    assert {
        "moments",
        "look_without_me",
        "sums",
        "weigh",
        "lean",
        "predict_exactly",
        "gains",
        "choose",
    } == set(phases)
    notes = []
    without = strict(algorithms=("fedavg",))
    with pytest.raises(RunError):
        Post(tmp_path / "without", frame, without).advice(notes=notes)
    assert any("survey is not one of fedavg" in note for note in notes)


@pytest.mark.parametrize(
    ("phase", "why"),
    [("receive", "has no phase"), ("carry_out", "has no phase"), ("_own_levels", "has no phase")],
)
def test_nothing_but_declared_phases_runs(tmp_path, phase, why):
    post = Post(tmp_path, table(), strict())
    post.advice()
    call = next(header for _, header, _, _ in post.received if header["kind"] == "call")
    header = {**call, "phase": phase, "nonce": f"again {phase}"}
    answer = wire.decode(post.nodes["n0"].answer(wire.encode(header, {"at": torch.arange(1)})))[0]
    assert why in answer["error"] or "does not say" in answer["error"]


def test_where_phases_of_its_kind_are_forbidden_there_is_no_advice(tmp_path):
    notes = []
    forbidding = strict(reveal=("nothing", "aggregate"))
    with pytest.raises(Exception, match="answer"):
        Post(tmp_path, table(), forbidding).advice(notes=notes)
    assert any("moments reveals gradient" in note for note in notes)


def test_a_node_that_leaves_ends_the_survey(tmp_path):
    post = Post(tmp_path, table())
    post.mute = lambda name, header: name == "n1" and header.get("phase") == "weigh"
    with pytest.raises(RunError, match="3 of 12 clients stopped answering"):
        post.advice()


class TestBudget:
    @pytest.mark.slow
    def test_with_much_of_it_the_advice_is_the_plain_one(self, tmp_path):
        frame = table(rows=150)
        alone = here(frame, tmp_path)
        for secure in (False, True):
            rich = Post(tmp_path / str(secure), frame).advice(secure, Privacy(1e5, 1e-5, "row"))
            assert rich.method == alone.method and rich.sure == alone.sure
            assert rich.risk == pytest.approx(alone.risk, rel=0.25)
            assert any("epsilon at most 100000" in line for line in rich.why)

    @pytest.mark.slow
    def test_with_little_of_it_nothing_can_be_told(self, tmp_path):
        poor = Post(tmp_path, table(rows=30)).advice(True, Privacy(0.5, 1e-5, "row"))
        assert not poor.sure and poor.verdict().startswith("I cannot tell")
        assert any("Noise for privacy" in line for line in poor.why)

    def test_rows_are_read_once_and_what_was_promised_is_kept(self, tmp_path):
        post = Post(tmp_path, table())
        post.advice(privacy=Privacy(4.0, 1e-5, "row"))
        call = next(h for _, h, _, _ in post.received if h["kind"] == "call" and h["phase"] == "moments")
        service = post.nodes["n0"]
        again = {**call, "call": 50, "since": None, "nonce": "another look"}
        answer = wire.decode(service.answer(wire.encode(again, {"at": torch.arange(3)})))[0]
        assert "error" in answer
        spent = json.loads((tmp_path / "n0" / RUN / "privacy.json").read_text())
        assert spent["used"] == [1] * 3 and spent["settings"]["epsilon"] == pytest.approx(3.2)

    @pytest.mark.slow
    def test_a_policy_with_a_budget_wants_noise_and_counts_it(self, tmp_path):
        frame, notes = table(), []
        with pytest.raises(RunError):
            Post(tmp_path / "plain", frame, strict(epsilon=5.0)).advice(notes=notes)
        assert any("noise only" in note for note in notes)
        Post(tmp_path / "within", frame, strict(epsilon=5.0)).advice(privacy=Privacy(4.0, 1e-6, "row"))

    def test_classes_are_refused(self, tmp_path):
        with pytest.raises(SettingError, match="linear regression"):
            Post(tmp_path, table("classes")).advice(privacy=Privacy(4.0, 1e-5, "row"))


@pytest.mark.slow
def test_on_real_nodes(tmp_path, command):
    """Server and four nodes, each a process with its own rows, TLS and keys: the advice of one machine."""
    frame = table(rows=100)
    four = [f"c{k:02d}" for k in range(4)]
    alone = here(frame.filter(polars.col("who").is_in(four)), tmp_path)

    def prepare(place, name):
        own = frame.filter(polars.col("who") == name)
        own.drop("who").write_csv(place / "own.csv")
        Policy.strict(own, ROLES).write(place / policies.FILE)
        return ["--data", place / "own.csv"]

    with demo._running(tmp_path / "fed", "fed", four, ROLES, "table", prepare, lambda text: None) as opened:
        done = command("federate", "advise", opened.path, "--secure", "--json", tmp_path / "advice.json")
        assert done.code == 0, done.out
        said = json.loads((tmp_path / "advice.json").read_text())
        own = [json.loads(place.read_text()) for place in opened.path.glob("nodes/*/state/*/advice.json")]
    assert said["method"] == alone.method and said["lam"] == pytest.approx(alone.lam, rel=1e-6)
    assert said["risk"] == pytest.approx(alone.risk, rel=1e-6)
    assert said["clients"] == [] and "under masks" in done.out
    methods = {row["client"]: row["method"] for one in own for row in one["clients"]}
    assert methods == dict(zip(alone.names, alone.methods, strict=True))
