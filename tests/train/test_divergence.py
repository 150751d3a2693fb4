"""A run that diverged is an error that names a step size at which it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import coterie
from coterie import models
from coterie._core.errors import Diverged, SettingError
from coterie.algorithms import make
from coterie.train.divergence import diverged_clients, largest_curvature


def federation(scale: float = 1.0, clients: int = 6) -> coterie.Federation:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(30, 3, generator=draw, dtype=torch.float64) for _ in range(clients)]
    xs[0] = xs[0] * scale
    ys = [x @ torch.ones(3, dtype=torch.float64) for x in xs]
    return coterie.Federation.from_arrays(
        xs, ys, models.linear(), clusters=[k % 2 for k in range(clients)], split=(0.6, 0.2, 0.2)
    )


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("async-l2gd", {"lr": 10.0, "gamma": 0.01, "lambda_": 0.01}),
        ("fedavg", {"lr": 100.0}),
        ("ditto", {"lr": 3.0}),
        ("local", {"lr": 100.0}),
        ("fine-tuned", {"tuning_lr": 100.0}),
    ],
)
def test_divergence_names_a_step_at_which_the_run_converges(
    method: str, settings: dict[str, float], tmp_path: Path
) -> None:
    fed = federation()
    with pytest.raises(Diverged, match=f"{method} diverged.*is too large") as said:
        coterie.fit(fed, make(method, **settings), 100, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    allowed = dict(re.findall(r"--set (\w+)=(\S+)", str(said.value)))
    run = coterie.fit(fed, make(method, **settings).replace(**allowed), 100, tmp_path / "run")
    start = fed.score(fed.initial_model().expand(fed.n, -1), "train")["loss"]
    assert (run.score("train", "loss") <= start).all()


def test_the_curvature_is_the_largest_eigenvalue() -> None:
    fed = federation()
    rows = fed.runtime.rows("train")
    grams = [rows.of(k)[0].T @ rows.of(k)[0] / len(rows.of(k)[0]) for k in range(fed.n)]
    expected = max(float(torch.linalg.eigvalsh(gram)[-1]) for gram in grams)
    assert largest_curvature(fed) == pytest.approx(expected)


def test_features_whose_squares_are_infinite_end_with_a_remedy() -> None:
    fed = federation(scale=1e200, clients=1)
    assert largest_curvature(fed) == float("inf")
    with pytest.raises(Diverged, match="rescale the columns"):
        coterie.fit(fed, make("local", lr=0.1), rounds=2)


def test_one_client_in_other_units_does_not_end_the_run_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fed = federation(scale=1000.0)
    run = coterie.fit(fed, make("local", lr=0.3), 50)
    assert (run.score("train", "loss")[1:] < 0.1).all()
    assert any("client '0'" in record.getMessage() for record in caplog.records)


def test_a_run_that_chooses_its_best_round_does_not_fail() -> None:
    run = coterie.fit(federation(), make("fedavg", lr=100.0), 30, select="best")
    assert run.deployed_round == 0


def test_losses_far_from_one_are_compared_with_the_start() -> None:
    fed = federation()
    fine = torch.full((fed.n,), 5.0)
    start = fed.score(fed.initial_model().expand(fed.n, -1), "train")["loss"]
    assert not diverged_clients(fed, fine).any()
    assert diverged_clients(fed, 11 * torch.maximum(start, start.mean())).all()
    assert diverged_clients(fed, torch.full((fed.n,), torch.nan)).all()


def test_a_bare_module_is_a_model_and_anything_else_is_named() -> None:
    xs, ys = [torch.randn(20, 3) for _ in range(2)], [torch.randn(20) for _ in range(2)]
    fed = coterie.Federation.from_arrays(xs, ys, torch.nn.Linear(3, 1))  # type: ignore[arg-type]
    assert fed.d == 4 and coterie.fit(fed, "fedavg", 2).personal.shape == (2, 4)
    with pytest.raises(SettingError, match="model is int; give one of"):
        coterie.Federation.from_arrays(xs, ys, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda", "gpu", "cuda:7"])
def test_a_device_that_is_not_here_is_named(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SettingError, match=f"device '{device}'"):
        coterie.Federation.from_table("heart_disease", "hospital", "sick", device=device)
    assert coterie.Federation.from_table("heart_disease", "hospital", "sick", device="auto").n == 4


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
    privacy = coterie.Privacy(epsilon=4, delta=1e-5)
    rare = {"checkpoint_every": 1000}  # by time, a busy machine would write one, and then the folder stays
    with pytest.raises(SettingError, match="more than once in a round"):
        coterie.fit(fed, "fedproto", rounds=2, out=tmp_path / "run", privacy=privacy, **rare)
    assert not list(tmp_path.iterdir())


def test_a_run_that_diverges_when_it_is_trained_again_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise Diverged("it diverged on more rows")

    fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
    monkeypatch.setattr("coterie.train.fit._again", fails)
    with pytest.raises(Diverged, match="on more rows"):
        coterie.fit(fed, "fedavg", rounds=2, out=tmp_path / "run", refit="validation")
    assert not list(tmp_path.iterdir())
