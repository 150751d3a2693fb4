"""Secure sums between a server and nodes: same results, nothing else arrives, and nodes that vanish do no harm."""

from __future__ import annotations

from dataclasses import replace

import polars
import pytest
import torch
from scipy import stats

from coterie._core import randomness
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.deploy import secure_sums, wire
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.node_service import NodeService
from coterie.deploy.transport import NodeCaller
from coterie.engine.privacy import Privacy
from coterie.engine.sums import SumsOnly
from coterie.models.description import description
from coterie.train import private
from coterie.train.fit import fit, resume

SIZES = (9, 14, 20, 31, 12, 40, 11, 25)
RUN = "a0b1c2d3"
ROLES = Roles("who", "y", cluster="group")


def table(columns: int = 2) -> polars.DataFrame:
    total = sum(SIZES)
    owner = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    x = randomness.normal(randomness.slots(randomness.key(3, "x", torch.arange(total)), columns))
    y = (x[:, 0] * (1 + owner % 2) > 0.2).long()
    return polars.DataFrame(
        {
            "who": [f"c{k}" for k in owner.tolist()],
            "group": [f"g{k % 2}" for k in owner.tolist()],
            **{f"x{j}": x[:, j].numpy() for j in range(columns)},
            "y": y.numpy(),
        }
    )


class Post:
    """Carries messages at once and writes down all that the server receives; nodes in `mute` do not answer."""

    def __init__(self, folder, nodes=4, frame=None):
        frame = table() if frame is None else frame
        self.nodes = {}
        for k in range(nodes):
            own = frame.filter(polars.col("who").is_in([f"c{i}" for i in range(k, len(SIZES), nodes)]))
            self.nodes[f"n{k}"] = NodeService(own, folder / f"n{k}")
        self.received, self.mute, self.box = [], lambda name, header: False, {}

    def send(self, envelopes, lasts):
        for name, message in envelopes.items():
            header = wire.decode(message)[0]
            if not self.mute(name, header):
                self.box[name] = self.nodes[name].answer(message)
                self.received.append((name, header, *wire.decode(self.box[name])))
        return {name: name for name in envelopes}

    def fetch(self, tickets, wait):
        return {ticket: self.box.pop(ticket) for ticket in tickets if ticket in self.box}

    def federation(self, algorithm, notes=None, rounds=3, **options):
        caller = NodeCaller(self, 0.05, (lambda text: None) if notes is None else notes.append)
        own = algorithm.own_model(rounds)
        request = RunRequest(ROLES, model=None if own is None else description(own))
        plan = survey(caller, {name: [] for name in self.nodes}, request, RUN, patience=0.05)
        return connect(caller, plan, algorithm, **options)


def deployed(post, run):
    models = torch.full((run.fed.n, run.fed.d), torch.nan, dtype=torch.float64)
    for place in run.fed.runtime.places:
        models[place.ids] = post.nodes[place.name].runs[RUN].models(run.deployed_round)
    return models


METHODS = {
    "fedavg": {},
    "fine-tuned": {},
    "ditto": {},
    "pfedme": {"steps": 3},
    "ftfa": {"tuning_epochs": 1},
    "rtfa": {"tuning_epochs": 1},
    "maml-fl": {"tuning_epochs": 1},
    "fomaml": {},
    "reptile": {},
    "oracle": {},
    "ifca": {"clusters": 2},
    "ifca restarts": {"clusters": 2, "restarts": 2, "trial": 2},
    "ifca gradients": {"clusters": 2, "average": "gradient"},
    "flix": {"lr": 0.1, "alpha": 0.5},
    "local": {},
    "trees": {"leaves": 4, "least": 2.0},
    "trees shared": {"leaves": 4, "least": 2.0, "lambda_": "shared"},
}


def test_a_second_training_has_sums_of_its_own(tmp_path):
    method, found = make("ditto", lr=0.1), []
    for secure in (False, True):
        post = Post(tmp_path / str(secure))
        found.append(fit(post.federation(method, secure=secure), method, 3, refit="validation"))
        assert found[-1].refitted.rows["train"].sum() > found[-1].fed.rows["train"].sum()
    torch.testing.assert_close(found[1].common(), found[0].common(), rtol=0, atol=1e-4)


@pytest.mark.quick("fedavg", "ditto", "maml-fl", "ifca", "oracle", "flix", "trees")
@pytest.mark.parametrize("name", METHODS)
def test_results_are_those_of_a_plain_run(tmp_path, name):
    method = make(name.split()[0], **METHODS[name])
    found = []
    for secure in (False, True):
        post = Post(tmp_path / str(secure))
        fed = post.federation(method, secure=secure)
        run = fit(fed, method, rounds=3, evaluate_every=0, aggregate="mean")
        found.append(deployed(post, run))
        assert run.lost_rounds == 0 and run.left_out == []
    assert float((found[0] - found[1]).abs().max()) < 1e-9  # 2^-33 of quantisation in a sum, at most
    sums = [(h, t) for _, asked, h, t in post.received if asked["kind"] == "sum"]
    assert (len(sums) > 0) == (name != "local")
    calls = [t for _, asked, _, t in post.received if asked["kind"] == "call" and not asked["split"]]
    assert calls and all(set(tensors) <= {"good"} for tensors in calls)  # no answer of a client arrives


@pytest.mark.parametrize("name", ["cobo", "fc", "pfl-tc", "hierarchical", "flix"])
def test_methods_that_need_single_answers_say_so(tmp_path, name):
    post = Post(tmp_path)
    fed = post.federation(make(name), secure=True)
    with pytest.raises(SumsOnly, match=f"{name} .phase .* needs the answer of each client"):
        fit(fed, make(name), rounds=2, evaluate_every=0)
    assert not any(
        key.startswith("value") for _, asked, _, t in post.received for key in t if asked["kind"] == "call"
    )


@pytest.mark.slow
def test_the_server_sees_uniform_numbers_and_the_sum(tmp_path):
    """Everything that arrives in a run: no value of a phase but masked ones, which are uniform."""
    post = Post(tmp_path, frame=table(columns=400))
    method = make("fedavg")
    run = fit(post.federation(method, secure=True), method, rounds=6, evaluate_every=0)
    kinds = {"sum_keys", "sum_shares", "sum", "unmask"}
    training = [entry for entry in post.received if entry[1]["kind"] in kinds]
    masked = torch.cat([t["total"] for _, asked, _, t in training if asked["kind"] == "sum"])
    assert len(masked) == 6 * 4 * run.fed.d
    counts = torch.bincount(masked.view(torch.uint8).long(), minlength=256)
    assert float(stats.chisquare(counts.numpy()).pvalue) > 1e-6
    high = torch.bincount(((masked >> 56) & 255), minlength=256)  # a plain number has its top byte 0 or 255
    assert float(stats.chisquare(high.numpy()).pvalue) > 1e-6
    for _, asked, header, tensors in post.received:
        if asked["kind"] == "call" and not asked["split"]:
            assert set(tensors) <= {"good"} and set(header) <= {"encoded", "at", "nonce"}
        if asked["kind"] in ("sum_keys", "sum_shares", "unmask"):
            assert tensors == {}
        if asked["kind"] == "sum":
            assert set(header) == {"shape", "nonce"} and set(tensors) == {"total"}


@pytest.mark.quick("call", "sum", "unmask")
@pytest.mark.parametrize("when", ["call", "sum_keys", "sum_shares", "sum", "unmask"])
def test_a_node_that_vanishes(tmp_path, when):
    """It is left out of the sum, or recovered if its answer is in it; the others go on."""
    post, notes = Post(tmp_path, nodes=5), []
    method = make("fedavg", batch=0, steps=1)
    fed = post.federation(method, notes, secure=True)
    here = {"round": 0}

    def mute(name, header):
        if header["kind"] == "call" and not header["split"]:
            here["round"] = header["round"]
        return name == "n2" and header["kind"] == when and here["round"] >= 2 and not header.get("split")

    post.mute = mute
    run = fit(fed, method, rounds=2, evaluate_every=0)
    assert run.lost_rounds == 0
    gone = when in ("call", "sum")  # keys and shares were exchanged in round 1, for 16 sums
    answers = plain_answers(tmp_path / "plain", method)
    sizes = run.fed.sizes.clone()
    if gone:
        sizes[run.fed.runtime.places[2].ids] = 0
    expected = (answers * sizes).sum(0) / sizes.sum()
    torch.testing.assert_close(run.state.x, expected, rtol=0, atol=1e-9)
    assert any("n2" in note for note in notes) == (when in ("call", "sum", "unmask"))


def plain_answers(folder, method):
    """What each client answers in round 2, [n, d], from an honest run."""
    post = Post(folder, nodes=5)
    fed = post.federation(method)
    run = fit(fed, method, rounds=1, evaluate_every=0, aggregate="mean")
    run.fed.enter_round(2, run.state)
    return run.fed.map(method.train, x=run.state.x).values


def test_too_few_nodes_lose_the_round_and_nothing_leaks(tmp_path):
    post, notes = Post(tmp_path, nodes=4), []
    method = make("fedavg")
    fed = post.federation(method, notes, secure=True)
    post.mute = lambda name, header: name in ("n1", "n2") and header["kind"] == "sum"
    run = fit(fed, method, rounds=2, evaluate_every=0)
    assert run.lost_rounds == 2 and any("secure sum needs" in note for note in notes)
    assert not any(asked["kind"] == "unmask" for _, asked, _, _ in post.received)


def test_a_cluster_on_one_node_is_not_summed(tmp_path):
    method = make("oracle")
    post = Post(tmp_path, nodes=4)
    fed = post.federation(method, secure=True)
    fed.clusters = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1])  # cluster 0 is on n0 alone
    with pytest.raises(SettingError, match="on one node alone"):
        fit(fed, method, rounds=1, evaluate_every=0)


def opened(tmp_path):
    """A node with an answer that waits to be summed, and the messages that led there."""
    post = Post(tmp_path, nodes=3)
    method = make("fedavg")
    fed = post.federation(method, secure=True)
    fit(fed, method, rounds=1, evaluate_every=0)
    return post.nodes["n0"], [asked for name, asked, _, _ in post.received if name == "n0"]


def test_a_node_refuses_what_would_give_an_answer_away(tmp_path):
    node, asked = opened(tmp_path)
    last = {header["kind"]: header for header in asked}

    def ask(number, **changes):
        kind = changes.pop("kind", "sum")
        header = {**last[kind], **changes, "nonce": f"again {number}"}
        return wire.decode(node.answer(wire.encode(header, {})))[0].get("error", "")

    assert "added up already" in ask(1)  # once only
    other = {**last["sum"]["about"], "call": [7, 0, "train"]}
    assert "holds no answer" in ask(2, about=other)
    assert "unmasked already" in ask(3, kind="unmask")
    assert "sums at once" in ask(4, kind="sum_keys", slots=10**6)
    about = {**last["sum"]["about"]}
    about["request"] = {**about["request"], "name": "x"}
    assert "no reply 'x'" in ask(5, about=about)


def test_plain_calls_of_a_node_in_a_secure_run_hold_their_values(tmp_path):
    """A server that forgets to ask for sums gets nothing."""
    node, asked = opened(tmp_path)
    sent = next(header for header in asked if header["kind"] == "call" and not header["split"])
    tensors = {"at": torch.tensor([0]), "shared.x": node.runs[RUN].runtime.initial}
    for lasting in (True, False):
        asked = {**sent, "lasting": lasting, "nonce": f"fresh {lasting}"}
        header, values = wire.decode(node.answer(wire.encode(asked, tensors)))
        assert "error" not in header and values == {}


BUDGET = Privacy(3.0, 1e-2, rounds=3)


@pytest.mark.parametrize("name", ["fedavg", "oracle"])
def test_nodes_share_the_noise_of_clients(tmp_path, name):
    """With noise switched off the result is that of clipped means; with it the budget is kept by every node."""
    pytest.importorskip("dp_accounting")
    method = make(name)
    post, notes = Post(tmp_path), []
    fed = post.federation(method, notes, secure=True, privacy=BUDGET)
    run = fit(fed, method, rounds=3, evaluate_every=0, privacy=BUDGET)
    assert run.lost_rounds == 0 and notes == []
    assert 2.9 < float(private.spent(run.fed).max()) <= 3.0
    node = post.nodes["n0"]
    assert len(node.runs[RUN].privacy._paid) == 3
    run.fed.enter_round(4, run.state)
    run.fed.privacy.used.zero_()  # a server that forgets what was paid
    sent = {"x": run.state.x} if name == "fedavg" else {"each": {"x": run.state.centres[run.fed.clusters]}}
    replies = run.fed.map(method.train, **sent)
    with pytest.raises(Exception, match="secure sum needs"):
        replies.mean(by=None if name == "fedavg" else run.fed.clusters)
    assert any("noisy sums that were planned" in note for note in notes)


def test_rows_on_nodes_are_protected_by_the_nodes(tmp_path):
    pytest.importorskip("dp_accounting")
    method, budget = make("ditto"), replace(BUDGET, unit="row")
    post = Post(tmp_path)
    fed = post.federation(method, privacy=budget)
    out = tmp_path / "run"

    def stop(t, rounds):
        if t == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(fed, method, rounds=3, evaluate_every=0, privacy=budget, out=out, checkpoint_every=1, watch=stop)
    used = post.nodes["n0"].runs[RUN].privacy.rows.used.clone()
    run = resume(out, fed)
    rows = post.nodes["n0"].runs[RUN].privacy.rows
    assert (used == 10).all() and (rows.used == 15).all()  # a call that is repeated is paid once
    assert float(rows.spent().max()) <= 3.0 and run.fed.promised.unit == "row"
    key = tmp_path / "n0" / RUN / private.KEY
    assert key.stat().st_mode & 0o077 == 0
    run.fed.enter_round(4, run.state)
    replies = run.fed.map(method.train, x=run.state.x)
    assert len(replies) == 0  # beyond its budget a node does not answer
    run.fed.runtime.finish(run.deployed_round, None)
    assert not key.exists()


def test_noise_that_nodes_share_needs_secure_sums(tmp_path):
    with pytest.raises(SettingError, match="--secure"):
        Post(tmp_path).federation(make("fedavg"), privacy=BUDGET)


def test_keys_are_made_for_many_sums_at_once(tmp_path):
    post = Post(tmp_path, nodes=3)
    method = make("fedavg")
    fit(post.federation(method, secure=True), method, rounds=secure_sums.SLOTS + 1, evaluate_every=0)
    keys = [asked for name, asked, _, _ in post.received if name == "n0" and asked["kind"] == "sum_keys"]
    assert len(keys) == 2
