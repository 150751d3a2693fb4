"""A client in other units, with reversed labels or outliers: noticed, named, and no harm to the others."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import coterie
from benchmarks import honest_tables
from coterie.data import odd_clients, tables
from coterie.data.client_sums import FAR, FEW, ClientSums
from coterie.data.preprocess import Preprocessor, local_statistics
from coterie.data.reversed_labels import find_reversed
from coterie.data.standing_out import chance_of
from coterie.train.export import export
from coterie.train.exported_model import ExportedModel

CLIENTS = 12
ODD = "s00"
SCRIPTED = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def world(seed: int, rows: int, task: str, clusters: bool = False) -> pl.DataFrame:
    draw = np.random.default_rng(seed)
    label = np.repeat([0, 1], CLIENTS // 2)
    centre = np.array([[3.0, 0, 0], [-3, 0, 0]] if clusters else [[2.0, -1, 0.5]] * 2)[label]
    truth = centre + 0.2 * np.random.default_rng(7).normal(size=(CLIENTS, 3))
    owner = np.repeat(np.arange(CLIENTS), rows)
    x = draw.normal(size=(len(owner), 3))
    score = (x * truth[owner]).sum(1)
    y = score + draw.normal(size=len(owner)) + 2
    if task == "binary":
        y = (draw.random(len(owner)) < 1 / (1 + np.exp(-score))).astype(int)
    return pl.DataFrame(
        {
            "site": [f"s{k:02}" for k in owner],
            "group": [f"g{label[k]}" for k in owner],
            "a": 5 + x[:, 0],
            "b": 2 * x[:, 1],
            "c": 1 + x[:, 2] / 2,
            "y": y,
        }
    )


def spoilt(frame: pl.DataFrame, how: str) -> pl.DataFrame:
    mine = pl.col("site") == ODD
    column, change = {
        "target in other units": ("y", pl.col("y") * 1000),
        "column in other units": ("a", pl.col("a") * 1000),
        "column in ounces": ("a", pl.col("a") * 28.35),
        "column in kelvin": ("a", pl.col("a") + 273),
        "column in fahrenheit": ("a", pl.col("a") * 1.8 + 32),
        "column in pounds": ("a", pl.col("a") * 2.2),
        "reversed target": ("y", -pl.col("y")),
        "reversed classes": ("y", 1 - pl.col("y")),
        "outliers": ("b", pl.when(pl.int_range(pl.len()) % 12 == 5).then(1e5).otherwise(pl.col("b"))),
        "outliers in a third": (
            "b",
            pl.when(pl.int_range(pl.len()) % 3 == 1).then(1e3).otherwise(pl.col("b")),
        ),
        "target outliers": ("y", pl.when(pl.int_range(pl.len()) % 12 == 5).then(1e4).otherwise(pl.col("y"))),
    }[how]
    return frame.with_columns(pl.when(mine).then(change).otherwise(pl.col(column)).alias(column))


CASES = [
    ("regression", "target in other units", "y"),
    ("regression", "column in other units", "a"),
    ("regression", "column in ounces", "a"),
    ("regression", "column in kelvin", "a"),
    ("regression", "column in fahrenheit", "a"),
    ("regression", "column in pounds", "a"),
    ("regression", "reversed target", "y"),
    ("regression", "outliers", "b"),
    ("regression", "outliers in a third", "b"),
    ("regression", "target outliers", "y"),
    ("binary", "column in other units", "a"),
    ("binary", "outliers", "b"),
    ("binary", "reversed classes", "y"),
]


def federation(frame: pl.DataFrame, clusters: bool = False) -> coterie.Federation:
    options: dict[str, Any] = {"cluster": "group"} if clusters else {"drop": ["group"]}
    return coterie.Federation.from_table(frame, "site", "y", **options)


def error_of_others(fed: coterie.Federation, method: str, rounds: int, fresh: pl.DataFrame) -> float:
    fresh = fresh.filter(pl.col("site") != ODD)
    found = coterie.fit(fed, method, rounds=rounds, evaluate_every=0).predict(fresh)
    target = fresh["y"].to_numpy()
    if fed.model.task == "regression":
        return float(np.sqrt(np.mean((found["prediction"].to_numpy() - target) ** 2)))
    likely = found["probability_1"].to_numpy().clip(1e-9, 1 - 1e-9)
    return float(-np.mean(np.log(np.where(target == 1, likely, 1 - likely))))


@pytest.mark.parametrize(("task", "how", "column"), CASES)
def test_noticed_named_and_harmless(task: str, how: str, column: str) -> None:
    frame, fresh = world(1, 40, task), world(2, 100, task)
    clean, odd = federation(frame), federation(spoilt(frame, how))
    assert not clean.table.preprocessor.clients
    assert list(odd.table.preprocessor.clients) == [ODD]
    (said,) = (warning for warning in odd.table.warnings if f"Client {ODD!r}" in warning)
    assert f"column {column!r}" in said and "Check" in said
    for method in ("local", "fedavg", "fine-tuned", "ditto"):
        before, after = (error_of_others(fed, method, 60, fresh) for fed in (clean, odd))
        assert after == pytest.approx(before, rel=0.05), method


@pytest.mark.parametrize("column", ["b", "y"])
@pytest.mark.parametrize(
    ("rows", "share", "size"), [(12, 0.3, 25), (40, 0.1, 25), (40, 0.3, 25), (40, 0.3, 8)]
)
def test_outliers_are_noticed_in_few_rows_and_harmless(
    rows: int, share: float, size: float, column: str
) -> None:
    frame, fresh = world(11, rows, "regression"), world(12, 100, "regression")
    values = frame[column].to_numpy().copy()
    values[: round(share * rows)] = values.mean() + size * values.std()
    clean, odd = federation(frame), federation(frame.with_columns(pl.Series(column, values)))
    assert list(odd.table.preprocessor.clients) == [ODD]
    assert any("far from all others" in said and repr(column) in said for said in odd.table.warnings)
    for method in ("fedavg", "ditto"):
        before, after = (error_of_others(fed, method, 60, fresh) for fed in (clean, odd))
        assert after == pytest.approx(before, rel=0.05), method


@pytest.mark.parametrize("column", ["a", "y"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_client_of_few_rows_in_other_units_is_noticed_and_harmless(rows: int, column: str) -> None:
    """Its own spread says nothing; its numbers are further away than any row of the others."""
    frame, fresh = world(21, 40, "regression"), world(22, 100, "regression")
    few = pl.concat([frame[:rows], frame.filter(pl.col("site") != ODD)])
    larger = pl.when(pl.col("site") == ODD).then(1000 * pl.col(column)).otherwise(pl.col(column))
    clean, odd = federation(few), federation(few.with_columns(larger.alias(column)))
    assert not clean.table.preprocessor.clients and list(odd.table.preprocessor.clients) == [ODD]
    for method in ("fedavg", "ditto"):
        before, after = (error_of_others(fed, method, 60, fresh) for fed in (clean, odd))
        assert after == pytest.approx(before, rel=0.05), method


def test_a_target_of_the_other_sign_is_told_by_its_mean() -> None:
    """Two rows do not show which way columns go; their sign does."""
    frame = world(23, 40, "regression").with_columns(pl.col("y") + 50)
    few = pl.concat([frame[:3].with_columns(-pl.col("y")), frame.filter(pl.col("site") != ODD)])
    fed = federation(few)
    (said,) = (warning for warning in fed.table.warnings if f"Client {ODD!r}" in warning)
    assert "other sign" in said
    found = coterie.fit(fed, "fedavg", rounds=60).predict(few[:3])["prediction"].to_numpy()
    np.testing.assert_allclose(found, few[:3]["y"].to_numpy(), atol=6)


@pytest.mark.quick("counts")
@pytest.mark.parametrize("shape", honest_tables.SHAPES)
def test_innocent_clients_are_not_named(shape: str) -> None:
    """Heavy tails, counts, zeros; clients honestly differ. Rules of gaps alone named one in a fifth of these."""
    named = 0
    for seed in range(50_000, 50_040):
        table, task = honest_tables.honest(seed, shape)
        frame = tables.read(table)
        spec = tables.check(frame, "site", "y", task="regression" if task == "regression" else None)
        named += bool(odd_clients.find(local_statistics(frame, spec), spec).clients)
    assert named <= 4


def test_a_value_beyond_all_tails_is_noticed_in_heavy_ones() -> None:
    """One value at 1000 standard deviations, where all clients have lognormal ones."""
    for seed in range(10):
        draw = np.random.default_rng(seed)
        x = draw.lognormal(size=216)
        x[4] = 1000 * x.std()
        frame = tables.read(
            {"site": np.repeat([f"s{k:02}" for k in range(12)], 18), "x": x, "y": draw.normal(size=216)}
        )
        spec = tables.check(frame, "site", "y")
        (found,) = odd_clients.find(local_statistics(frame, spec), spec).clients
        assert found.client == ODD and found.kind == "outliers"


def test_the_furthest_of_many_like_clients_is_not_odd() -> None:
    """The chance counts for all clients: it is below 1 % in hardly 1 % of draws, and one far away is seen."""
    draw, odd = np.random.default_rng(0), 0
    for count in (5, 12, 40) * 200:
        rows = draw.integers(4, 100, count)
        error = 1 / np.sqrt(rows)
        values = draw.uniform(0, 2) * draw.normal(size=count) + error * draw.standard_t(rows - 1)
        odd += bool((chance_of(values, error, rows) < 0.01).any())
    assert odd <= 12
    assert chance_of(np.append(draw.normal(size=11), 40.0), np.full(12, 0.3), np.full(12, 10))[-1] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize(("task", "how", "column"), CASES)
def test_harmless_to_all_methods(task: str, how: str, column: str, clusters: bool) -> None:
    methods = {"fedavg": 60, "ditto": 60, "hierarchical": 6, "async-l2gd": 200}
    frame, fresh = world(3, 40, task, clusters), world(4, 100, task, clusters)
    clean, odd = federation(frame, True), federation(spoilt(frame, how), True)
    for method, rounds in methods.items():
        before, after = (error_of_others(fed, method, rounds, fresh) for fed in (clean, odd))
        assert after == pytest.approx(before, rel=0.05), method


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "how"),
    [
        ("regression", "target in other units"),
        ("regression", "outliers"),
        ("regression", "target outliers"),
        ("binary", "reversed classes"),
    ],
)
def test_harmless_to_auto(task: str, how: str) -> None:
    frame, fresh = world(5, 40, task), world(6, 100, task)
    before, after = (
        error_of_others(federation(one), "auto", 30, fresh) for one in (frame, spoilt(frame, how))
    )
    assert after <= 1.05 * before


@SCRIPTED
def test_predictions_and_exports_are_in_the_clients_own_units(tmp_path: Path) -> None:
    frame = spoilt(world(5, 60, "regression"), "target in other units")
    run = coterie.fit(federation(frame), "local", rounds=60, out=tmp_path / "run")
    mine = frame.filter(pl.col("site") == ODD)
    found = run.predict(mine)["prediction"].to_numpy()
    assert np.corrcoef(found, mine["y"].to_numpy())[0, 1] > 0.9 and found.std() > 500
    module = torch.jit.load(str(export(tmp_path / "run", ODD, "torchscript")))
    given = {name: torch.from_numpy(mine[name].to_numpy().copy()) for name in "abc"}
    np.testing.assert_allclose(module(given, {}).numpy(), found, rtol=1e-9)

    flipped = spoilt(world(5, 60, "binary"), "reversed classes")
    run = coterie.fit(federation(flipped), "fedavg", rounds=60, out=tmp_path / "flipped")
    mine = flipped.filter(pl.col("site") == ODD)
    found = run.predict(mine)
    assert (found["prediction"] == mine["y"].cast(pl.String)).mean() > 0.75
    assert ((found["probability_1"] > 0.5) == (found["prediction"] == "1")).all()
    one = ExportedModel.load(tmp_path / "flipped", ODD)
    assert one.classes == ["1", "0"]
    assert ExportedModel.load(tmp_path / "flipped", "s01").classes == ["0", "1"]


@SCRIPTED
def test_outliers_count_as_the_mean_in_every_export(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    frame = spoilt(world(6, 60, "regression"), "outliers")
    run = coterie.fit(federation(frame), "local", rounds=20, out=tmp_path / "run")
    mine = frame.filter(pl.col("site") == ODD)
    assert mine["b"].max() == 1e5
    found = run.predict(mine)["prediction"].to_numpy()
    assert np.abs(found).max() < 50
    numbers = {name: mine[name].to_numpy().copy() for name in "abc"}
    module = torch.jit.load(str(export(tmp_path / "run", ODD, "torchscript")))
    scripted = module({name: torch.from_numpy(values) for name, values in numbers.items()}, {})
    np.testing.assert_allclose(scripted.numpy(), found, rtol=1e-9)
    path = export(tmp_path / "run", ODD, "onnx")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.run(["prediction"], {name: values.reshape(-1, 1) for name, values in numbers.items()})
    np.testing.assert_allclose(given, found, rtol=1e-9)


def test_the_encoding_survives_json() -> None:
    fitted = federation(spoilt(world(1, 40, "regression"), "outliers")).table.preprocessor
    again = Preprocessor.from_json(fitted.to_json())
    assert again == fitted and again.clients[ODD].scales[0].limit > 0
    fitted = federation(spoilt(world(1, 40, "regression"), "target outliers")).table.preprocessor
    again = Preprocessor.from_json(fitted.to_json())
    assert again == fitted and again.clients[ODD].limit > 0


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_odd_where_clients_are_just_different(seed: int) -> None:
    draw = np.random.default_rng(seed)
    owner = np.repeat(np.arange(10), draw.integers(5, 60, 10))
    size = len(owner)
    frame = tables.read(
        {
            "site": [f"s{k}" for k in owner],
            "shifted": draw.normal(size=size) + draw.normal(0, 3, 10)[owner],
            "spread": draw.normal(size=size) * draw.lognormal(0, 0.7, 10)[owner],
            "tail": draw.lognormal(0, 2, size),
            "rare": (draw.random(size) < 0.03).astype(float) * draw.integers(1, 9, size),
            "y": draw.normal(size=size) + draw.normal(size=size) * draw.normal(0, 2, 10)[owner],
        }
    )
    spec = tables.check(frame, "site", "y")
    assert not Preprocessor.from_statistics(spec, local_statistics(frame, spec)).clients


def shortest(values: np.ndarray, low: float, high: float) -> float:
    """Length of an interval; infinite if it has not more than half of the values."""
    inside = (values >= low) & (values <= high)
    return float(high - low) if inside.sum() > len(values) / 2 else np.inf


def test_sums_of_each_client_by_brute_force() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=60), draw.normal(size=60)
    x[7], x[20] = 1e6, np.nan
    owner = np.repeat(["a", "b", "c"], [25, 30, 5])
    values = [pl.Series(x, nan_to_null=True), pl.Series(y)]
    found = ClientSums.of(pl.Series(owner), values)
    for k, name in enumerate("abc"):
        mine = (owner == name) & ~np.isnan(x)
        size = int(mine.sum())
        low, high = min(combinations(sorted(x[mine]), 2), key=lambda pair: shortest(x[mine], *pair))
        far = FAR * (1 + FEW / size) * (high - low) / 2
        inner = mine & (np.abs(np.nan_to_num(x) - (low + high) / 2) <= far)
        assert not inner[7]
        gap = x[inner] - x[inner].mean()
        expected = [
            *(mine.sum(), x[mine].mean(), ((x[mine] - x[mine].mean()) ** 2).sum(), (mine & ~inner).sum()),
            *(x[inner].mean(), (gap**2).sum(), (gap * (y[inner] - y[inner].mean())).sum()),
        ]
        np.testing.assert_allclose(found.sums[k, 0], expected, rtol=1e-9)


def random_slopes(seed: int, spread: float, task: str, flip: bool) -> np.ndarray:
    """Sums of 20 clients whose slopes vary; the first may have exchanged labels."""
    draw = np.random.default_rng(seed)
    slopes = [1.0, -0.5, 0.25] + spread * draw.normal(size=(20, 3))
    owner = np.repeat(np.arange(20), 60)
    x = draw.normal(size=(len(owner), 3))
    score = (x * slopes[owner]).sum(1)
    y = score + draw.normal(size=len(owner))
    if task == "binary":
        y = (draw.random(len(owner)) < 1 / (1 + np.exp(-2 * score))).astype(float)
    if flip:
        y = np.where(owner == 0, (1.0 if task == "binary" else 0.0) - y, y)
    columns = [pl.Series(column) for column in (*x.T, y)]
    return ClientSums.of(pl.Series([str(k) for k in owner]), columns).sums


@pytest.mark.parametrize("task", ["regression", "binary"])
def test_slopes_that_differ_are_not_exchanged_labels(task: str) -> None:
    """Clients whose slopes are opposite by nature stay as they are; exchanged labels among like clients are found."""
    binary = task == "binary"
    turned = [len(find_reversed(random_slopes(k, 0.6, task, False), binary).turned) for k in range(60)]
    assert np.mean(np.array(turned) > 0) <= 0.05
    found = [list(find_reversed(random_slopes(k, 0.1, task, True), binary).turned) == [0] for k in range(60)]
    assert np.mean(found) > 0.85


@pytest.mark.parametrize("unit", [1e-120, 1e120])
def test_exchanged_signs_are_found_in_any_unit_of_the_target(unit: float) -> None:
    sums = random_slopes(0, 0.1, "regression", True)
    sums[:, :-1, 6] *= unit
    sums[:, -1, 2] *= unit**2
    assert find_reversed(sums, False).turned == [0]


def test_one_slope_of_three_is_not_everything() -> None:
    """A client that reverses its strongest slope alone is named, and not turned round."""
    draw = np.random.default_rng(0)
    owner = np.repeat(np.arange(12), 80)
    slopes = np.tile([1.0, -0.7, 0.7], (12, 1))
    slopes[0, 0] = -2.5
    x = draw.normal(size=(len(owner), 3))
    y = (x * slopes[owner]).sum(1) + 0.5 * draw.normal(size=len(owner))
    sums = ClientSums.of(pl.Series([str(k) for k in owner]), [pl.Series(c) for c in (*x.T, y)]).sums
    found = find_reversed(sums, False)
    assert list(found.turned) == [] and list(found.opposite) == [0]
