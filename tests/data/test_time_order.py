"""Rows in the order of time: nothing later is ever trained on, equal times stay together, drift is noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import coterie
from coterie._core.errors import DataError, SettingError
from coterie.data.time_order import cuts, split_in_time, windows
from coterie.engine.resplit import AllRows
from coterie.report.drift import _errors as errors_over_time
from coterie.select.divisions import divisions
from coterie.train.drift import Drift


def visits(seed: int, jump: float = 0.0, clients: int = 5, rows: int = 100) -> pl.DataFrame:
    """Return visits in random order; from day 80 of 100 on, `x` moves and its effect turns round."""
    draw = np.random.default_rng(seed)
    parts = []
    for k in range(clients):
        day, x = draw.permutation(rows), draw.normal(size=rows)
        late = day >= 0.8 * rows
        y = x * np.where(late & (jump > 0), -1.0, 1.0) + 0.5 * draw.normal(size=rows)
        date = pl.date(2024, 1, 1) + pl.duration(days=pl.Series(day))
        parts.append(
            pl.DataFrame(
                {"clinic": [f"c{k}"] * rows, "x": x + jump * late, "z": draw.normal(size=rows), "y": y}
            ).with_columns(day=date, number=pl.Series(day.astype(float)))
        )
    return pl.concat(parts).sample(fraction=1.0, shuffle=True, seed=seed)


@pytest.mark.parametrize("column", ["day", "number"])
def test_the_earliest_rows_train_and_the_latest_test(column: str) -> None:
    frame = visits(0).rename({column: "when"}).drop("number" if column == "day" else "day")
    fed = coterie.Federation.from_table(frame, "clinic", "y", time="when", keep=["when"])
    at = fed.table.preprocessor.feature_names.index("when")
    parts = [fed.runtime.rows(split) for split in ("train", "validation", "test")]
    assert [part.size.tolist() for part in parts] == [[60] * 5, [20] * 5, [20] * 5]
    for k in range(fed.n):
        when = [part.of(k)[0][:, at] for part in parts]
        assert when[0].max() < when[1].min() and when[1].max() < when[2].min()
        assert all(bool((part.diff() >= 0).all()) for part in when)
    plain = coterie.Federation.from_table(frame, "clinic", "y", time="when")
    assert "when" not in plain.table.preprocessor.feature_names


def test_equal_times_stay_together_where_every_part_keeps_rows() -> None:
    assert cuts(torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 3.0]), (0.5, 0.25, 0.25)) == [4, 5]
    assert cuts(torch.ones(10), (0.6, 0.2, 0.2)) == [6, 8]
    assert cuts(torch.ones(1), (0.6, 0.2, 0.2)) == [1, 1]
    times = torch.tensor(np.sort(np.random.default_rng(0).integers(0, 30, 200))).double()
    parts = split_in_time(torch.tensor([200]), times, (0.6, 0.2, 0.2))
    seen = [set(times[part.order].tolist()) for part in (parts.train, parts.validation, parts.test)]
    assert not (seen[0] & seen[1] or seen[1] & seen[2])
    assert abs(len(parts.train.order) - 120) < 10 and abs(len(parts.test.order) - 40) < 10


def test_every_row_is_in_one_part_whatever_the_sizes() -> None:
    draw = np.random.default_rng(3)
    sizes = torch.tensor([1, 2, 3, 5, 8, 40, 1])
    times = torch.cat([torch.tensor(np.sort(draw.integers(0, 9, size))).double() for size in sizes.tolist()])
    parts = split_in_time(sizes, times, (0.6, 0.2, 0.2))
    whole = torch.cat([parts.train.order, parts.validation.order, parts.test.order])
    assert sorted(whole.tolist()) == list(range(int(sizes.sum())))
    assert bool((parts.train.size >= 1).all())


def test_windows_roll_on_and_never_train_on_what_is_later() -> None:
    fed = coterie.Federation.from_table(visits(1), "clinic", "y", time="day", drop=["number"])
    rows = AllRows.of(fed)
    assert rows.times is not None
    tested = []
    for split in rows.folds(3, seed=0):
        for k in range(fed.n):
            mine = [rows.times[(rows.client == k) & (split == part)] for part in range(3)]
            assert mine[0].max() < mine[1].min() and mine[1].max() < mine[2].min()
        tested.append(set(rows.places(split, 2).tolist()))
    assert not (tested[0] & tested[1] or tested[1] & tested[2])
    assert [len(found) for found in divisions_of(fed)] == [len(part) for part in tested]
    with pytest.raises(SettingError, match="--folds"):
        rows.again((0.6, 0.2, 0.2), seed=1)
    with pytest.raises(SettingError, match="1 or more"):
        windows(torch.tensor([3]), torch.arange(3.0), 0)


def divisions_of(fed: coterie.Federation) -> list[torch.Tensor]:
    return [one.tested for one in divisions(fed, seeds=1, folds=3)]


def test_drift_is_named_where_there_is_some_and_not_where_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "visits.csv"
    said = {}
    for jump in (0.0, 1.5):
        visits(2, jump).drop("number").write_csv(file)
        fed = coterie.Federation.from_table(file, "clinic", "y", time="day")
        run = coterie.fit(
            fed, coterie.algorithms.FedAvg(lr=0.1), rounds=20, out=tmp_path / f"run{jump}", refit="validation"
        )
        drift = Drift.load(tmp_path / f"run{jump}")
        assert drift is not None and drift == Drift.of(run)
        said[jump] = drift
    assert said[0.0].sentence() == "" and not said[0.0].moved
    assert "past does not predict the future" in said[1.5].sentence()
    assert {(one.client, one.feature) for one in said[1.5].moved} == {(f"c{k}", "x") for k in range(5)}
    assert said[1.5].looked_at == 10
    page = coterie.report.write_report([tmp_path / "run1.5"], by=["z"])
    text = page.read_text(encoding="utf-8")
    assert "Errors over time" in text and "Inputs that have moved" in text and "--time day" in text


def test_clients_whose_errors_rise_most_come_first() -> None:
    names = ["still", "worse", "better"]
    drift = Drift(names, [1.0, 1.0, 1.0], [[1.0] * 4, [1.0, 2.0, 3.0, 4.0], [0.5] * 4], [], 6, 0.4, 1.0)
    panel = errors_over_time(drift)
    assert [row[0] for row in panel.rows] == ["worse", "still", "better"]


def test_drift_is_claimed_no_more_often_than_promised() -> None:
    draw = np.random.default_rng(0)
    from coterie.train.drift import SURE, _rise

    claimed = 0
    for _ in range(2000):
        rise, error = _rise([(draw.gamma(1.0, size=20), draw.gamma(1.0, size=20)) for _ in range(5)])
        claimed += rise > SURE * error
    assert claimed / 2000 < 0.012


def test_unusable_times_are_named() -> None:
    frame = visits(0, clients=2, rows=10).with_columns(word=pl.lit("soon"))
    with pytest.raises(DataError, match="no time column 'dya'"):
        coterie.Federation.from_table(frame, "clinic", "y", time="dya")
    with pytest.raises(DataError, match="holds text such as 'soon'"):
        coterie.Federation.from_table(frame, "clinic", "y", time="word")
    gap = frame.with_columns(
        pl.when(pl.int_range(pl.len()) == 3).then(None).otherwise(pl.col("day")).alias("day")
    )
    with pytest.raises(DataError, match=r"1 value.s. that are missing"):
        coterie.Federation.from_table(gap, "clinic", "y", time="day", drop=["word"])
