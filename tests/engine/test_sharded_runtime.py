"""Clients that are shared over workers train as in one process, and what crosses the wire is a model per worker."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie import CoterieError, fit, models, resume
from coterie._core.errors import RunError, SettingError
from coterie.algorithms import make
from coterie.data.augment import CropFlip
from coterie.engine.privacy import Privacy
from coterie.engine.sharded_runtime import ShardedRuntime
from coterie.engine.shards import Shards, dealt, tree_nodes, tree_sum
from coterie.engine.worker_links import pack, unpack
from coterie.train import workers
from tests.engine.sharding import BUFFERS, METHODS, MODELS, crew, federation, gap


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_clients_are_dealt_evenly(costs, bins):
    place = dealt(torch.tensor(costs), bins)
    counts = torch.bincount(place, minlength=bins)
    loads = torch.bincount(place, torch.tensor(costs).double(), minlength=bins)
    assert int(counts.max() - counts.min()) <= 1
    assert float(loads.max() - loads.min()) <= max(costs)


@given(st.integers(1, 70), st.integers(1, 12))
def test_a_sum_has_the_same_bits_whoever_adds(blocks, workers):
    leaves = {
        (k, k + 1): torch.tensor([math.sin(k) * 10.0 ** (k % 7)], dtype=torch.float64) for k in range(blocks)
    }
    shards = Shards.of(torch.arange(blocks), workers)
    parts, seen = {}, []
    for worker in range(workers):
        first, end = worker * blocks // workers, (worker + 1) * blocks // workers
        for node in tree_nodes(blocks, first, end):
            parts[node] = tree_sum(leaves, node)
            seen += range(*node)
    assert sorted(seen) == list(range(blocks))
    assert torch.equal(tree_sum(parts, (0, blocks)), tree_sum(leaves, (0, blocks)))
    assert sum(map(len, shards.ids)) == blocks


def test_a_packed_message_is_the_message():
    tensors = {
        "large": torch.randn(200, 100),
        "one row": torch.randn(1, 50_000).expand(7, -1),
        "bits": torch.tensor([True, False]),
        "none": torch.empty(0, 3, dtype=torch.float64),
        "number": torch.tensor(3),
    }
    block, large = pack(({"kind": "call", "x": [1.5, None]}, tensors))
    assert len(block) < 1000 and sum(map(len, large)) == 4 * (20_000 + 50_000)
    header, found = unpack(block, lambda size: large.pop(0))
    assert header == {"kind": "call", "x": [1.5, None]}
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert found["one row"].stride(0) == 0


@pytest.mark.quick("fedavg-glm", "ditto-glm", "cobo-glm", "ditto-cnn")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_four_workers_train_what_one_process_trains(method, model):
    fed = federation(model, buffers=BUFFERS.get(method, "averaged"))
    algorithm = make(method, **METHODS[method])
    one = fit(fed, algorithm, rounds=3)
    four = fit(fed, algorithm, rounds=3, workers=crew(4))
    assert gap(one.personal, four.personal) < 1e-6
    assert one.fed.ledger.entries == four.fed.ledger.entries
    assert four.score("test", "accuracy").equal(one.score("test", "accuracy"))


@pytest.mark.quick("glm")
@pytest.mark.parametrize("model", ["glm", "cnn"])
def test_exact_runs_have_the_same_bits_for_any_number_of_workers(model):
    fed, algorithm = federation(model), make("ditto", **METHODS["ditto"])
    runs = [fit(fed, algorithm, rounds=3, workers=crew(count, exact=True), exact=True) for count in (1, 2, 5)]
    assert all(run.personal.equal(runs[0].personal) and run.state.equal(runs[0].state) for run in runs)


@pytest.mark.parametrize(
    "options",
    [
        {"aggregate": "median"},
        {"privacy": Privacy(epsilon=8, delta=1e-3)},
        {"refit": "validation"},
        {"state_memory": 0.0},
        {"select": "best"},
    ],
    ids=str,
)
def test_options_of_a_run_hold_for_workers(options):
    fed = federation("glm", dropout=0.2, byzantine={} if "privacy" in options else {1: "shift"})
    algorithm = make("fedavg", lr=0.05, batch=4, participation=0.7)
    if "privacy" in options:  # the noise of two runs differs: what is spent does not
        runs = [fit(fed, algorithm, rounds=4, workers=who, **options) for who in (None, crew(3))]
        assert runs[0].fed.ledger.entries == runs[1].fed.ledger.entries
        return
    one, three = (fit(fed, algorithm, rounds=4, workers=who, **options) for who in (None, crew(3)))
    assert gap(one.personal, three.personal) < 1e-6
    assert one.fed.ledger.entries == three.fed.ledger.entries and one.left_out == three.left_out


def test_traffic_of_a_round_does_not_depend_on_the_number_of_clients():
    sent = []
    for n in (30, 300):
        fed = federation("glm", (8,) * n, split=(1.0, 0.0, 0.0))
        traffic = []
        for rounds in (2, 12):
            who = crew(3)
            fit(fed, make("fedavg", batch=4, participation=0.5), rounds, evaluate_every=0, workers=who)
            traffic.append(sum(who.sent) + sum(who.received))
        sent.append((traffic[1] - traffic[0]) / 10)
    assert abs(sent[1] - sent[0]) < 0.05 * sent[0], sent


class Stop(Exception):
    pass


def stopped(fed, path, **options):
    def watch(t, rounds):
        if t == 2:
            raise Stop

    with pytest.raises(Stop):
        fit(fed, make("ditto", **METHODS["ditto"]), 5, path, checkpoint_every=1, watch=watch, **options)


def test_a_run_resumes_with_another_number_of_workers(tmp_path):
    fed = federation("glm")
    whole = fit(fed, make("ditto", **METHODS["ditto"]), 5, workers=crew(2, exact=True), exact=True)
    stopped(fed, tmp_path / "exact", workers=crew(4, exact=True), exact=True)
    again = resume(tmp_path / "exact", fed, workers=crew(3, exact=True))
    assert (
        again.personal.equal(whole.personal)
        and again.fed.runtime.kept("personal").shape == whole.personal.shape
    )
    stopped(fed, tmp_path / "usual", workers=crew(4))
    with pytest.raises(RunError, match="processes: 4 then, 3 now"):
        resume(tmp_path / "usual", fed, workers=crew(3))
    assert gap(resume(tmp_path / "usual", fed, workers=crew(3), anyway=True).personal, whole.personal) < 1e-6


def test_what_cannot_be_sent_is_said(monkeypatch):
    xs, ys = [torch.randn(6, 1, 8, 8)] * 3, [torch.arange(6) % 2] * 3
    nameless = (
        federation("glm")
        .fresh()
        .__class__.from_arrays(
            xs, ys, models.network(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2)))
        )
    )
    with pytest.raises(SettingError, match="cannot be sent to a worker"):
        fit(nameless, "fedavg", rounds=1, workers=crew(2))
    federation_class = type(nameless)
    turned = federation_class.from_arrays(xs, ys, models.cnn((4,), hidden=8), augment=lambda x, keys: x)
    with pytest.raises(SettingError, match="function of your own"):
        fit(turned, "fedavg", rounds=1, workers=crew(2))
    cropped = federation_class.from_arrays(xs, ys, models.cnn((4,), hidden=8), augment=CropFlip(pad=1))
    one, two = (fit(cropped, make("fedavg", batch=4), rounds=2, workers=who) for who in (None, crew(2)))
    assert gap(one.personal, two.personal) < 1e-6
    for wrong in (0, "-1", "torch", "ray:x"):
        with pytest.raises(CoterieError):
            fit(cropped, "fedavg", rounds=1, workers=wrong)
    with pytest.raises(SettingError, match="RANK and WORLD_SIZE are not set"):
        fit(cropped, "fedavg", rounds=1, workers="torchrun")


def test_an_error_of_a_worker_is_raised_here_and_the_others_go_on():
    fed, who = federation("glm"), crew(3)
    spread = fed.fresh()
    spread.runtime = ShardedRuntime.open(who, fed.runtime)
    with pytest.raises(SettingError, match="no metric"):
        who.ask(
            [None, ({"kind": "score", "shard": 1, "split": "test", "metrics": ["nonsense"]}, {})] * 1 + [None]
        )
    assert fit(spread, "fedavg", rounds=1).rounds == 1


def test_answers_that_nobody_can_ask_for_are_forgotten():
    fed, who = federation("glm"), crew(2)
    spread = fed.fresh()
    spread.runtime = ShardedRuntime.open(who, fed.runtime)
    algorithm = make("fedavg", **METHODS["fedavg"])
    state = algorithm.start(spread)
    spread.map(algorithm.train, x=state.x)
    other = who.links[0].worker
    assert len(other._held) == len(who.own._held) == 1
    mine = spread.runtime.shards.ids[0]
    for _ in range(3):  # the other worker is not asked, and is told later
        spread.map(algorithm.train, x=state.x, to=mine)
    spread.runtime.paths_used()
    assert not other._held and not who.own._held


def test_the_place_of_a_process_is_read_from_slurm(monkeypatch):
    told = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "4711"}
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**told, "SLURM_JOB_NODELIST": "gpu[07-09]"}.items():
        monkeypatch.setenv(name, value)
    assert workers._place("slurm") == workers.ProcessPlace(3, 8, 2, "gpu07", 29400 + 711)
