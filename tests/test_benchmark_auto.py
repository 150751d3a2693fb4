"""The benchmark of `auto`: what "best in hindsight" means, intervals from sums, and files that grow."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import auto as bench
from coterie.train.history import interval


def season(
    auto: float, local: float, fedavg: float, ditto: float, metric: str = "accuracy"
) -> dict[str, Any]:
    test = {"local": local, "fedavg": fedavg, "ditto": ditto, "auto": auto}
    gaps = {"local": [2, 0.0, 0.02], "fedavg": [2, 0.4, 0.1]}
    return {"metric": metric, "clients": 2, "test": test, "chosen": "ditto", "gaps": gaps, "cpu_seconds": 1.0}


def test_three_readings_of_the_best_method() -> None:
    """Local is best over all seeds, ditto on the others of the first one, and each seed has its own."""
    found = bench.judge([season(0.5, 0.9, 0.1, 0.5), season(0.5, 0.5, 0.1, 0.6), season(0.5, 0.5, 0.1, 0.6)])
    assert found["best"] == "local" and found["better_extreme"] == "local" and found["chosen"] == {"ditto": 3}
    behind = found["behind_percent"]
    assert behind["over_seeds"] == pytest.approx(100 * (1.9 / 3 - 0.5) / (1.9 / 3))
    assert behind["elsewhere"] == pytest.approx(
        0.0
    )  # ditto, local, local, each on the seed it was not chosen by
    assert behind["each_seed"] == pytest.approx(100 * (2.1 / 3 - 0.5) / (2.1 / 3))
    gaps = torch.tensor([40.0, 0.0, 0.0]) / (1.9 / 3)
    assert found["standard_error"]["over_seeds"] == pytest.approx(float(gaps.std()) / math.sqrt(3), rel=1e-6)


def test_lower_may_be_better() -> None:
    found = bench.judge([season(1.1, 2.0, 1.5, 1.0, "rmse")])
    assert found["best"] == "ditto" and found["better_extreme"] == "fedavg"
    assert found["behind_percent"]["over_seeds"] == pytest.approx(10.0)
    assert found["standard_error"]["over_seeds"] is None and found["auto"] == 1.1


def test_the_interval_is_that_of_all_clients_and_seeds() -> None:
    gaps = [torch.randn(7, dtype=torch.float64) + 0.3 for _ in range(3)]
    mean, half = bench._pooled([[len(g), float(g.sum()), float(g.square().sum())] for g in gaps])
    low, high = interval(torch.cat(gaps))
    assert (mean - half, mean + half) == (pytest.approx(low), pytest.approx(high))


def test_a_file_grows_by_seeds(tmp_path: Path) -> None:
    out = tmp_path / "auto.json"
    bench.save(out, {"digits": {"0": season(0.5, 0.9, 0.1, 0.5)}})
    bench.save(out, {"hospitals": {"4": season(0.5, 0.9, 0.1, 0.5)}})
    rows = bench.save(out, {"digits": {"1": season(0.5, 0.9, 0.1, 0.5)}})
    assert list(rows) == ["hospitals", "digits"] and rows["digits"]["seeds"] == 2
    assert list(json.loads(out.read_text())["seasons"]["digits"]) == ["0", "1"]
    lines = (tmp_path / "auto.md").read_text().splitlines()
    assert len(lines) == 4 and lines[-1].startswith(
        "| digits | 2 | 2 | accuracy | 0.5 | 0.9 local | +44.44 ± 0.00 |"
    )


@pytest.mark.slow
def test_one_season_end_to_end() -> None:
    found = bench.season(bench.WORLDS["hierarchy, few rows"](0), rounds=4)
    assert {"local", "fedavg", "hierarchical", "oracle", "auto"} <= set(found["test"])
    assert all(math.isfinite(value) for value in found["test"].values()) and found["gaps"]["local"][0] == 40
