"""Rounds of L2GD that are taken at once: bits, ledger, watchers, checkpoints and overflow of one after the other."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from coterie import Federation, fit, models, resume
from coterie.algorithms import make
from coterie.algorithms.async_l2gd import AsyncL2GD
from coterie.algorithms.base import Algorithm
from coterie.train.divergence import divergence_ignored

CLUSTERS = torch.tensor([0, 1, 1, 2, 2, 2, 0, 1])
N = len(CLUSTERS)


def federation(clusters=CLUSTERS, **options):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(12, 4)) for _ in range(len(clusters))]
    ys = [x @ rng.normal(size=4) + rng.normal(size=12) for x in xs]
    return Federation.from_arrays(xs, ys, models.linear(l2=0.05), clusters=clusters, **options)


@pytest.mark.parametrize(
    ("clusters", "options"),
    [
        (CLUSTERS, {}),
        (CLUSTERS, {"loop": True}),
        (CLUSTERS, {"dropout": 0.3}),
        (torch.arange(N) // 2, {}),
        (torch.arange(N) % 2, {}),
        (torch.zeros(N, dtype=torch.long), {}),
    ],
)
def test_rounds_taken_at_once_are_the_rounds(clusters, options):
    """One coin: the bits and the ledger of one round after the other, wherever the rounds computed at once end."""
    fed, rounds = federation(clusters=clusters, **options), 25 if options else 150
    gamma = tuple(0.5 + j for j in range(int(clusters.max()) + 1))
    algorithm = AsyncL2GD(lr=0.1, gamma=gamma, p0=0.3, coins="one")
    with patch.object(AsyncL2GD, "fast_forward", Algorithm.fast_forward):
        stepped = fit(fed, algorithm, rounds, evaluate_every=0)
    for every in (0, 1, 7):
        skipped = fit(fed, algorithm, rounds, evaluate_every=every)
        assert torch.equal(skipped.personal, stepped.personal) and skipped.state.equal(stepped.state)
        assert trained(skipped) == trained(stepped)


def trained(run):
    return [item for item in run.fed.ledger.entries.items() if item[0].kind != "evaluate"]


@pytest.mark.parametrize("model", [models.linear(), models.logistic(l2=0.1), models.mlp(hidden=(2,))])
def test_rounds_are_computed_at_once_and_watched(model):
    """Most rounds are not called one by one, with a closed form or without; a watcher hears of each in turn."""
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(5, 2)) for _ in range(4)]
    ys = [(x[:, 0] > 0).astype(int) for x in xs]
    fed = Federation.from_arrays(xs, ys, model, clusters=[0, 0, 1, 1])
    heard, asked, one_by_one = [], [], AsyncL2GD.round

    def counted(self, fed, s, t):
        asked.append(t)
        return one_by_one(self, fed, s, t)

    algorithm = make("async-l2gd", p0=0.3, coins="one")
    with patch.object(AsyncL2GD, "round", counted):
        fit(fed, algorithm, 2500, evaluate_every=0, watch=lambda t, rounds: heard.append(t))
    assert heard == list(range(1, 2501)) and len(asked) < 30


def test_a_run_stopped_amid_rounds_computed_at_once_resumes_to_the_same_bytes(tmp_path):
    fed, algorithm = federation(split=(0.6, 0.2, 0.2)), make("async-l2gd", p0=0.3, coins="one")
    plan = {"rounds": 60, "evaluate_every": 25, "checkpoint_every": 10}

    def stop(t, rounds):
        if t == 37:
            raise KeyboardInterrupt

    whole = fit(fed, algorithm, out=tmp_path / "whole", **plan)
    with pytest.raises(KeyboardInterrupt):
        fit(fed, algorithm, out=tmp_path / "broken", watch=stop, **plan)
    again = resume(tmp_path / "broken", fed)
    assert torch.equal(again.personal, whole.personal) and again.state.equal(whole.state)
    for name in ("metrics.parquet", "ledger.parquet", "models/models.safetensors"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_client_that_overflows_is_left_out_as_ever():
    """Its own round leaves it out, exactly as one by one, and the others go on."""
    fed = federation()
    fed.runtime.train.x[0] *= 1e4
    fed.runtime._statistics = None
    algorithm = AsyncL2GD(lr=0.1, p0=0.05, coins="one")
    with divergence_ignored():
        skipped = fit(fed, algorithm, rounds=400, evaluate_every=0)
        with patch.object(AsyncL2GD, "fast_forward", Algorithm.fast_forward):
            stepped = fit(fed, algorithm, rounds=400, evaluate_every=0)
    assert skipped.fed.left_out and skipped.fed.left_out == stepped.fed.left_out
    assert torch.equal(skipped.personal[1:], stepped.personal[1:])
