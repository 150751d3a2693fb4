"""Survival tables end to end: reading, fitting, saving, predicting, reporting, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest
import torch

import coterie
from coterie._core.errors import CoterieError, DataError, SettingError
from coterie.data import tables
from coterie.train.adapt import adapt
from coterie.train.baseline import Baseline
from coterie.train.predict import Predictor

if TYPE_CHECKING:
    from tests.conftest import Command


def hospitals(seed: int, clients: int = 6, rows: int = 60, spread: float = 0.3) -> pl.DataFrame:
    """Return patients of hospitals: Weibull times with effects that differ by `spread`, censored at random."""
    draw = np.random.default_rng(seed)
    parts = []
    for k in range(clients):
        effect = np.array([0.8, -0.6]) + spread * draw.normal(size=2)
        x = draw.normal(size=(rows, 2))
        time = (300 + 50 * k) * (draw.exponential(size=rows) * np.exp(-x @ effect)) ** (1 / 1.2)
        end = draw.uniform(50, 1500, rows)
        parts.append(
            pl.DataFrame(
                {
                    "hospital": [f"h{k}"] * rows,
                    "age": 60 + 10 * x[:, 0],
                    "lab": x[:, 1],
                    "days": np.minimum(time, end).round(3) + 0.001,
                    "died": np.where(time <= end, "yes", "no"),
                }
            )
        )
    return pl.concat(parts)


def federation(frame: pl.DataFrame, **options: object) -> coterie.Federation:
    return coterie.Federation.from_table(frame, client="hospital", target="days", event="died", **options)


def test_the_event_is_no_feature_and_times_carry_its_sign() -> None:
    frame = hospitals(0)
    spec = tables.check(frame, "hospital", "days", event="died")
    assert (spec.task, spec.event, spec.numeric, spec.categories) == ("survival", "died", ("age", "lab"), ())
    fed = federation(frame, split=(1.0, 0.0, 0.0))
    y = fed.runtime.rows("train").y
    sign = np.where((frame["died"] == "yes").to_numpy(), 1, -1)
    assert np.allclose(y.numpy(), sign * frame["days"].to_numpy())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"days": [0.0, 1.0, 2.0, 3.0]}, "row 1 .client 'a'.: '0' is no time above 0"),
        ({"died": ["yes", "no", "maybe", "no"]}, "row 3 .client 'b'.: 'maybe' is neither 1, yes"),
        ({"died": ["no", "no", "no", "no"]}, "the event never happened"),
        ({"days": ["2020-01-01", "2020-01-02", "2020-02-01", "2020-03-01"]}, "holds dates"),
    ],
)
def test_unusable_times_and_events_are_named(change: dict[str, list[object]], error: str) -> None:
    table = {
        "hospital": list("aabb"),
        "age": [1, 2, 3, 4],
        "days": [1.0, 2.0, 3.0, 4.0],
        "died": [1, 0, 1, 0],
    }
    with pytest.raises(DataError, match=error):
        tables.check(tables.read(table | change), "hospital", "days", event="died")


def test_a_client_without_events_is_named_and_has_the_shared_model() -> None:
    frame = hospitals(1, clients=4)
    frame = frame.with_columns(
        pl.when(pl.col("hospital") == "h2").then(pl.lit("no")).otherwise("died").alias("died")
    )
    fed = federation(frame)
    assert any("without any event: 'h2'" in warning for warning in fed.table.warnings)
    run = coterie.fit(fed, coterie.algorithms.FineTuned(lr=0.3), rounds=20)
    shared = run.common()
    assert torch.allclose(run.personal[2], shared, rtol=0.05)  # the ridge penalty alone moves it
    assert not torch.allclose(run.personal[0], shared, rtol=0.05)


def test_a_run_is_saved_loaded_and_predicts_the_same(tmp_path: Path) -> None:
    file = tmp_path / "hospitals.csv"
    hospitals(2).write_csv(file)
    fed = coterie.Federation.from_table(file, client="hospital", target="days", event="died")
    run = coterie.fit(fed, "ditto", rounds=10, out=tmp_path / "run", refit="validation")
    same = coterie.load(tmp_path / "run")
    new = (
        hospitals(3)
        .drop("days", "died")
        .vstack(hospitals(3).drop("days", "died")[:1].with_columns(hospital=pl.lit("new")))
    )
    first, again = (one.predict(new, times=[100.0, 400.0]) for one in (run, same))
    assert first.equals(again)
    assert first.columns == ["row", "hospital", "prediction", "survival_100", "survival_400", "warning"]
    assert (first["survival_100"] >= first["survival_400"]).all() and (first["survival_400"] > 0).all()
    risky = first.filter(pl.col("hospital") == "h0").sort("prediction")
    assert (risky["survival_100"].diff().drop_nulls() <= 0).all()
    assert first["warning"].null_count() == len(first) - 1
    assert same.score("test", "concordance").equal(run.score("test", "concordance"))
    with pytest.raises(SettingError, match="rows were seen"):
        run.predict(new, times=[1e6])
    page = coterie.report.write_report([tmp_path / "run"])
    text = page.read_text(encoding="utf-8")
    assert "Survival by predicted risk" in text and "ROC curve" not in text and "hazard ratio" in text
    assert run.export("csv", "h0", tmp_path / "h0.csv").read_text().count("log-hazard") == 3
    with pytest.raises(SettingError, match="csv or safetensors"):
        run.export("onnx", "h0", tmp_path / "h0.onnx")


def test_probabilities_are_calibrated_on_fresh_rows() -> None:
    run = coterie.fit(
        federation(hospitals(5, rows=400, spread=0.0)), coterie.algorithms.FedAvg(lr=0.3), rounds=60
    )
    fresh = hospitals(5, rows=4000, spread=0.0)  # the same hospitals, other patients after the first draws
    said = run.predict(fresh, times=[300.0])["survival_300"].to_numpy()
    draw = np.random.default_rng(9)
    effects = np.array([0.8, -0.6])
    x = np.stack([(fresh["age"].to_numpy() - 60) / 10, fresh["lab"].to_numpy()], 1)
    scale = np.repeat(300 + 50 * np.arange(6), 4000)
    true = np.exp(-((300 / scale) ** 1.2) * np.exp(x @ effects))
    assert np.abs(said - true).mean() < 0.04
    assert abs(float((draw.random(len(true)) < true).mean()) - said.mean()) < 0.03


def test_the_baseline_is_that_of_breslow_and_leans_on_the_others_where_rows_are_few() -> None:
    phreg = pytest.importorskip("statsmodels.duration.hazard_regression").PHReg
    draw = np.random.default_rng(4)
    x, time = draw.normal(size=40), np.ceil(9 * draw.exponential(size=40))
    event = draw.random(40) < 0.6
    fitted = phreg(time, x[:, None], status=event.astype(int), ties="breslow").fit()
    score, y = torch.tensor(fitted.params[0] * x), torch.tensor(np.where(event, time, -time))
    found = Baseline.estimate([score], [y], at_risk=0.0)
    times, hazard, _ = fitted.baseline_cumulative_hazard[0]
    before = [
        hazard[times <= t].max() for t in found.times.tolist()
    ]  # statsmodels tells it just before a time
    assert np.allclose(found.hazard[0].numpy()[:-1], before[1:])
    both = Baseline.estimate([score, score[:0]], [y, y[:0]])
    assert torch.allclose(both.hazard[1], both.hazard[2])  # a client without rows has the common curve
    many = Baseline.estimate([score.repeat(500), score], [y.repeat(500), y])
    alone = Baseline.estimate([score.repeat(500)], [y.repeat(500)], at_risk=0.0)
    assert torch.allclose(many.hazard[0], alone.hazard[0], rtol=0.01)


def test_newcomers_are_adapted_and_have_the_common_baseline(tmp_path: Path) -> None:
    file = tmp_path / "hospitals.csv"
    hospitals(2).write_csv(file)
    fed = coterie.Federation.from_table(file, client="hospital", target="days", event="died")
    run = coterie.fit(fed, "fine-tuned", rounds=5, out=tmp_path / "run")
    new = hospitals(8, clients=1).with_columns(hospital=pl.lit("new"))
    adapted = adapt(tmp_path / "run", new)
    assert adapted.names == ["new"] and adapted.metric == "concordance"
    folder = adapted.save(tmp_path / "adapted", tmp_path / "run")
    known = Baseline.of(run)
    assert known is not None
    score = adapted.predictor.model.scores(adapted.models[0], adapted.predictor.preprocessor.encode(new))
    expected = known.survival(torch.full((60,), 6), score.squeeze(-1), 200.0)
    found = Predictor.load(folder)(new, [200.0])
    assert np.allclose(found["survival_200"].to_numpy(), expected.numpy())


@pytest.mark.parametrize("name", ["hierarchical", "trees", "knn-per", "fedproto"])
def test_methods_that_look_at_single_rows_are_refused_by_name(name: str) -> None:
    with pytest.raises(SettingError, match=f"{name} looks at rows one by one.*ditto"):
        coterie.compare(hospitals(0, rows=30), "hospital", "days", event="died", algorithms=[name], rounds=2)


def test_the_command_line_takes_times_and_names_faults(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "hospitals.csv"
    hospitals(2, clients=3, rows=40).write_csv(file)
    roles = (str(file), "--client", "hospital", "--target", "days")
    told = command("data", "describe", *roles, "--event", "died")
    assert told.code == 0 and "survival" in told.out
    made = command("fit", *roles, "--event", "died", "--rounds", "2", "--out", str(tmp_path / "run"))
    assert made.code == 0 and "concordance" in made.out
    told = command("predict", str(tmp_path / "run"), str(file), "--times", "50,500")
    assert told.code == 0 and "prediction,survival_50,survival_500" in told.out
    for arguments, error in (
        (("predict", str(tmp_path / "run"), str(file), "--times", "soon"), "write numbers with commas"),
        (("fit", *roles, "--event", "dide", "--out", str(tmp_path / "no")), "no event column 'dide'"),
        (("fit", *roles, "--event", "died", "--model", "trees", "--out", str(tmp_path / "no")), "survival"),
    ):
        failed = command(*arguments)
        assert failed.code == 2 and error in " ".join(failed.err.split())
    assert not (tmp_path / "no").exists()


def test_what_survival_data_cannot_have_is_refused_with_the_remedy() -> None:
    frame = hospitals(0, clients=2, rows=30)
    with pytest.raises(SettingError, match="Cox regression"):
        federation(frame, model="mlp")
    with pytest.raises(SettingError, match=r"coterie\.models\.cox"):
        federation(frame, model=coterie.models.linear())
    with pytest.raises(SettingError, match="--event COLUMN"):
        coterie.Federation.from_table(frame, "hospital", "days", model=coterie.models.cox())
    with pytest.raises(SettingError, match="--event COLUMN"):
        coterie.Federation.from_table(frame, "hospital", "days", task="survival")
    with pytest.raises(SettingError, match="not regression"):
        federation(frame, task="regression")
    with pytest.raises(CoterieError, match="--unit client"):
        coterie.fit(federation(frame), "fedavg", rounds=2, privacy=coterie.Privacy(4.0, 1e-5, "row"))


@pytest.mark.slow
def test_personal_models_beat_both_extremes_where_effects_differ() -> None:
    table = hospitals(201, clients=40, rows=40, spread=0.35)
    found = coterie.compare(
        table, "hospital", "days", event="died", algorithms=["ditto"], rounds=40, budget=8, folds=1
    )
    loss = {row["algorithm"]: row["over_rows"]["loss"] for row in found.rows}
    assert loss["ditto"] < min(loss["local"], loss["fedavg"])
    low = found.against_alone("ditto").by_rows.low
    assert low is not None and low > 0
    assert "loss per event" in found.verdict()


@pytest.mark.slow
def test_hazards_are_recovered() -> None:
    run = coterie.fit(
        federation(hospitals(7, rows=1500, spread=0.0)), coterie.algorithms.FedAvg(lr=0.3), rounds=80
    )
    scale = run.fed.table.preprocessor.scales[0].sd / 10, run.fed.table.preprocessor.scales[1].sd
    effects = [float(w) / s for w, s in zip(run.personal[0], scale, strict=True)]
    assert all(math.isclose(a, b, abs_tol=0.06) for a, b in zip(effects, (0.8, -0.6), strict=True))
