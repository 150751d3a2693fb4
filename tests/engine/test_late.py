"""Late answers: a reference loop of FedBuff, the ledger, resume, and what is refused."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import coterie
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.conformance import federation
from coterie.engine.late import Lateness, durations

ROUNDS = 30
SLOW = (0.2, 2.5, 0.4, 7.0, 0.3, 1.0)  # rounds that a visit of each client takes
DELAYS = "fixed:" + ",".join(map(str, SLOW))


def fedbuff(fed, lr, steps, buffer, staleness, uniform):
    """FedBuff in a plain loop: the model, who was asked and who answered in which round, and how many came too late."""
    rows = fed.runtime.rows("train")
    data = [
        (rows.x[int(s) : int(s) + int(k)], rows.y[int(s) : int(s) + int(k)])
        for s, k in zip(rows.start, rows.size, strict=True)
    ]
    l2 = fed.model.l2

    def trained(i, x):
        a, b = data[i]
        for _ in range(steps):
            x = x - lr * (a.t() @ (a @ x - b) / len(b) + l2 * x)
        return x

    x, clock, flying, asked, answered, old = fed.initial_model(), 0.0, {}, [], [], 0
    for t in range(1, ROUNDS + 1):
        for i in range(fed.n):
            if i not in flying:
                flying[i] = (clock + SLOW[i], t, trained(i, x) - x)
                asked.append((t, i))
        times = sorted(due for due, _, _ in flying.values())
        end = clock + 1
        if buffer and buffer <= len(times):
            end = min(end, times[buffer - 1])
        clock = max(clock, end)
        total, weight = torch.zeros_like(x), 0.0
        for i in [i for i, (due, _, _) in flying.items() if due <= clock]:
            _, since, delta = flying.pop(i)
            answered.append((t, i))
            if t - since <= staleness:
                share = 1.0 if uniform else float(fed.sizes[i])
                total += share * delta / math.sqrt(1 + t - since)
                weight += share
            else:
                old += 1
        if weight:
            x = x + total / weight
    return x, asked, answered, old


@pytest.mark.parametrize("buffer, staleness", [(0, 10), (3, 10), (2, 1), (5, 3), (6, 0)])
@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_it_is_fedbuff(buffer, staleness, weighting):
    """Models agree with a reference loop to 1e-12, and every message is in the ledger of its round."""
    fed = federation(dtype=torch.float64)
    method = coterie.algorithms.FedAvg(lr=0.05, steps=3, batch=0, weighting=weighting)
    late = Lateness(buffer, staleness, DELAYS)
    run = coterie.fit(fed, method, ROUNDS, evaluate_every=0, late=late)
    x, asked, answered, old = fedbuff(fed, 0.05, 3, buffer, staleness, weighting == "uniform")
    assert torch.isfinite(x).all() and float((run.state.x - x).abs().max()) < 1e-12
    entries = {e.round: counts for e, counts in run.fed.ledger.entries.items() if e.kind == "train"}
    for t in range(1, ROUNDS + 1):
        down, up = sum(at == t for at, _ in asked), sum(at == t for at, _ in answered)
        messages_down, _, bytes_down, messages_up, _, bytes_up = entries.get(t, [0] * 6)
        assert (messages_down, messages_up) == (down, up), t
        assert (bytes_down, bytes_up) == (8 * fed.d * down, 8 * fed.d * up), t
    assert sum("rounds late" in why for _, _, why in run.left_out) == old


def test_nobody_late_is_the_same_to_the_last_bit():
    fed = federation()
    for name in ("fedavg", "ditto", "fedadam"):
        plain = coterie.fit(fed, name, 10)
        for late in (Lateness(), Lateness(delays="fixed:" + ",".join(["0.9"] * fed.n)), Lateness(buffer=2)):
            run = coterie.fit(fed, name, 10, late=late)
            assert torch.equal(run.personal, plain.personal)
            assert run.fed.ledger.entries == plain.fed.ledger.entries


def test_a_compressed_late_answer_weighs_what_it_weighed(monkeypatch):
    """The ledger of all rounds together has what was sent, whenever it arrived."""
    fed, method = federation(), coterie.algorithms.FedAvg(lr=0.05)

    def compressed(self, fed, s, t):
        return coterie.State(x=fed.map(self.train, x=s.x, compress="rand-1").mean())

    monkeypatch.setattr(coterie.algorithms.FedAvg, "round", compressed)
    plain = coterie.fit(fed, method, 1, evaluate_every=0)
    one = next(counts for e, counts in plain.fed.ledger.entries.items() if e.kind == "train")
    late = coterie.fit(fed, method, 3, evaluate_every=0, late=Lateness(delays="fixed:0,0,0,0,0,2.5"))
    up = [counts for e, counts in late.fed.ledger.entries.items() if e.kind == "train"]
    each = one[5] // fed.n
    assert [counts[5] for counts in up] == [5 * each, 5 * each, 6 * each]


def test_a_client_that_is_late_or_gone_does_not_stop_the_others():
    fed = federation()
    run = coterie.fit(fed, "fedavg", 20, late=Lateness(delays="fixed:0,0,0,0,0,1000"))
    assert run.lost_rounds == 0 and torch.isfinite(run.personal).all()
    assert int(run.fed.late.waiting["train"].ids) == 5


@pytest.mark.slow
def test_resume_keeps_what_is_on_its_way(tmp_path: Path):
    fed, late = federation(split=(0.6, 0.2, 0.2)), Lateness(2, 5, "exponential:1.5")
    whole = coterie.fit(fed, "ditto", 12, tmp_path / "whole", checkpoint_every=1, late=late)

    class Stopped(Exception):
        pass

    for stop in (1, 5, 11):

        def watch(t, rounds, stop=stop):
            if t == stop:
                raise Stopped

        out = tmp_path / str(stop)
        with pytest.raises(Stopped):
            coterie.fit(fed, "ditto", 12, out, checkpoint_every=1, late=late, watch=watch)
        again = coterie.resume(out, fed)
        assert torch.equal(again.personal, whole.personal)
        assert again.fed.ledger.entries == whole.fed.ledger.entries
        assert again.fed.late.clock == whole.fed.late.clock
    clean = Lateness(0, 5, "")
    assert not torch.equal(coterie.fit(fed, "ditto", 12, late=clean).personal, whole.personal)


def test_delays_have_the_distribution_that_they_name():
    ids = torch.arange(200_000)
    drawn = durations("exponential:2")(1, 3, 0, ids)
    assert (
        abs(float(drawn.mean()) - 2) < 0.02 and abs(float((drawn > 2).double().mean()) - math.exp(-1)) < 0.005
    )
    slow = durations("slow:0.25:4")(1, 3, 0, ids)
    again = durations("slow:0.25:4")(1, 9, 0, ids)
    assert abs(float((slow == 4).double().mean()) - 0.25) < 0.005 and float(slow[slow != 4].max()) < 1
    assert torch.equal(slow == 4, again == 4) and not torch.equal(slow, again)
    assert torch.equal(
        durations("fixed:1,2")(0, 0, 0, torch.tensor([1, 0])), torch.tensor([2.0, 1.0]).double()
    )


@pytest.mark.parametrize(
    "text", ["exponential", "exponential:-1", "slow:0.5", "fixed:a", "fixed:1,inf", "quick:1"]
)
def test_wrong_delays_are_named(text):
    with pytest.raises(SettingError, match="exponential:MEAN"):
        Lateness(delays=text)


def test_what_does_not_go_together_is_refused():
    fed = federation()
    for name in ("scaffold", "cobo", "pdl-tc", "feddyn"):
        with pytest.raises(SettingError, match=f"{name} does not tolerate late answers"):
            coterie.fit(fed, make(name), 2, late=Lateness())
    with pytest.raises(SettingError, match="epsilon"):
        coterie.fit(fed, "fedavg", 2, late=Lateness(), privacy=coterie.Privacy(epsilon=4.0, delta=1e-5))
    with pytest.raises(SettingError, match="only 6 clients"):
        coterie.fit(fed, "fedavg", 2, late=Lateness(buffer=7))
    with pytest.raises(SettingError, match="a race takes no"):
        coterie.fit(fed, "auto", 2, late=Lateness())
    with pytest.raises(SettingError, match="has 2 numbers"):
        coterie.fit(fed, "fedavg", 2, late=Lateness(delays="fixed:1,2"))


def test_late_answers_train_nearly_as_well_as_waiting():
    """A quarter of the clients take three rounds: after as many rounds the loss is near that of waiting for all."""
    fed = federation((20,) * 12)
    start, waited, late = (
        coterie.fit(fed, "fedavg", rounds, evaluate_every=0, late=how)
        for rounds, how in ((0, None), (60, None), (60, Lateness(delays="slow:0.25:3")))
    )
    loss = [float(run.fed.score(run.personal, "train")["loss"].mean()) for run in (start, waited, late)]
    assert loss[2] - loss[1] < 0.05 * (loss[0] - loss[1])


@pytest.mark.quick("scaffold")
@pytest.mark.parametrize("name", ["cobo", "scaffold"])
def test_the_command_refuses_what_does_not_tolerate_lateness(name, tmp_path):
    """Exit 2 and one line that names the method; nothing is written."""
    words = ["fit", "heart_disease", "--client", "hospital", "--target", "sick", "--algorithm", name]
    out = tmp_path / "run"
    run = subprocess.run(
        [sys.executable, "-m", "coterie", *words, "--buffer", "2", "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2 and f"{name} does not tolerate late answers" in run.stderr.replace("\n", " ")
    assert not out.exists()


@pytest.mark.slow
def test_the_command_trains_with_late_clients(tmp_path):
    words = ["fit", "heart_disease", "--client", "hospital", "--target", "sick", "--algorithm", "ditto"]
    late = ["--buffer", "2", "--staleness", "3", "--delays", "slow:0.5:2", "--rounds", "5"]
    run = subprocess.run(
        [sys.executable, "-m", "coterie", *words, *late, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert coterie.load(tmp_path / "run").rounds == 5
