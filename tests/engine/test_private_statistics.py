"""Noisy statistics of a table: one row changes little, units are found, and a run pays for them."""

from __future__ import annotations

import math

import numpy as np
import polars
import pytest
import torch

from coterie import Federation, fit, resume
from coterie._core.errors import SettingError
from coterie.data import tables
from coterie.engine import accounting
from coterie.engine.noise import Noise
from coterie.engine.privacy import Privacy
from coterie.engine.private_statistics import SHARE, histogram, moments_of, noisy_statistics
from coterie.train import private

pytest.importorskip("dp_accounting")


def frame(rows=4000, clients=40):
    g = np.random.default_rng(1)
    return polars.DataFrame(
        {
            "who": [f"c{k % clients}" for k in range(rows)],
            "age": g.uniform(20, 80, rows),
            "balance": g.normal(-3e5, 4e4, rows),
            "tiny": g.normal(0, 0.02, rows),
            "kind": [("a", "b")[k % 2] for k in range(rows)],
            "y": g.normal(50, 10, rows),
        }
    )


@pytest.mark.parametrize("unit", ["row", "client"])
def test_units_are_found(unit):
    table = frame(clients=400)
    spec = tables.check(table, "who", "y")
    found, doubts = noisy_statistics(table, spec, "who", Privacy(20.0, 1e-3, unit), Noise(b"u" * 32))
    assert doubts == []
    for name, moments in {**found.numeric, "y": found.target}.items():
        true = table[name]
        assert abs(moments.mean - true.mean()) < 1.5 * true.std() + 0.3 * abs(true.mean())
        assert 0.4 * true.std() < moments.sd < 0.5 * abs(true.mean()) + 2 * true.std()
    assert set(found.categories["kind"].counts) == {"a", "b"}
    assert len(set(found.categories["kind"].counts.values())) == 1  # how often each occurs is not told
    assert not found.by_client.names


def test_columns_are_read_as_they_are_written():
    plain = frame(rows=400)
    written = plain.with_columns(
        age=polars.Series([f"{value:.1f} %" for value in plain["age"]]),
        y=polars.Series([f"$ {value:,.2f}" for value in 1000 * plain["y"]]),
    )
    spec = tables.check(written, "who", "y")
    found, _ = noisy_statistics(written, spec, "who", Privacy(1e4, 1e-3, "row"), Noise(b"u" * 32))
    assert 30 < found.numeric["age"].mean < 70 and 3e4 < found.target.mean < 7e4


def test_what_does_not_stand_out_keeps_its_units():
    table = frame(rows=30, clients=3)
    spec = tables.check(table, "who", "y")
    found, doubts = noisy_statistics(table, spec, "who", Privacy(0.1, 1e-6, "row"), Noise(b"k" * 32))
    assert len(doubts) == 4 and all(moments.sd == 1.0 for moments in found.numeric.values())


def test_a_row_is_in_one_bin_and_a_client_counts_one():
    values = np.array([0.0, 1e-9, 1.0, 1.99, 2.0, -3.0, 1e30, -1e30, np.nan])
    counts = histogram(values, np.ones(9))
    assert counts.sum() == 8 and counts.max() == 2  # zero and what is nearly zero; 1 and 1.99
    for k in range(9):
        assert np.abs(histogram(np.delete(values, k), np.ones(8)) - counts).sum() <= 1
    spread = moments_of(histogram(np.linspace(1, 2, 1001)[:-1], np.ones(1000)), 0)
    assert spread.mean == 1.5 and spread.sd == pytest.approx(math.sqrt(1 / 12))
    assert moments_of(np.zeros(85), 0) is None


def test_noise_of_a_histogram_is_what_is_paid_for(monkeypatch):
    """The table has four numeric columns, so a row changes four bins by one."""
    table = frame(rows=200)
    spec = tables.check(table, "who", "y")
    seen = []
    original = Noise.normal
    monkeypatch.setattr(
        Noise, "normal", lambda self, use, n: seen.append(original(self, use, n)) or 0 * seen[-1]
    )
    budget = Privacy(4.0, 1e-3, "row")
    exact, _ = noisy_statistics(table, spec, "who", budget, Noise())
    assert len(seen) == 4
    scale = 2.0 * accounting.noise_for(SHARE * 4.0, SHARE * 1e-3, 1)
    assert exact.numeric["age"].count <= 200 and scale > 0


@pytest.mark.slow
def test_a_run_pays_for_its_statistics_and_is_resumed(tmp_path):
    table = tmp_path / "t.csv"
    frame(rows=1000, clients=5).write_csv(table)
    budget = Privacy(10.0, 1e-3, "row")
    fed = Federation.from_table(table, "who", "y", privacy=budget)
    assert fed.table.options["paid"] == [2.0, 2e-4]
    run = fit(fed, "fedavg", rounds=2, privacy=budget, out=tmp_path / "run")
    spent = private.spent(run.fed)
    assert 9.9 < float(spent.max()) <= 10.0 and "less the encoding" not in private.explain(run.fed)
    again = resume(tmp_path / "run")  # reads the table anew, with the encoding that was paid for
    assert torch.equal(again.personal, run.personal)
    with pytest.raises(SettingError, match="nothing is left"):
        fit(fed, "fedavg", rounds=2, privacy=Privacy(1.0, 1e-3, "row"))
    free = fit(Federation.from_table(table, "who", "y"), "fedavg", rounds=2, privacy=budget)
    assert "less the encoding" in private.explain(free.fed)
