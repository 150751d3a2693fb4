"""The server's end and the nodes' end of a federation, with a transport in this process instead of a network."""

from __future__ import annotations

from pathlib import Path

import polars
import pytest
import torch

from coterie import models
from coterie._core import randomness
from coterie._core.errors import RunError
from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.deploy import federation_plan, wire
from coterie.deploy.answers import check
from coterie.deploy.federation_plan import FederationPlan, RunRequest, connect, survey
from coterie.deploy.node_service import NodeService
from coterie.deploy.transport import NodeCaller, Undelivered
from coterie.engine.aggregate import ON_NODES
from coterie.engine.federation import Federation
from coterie.engine.protocol import Call
from coterie.models.metrics import Metric, find, names, register, registry
from coterie.train.fit import fit, resume
from coterie.train.predict import Predictor
from coterie.train.run import Run

SIZES = (9, 14, 20, 31, 12, 40)
ROLES = Roles("who", "y", cluster="group", drop=("note",))
RUN = "a0b1c2d3"


class Mail:
    """Carries envelopes at once, to `away` nodes when they are back; `forge` changes answers on the way."""

    def __init__(self, sites):
        self.sites, self.away, self.forge, self.box, self.sent, self.held = sites, set(), {}, {}, [], []

    def send(self, envelopes, lasts):
        tickets = {}
        for name, envelope in envelopes.items():
            tickets[name] = f"{name} {len(self.sent)}"
            self.sent.append((name, envelope))
            self.held.append((name, envelope, tickets[name]))
        return tickets

    def fetch(self, tickets, wait):
        for name, envelope, ticket in [held for held in self.held if held[0] not in self.away]:
            if name not in self.away:
                self.held.remove((name, envelope, ticket))
                answer = self.sites[name].answer(envelope)
                self.box[ticket] = self.forge.get(name, lambda answer, envelope: answer)(answer, envelope)
        return {ticket: self.box.pop(ticket) for ticket in list(tickets) if ticket in self.box}


def write_table(path: Path, task: str = "regression") -> Path:
    """Six clients in two groups; a number, a number with gaps, a category and something to be dropped."""
    total = sum(SIZES)
    owner = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    x = randomness.normal(randomness.slots(randomness.key(3, "x", torch.arange(total)), 2))
    score = (
        x[:, 0] * (1 + owner % 2)
        - x[:, 1]
        + 0.3 * randomness.normal(randomness.key(4, "e", torch.arange(total)))
    )
    targets = {"regression": score, "classes": (score > 0).long(), "three": (score > 1).long() + (score > -1)}
    frame = polars.DataFrame(
        {
            "who": [f"client {'fbdace'[k]}" for k in owner.tolist()],
            "group": [f"g{k % 2}" for k in owner.tolist()],
            "a": (100 * x[:, 0] + 7).numpy(),
            "b": [None if k % 7 == 3 else value for k, value in enumerate(x[:, 1].tolist())],
            "c": [("red", "green", "blue")[k % 3] for k in range(total)],
            "note": list(range(total)),
            "y": targets[task].numpy(),
        }
    )
    frame.write_parquet(path)
    return path


def local(table: Path, **options):
    made = Federation.from_table(table, "who", "y", cluster="group", drop=["note"], **options)
    made.aggregate = ON_NODES
    return made


def nodes(table: Path, folder: Path, count: int = 3) -> Mail:
    """The table cut into one file per node: clients 0 and 3, 1 and 4, 2 and 5."""
    frame = polars.read_parquet(table)
    names = frame["who"].unique(maintain_order=True).to_list()
    sites = {}
    for k in range(count):
        own = frame.filter(polars.col("who").is_in(names[k::count]))
        own.write_parquet(folder / f"node{k}.parquet")
        sites[f"node{k}"] = NodeService(folder / f"node{k}.parquet", folder / f"state{k}")
    return Mail(sites)


def federation(mail: Mail, algorithm, deadline: float = 0.05, run: str = RUN, notes=None, **request):
    caller = NodeCaller(mail, deadline, (lambda text: None) if notes is None else notes.append)
    plan = survey(caller, {name: [] for name in mail.sites}, RunRequest(ROLES, **request), run, patience=0.05)
    plan = FederationPlan.from_json(plan.to_json())
    return connect(caller, plan, algorithm)


def personal(mail: Mail, run: Run, name: str = RUN) -> torch.Tensor:
    """The models the nodes have on their disks, in the order of the federation."""
    remote = run.fed.runtime
    models = torch.full((run.fed.n, run.fed.d), torch.nan, dtype=torch.float64)
    for place in remote.places:
        models[place.ids] = mail.sites[place.name].runs[name].models(run.deployed_round)
    return models


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    scale = max(1.0, float(other.abs().max()))
    assert float((one - other).abs().max()) <= 1e-12 * scale


def same(here: Run, there: Run, mail: Mail, name: str = RUN) -> None:
    close(personal(mail, there, name), here.personal)
    for field, value in here.state.tensors().items():
        close(there.state.tensors()[field].double(), value.double())
    assert here.fed.ledger.entries == there.fed.ledger.entries
    assert len(here.history.blocks) == len(there.history.blocks)
    for (*mine, value), (*theirs, other) in zip(here.history.blocks, there.history.blocks, strict=True):
        assert mine == theirs
        close(torch.nan_to_num(other), torch.nan_to_num(value))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("table") / "table.parquet")


@pytest.mark.parametrize("select", ["last", "best"])
def test_classes_best_models_and_the_run_folder(tmp_path, select):
    table, algorithm = write_table(tmp_path / "t.parquet", "classes"), make("ditto", lr=0.3)
    mail = nodes(table, tmp_path)
    here = fit(local(table), algorithm, 6, tmp_path / "here", select=select)
    there = fit(federation(mail, algorithm), algorithm, 6, tmp_path / "there", select=select)
    same(here, there, mail)
    for metrics in ("metrics.parquet", "ledger.parquet"):
        mine, theirs = (polars.read_parquet(tmp_path / side / metrics) for side in ("here", "there"))
        assert mine.shape == theirs.shape
    stored = Predictor.load(tmp_path / "there")
    assert stored.clients == [] and torch.allclose(stored.common, here.common())


@pytest.mark.parametrize("which", ["validation", "all"])
def test_nodes_train_again_on_rows_that_were_held_out(table, tmp_path, which):
    algorithm = make("ditto", lr=0.1, batch=0)
    mail = nodes(table, tmp_path)
    here = fit(local(table), algorithm, 3, tmp_path / "here", refit=which)
    there = fit(federation(mail, algorithm), algorithm, 3, tmp_path / "there", refit=which)
    assert there.trained_on == here.trained_on
    close(there.score("test", "rmse"), here.score("test", "rmse"))
    close(there.common(), here.common())
    again = there.refitted.runtime
    assert int(there.refitted.rows["train"].sum()) == (sum(SIZES) if which == "all" else sum(SIZES) - 25)
    for runtime in (there.fed.runtime, again):
        assert runtime.finish(3, there.common()) == ["node0", "node1", "node2"]
    expected = here.predict(table)
    for k in range(3):
        own = Predictor.load(tmp_path / f"state{k}" / RUN / "run")
        rows = expected.filter(polars.col("who").is_in(own.clients))
        found = own(tmp_path / f"node{k}.parquet")["prediction"]
        assert (found - rows["prediction"]).abs().max() < 1e-12
    refits = [entry for entry in there.fed.ledger.entries if entry.kind == "refit"]
    assert refits and here.fed.ledger.entries == there.fed.ledger.entries


def test_models_stay_on_the_nodes_and_predict_there(table, tmp_path):
    algorithm = make("ditto", lr=0.1)
    mail = nodes(table, tmp_path)
    here = fit(local(table), algorithm, 3)
    there = fit(federation(mail, algorithm), algorithm, 3)
    assert there.personal.shape == (6, 1)
    with pytest.raises(Exception, match="on the nodes"):
        there.model("client a")
    assert there.fed.runtime.finish(3, there.common()) == ["node0", "node1", "node2"]
    expected = here.predict(table)
    for k in range(3):
        own = Predictor.load(tmp_path / f"state{k}" / RUN / "run")
        predictions = own(tmp_path / f"node{k}.parquet")
        rows = expected.filter(polars.col("who").is_in(own.clients))
        assert predictions["warning"].null_count() == len(predictions)
        assert (predictions["prediction"] - rows["prediction"]).abs().max() < 1e-12


def test_rows_never_leave_a_node(table, tmp_path):
    """No value of a numeric column, no target and no row order is in anything a node says."""
    algorithm = make("fedavg")
    mail = nodes(table, tmp_path)
    said = []
    for name in mail.sites:
        mail.forge[name] = lambda answer, envelope: said.append(answer) or answer
    fit(federation(mail, algorithm), algorithm, 2)
    heard = b"".join(said)
    for column in ("a", "y"):
        for value in polars.read_parquet(table)[column].to_list():
            assert repr(value).encode() not in heard
            assert torch.tensor([value], dtype=torch.float64).numpy().tobytes() not in heard


class TestWhoIsAway:
    def test_dropout_of_a_node_is_dropout_of_its_clients(self, table, tmp_path, absent_in):
        """A node that misses rounds 3 and 4 gives the models of a local run in which its clients were away."""
        algorithm = make("ditto", lr=0.1, batch=4)
        mail = nodes(table, tmp_path)
        fed = federation(mail, algorithm)

        def watch(t, rounds):
            mail.away = {"node1"} if t in (2, 3) else set()

        there = fit(fed, algorithm, 8, watch=watch)
        missed = {(t, name) for t, name, _ in there.left_out}
        assert {t for t, _ in missed} == {3, 4} and there.lost_rounds == 0
        here = fit(absent_in(local(table), missed), algorithm, 8)
        close(personal(mail, there), here.personal)
        assert here.fed.ledger.entries == there.fed.ledger.entries

    def test_a_node_killed_after_keeping_and_before_answering_goes_back(self, table, tmp_path, absent_in):
        """Its clients trained in round 3, but nobody heard: in round 5 they go on from round 2."""
        algorithm = make("ditto", lr=0.1, batch=4)
        mail = nodes(table, tmp_path)
        fed = federation(mail, algorithm)

        def killed(answer, envelope):
            mail.sites["node1"] = NodeService(tmp_path / "node1.parquet", tmp_path / "state1")
            mail.away, mail.forge = {"node1"}, {}
            return Undelivered("killed")

        def watch(t, rounds):
            if t == 2:
                mail.forge["node1"] = killed
            if t == 3:
                mail.away = set()

        there = fit(fed, algorithm, 8, watch=watch)
        missed = {(t, name) for t, name, _ in there.left_out}
        assert {t for t, _ in missed} == {3, 4}
        close(personal(mail, there), fit(absent_in(local(table), missed), algorithm, 8).personal)

    def test_a_node_that_lost_its_disk_begins_again(self, table, tmp_path):
        algorithm, notes = make("ditto", lr=0.1), []
        mail = nodes(table, tmp_path)
        fed = federation(mail, algorithm, notes=notes)

        def watch(t, rounds):
            if t == 3:
                mail.sites["node1"] = NodeService(tmp_path / "node1.parquet", tmp_path / "other disk")

        there = fit(fed, algorithm, 8, watch=watch)
        assert {t for t, _, _ in there.left_out} == {4, 5}
        assert any("unknown run" in note for note in notes)
        assert torch.isfinite(personal(mail, there)).all()
        ledger = there.fed.ledger.entries.items()
        begins = [entry.round for entry, counts in ledger if entry.phase == "begin" and any(counts)]
        assert begins == [1, 6]

    def test_a_node_that_joins_late_takes_part(self, table, tmp_path, monkeypatch):
        monkeypatch.setattr(federation_plan, "PATIENCE", 0.05)
        algorithm = make("ditto", lr=0.1)
        mail = nodes(table, tmp_path)
        mail.away = {"node2"}
        clients = sorted(set(polars.read_parquet(tmp_path / "node2.parquet")["who"]))
        caller = NodeCaller(mail, 0.05)
        expected = {"node0": [], "node1": [], "node2": clients}
        plan = survey(caller, expected, RunRequest(Roles("who", "y", drop=("note", "group"))), RUN, 0.05)
        fed = connect(caller, plan, algorithm)

        def watch(t, rounds):
            mail.away = set() if t >= 3 else mail.away

        there = fit(fed, algorithm, 8, watch=watch)
        assert {t for t, name, _ in there.left_out} == {1, 2, 3} and (there.fed.sizes > 0).all()
        models = personal(mail, there)
        assert torch.isfinite(models).all() and torch.isfinite(there.score("test", "rmse")).all()

    def test_a_node_that_comes_back_with_other_clients_stays_outside(self, table, tmp_path):
        algorithm, notes = make("fedavg", lr=0.1), []
        mail = nodes(table, tmp_path)
        fed = federation(mail, algorithm, notes=notes)
        mail.sites["node1"] = NodeService(tmp_path / "node2.parquet", tmp_path / "another state")
        there = fit(fed, algorithm, 5)
        assert {t for t, _, _ in there.left_out} == {1, 2, 3, 4, 5}
        assert any("not those that the federation lists" in note for note in notes)

    def test_a_round_in_which_nobody_answers_is_lost_and_nothing_more(self, table, tmp_path):
        algorithm = make("fedavg", lr=0.1)
        mail = nodes(table, tmp_path)
        fed = federation(mail, algorithm)

        def watch(t, rounds):
            mail.away = set(mail.sites) if t == 2 else set()

        there = fit(fed, algorithm, 6, watch=watch)
        assert there.lost_rounds >= 1
        assert torch.isfinite(personal(mail, there)).all()

    def test_without_any_node_there_is_no_run(self, table, tmp_path):
        mail = nodes(table, tmp_path)
        mail.away = set(mail.sites)
        with pytest.raises(RunError, match="none of 3 nodes answered"):
            federation(mail, make("fedavg"))


@pytest.mark.quick("3")
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_server_that_goes_back_to_a_checkpoint_finds_the_same_bits(table, tmp_path, stop):
    """The nodes are rounds ahead, and one of them has been started anew."""
    algorithm = make("ditto", lr=0.1, batch=4)
    whole = nodes(table, tmp_path)
    undisturbed = fit(federation(whole, algorithm), algorithm, 6)
    mail = nodes(table, tmp_path)

    def watch(t, rounds):
        if t == stop + 1:
            raise KeyboardInterrupt

    fed = federation(mail, algorithm, run="bbbbbbbb")
    with pytest.raises(KeyboardInterrupt):
        fit(fed, algorithm, 6, tmp_path / "run", checkpoint_every=stop, watch=watch)
    mail.sites["node2"] = NodeService(tmp_path / "node2.parquet", tmp_path / "state2")
    again = resume(tmp_path / "run", federation(mail, algorithm, run="bbbbbbbb"))
    assert torch.equal(personal(mail, again, "bbbbbbbb"), personal(whole, undisturbed))
    assert again.state.equal(undisturbed.state)
    assert again.fed.ledger.entries == undisturbed.fed.ledger.entries


def altered(change):
    """An answer whose header and tensors were changed."""

    def forge(answer, envelope):
        header, tensors = wire.decode(answer)
        if "value." not in tensors or wire.decode(envelope)[0]["phase"] != "train":
            return answer
        return wire.encode(*change(header, dict(tensors)))

    return forge


def every_train(change):
    def forge(answer, envelope):
        trains = wire.decode(envelope)[0].get("phase") == "train"
        return change(answer) if trains else answer

    return forge


GARBAGE = {
    "NaN": altered(lambda h, t: (h, t | {"value.": t["value."] * torch.nan})),
    "infinite": altered(lambda h, t: (h, t | {"value.": t["value."] * torch.inf})),
    "far too large": altered(lambda h, t: (h, t | {"value.": t["value."] * 1e200})),
    "one value more": altered(lambda h, t: (h, t | {"value.": torch.cat([t["value."]] * 2, -1)})),
    "one row more": altered(lambda h, t: (h, t | {"value.": torch.cat([t["value."]] * 2)})),
    "no row": altered(lambda h, t: (h, t | {"value.": t["value."][:0]})),
    "a single number": altered(lambda h, t: (h, t | {"value.": torch.tensor(3.0)})),
    "another type": altered(lambda h, t: (h, t | {"value.": t["value."].long()})),
    "another name": altered(lambda h, t: (h, {"value.w": t["value."]})),
    "nothing": altered(lambda h, t: (h, {})),
    "good ones by the thousand": altered(lambda h, t: (h, t | {"good": torch.ones(1000, dtype=torch.bool)})),
    "megabytes": altered(lambda h, t: (h, t | {"more": torch.zeros(1 << 21)})),
    "encoded": altered(lambda h, t: (h | {"encoded": {"": [0, 5, "float64"]}}, t)),
    "no encoded": altered(lambda h, t: ({k: v for k, v in h.items() if k != "encoded"}, t)),
    "another call": altered(lambda h, t: (h | {"at": [1, 99]}, t)),
    "replayed": altered(lambda h, t: (h | {"nonce": "0" * 24}, t)),
    "a list for a header": every_train(lambda answer: wire.encode([], {})),  # type: ignore[arg-type]
    "cut short": every_train(lambda answer: answer[:-3]),
    "too long": every_train(lambda answer: answer + b"..."),
    "empty": every_train(lambda answer: b""),
    "noise": every_train(lambda answer: bytes(range(256))),
    "another version": every_train(lambda answer: answer.replace(b'"version": 1', b'"version": 2')),
    "an error": every_train(lambda answer: Undelivered("the app raised an exception")),
}


@pytest.mark.parametrize("what", sorted(GARBAGE))
def test_a_node_that_answers_garbage_is_left_out_by_name(table, tmp_path, what, absent_in):
    """The others get the models of a local run in which the liar's clients were always away."""
    algorithm, notes = make("fedavg", lr=0.1, batch=4), []
    mail = nodes(table, tmp_path)
    fed = federation(mail, algorithm, notes=notes)
    mail.forge["node1"] = GARBAGE[what]
    there = fit(fed, algorithm, 3)
    assert {name for _, name, _ in there.left_out} == {"client b", "client c"}
    missed = {(t, name) for t, name, _ in there.left_out}
    here = fit(absent_in(local(table), missed), algorithm, 3)
    close(there.state.x, here.state.x)
    assert any(note.startswith("node1") for note in notes) and not any("node0" in note for note in notes)


@pytest.mark.parametrize(
    "header",
    [
        {"kind": "eval", "nonce": "1"},
        {"kind": "__init__", "nonce": "2"},
        {"kind": "call", "run": "../../etc", "nonce": "3"},
        {"kind": "call", "run": "ffffffff", "nonce": "4"},
        {"kind": "hello"},
        {"kind": "call", "run": RUN, "phase": "__class__", "algorithm": "ditto", "since": None, "nonce": "5"},
        {"kind": "call", "run": RUN, "phase": "round", "algorithm": "ditto", "since": None, "nonce": "6"},
        {"kind": "call", "run": RUN, "phase": "train", "algorithm": "fedavg", "since": None, "nonce": "7"},
        {"kind": "call", "run": RUN, "phase": "train", "algorithm": "ditto", "since": [9, 9], "nonce": "8"},
        {"kind": "score", "run": RUN, "round": "x", "split": "test", "nonce": "9"},
    ],
)
def test_a_node_refuses_what_is_not_on_its_list(table, tmp_path, header):
    mail = nodes(table, tmp_path)
    federation(mail, make("ditto"))
    answer, tensors = wire.decode(mail.sites["node0"].answer(wire.encode(header, {})))
    assert answer["error"] and not tensors
    for envelope in (b"", b"\0" * 40, wire.encode({"nonce": "a"}, {})[:-1]):
        assert wire.decode(mail.sites["node0"].answer(envelope))[0]["error"]


def test_a_message_is_answered_once(table, tmp_path):
    mail = nodes(table, tmp_path)
    federation(mail, make("ditto"))
    name, envelope = mail.sent[0]
    answer, _ = wire.decode(mail.sites[name].answer(envelope))
    assert "nonce already used" in answer["error"]


def test_a_node_with_one_client_needs_no_client_column(table, tmp_path):
    frame = polars.read_parquet(table)
    sites = {}
    for name in ("client a", "client b"):
        rows = frame.filter(polars.col("who") == name).drop("who")
        rows.write_parquet(tmp_path / f"{name}.parquet")
        sites[name] = NodeService(tmp_path / f"{name}.parquet", tmp_path / name, name)
    mail, algorithm = Mail(sites), make("ditto", lr=0.1)
    there = fit(federation(mail, algorithm), algorithm, 3)
    both = frame.filter(polars.col("who").is_in(["client a", "client b"]))
    here = fit(Federation.from_table(both, "who", "y", cluster="group", drop=["note"]), algorithm, 3)
    same(here, there, mail)
    there.fed.runtime.finish(3, there.common())
    predictions = Predictor.load(tmp_path / "client a" / RUN / "run")(tmp_path / "client a.parquet")
    expected = here.predict(both.filter(polars.col("who") == "client a"))
    assert predictions["who"].unique().to_list() == ["client a"]
    assert (predictions["prediction"] - expected["prediction"]).abs().max() < 1e-12


@pytest.mark.quick("three", "regression")
@pytest.mark.parametrize("task", ["regression", "classes", "three"])
def test_every_metric_is_the_same_across_nodes(tmp_path, task):
    """Nodes send sums, the server finishes them; what was not recorded is asked for afterwards."""
    table, algorithm = write_table(tmp_path / "t.parquet", task), make("ditto", lr=0.3)
    mail = nodes(table, tmp_path)
    asked = names({"regression": "regression", "classes": "binary", "three": "multiclass"}[task])
    here = fit(local(table), algorithm, 3, metrics=asked)
    there = fit(federation(mail, algorithm), algorithm, 3, metrics=asked)
    same(here, there, mail)
    usual = fit(federation(nodes(table, tmp_path), algorithm), algorithm, 3)
    for name in asked:
        assert there.pooled("test", name) == pytest.approx(here.pooled("test", name), rel=1e-9)
        assert here.score("test", name).isnan().equal(usual.score("test", name).isnan())
        close(usual.score("test", name).nan_to_num(), here.score("test", name).nan_to_num())


def test_a_metric_that_a_node_does_not_know_is_named(tmp_path, monkeypatch):
    table, notes = write_table(tmp_path / "t.parquet", "classes"), []
    mail, algorithm = nodes(table, tmp_path), make("fedavg")
    run = fit(federation(mail, algorithm, notes=notes), algorithm, 1)
    mine = Metric("mine", sums=lambda rows: rows.mean(rows.correct), tasks=("binary",))
    monkeypatch.setattr(registry, "_registered", {})
    assert run.fed.score(run.personal, "test", [mine])["mine"].isnan().all()
    assert all(any(f"{node} is left out: no metric 'mine'" in note for note in notes) for node in mail.sites)
    header = {"kind": "score", "run": RUN, "round": 1, "split": "test", "metrics": ["rmse"], "nonce": "b"}
    answer, _ = wire.decode(mail.sites["node0"].answer(wire.encode(header, {})))
    assert "'rmse' does not apply to binary targets" in answer["error"] and answer["code"] == "refused"
    register(mine)
    close(run.score("test", mine), run.score("test", "accuracy"))


@pytest.mark.parametrize("kind", ["call", "score"])
def test_sums_that_give_no_possible_value_are_not_used(tmp_path, kind):
    table, notes = write_table(tmp_path / "t.parquet", "classes"), []
    mail, algorithm = nodes(table, tmp_path), make("fedavg")

    def boast(answer, envelope):
        header, tensors = wire.decode(answer)
        if wire.decode(envelope)[0]["kind"] == kind and "value.accuracy" in tensors:
            tensors["value.accuracy"] = tensors["value.accuracy"] + 1e9
            if kind == "score":  # where answers are not compared with each other
                tensors["value.auc"] = tensors["value.auc"][:, :-1]
        return wire.encode(header, tensors)

    fed = federation(mail, algorithm, notes=notes)
    mail.forge["node1"] = boast
    split = "validation" if kind == "call" else "test"
    run = fit(fed, algorithm, 2, metrics=[find("auc")])
    owner = fed.runtime.place
    accuracy, auc = run.score(split, "accuracy"), run.score(split, "auc")
    assert accuracy[owner == 1].isnan().all() and accuracy[owner != 1].isfinite().all()
    assert auc[owner == 1].isnan().all() == (kind == "score") and not auc[owner != 1].isnan().all()
    assert any(note.startswith("node1: accuracy outside 0 to 1") for note in notes)
    assert not any("node0" in note for note in notes)


def test_answers_may_be_as_long_as_the_metrics_that_were_asked_for():
    call = Call(make("fedavg"), "deploy", 1, 0, {}, {})
    many = {"value.auc": torch.zeros(100, 2046, dtype=torch.float64)}
    model = models.linear().fit_to(torch.zeros(2, 5), torch.zeros(2))
    assert check(({"encoded": {}, "at": None}, many), call, 100, None, model, sums=2046).visits == 100
    with pytest.raises(wire.WireError, match="far more than deploy declares"):
        check(({"encoded": {}, "at": None}, many), call, 100, None, model, sums=2)
