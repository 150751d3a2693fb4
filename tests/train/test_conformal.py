"""Conformal intervals and sets: coverage per client, on average over clients, and for clients never seen."""

import numpy as np
import polars
import pytest
import torch

from coterie import Federation, fit, models
from coterie._core.errors import SettingError
from coterie.theory.conformal import new_client_quantile, own_quantile


def test_own_rows_cover_exactly_as_often_as_ranks_say():
    """Continuous scores: a new one is below the r-th of m with probability r / (m + 1)."""
    rng = np.random.default_rng(0)
    for m, level in ((19, 0.9), (9, 0.5)):
        hits = [
            rng.normal() <= own_quantile(torch.from_numpy(rng.normal(size=m)), level) for _ in range(4000)
        ]
        rank = np.ceil((m + 1) * level) / (m + 1)
        assert abs(np.mean(hits) - rank) < 4 * np.sqrt(rank * (1 - rank) / 4000)


def test_a_new_client_is_one_more_among_those_that_are_known():
    scores = [torch.tensor([float(k)]) for k in range(1, 10)]
    assert new_client_quantile(scores, 0.85) == 9.0  # ranks 1 to 9 of ten: 8 of them cover 0.8
    assert new_client_quantile(scores, 0.8) == 8.0
    assert new_client_quantile(scores[:8], 0.9) == torch.inf


def test_new_clients_are_covered_where_pooled_rows_fail():
    """Few large and many small clients of different scale: pooled rows undercover new clients, the method does not."""
    rng = np.random.default_rng(1)
    hits, pooled = [], []
    for _ in range(1500):
        scale = rng.choice([1.0, 8.0], size=21, p=[0.3, 0.7])
        sizes = np.where(scale == 1.0, 60, 4)
        scores = [torch.from_numpy(s * np.abs(rng.normal(size=m))) for s, m in zip(scale, sizes, strict=True)]
        new = float(scores[-1][0])
        hits.append(new <= new_client_quantile(scores[:-1], 0.8))
        pooled.append(new <= own_quantile(torch.cat(scores[:-1]), 0.8))
    assert np.mean(hits) > 0.8 - 3 * np.sqrt(0.16 / 1500)
    assert np.mean(hits) < 0.92 and np.mean(pooled) < 0.75


def table(clients, rows, seed, classes=False):
    rng = np.random.default_rng(seed)
    x, who = rng.normal(size=clients * rows), np.repeat(np.arange(clients), rows)
    y = x * (1 + who % 3) + (1 + who % 2) * rng.normal(size=len(x))
    target = np.where(y > 0, "yes", "no") if classes else y
    return polars.DataFrame({"who": [f"c{k}" for k in who], "x": x, "y": target})


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_test_rows_of_every_client_are_covered(classes, method):
    """Clients with noise of different size: each is covered by its own bound, whatever the method."""
    frame = table(6, 800, 2, classes)
    fed = Federation.from_table(frame, client="who", target="y", split=(0.2, 0.4, 0.4))
    run = fit(fed, method, rounds=10, evaluate_every=0)
    calibrated = run.conformal(0.9)
    assert calibrated.own.all()
    assert (calibrated.coverage("test") - 0.9).abs().max() < 0.06
    if not classes:
        wide, narrow = calibrated.bounds[1::2].mean(), calibrated.bounds[0::2].mean()
        assert wide > 1.1 * narrow
        found = calibrated.predict(frame.head(5))
        assert (found["upper"] > found["prediction"]).all() and (found["lower"] < found["prediction"]).all()
        assert abs((frame["y"][:5] - found["prediction"]).abs().max()) < 1e3
        some = calibrated.predict(frame.gather([0, 800, 1600]))  # clients 0, 1 and 2, each by its own bound
        reach = (some["upper"] - some["prediction"]).to_numpy() / fed.table.target_scale
        assert np.allclose(reach, calibrated.bounds[:3].numpy())
    else:
        assert set(calibrated.predict(frame.head(20))["set"]) <= {"", "no", "yes", "no | yes"}


def test_clients_with_few_rows_share_a_bound():
    rng = np.random.default_rng(3)
    xs = [rng.normal(size=(8, 1)) for _ in range(40)]
    ys = [x[:, 0] + rng.normal(size=8) for x in xs]
    fed = Federation.from_arrays(xs, ys, models.linear(), split=(0.5, 0.25, 0.25))
    run = fit(fed, "fedavg", rounds=20, evaluate_every=0)
    calibrated = run.conformal(0.8)
    assert not calibrated.own.any() and bool((calibrated.bounds == calibrated.new).all())
    assert 0.65 < float(calibrated.coverage("test").mean()) < 0.95
    low, high = calibrated.rows(None, torch.ones(1, 1))[0]
    assert high - low == pytest.approx(2 * calibrated.new)
    assert calibrated.rows(fed.names[0], torch.ones(2, 1)).shape == (2, 2)


def test_rows_that_refitted_the_models_do_not_calibrate_them():
    fed = Federation.from_table(table(4, 60, 1, False), client="who", target="y")
    run = fit(fed, "fedavg", rounds=3, evaluate_every=0, refit="validation")
    with pytest.raises(SettingError, match=r"trained on the validation rows too; calibrate on split='test'"):
        run.conformal()
    assert run.conformal(split="test").bounds.shape == (4,)
    with pytest.raises(SettingError, match="--refit none"):
        fit(fed, "fedavg", rounds=3, evaluate_every=0, refit="all").conformal()


def test_what_cannot_be_calibrated_says_so():
    xs, ys = [np.ones((4, 1))] * 2, [np.arange(4.0)] * 2
    run = fit(Federation.from_arrays(xs, ys, models.linear()), "fedavg", rounds=1)
    with pytest.raises(SettingError, match="validation rows"):
        run.conformal()
    with pytest.raises(SettingError, match="trained no model"):
        run.conformal(split="train")
    with pytest.raises(SettingError, match="between 0 and 1"):
        own_quantile(torch.ones(3), 90)
