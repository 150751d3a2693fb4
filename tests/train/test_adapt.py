"""Newcomers: their models from the shared state, closed forms, real hospitals held out, and the command."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars
import pytest
import torch
from torch import Tensor

import coterie
from coterie._core.errors import DataError, RunError
from coterie.algorithms import all_algorithms, make
from coterie.algorithms.cobo import PRINTED
from coterie.conformance import federation
from coterie.data import bundled, tables
from coterie.engine.state import State
from coterie.train.adapt import _step_size, _tuned, adapt, collaborators, load_state, personal_models
from coterie.train.predict import Predictor

if TYPE_CHECKING:
    from tests.conftest import Command

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def clinics(count: int, rows: int, seed: int, first: int = 0) -> polars.DataFrame:
    """Clinics of three kinds, whose linear rules differ."""
    rules = np.random.default_rng(5).normal(0, 2, (3, 4))
    draw = np.random.default_rng(seed)
    parts = []
    for k in range(first, first + count):
        x = draw.normal(size=(rows, 4))
        y = x @ rules[k % 3] + 0.3 * draw.normal(size=rows)
        columns = {f"x{j}": x[:, j] for j in range(4)}
        parts.append(
            polars.DataFrame({"clinic": [f"c{k}"] * rows, "kind": [f"k{k % 3}"] * rows, **columns, "y": y})
        )
    return polars.concat(parts)


def heart(hospital: str) -> tuple[polars.DataFrame, polars.DataFrame]:
    """The other hospitals, and the one held out."""
    table = tables.read(bundled.path("heart_disease"))
    own = table["hospital"] == hospital
    return table.filter(~own), table.filter(own)


def log_loss(known: Predictor, rows: polars.DataFrame) -> float:
    likely = known(rows)["probability_1"].to_numpy().clip(1e-9, 1 - 1e-9)
    return float(-np.log(np.where(rows["sick"].to_numpy() == 1, likely, 1 - likely)).mean())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Nine clinics, trained by several methods."""
    folder = tmp_path_factory.mktemp("trained")
    fed = coterie.Federation.from_table(clinics(9, 60, seed=1).drop("kind"), "clinic", "y")
    methods: dict[str, Any] = {
        "fedavg": make("fedavg"),
        "fine-tuned": make("fine-tuned", batch=0, tuning_steps=7),
        "ditto": make("ditto", batch=0, lam=0.7, lr=0.3),
        "ifca": make("ifca", clusters=3, restarts=5, trial=5),
        "cobo": make("cobo", **{**PRINTED, "gamma": 0.1, "sampling": "all"}),
        "pfl-tc": make("pfl-tc", clusters=3),
    }
    for name, method in methods.items():
        coterie.fit(fed, method, rounds=60, out=folder / name)
    return {name: folder / name for name in methods}


def encoded(run: Path, frame: polars.DataFrame) -> tuple[Tensor, Tensor]:
    """Features with a last column of ones, and standardised targets."""
    known = Predictor.load(run)
    x = known.preprocessor.encode(frame)
    return torch.cat([x, torch.ones(len(x), 1)], 1), known.preprocessor.encode_target(frame)


def whole(run: Path, frame: polars.DataFrame) -> coterie.Federation:
    """The newcomer with all its rows in training."""
    known = Predictor.load(run)
    x, y = known.preprocessor.encode(frame), known.preprocessor.encode_target(frame)
    return coterie.Federation.from_arrays([x], [y], known.model, dtype=torch.float64)


def ridge_gradient(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    penalty = torch.full_like(w, 1e-3)
    penalty[-1] = 0
    return x.T @ (x @ w - y) / len(x) + penalty * w


@pytest.mark.slow
def test_fine_tuning_starts_from_the_shared_model(trained: dict[str, Path]) -> None:
    run, new = trained["fine-tuned"], clinics(1, 20, seed=3, first=9)
    state, fed = load_state(run), whole(run, new)
    method = make("fine-tuned", batch=0, tuning_steps=7)
    models, _ = personal_models(method, fed, state, torch.zeros(9, 5), torch.zeros(5), 60)
    x, y = encoded(run, new)
    w = state.x
    for _ in range(7):
        w = w - 0.05 * ridge_gradient(x, y, w)
    torch.testing.assert_close(models[0], w, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_dittos_newcomer_ends_at_its_own_minimum(trained: dict[str, Path]) -> None:
    run, new = trained["ditto"], clinics(1, 20, seed=3, first=9)
    state, fed = load_state(run), whole(run, new)
    method = make("ditto", batch=0, lam=0.7, lr=0.3)
    models, how = personal_models(method, fed, state, torch.zeros(9, 5), torch.zeros(5), 200)
    x, y = encoded(run, new)
    slope = ridge_gradient(x, y, models[0]) + 0.7 * (models[0] - state.x)
    assert float(slope.abs().max()) < 1e-8 and how == ["as a client of ditto"]


@pytest.mark.parametrize("method", ["ifca", "pfl-tc"])
def test_the_nearest_cluster(trained: dict[str, Path], method: str) -> None:
    found = adapt(trained[method], clinics(3, 15, seed=4, first=9).drop("kind"))
    mates = found.predictor.personal[:9]
    for name, model in zip(
        found.names, found.models, strict=True
    ):  # c9 belongs to c0, c3, c6; c10 to c1, ...
        distance = torch.linalg.vector_norm(mates - model, dim=1)
        assert int(distance.argmin()) % 3 == int(name[1:]) % 3
    assert "of 3" in found.how[0]
    assert np.mean(found.scores["adapted"]) < 0.5 * np.mean(found.scores["common"])


def test_collaborators_are_those_of_the_own_kind(trained: dict[str, Path]) -> None:
    run = trained["cobo"]
    found = adapt(run, clinics(3, 15, seed=4, first=9).drop("kind"))
    assert np.mean(found.scores["adapted"]) < 0.5 * np.mean(found.scores["common"])
    others, common = found.predictor.personal[:9], found.predictor.common
    for k in range(3):
        new = clinics(3, 15, seed=4, first=9).filter(polars.col("clinic") == f"c{9 + k}")
        weights = collaborators(whole(run, new), common, others)[0]
        assert set(weights.topk(3).indices.tolist()) == {k, k + 3, k + 6}
        assert float(weights[[j for j in range(9) if j % 3 != k]].max()) < 0.5 * float(weights[k])


def test_a_shared_model_is_tuned_only_as_far_as_it_helps(trained: dict[str, Path]) -> None:
    found = adapt(trained["fedavg"], clinics(2, 50, seed=6, first=9).drop("kind"))
    assert all("shared model" in how for how in found.how)
    assert np.mean(found.scores["adapted"]) < np.mean(found.scores["common"])


def test_few_validation_rows_do_not_choose_how_long_to_tune(trained: dict[str, Path]) -> None:
    """Clients with eight rows have two to validate on, which is chance; those with sixty have twelve."""
    few = adapt(trained["fedavg"], clinics(6, 8, seed=7, first=9).drop("kind"))
    assert set(few.how) == {"shared model, 20 steps at home"}
    many = adapt(trained["fedavg"], clinics(6, 60, seed=7, first=9).drop("kind"))
    assert "shared model, 20 steps at home" not in many.how


def test_steps_at_home_are_those_of_the_method() -> None:
    assert _step_size(make("fine-tuned", lr=0.1, tuning_lr=0.02), State()) == 0.02
    assert _step_size(make("fedavg", lr=0.1), State(lr=0.3)) == 0.1
    assert _step_size(make("cobo"), State(lr=0.3)) == 0.3


def test_the_others_stay_as_they_were(trained: dict[str, Path]) -> None:
    before = {file: file.read_bytes() for file in trained["ditto"].rglob("*") if file.is_file()}
    found = adapt(trained["ditto"], clinics(2, 20, seed=3, first=9).drop("kind"))
    assert torch.equal(found.predictor.personal[:9], Predictor.load(trained["ditto"]).personal)
    assert found.predictor.clients[9:] == ["c10", "c9"] or found.predictor.clients[9:] == ["c9", "c10"]
    assert {file: file.read_bytes() for file in trained["ditto"].rglob("*") if file.is_file()} == before


@pytest.mark.quick("local", "ditto", "hierarchical", "trees")
@pytest.mark.parametrize("name", sorted(all_algorithms()))
def test_every_method_takes_newcomers(name: str, tmp_path: Path) -> None:
    table = clinics(6, 30, seed=1)
    method = make(name)
    fed = coterie.Federation.from_table(table, "clinic", "y", cluster="kind", model=method.trial_model(3))
    coterie.fit(fed, method, rounds=3, out=tmp_path / "run")
    found = adapt(tmp_path / "run", clinics(2, 12, seed=2, first=6))
    assert torch.isfinite(found.models).all() and found.models.shape == (2, fed.d)
    assert len(found.how) == 2 and found.frame().height == 2


@dataclass(frozen=True)
class WithARule(type(make("fedavg"))):  # type: ignore[misc]
    """A method that says itself what newcomers get (test, 2026)."""

    def adapt(self, fed: coterie.Federation, s: State, personal: Tensor, rounds: int) -> Tensor:
        return s.x.expand(fed.n, -1) + 1


def test_a_method_may_have_a_rule_of_its_own(trained: dict[str, Path]) -> None:
    fed = whole(trained["fedavg"], clinics(1, 10, seed=2, first=9))
    models, _ = personal_models(
        WithARule(), fed, State(x=torch.zeros(5)), torch.zeros(9, 5), torch.zeros(5), 1
    )
    assert torch.equal(models, torch.ones(1, 5))


@pytest.mark.parametrize("odd", [b"\x00\xff", [1, 2], {"a": 1}])
def test_clients_named_by_bytes_or_lists_are_refused(trained: dict[str, Path], odd: Any) -> None:
    new = clinics(1, 20, seed=3, first=9).with_columns(polars.Series("clinic", [odd] * 20))
    for use in (adapt, lambda run, table: Predictor.load(run)(table)):
        with pytest.raises(
            DataError, match=r"client column 'clinic' holds .*not plain values\. Write it as text"
        ):
            use(trained["fedavg"], new)


def test_a_newcomer_has_a_name_in_every_row(trained: dict[str, Path]) -> None:
    new = clinics(1, 20, seed=3, first=9).with_columns(polars.Series("clinic", [None, *["c9"] * 19]))
    with pytest.raises(DataError, match="client column 'clinic' has 1 missing"):
        adapt(trained["fedavg"], new)


LONGER = ("fedavg", "fine-tuned", "cobo", "hierarchical")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["ditto", *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER)]
)
def test_hospitals_held_out(method: str, tmp_path: Path) -> None:
    """A hospital with 12 training rows joins the three others: better served than by the common model or alone."""
    losses: dict[str, list[float]] = {"adapted": [], "common": [], "alone": []}
    for hospital in HOSPITALS:
        others, own = heart(hospital)
        fed = coterie.Federation.from_table(others, "hospital", "sick")
        settings = {"grouping": "one"} if method == "hierarchical" else {}
        coterie.fit(fed, make(method, **settings), rounds=40, out=tmp_path / hospital)
        for seed in range(6):  # 12 rows say little: two draws decide nothing
            mixed = own.sample(own.height, shuffle=True, seed=seed)
            found = adapt(tmp_path / hospital, mixed[:20])
            assert found.names == [hospital] and found.rows["train"] == [12]
            known, rest = found.predictor, mixed[20:]
            losses["adapted"].append(log_loss(known, rest))
            losses["common"].append(log_loss(replace(known, clients=[*known.clients[:-1], "other"]), rest))
            alone = replace(known, personal=torch.cat([known.personal[:-1], found.alone]))
            losses["alone"].append(log_loss(alone, rest))
    mean = {name: float(np.mean(values)) for name, values in losses.items()}
    assert mean["adapted"] < min(mean["common"], mean["alone"]), mean


class TestCommand:
    def test_old_and_new_clients_are_served(
        self, trained: dict[str, Path], tmp_path: Path, command: Command
    ) -> None:
        new = tmp_path / "new.csv"
        clinics(1, 25, seed=3, first=9).drop("kind").write_csv(new)
        out = tmp_path / "with_new"
        done = command("adapt", trained["ditto"], new, "--out", out, "--json", tmp_path / "new.json")
        assert done.code == 0, done.err
        assert "adapted" in done.out and "alone" in done.out
        (line,) = json.loads((tmp_path / "new.json").read_text())
        assert line["client"] == "c9" and line["training_rows"] == 15
        both = tmp_path / "both.csv"
        clinics(10, 3, seed=8).drop("kind").write_csv(both)
        for folder, warned in ((trained["ditto"], 3), (out, 0)):
            done = command("predict", folder, both, "--out", tmp_path / f"{warned}.csv")
            assert done.code == 0
            assert polars.read_csv(tmp_path / f"{warned}.csv")["warning"].is_not_null().sum() == warned
        before, after = (
            polars.read_csv(tmp_path / f"{warned}.csv").filter(polars.col("clinic") != "c9")
            for warned in (3, 0)
        )
        assert before["prediction"].to_list() == after["prediction"].to_list()
        assert command("export", out, "--client", "c9", "--to", "csv").code == 0

    def test_without_a_client_column_the_file_names_the_client(
        self, trained: dict[str, Path], tmp_path: Path, command: Command
    ) -> None:
        new = tmp_path / "hill clinic.csv"
        clinics(1, 25, seed=3, first=9).drop("kind", "clinic").write_csv(new)
        done = command("adapt", trained["fedavg"], new, "--out", tmp_path / "out")
        assert done.code == 0 and "hill clinic" in done.out
        named = adapt(trained["fedavg"], new, client="Hill")
        assert named.names == ["Hill"]

    def test_what_it_refuses(self, trained: dict[str, Path], tmp_path: Path, command: Command) -> None:
        with pytest.raises(DataError, match="'c3' was in training"):
            adapt(trained["ditto"], clinics(1, 10, seed=3, first=3))
        with pytest.raises(DataError, match="column 'y' is missing"):
            adapt(trained["ditto"], clinics(1, 10, seed=3, first=9).drop("y"))
        out = adapt(trained["ditto"], clinics(1, 10, seed=3, first=9)).save(
            tmp_path / "out", trained["ditto"]
        )
        with pytest.raises(RunError, match="adapted models"):
            adapt(out, clinics(1, 10, seed=3, first=10))
        for name in ("resume", "report"):
            done = command(name, out)
            assert done.code == 2 and "adapted models" in done.err
        done = command("adapt", trained["ditto"], tmp_path / "none.csv", "--out", out)
        assert done.code == 2 and "exists already" in done.err


@pytest.mark.parametrize("lr", [0.05, 50.0])
def test_steps_at_home_never_raise_the_loss_of_a_newcomer(lr: float) -> None:
    """A step size that suited the run's clients may be far too large for rows in other units."""
    fed = federation((12, 20, 9), split=(0.8, 0.0, 0.2))
    start = fed.initial_model().expand(fed.n, -1)
    tuned, _ = _tuned(fed, start, lr)
    before, after = (fed.score(models, "train")["loss"] for models in (start, tuned))
    assert (after < before).all() and torch.isfinite(tuned).all()
