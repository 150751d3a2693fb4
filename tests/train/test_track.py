"""What TensorBoard, MLflow and Weights & Biases are given is what the run recorded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie import models
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.engine.federation import Federation
from coterie.select.fit import fit
from coterie.train.track import WandB, numbers


def federation(clients: int = 3) -> Federation:
    draw = torch.Generator().manual_seed(1)
    xs = torch.randn(clients, 20, 2, generator=draw)
    ys = (xs.sum(-1) > 0).long()
    return Federation.from_arrays(
        list(xs),
        list(ys),
        models.logistic(),
        names=[f"clinic {k}!" for k in range(clients)],
        split=(0.6, 0.2, 0.2),
    )


def test_numbers_of_a_round() -> None:
    run = fit(federation(), make("fedavg"), 4, evaluate_every=2)
    found = numbers(run.fed, 4, run.history)
    values = run.score("validation", "accuracy")
    assert found["validation/accuracy/mean"] == pytest.approx(float(values.mean()))
    assert found["validation/accuracy/worst"] == float(values.min())
    assert found["validation/loss/worst"] == float(run.score("validation", "loss").max())
    assert found["validation/accuracy/clinic 1!"] == float(values[1])
    up, down = run.traffic()
    assert (found["communication/MB up"], found["communication/MB down"]) == pytest.approx((up, down))
    many = fit(federation(25), make("fedavg"), 1)
    assert not any("clinic" in name for name in numbers(many.fed, 1, many.history))


def test_tensorboard_reads_the_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        run = fit(federation(), make("ditto"), 6, tmp_path / "run", evaluate_every=2, track="tensorboard")
        events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
        events.Reload()
    rounds, values = run.history.curve("validation", "loss")
    seen = {event.step: event.value for event in events.Scalars("validation/loss/mean")}
    assert seen == pytest.approx(dict(zip(rounds, values, strict=True)), rel=1e-6)
    assert events.Scalars("test/accuracy/mean")[-1].value == pytest.approx(
        float(run.score("test", "accuracy").mean()), rel=1e-6
    )
    assert "validation/accuracy" in events.Tags()["histograms"]


@pytest.mark.slow
def test_a_place_that_mlflow_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of files, which older versions wrote, for one."""
    mlflow = pytest.importorskip("mlflow")
    refused = mlflow.exceptions.MlflowException("no longer")

    def refuse(name: str) -> None:
        raise refused

    monkeypatch.setattr(mlflow, "set_experiment", refuse)
    with pytest.raises(SettingError, match=r"MLflow cannot write to .*MLFLOW_TRACKING_URI.*no longer"):
        fit(federation(), "fedavg", 1, tmp_path / "run", track="mlflow")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_mlflow_has_parameters_metrics_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
        run = fit(federation(), make("ditto", lam=0.3), 4, tmp_path / "run", evaluate_every=2, track="mlflow")
        (found,) = mlflow.search_runs(experiment_names=["coterie"], output_format="list")
        client = mlflow.MlflowClient()
        history = client.get_metric_history(found.info.run_id, "validation/loss/mean")
        kept = {item.path for item in client.list_artifacts(found.info.run_id)}
    assert found.data.params["algorithm"] == "ditto" and found.data.params["lam"] == "0.3"
    rounds, values = run.history.curve("validation", "loss")
    assert {entry.step: entry.value for entry in history} == pytest.approx(
        dict(zip(rounds, values, strict=True))
    )
    assert "validation/accuracy/clinic 1_" in found.data.metrics
    assert {"config.toml", "metrics.parquet", "models"} <= kept


@pytest.mark.slow
def test_wandb_keeps_settings_and_curves_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tracked = WandB(None)
        seen: list[dict[str, float]] = []
        begin = tracked.begin

        def listen(*arguments: Any) -> None:
            monkeypatch.chdir(tmp_path)
            begin(*arguments)
            log = tracked._run.log
            monkeypatch.setattr(tracked._run, "log", lambda values: (seen.append(values), log(values)))

        monkeypatch.setattr(tracked, "begin", listen)
        run = fit(federation(), make("ditto", lam=0.3), 4, evaluate_every=2, track=tracked)
        assert tracked._run.config["lam"] == 0.3
    rounds, values = run.history.curve("validation", "loss")
    assert {one["round"]: one["validation/loss/mean"] for one in seen} == pytest.approx(
        dict(zip(rounds, values, strict=True))
    )
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_unknown_trackers_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="Did you mean 'mlflow'"):
        fit(federation(), "fedavg", 1, track="mlfow")
    import sys

    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(SettingError, match=r'pip install "coterie\[track\]"'):
        fit(federation(), "fedavg", 1, track="mlflow")
    with pytest.raises(SettingError, match="a race has many runs"):
        fit(federation(), "auto", 1, track="mlflow")
