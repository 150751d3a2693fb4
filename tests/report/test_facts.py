"""What a report reads of a run, and how it describes its clients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars
import pytest

import coterie
from coterie.algorithms import make
from coterie.conformance import federation
from coterie.report.differences import heterogeneity
from coterie.report.facts import read_runs


def test_megabytes_and_loss_are_those_of_the_deployed_models(tmp_path: Path) -> None:
    """Evaluation is not counted, and the loss is that of the round whose models are deployed."""
    fed = federation((12, 12, 12), split=(0.6, 0.2, 0.2))
    method = make("fedavg", lr=0.3, steps=5, batch=1)
    run = coterie.fit(fed, method, 40, tmp_path / "run", evaluate_every=1, select="best")
    (shown,) = read_runs([tmp_path / "run"])
    best, last = float(run.score("validation", "loss").mean()), run.history.curve("validation", "loss")[1][-1]
    assert run.deployed_round < 40 and best < 0.99 * last
    assert shown.validation_cost() == pytest.approx(best)
    ledger = run.fed.ledger
    up, down = ledger.total("bytes_up") / 1e6, ledger.total("bytes_down") / 1e6
    assert ledger.total("bytes_up", kind="evaluate") > 0
    assert shown.megabytes[40] == pytest.approx((up, down))
    assert shown.megabytes[run.deployed_round] == pytest.approx(run.traffic())
    assert shown.megabytes_at(20) == pytest.approx((up + down) / 2)


def clients(**targets: Any) -> Any:
    """What the charts of differences read of a run with two clients."""
    roster = SimpleNamespace(rows={"train": [10, 30]}, targets=targets)
    metrics = polars.DataFrame(schema=dict.fromkeys(("split", "metric", "client"), polars.String))
    return SimpleNamespace(names=["a", "b"], roster=roster, metrics=metrics)


def test_variation_between_clients_is_a_share_of_all() -> None:
    _, panel = heterogeneity(clients(mean=[0.0, 4.0], sd=[1.0, 1.0]))
    assert "80 % of all variation is between clients" in panel.caption
    assert panel.rows[0][:3] == ["0", "2.000", "4.000"]


def test_rare_answers_are_taken_together() -> None:
    shares = np.array([np.arange(1, 11), np.arange(10, 0, -1)]) / 55
    _, panel = heterogeneity(clients(classes=[f"k{k}" for k in range(10)], shares=shares.tolist()))
    assert [row[0] for row in panel.rows] == [*(f"k{k}" for k in range(7)), "others"]
    low, mean, high = 100 * 6 / 55, 100 * 16.5 / 55, 100 * 27 / 55
    assert panel.rows[-1][1:] == [f"{value:.1f} %" for value in (low, mean, high)]
    assert panel.rows[0][1:] == [f"{100 * value / 55:.1f} %" for value in (1, 5.5, 10)]
