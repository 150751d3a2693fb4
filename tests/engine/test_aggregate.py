"""Robust means: brute force in one dimension, limits, clusters, and clients that lie."""

from __future__ import annotations

import contextlib

import pytest
import torch

from coterie import Federation, fit, models
from coterie._core.errors import Diverged, SettingError
from coterie.algorithms import make
from coterie.engine.aggregate import ON_NODES, PLAIN, Aggregate
from coterie.engine.replies import Replies
from coterie.report.tables import run_notes
from coterie.train.fit import resume
from coterie.train.load import load

G = torch.Generator().manual_seed(3)
VALUES = torch.randn(9, 4, dtype=torch.float64, generator=G)
ROWS = torch.randint(1, 20, (9, 1), generator=G).double()


def test_weights_are_copies():
    """A weight of 3 is the same as three clients, for every rule."""
    copies = torch.repeat_interleave(VALUES, ROWS.long().squeeze(1), 0)
    ones = torch.ones(len(copies), 1, dtype=torch.float64)
    for rule in ("mean", "median", "trimmed:0.13", "geometric-median"):
        one = Aggregate.parse(rule)
        torch.testing.assert_close(one(VALUES, ROWS), one(copies, ones), rtol=1e-7, atol=1e-7)


def test_against_brute_force():
    ones = torch.ones(9, 1, dtype=torch.float64)
    torch.testing.assert_close(Aggregate.parse("median")(VALUES, ones), VALUES.median(0).values)
    torch.testing.assert_close(Aggregate.parse("median")(VALUES[:4], ones[:4]), VALUES[:4].quantile(0.5, 0))
    middle = VALUES.sort(0).values[2:7].mean(0)
    torch.testing.assert_close(Aggregate.parse(f"trimmed:{2 / 9}")(VALUES, ones), middle)
    found = Aggregate.parse("geometric-median")(VALUES, ROWS)
    pulls = ROWS * (VALUES - found) / torch.linalg.vector_norm(VALUES - found, dim=1, keepdim=True)
    assert float(pulls.sum(0).abs().max()) < 1e-5 * float(ROWS.sum())  # the gradient of the sum of distances
    centre = VALUES.median(0).values
    away = torch.linalg.vector_norm(VALUES - centre, dim=1)
    drawn = centre + (VALUES - centre) * (0.5 * away.median() / away).clamp(max=1).unsqueeze(1)
    torch.testing.assert_close(Aggregate.parse("clip:0.5")(VALUES, ROWS), (ROWS * drawn).sum(0) / ROWS.sum())


@pytest.mark.parametrize("rule", ["clip", "median", "trimmed:0.3", "geometric-median", "screen,cap"])
def test_two_of_nine_cannot_move_it_far(rule):
    bad = VALUES.clone()
    bad[:2] = torch.tensor([[1e150], [-1e6]], dtype=torch.float64)
    rows = ROWS.clone()
    rows[:2] = 1e15
    one = Aggregate.parse(rule if "cap" in rule else f"{rule},cap:2")
    reach = torch.linalg.vector_norm(VALUES[2:] - VALUES[2:].median(0).values, dim=1).max()
    moved = one(bad, rows) - VALUES[2:].median(0).values
    assert float(torch.linalg.vector_norm(moved)) <= 4 * float(reach)
    assert float((PLAIN(bad, rows) - VALUES[2:].mean(0)).abs().max()) > 1e5


def test_a_cluster_is_averaged_by_itself():
    by = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0])
    r = Replies(
        torch.arange(9), {"": VALUES, "own": by.unsqueeze(1).double()}, ROWS, Aggregate.parse("median")
    )
    default = torch.zeros(3, 4, dtype=torch.float64)
    found = r.mean(by=by, default=default)
    for k in (0, 1):
        torch.testing.assert_close(found[k], r.aggregate(VALUES[by == k], ROWS[by == k]))
    assert torch.equal(found[2], default[2]) and torch.equal(r.mean(by="own", default=default), found)
    assert r.count("own", 3).squeeze(1).tolist() == [5, 4, 0]


def test_outliers_are_named():
    told = []
    bad = VALUES.clone()
    bad[4] = 1e9
    r = Replies(torch.arange(9) + 10, {"": bad}, ROWS, ON_NODES, lambda far, long: told.extend(far.tolist()))
    torch.testing.assert_close(
        r.mean(),
        Replies(torch.arange(8), {"": VALUES[torch.arange(9) != 4]}, ROWS[torch.arange(9) != 4]).mean(),
    )
    assert told == [14]


def test_replies_that_are_alike_are_averaged_to_the_same_bytes():
    """Where nobody is shortened the rule for nodes is the plain mean, bit by bit."""
    for rows in (ROWS, torch.ones_like(ROWS)):
        replies = Replies(torch.arange(9), {"": VALUES + 5}, rows, ON_NODES)
        assert torch.equal(replies.mean(), Replies(torch.arange(9), {"": VALUES + 5}, rows).mean())


def test_a_long_step_moves_the_mean_as_far_as_a_typical_one():
    """Brute force: its length becomes the median length, its weight the median weight, its direction stays."""
    sent = torch.full((9, 8), 3.0, dtype=torch.float64)
    steps = torch.nn.functional.normalize(torch.randn(9, 8, dtype=torch.float64, generator=G), dim=1)
    steps *= torch.tensor([0.8, 0.9, 1.0, 1.0, 1.1, 1.2, 1.3, 1.9, 12.0], dtype=torch.float64).unsqueeze(1)
    rows = torch.tensor([[4.0], [5], [6], [7], [8], [9], [10], [11], [70]], dtype=torch.float64)
    told = []
    replies = Replies(
        torch.arange(9), {"": sent + steps}, rows, ON_NODES, lambda *one: told.append(one), origin=sent
    )
    found = replies.mean()
    drawn, weights = steps.clone(), rows.clone()
    drawn[8], weights[8] = steps[8] / 12.0 * 1.1, 8.0
    torch.testing.assert_close(found, 3.0 + (weights * drawn).sum(0) / weights.sum())
    assert [(far.tolist(), long.tolist()) for far, long in told] == [([], [8])]
    light = rows.clone()
    light[8] = 1.0  # an eighth of the median: twelve times the step is 1.5 times the influence
    told.clear()
    Replies(
        torch.arange(9), {"": sent + steps}, light, ON_NODES, lambda *one: told.append(one), origin=sent
    ).mean()
    assert not told


@pytest.mark.slow
def test_honest_replies_are_rarely_changed():
    """Replies that are noise alone differ most in length; a few of four to eight numbers are shortened."""
    g = torch.Generator().manual_seed(3)
    for k, d, most in (
        *((5, 1, 10), (8, 1, 15), (20, 1, 5), (5, 2, 5), (4, 3, 10)),
        *((4, 6, 20), (4, 8, 60), (4, 12, 15), (4, 20, 3), (8, 12, 10)),
    ):
        ones, short, out = torch.ones(k, 1), 0, 0
        for _ in range(1000):
            _, absurd, long = ON_NODES.combine(torch.randn(k, d, generator=g), ones)
            short, out = short + bool(long.any()), out + bool(absurd.any())
        assert short <= most and out == 0, (k, d, short, out)
    _, absurd, long = ON_NODES.combine(torch.tensor([[0.0], [1e-3], [1e9], [2.0]]), torch.ones(4, 1))
    assert not absurd.any() and not long.any()  # four cannot tell


@pytest.mark.parametrize("clients", [4, 6, 12])
def test_an_honest_client_that_is_ten_times_as_far_stays(clients):
    """It is shortened at most; no bar on distance told it from a liar."""
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        slopes = torch.randn(10, generator=g) + 0.2 * torch.randn(clients, 10, generator=g)
        way = torch.randn(10, generator=g)
        slopes[0] += 10 * torch.pdist(slopes).median() * way / way.norm()
        xs = [torch.randn(200, 10, generator=g) for _ in range(clients)]
        ys = [x @ slope + torch.randn(200, generator=g) for x, slope in zip(xs, slopes, strict=True)]
        fed = Federation.from_arrays(xs, ys, models.linear())
        run = fit(fed, make("fedavg"), rounds=10, evaluate_every=0, aggregate=ON_NODES)
        assert run.left_out == [] and {name for _, name, _ in run.shortened} == {fed.names[0]}


@pytest.mark.parametrize("text", ["medain", "clip:x", "median,clip", "trimmed:0.5", "cap:0.5", "screen:-1"])
def test_what_is_no_rule(text):
    with pytest.raises(SettingError):
        Aggregate.parse(text)


def test_the_text_of_a_rule_is_read_back():
    for text in ("mean", "clip:3", "median", "trimmed:0.1,cap:5", "geometric-median,screen:8"):
        assert Aggregate.parse(str(Aggregate.parse(text))) == Aggregate.parse(text)
    assert Aggregate.parse("mean").plain and not ON_NODES.plain


def federation(**options):
    g = torch.Generator().manual_seed(0)
    xs = [torch.randn(60, 3, dtype=torch.float64, generator=g) for _ in range(8)]
    truth = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    ys = [x @ truth + 0.1 * torch.randn(60, dtype=torch.float64, generator=g) for x in xs]
    return Federation.from_arrays(xs, ys, models.linear(), torch.arange(8) % 2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "ditto", "pfedme", "reptile", "oracle"])
def test_a_run_with_a_liar(name, tmp_path):
    """Every method that takes means follows the rule, and a resumed run too."""
    method = make(name, **({"steps": 5} if name == "pfedme" else {}))
    liar = federation(byzantine={3: "large"})
    honest = fit(federation(), method, rounds=20, evaluate_every=0).personal
    robust = fit(liar, method, rounds=20, evaluate_every=0, aggregate="median", out=tmp_path / "run")
    others = torch.arange(8) != 3
    assert float((robust.personal - honest)[others].abs().max()) < 0.2
    with contextlib.suppress(Diverged):
        plain = fit(liar, method, rounds=20, evaluate_every=0)
        assert float((plain.personal - honest)[others].abs().max()) > 10
    assert robust.fed.aggregate == Aggregate.parse("median")


def test_who_was_shortened_is_known_after_a_resume_and_in_the_folder(tmp_path):
    def stop(done, rounds):
        if done == 6:
            raise KeyboardInterrupt

    def world():
        return federation(byzantine={3: "sign-flip:40"})

    method, options = make("fedavg"), {"evaluate_every": 0, "aggregate": "screen,cap"}
    whole = fit(world(), method, rounds=10, **options)
    assert {name for _, name, _ in whole.shortened} == {whole.fed.names[3]}
    with pytest.raises(KeyboardInterrupt):
        fit(world(), method, rounds=10, out=tmp_path / "run", checkpoint_every=2, watch=stop, **options)
    again = resume(tmp_path / "run", world())
    assert again.shortened == whole.shortened == load(tmp_path / "run").shortened
    assert any(whole.fed.names[3] in note and "too far" in note for note in run_notes(again))
