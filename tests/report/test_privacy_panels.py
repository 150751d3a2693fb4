"""The report shows what privacy has cost, of every client and in accuracy."""

from __future__ import annotations

import pytest

from coterie import Federation, Privacy, fit
from coterie.report.facts import read_runs
from coterie.report.page import report
from coterie.report.privacy_panels import privacy


@pytest.mark.slow
def test_the_report_shows_what_was_spent_and_what_it_cost(tmp_path):
    pytest.importorskip("dp_accounting")
    fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    folders = [tmp_path / name for name in ("free", "low", "high")]
    for folder, budget in zip(folders, (None, 2.0, 8.0), strict=True):
        given = None if budget is None else Privacy(budget, 1e-3, "row")
        fit(fed, "fedavg", 2, folder, evaluate_every=0, privacy=given)
    assert privacy(read_runs(folders[:1])) == []
    spent, curve = privacy(read_runs(folders))
    assert [name for name, _ in spent.rows] == fed.names
    assert all(0 < float(value) <= 2.0 for _, value in spent.rows)
    assert [price for _, price, _ in curve.rows] == ["2", "8", "no noise"]
    page = report(folders)
    assert 'id="privacy"' in page and "What privacy costs" in page
    assert 'id="privacy"' not in report(folders[:1])
