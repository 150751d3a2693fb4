"""Metrics against scikit-learn and plain numpy, per client and pooled, for stacks that are padded."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn import metrics as reference
from torch import Tensor

import coterie
from coterie import models
from coterie._core.errors import SettingError
from coterie.deploy.loopback import LoopbackRuntime
from coterie.engine.federation import Federation
from coterie.metrics import Metric, ScoredRows, find, names, quantile_loss, register
from coterie.models.metrics import TASKS, client_sums, main_metric, registry, resolve
from coterie.models.metrics.classification import AUC_BINS

Array = NDArray[np.float64]
SIZES = (1, 7, 40, 3, 0, 120, 16)
C = 4

# Rows of clients of different sizes


def draw(task: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scores [count, outputs] and targets [count] that have something to do with each other; some scores are equal."""
    generator = torch.Generator().manual_seed(1000 * TASKS.index(task) + seed)
    outputs = C if task == "multiclass" else 1
    scores = 2 * torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    if task == "regression":
        return scores, scores[:, 0] + torch.randn(count, generator=generator, dtype=torch.float64) + 3
    scores = (2 * scores).round() / 2
    likely = torch.softmax(torch.cat([scores, 0 * scores], 1) if outputs == 1 else scores, -1)
    targets = torch.multinomial(likely, 1, generator=generator).squeeze(1)
    return scores, targets.double() if outputs > 1 else 1.0 - targets


def clients(task: str) -> list[tuple[Tensor, Tensor]]:
    return [draw(task, size, k) for k, size in enumerate(SIZES)]


def stacked(task: str, rows: list[tuple[Tensor, Tensor]]) -> ScoredRows:
    """The clients padded to the largest; padding holds wild numbers that must not count."""
    most = max(len(y) for _, y in rows)
    outputs = rows[0][0].shape[1]
    scores = torch.full((len(rows), most, outputs), 7.0, dtype=torch.float64)
    scores[..., 0] = -9.0
    targets, weight = torch.zeros(len(rows), most), torch.zeros(len(rows), most, dtype=torch.float64)
    targets = targets.double()
    for k, (z, y) in enumerate(rows):
        scores[k, : len(y)], targets[k, : len(y)] = z, y
        weight[k, : len(y)] = 1 / max(1, len(y))
    return ScoredRows(task, scores, targets, weight)


# What others say of the same rows


def probabilities(scores: Array) -> Array:
    if scores.shape[1] == 1:
        up = 1 / (1 + np.exp(-scores[:, 0]))
        return np.stack([1 - up, up], 1)
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def said(scores: Array) -> Array:
    return probabilities(scores).argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).astype(float)


def log_loss(z: Array, y: Array) -> float:
    p = probabilities(z)
    return float(reference.log_loss(y, p, labels=list(range(p.shape[1]))))


def auc(z: Array, y: Array) -> float:
    p = probabilities(z)
    which = [1] if p.shape[1] == 2 else range(p.shape[1])
    found = [reference.roc_auc_score(y == c, p[:, c]) for c in which if 0 < (y == c).sum() < len(y)]
    return float(np.mean(found)) if found else math.nan


def brier(z: Array, y: Array) -> float:
    p = probabilities(z)
    if p.shape[1] == 2:
        return float(reference.brier_score_loss(y, p[:, 1], pos_label=1))
    return float(((p - np.eye(p.shape[1])[y.astype(int)]) ** 2).sum(1).mean())


def ece(z: Array, y: Array) -> float:
    p, total = probabilities(z).max(1), 0.0
    right = said(z) == y
    for low in np.arange(15) / 15:
        here = (p > low) & (p <= low + 1 / 15)
        if here.any():
            total += here.mean() * abs(right[here].mean() - p[here].mean())
    return float(total)


def f1(z: Array, y: Array) -> float:
    average = "binary" if z.shape[1] == 1 else "macro"
    return float(reference.f1_score(y, said(z), average=average, zero_division=np.nan))


def balanced(z: Array, y: Array) -> float:
    return float(np.mean([(said(z)[y == c] == c).mean() for c in np.unique(y)]))


def r2(z: Array, y: Array) -> float:
    return math.nan if len(np.unique(y)) < 2 else float(reference.r2_score(y, z[:, 0]))


REFERENCES: dict[str, Callable[[Array, Array], float]] = {
    "accuracy": lambda z, y: float(reference.accuracy_score(y, said(z))),
    "balanced-accuracy": balanced,
    "auc": auc,
    "log-loss": log_loss,
    "brier": brier,
    "ece": ece,
    "f1": f1,
    "rmse": lambda z, y: float(reference.root_mean_squared_error(y, z[:, 0])),
    "mae": lambda z, y: float(reference.mean_absolute_error(y, z[:, 0])),
    "r2": r2,
    "quantile-0.5": lambda z, y: float(reference.mean_pinball_loss(y, z[:, 0], alpha=0.5)),
    "quantile-0.9": lambda z, y: float(reference.mean_pinball_loss(y, z[:, 0], alpha=0.9)),
    "loss": lambda z, y: log_loss(z, y) if (y == y.round()).all() else float(((z[:, 0] - y) ** 2).mean() / 2),
}
CASES = [
    (name, task)
    for name in REFERENCES
    for task in ("regression", "binary", "multiclass")
    if task in find(name).tasks
]


def near(expected: float, metric: Metric, rows: ScoredRows) -> object:
    """Equal to rounding; for AUC of scores that are not bins apart, within half the share of pairs in one bin."""
    far = rows.task == "binary" and bool((2 * rows.scores == (2 * rows.scores).round()).all())
    off = auc_bound(metric.sums(rows)) if metric.name == "auc" and not far else 0.0
    return pytest.approx(expected, rel=1e-9, abs=1e-12 + off, nan_ok=True)


def auc_bound(sums: Tensor) -> float:
    others, own = sums.reshape(-1, 2, AUC_BINS).unbind(-2)
    share = (others * own).sum(-1) / (2 * others.sum(-1) * own.sum(-1))
    return float(share.nanmean().nan_to_num())


def scored(task: str, z: Tensor, y: Tensor) -> ScoredRows:
    return ScoredRows(task, z, y, torch.full((len(y),), 1 / max(1, len(y)), dtype=torch.float64))


@pytest.mark.parametrize(("name", "task"), CASES)
def test_values_are_those_of_others_per_client_and_pooled(name: str, task: str) -> None:
    metric, rows = find(name), clients(task)
    sums = metric.sums(stacked(task, rows))
    values = metric.finish(sums)
    assert values.shape == (len(SIZES), 1) and values.dtype == torch.float64
    assert sums.shape[-1] == len(metric.no_rows(task, rows[0][0].shape[1]))
    for k, (z, y) in enumerate(rows):
        if len(y):
            expected = REFERENCES[name](z.numpy(), y.numpy())
            assert float(values[k]) == near(expected, metric, scored(task, z, y)), k
            assert metric.value(task, z, y) == pytest.approx(float(values[k]), rel=1e-12, nan_ok=True)
            assert math.isnan(expected) or metric.low <= expected <= metric.high
    z, y = (torch.cat(parts) for parts in zip(*rows, strict=True))
    pooled = metric.pooled(sums, torch.tensor(SIZES).unsqueeze(-1))
    assert float(pooled) == near(REFERENCES[name](z.numpy(), y.numpy()), metric, scored(task, z, y))


@pytest.mark.parametrize(("name", "task"), CASES)
def test_row_weights_count_rows(name: str, task: str) -> None:
    """A row of weight three is as good as three rows."""
    metric, (z, y) = find(name), draw(task, 30, 5)
    count = torch.arange(30) % 4
    many = torch.repeat_interleave(torch.arange(30), count)
    assert metric.value(task, z, y, count.double()) == pytest.approx(
        metric.value(task, z[many], y[many]), rel=1e-9
    )


@pytest.mark.parametrize("outputs", [1, C])
@pytest.mark.parametrize("shift", [0.0, -7.0])
def test_auc_is_within_its_bound_of_the_exact_one(outputs: int, shift: float) -> None:
    """Half the pairs that share a bin, for common and for rare classes; for many rows far less than that."""
    generator, task = torch.Generator().manual_seed(3), "binary" if outputs == 1 else "multiclass"
    metric = find("auc")
    for count, most in ((20, 0.02), (500, 1e-3), (50_000, 1e-4)):
        z = 1.5 * torch.randn(count, outputs, generator=generator, dtype=torch.float64)
        z[:, 0] += shift if outputs == 1 else 0.0
        y = (torch.sigmoid(z[:, 0] - shift) > torch.rand(count, generator=generator)).double()
        if outputs > 1:
            y = torch.multinomial(torch.softmax(z, 1), 1, generator=generator).squeeze(1).double()
        sums = metric.sums(scored(task, z, y))
        error = abs(float(metric.finish(sums)) - auc(z.numpy(), y.numpy()))
        assert error <= auc_bound(sums) + 1e-12 and error < most and auc_bound(sums) < 0.01


def test_auc_of_one_class_is_missing_and_ties_count_half() -> None:
    metric = find("auc")
    assert math.isnan(metric.value("binary", torch.randn(5, 1), torch.ones(5)))
    assert math.isnan(metric.value("multiclass", torch.randn(5, 3), torch.full((5,), 2.0)))
    assert metric.value("binary", torch.zeros(4, 1), torch.tensor([0.0, 1.0, 1.0, 0.0])) == 0.5
    two = torch.tensor([0.0, 1.0, 1.0])
    scores = torch.tensor([[1.0], [1.0], [2.0]])
    assert metric.value("binary", scores, two) == reference.roc_auc_score(two, scores[:, 0]) == 0.75
    # Two of the three classes occur: the mean is over those that can be told from others.
    some = metric.value("multiclass", torch.tensor([[2.0, 0, 1], [0, 1.0, 3]]), torch.tensor([0, 1]))
    assert some == 1.0


def test_extreme_probabilities_are_told_apart() -> None:
    """Equal parts of the probability would put all of these into one bin."""
    z = torch.linspace(-16, -1, 60, dtype=torch.float64).unsqueeze(1)
    y = (torch.arange(60) % 7 > 3).double()
    assert find("auc").value("binary", z, y) == pytest.approx(auc(z.numpy(), y.numpy()), abs=1e-12)


@pytest.mark.parametrize(
    ("name", "task"), [case for case in CASES if case[0] not in ("accuracy", "f1", "balanced-accuracy")]
)
def test_models_that_diverged_have_no_value(name: str, task: str) -> None:
    z, y = draw(task, 12, 1)
    z = z.clone()
    z[3] = torch.nan
    assert math.isnan(find(name).value(task, z, y))


def test_r2_of_equal_targets_is_missing_in_single_precision_too() -> None:
    metric = find("r2")
    for size in (1, 3, 7, 11, 49):
        y = torch.full((size,), 5.3)
        rows = ScoredRows("regression", torch.randn(size, 1), y, torch.full((size,), 1 / size))
        assert math.isnan(float(metric.finish(metric.sums(rows))))
    y = 1e4 + torch.randn(49, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = (y + 0.5).unsqueeze(1)
    rows = ScoredRows("regression", z, y, torch.full((49,), 1 / 49))
    assert float(metric.finish(metric.sums(rows))) == pytest.approx(r2(z.numpy(), y.numpy()), rel=1e-4)


def test_pooling_leaves_out_who_has_no_rows_or_no_answer() -> None:
    metric = find("mae")
    sums = torch.tensor([[1.0], [3.0], [torch.nan], [9.0]], dtype=torch.float64)
    assert float(metric.pooled(sums, torch.tensor([[2.0], [2.0], [5.0], [0.0]]))) == 2.0
    assert math.isnan(float(metric.pooled(sums, torch.zeros(4, 1))))


# Groups of different sizes, empty splits


def rows_of(fed: Federation, split: str) -> list[tuple[Tensor, Tensor]]:
    return [fed.runtime.splits[split].of(k) for k in range(fed.n)]


def federation(task: str, loop: bool = False, dtype: torch.dtype = torch.float64) -> Federation:
    """Clients from one row to 150, so that they are scored in several groups."""
    generator = torch.Generator().manual_seed(1)
    xs, ys = [], []
    for size in (1, 150, 9, 33, 2, 70):
        x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        z = x @ torch.randn(3, C if task == "multiclass" else 1, generator=generator, dtype=torch.float64)
        noise = torch.rand(size, generator=generator)
        y = z.argmax(1) if task == "multiclass" else (torch.sigmoid(z[:, 0]) > noise).long()
        xs.append(x.to(dtype))
        ys.append(z[:, 0].to(dtype) if task == "regression" else y)
    model = {
        "regression": models.linear(),
        "binary": models.logistic(),
        "multiclass": models.softmax(classes=C),
    }[task]
    return Federation.from_arrays(xs, ys, model, split=(0.5, 0.25, 0.25), loop=loop, dtype=dtype)


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass"])
def test_groups_of_clients_are_scored_as_clients_one_by_one(task: str) -> None:
    fed = federation(task)
    w = torch.randn(fed.n, fed.d, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    asked = [find(name) for name in names(task)]
    values = fed.score(w, "train", asked)
    pooled = fed.pooled(w, "train", asked)
    rows = [(fed.model.scores(w[k], x), y.double()) for k, (x, y) in enumerate(rows_of(fed, "train"))]
    together = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    assert len(list(fed.runtime.splits["train"].full(None))) > 2
    for metric in asked:
        for k, (z, y) in enumerate(rows):
            expected = REFERENCES[metric.name](z.numpy(), y.numpy())
            assert float(values[metric.name][k]) == near(expected, metric, scored(task, z, y))
        assert pooled[metric.name] == pytest.approx(metric.value(task, *together), rel=1e-9)


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass"])
@pytest.mark.parametrize("at", [None, torch.tensor([1, 2]), torch.tensor(1)])
def test_a_split_without_rows_has_sums_of_the_same_shape(task: str, at: Tensor | None) -> None:
    fed = federation(task)
    full, some = fed.runtime.splits["train"], fed.runtime.splits["test"]
    empty = type(full)(full.x[:0], full.y[:0], full.start * 0, full.size * 0)
    w = torch.zeros(fed.n, fed.d, dtype=torch.float64)
    w = w if at is None else w[at]
    asked = [find(name) for name in names(task)]
    nothing = client_sums(fed.model, w, empty, at, asked)
    for other in (full, some):
        for name, sums in client_sums(fed.model, w, other, at, asked).items():
            assert nothing[name].shape == sums.shape and nothing[name].dtype == sums.dtype
            assert bool((nothing[name] == 0).all())


def test_units_of_the_target_are_those_of_the_table(tmp_path: Path) -> None:
    """Errors are in the table's units; shares of variance are not."""
    generator = torch.Generator().manual_seed(0)
    lines = ["who,x,y"]
    for k in range(90):
        x = float(torch.randn((), generator=generator))
        lines.append(f"c{k % 3},{x},{1000 * x + 100 * float(torch.randn((), generator=generator))}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    fed = Federation.from_table(tmp_path / "t.csv", "who", "y")
    run = coterie.fit(fed, "fedavg", 5, metrics=["mae", "quantile-0.9", "r2"])
    scale = fed.table.target_scale
    assert scale > 500
    for k in range(fed.n):
        x, y = fed.runtime.splits["test"].of(k)
        error = scale * (fed.model.scores(run.personal[k], x)[:, 0] - y).double()
        assert float(run.score("test", "mae")[k]) == pytest.approx(float(error.abs().mean()), rel=1e-5)
        pinball = torch.maximum(-0.9 * error, 0.1 * error).mean()
        assert float(run.score("test", "quantile-0.9")[k]) == pytest.approx(float(pinball), rel=1e-5)
        expected = r2(fed.model.scores(run.personal[k], x).double().numpy(), y.double().numpy())
        assert float(run.score("test", "r2")[k]) == pytest.approx(expected, rel=1e-4)


# Every runtime


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass"])
def test_runtimes_agree(task: str) -> None:
    """Stacked, one by one, and on nodes that see nothing but messages; a node may have no rows in a split."""
    asked = [find(name) for name in names(task)]
    feds = {
        "stacked": federation(task),
        "loop": federation(task, loop=True),
        "nodes": LoopbackRuntime.split(federation(task), 4),
    }
    assert any(node.runtime.splits["test"].largest == 0 for node in feds["nodes"].runtime.nodes)
    found = {}
    for kind, fed in feds.items():
        run = coterie.fit(fed, "ditto", 3, metrics=asked)
        values = {
            (t, split, name): value for t, split, name, value in run.history.blocks if split != "server"
        }
        pooled = {name: run.pooled(split, name) for split in fed.rows for name in names(task)}
        found[kind] = values, pooled, run.fed.ledger.entries
    values, pooled, ledger = found["stacked"]
    for others, other_pooled, other_ledger in (found["loop"], found["nodes"]):
        assert values.keys() == others.keys() and ledger == other_ledger
        for key, value in values.items():
            torch.testing.assert_close(
                others[key], value, rtol=1e-9, atol=1e-12, equal_nan=True, msg=str(key)
            )
        assert other_pooled == pytest.approx(pooled, rel=1e-9)


# In training


def test_the_usual_metrics_alone_are_recorded_unless_more_are_asked_for() -> None:
    fed = federation("binary")
    usual = coterie.fit(fed, "fedavg", 2)
    assert {metric for _, _, metric, _ in usual.history.blocks} == {"loss", "accuracy"}
    more = coterie.fit(fed, "fedavg", 2, metrics=["auc", find("brier")])
    assert {metric for _, _, metric, _ in more.history.blocks} == {"loss", "accuracy", "auc", "brier"}
    for split in ("train", "validation", "test"):
        for name in ("auc", "brier"):
            torch.testing.assert_close(usual.score(split, name), more.score(split, name), equal_nan=True)
    assert math.isclose(usual.pooled("test", "brier"), more.pooled("test", "brier"))


def test_a_score_that_cannot_be_had_is_said() -> None:
    run = coterie.fit(federation("binary"), "fedavg", 1)
    with pytest.raises(
        SettingError, match=r"'rmse' does not apply to binary targets; choose from loss, accuracy"
    ):
        run.score("test", "rmse")
    with pytest.raises(SettingError, match=r"no metric 'acuracy'\. Did you mean 'accuracy'"):
        run.score("test", "acuracy")
    with pytest.raises(SettingError, match="no split 'tset'"):
        run.score("tset", "auc")
    whole = Federation.from_arrays([torch.randn(9, 2)] * 2, [torch.arange(9) % 2] * 2, models.logistic())
    with pytest.raises(SettingError, match="no client of this run has test rows"):
        coterie.fit(whole, "fedavg", 1).score("test", "auc")


def test_the_best_round_is_the_best_by_the_metric() -> None:
    fed = federation("binary")
    run = coterie.fit(
        fed, coterie.algorithms.make("local", lr=3.0), 12, evaluate_every=1, select="best", metric="auc"
    )
    rounds, values = run.history.curve("validation", "auc")
    assert run.deployed_round == rounds[values.index(max(values))]
    by_loss = coterie.fit(fed, coterie.algorithms.make("local", lr=3.0), 12, evaluate_every=1, select="best")
    rounds, values = by_loss.history.curve("validation", "loss")
    assert by_loss.deployed_round == rounds[values.index(min(values))] != run.deployed_round


def test_a_run_folder_keeps_its_metrics(tmp_path: Path) -> None:
    fed = federation("binary")
    run = coterie.fit(fed, "ditto", 4, tmp_path / "run", select="best", metric="auc", metrics=["ece"])
    again = coterie.resume(tmp_path / "run", fed)
    assert again.metric == "auc" and [metric.name for metric in again.further] == ["auc", "ece"]
    assert torch.equal(again.personal, run.personal)
    assert again.metrics.equals(run.metrics) and set(run.metrics["metric"]) == {
        "loss",
        "accuracy",
        "auc",
        "ece",
    }


# A metric of one's own


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


def cost_of_misses(miss: float = 5.0) -> Metric:
    """False negatives cost more than false alarms."""

    def sums(rows: ScoredRows) -> Tensor:
        missed = (rows.labels == 1) & (rows.predicted == 0)
        alarm = (rows.labels == 0) & (rows.predicted == 1)
        return rows.mean(missed.double(), alarm.double())

    def finish(sums: Tensor) -> Tensor:
        return (sums * torch.tensor([miss, 1.0])).sum(-1, keepdim=True)

    return Metric("cost-of-misses", sums, finish, tasks=("binary",), low=0.0, high=miss)


@pytest.mark.usefixtures("clean_registry")
def test_a_users_own_metric_is_used_like_any_other() -> None:
    fed, own = federation("binary"), cost_of_misses()
    run = coterie.fit(fed, "fedavg", 2, metrics=[own])
    assert find("cost-of-misses") is own
    for k, (x, y) in enumerate(rows_of(fed, "test")):
        if len(y):
            up = fed.model.scores(run.personal[k], x)[:, 0] > 0
            expected = (5 * ((y == 1) & ~up).double() + ((y == 0) & up).double()).mean()
            assert float(run.score("test", own)[k]) == pytest.approx(float(expected))
    assert "cost-of-misses" in names("binary") and "cost-of-misses" not in names("regression")
    other = cost_of_misses(2.0)
    assert resolve(other, "binary") is other is find("cost-of-misses"), "the newest of a name counts"


@pytest.mark.usefixtures("clean_registry")
def test_names_of_the_package_stay_its_own() -> None:
    for name in ("auc", "loss", "quantile-0.3"):
        with pytest.raises(SettingError, match="is a metric of coterie"):
            register(Metric(name, sums=lambda rows: rows.mean(rows.correct)))
    for name in ("", "rows", "two words", "a/b", "-x"):
        with pytest.raises(SettingError, match="cannot be called"):
            Metric(name, sums=lambda rows: rows.mean(rows.correct))
    with pytest.raises(SettingError, match="no task 'ranking'"):
        Metric("x", sums=lambda rows: rows.mean(rows.correct), tasks=("ranking",))


def test_quantiles_of_every_level_are_found() -> None:
    assert find("quantile-0.25") is quantile_loss(0.25) is find("quantile-0.250")
    assert resolve(quantile_loss(0.123456789), "regression") is find("quantile-0.123456789")
    for name in ("quantile-0", "quantile-1", "quantile-nan", "quantile-x", "quantile-"):
        with pytest.raises(SettingError, match="above 0 and below 1"):
            find(name)


installed = Metric("installed", sums=lambda rows: rows.mean(rows.row_loss), title="from a package")


def test_installed_packages_add_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points of the group; one that cannot be loaded is named when it is asked for, and stops nothing else."""
    points = {
        "installed": EntryPoint("installed", "metrics_of_others:installed", "coterie.metrics"),
        "broken": EntryPoint("broken", "no_such_package:thing", "coterie.metrics"),
        "misnamed": EntryPoint("misnamed", "metrics_of_others:installed", "coterie.metrics"),
    }
    package = SimpleNamespace(installed=installed)
    monkeypatch.setitem(sys.modules, "metrics_of_others", package)
    monkeypatch.setattr(registry, "_installed", lambda: points)
    assert find("installed") is installed and "installed" in names("language")
    assert "broken" in names() and "broken" not in names("binary")
    with pytest.raises(SettingError, match=r"'broken'.*cannot be loaded"):
        find("broken")
    with pytest.raises(SettingError, match="not a metric of that name"):
        find("misnamed")


def test_every_task_has_a_main_metric_that_applies_to_it() -> None:
    for task in TASKS:
        assert task in main_metric(task).tasks and main_metric(task).name in names(task)


def test_the_page_lists_every_metric_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    told = {row[0].strip("`").replace("-Q", "-0.5"): row[1:] for row in rows}
    assert set(told) == {*registry.BUILT_IN, "quantile-0.5"} and len(told) == len(rows)
    tasks = {
        "all": TASKS,
        "classes": ("binary", "multiclass"),
        "numbers": ("regression",),
        "text": ("language",),
        "survival": ("survival",),
    }
    for name, (kind, _, span, better, missing) in told.items():
        metric = find(name)
        assert metric.tasks == tasks[kind] and metric.direction == f"{better} is better"
        assert bool(missing) == bool(metric.undefined)
        assert span.startswith(f"≥ {metric.low:g}" if metric.high == math.inf else f"{metric.low:g} to") or (
            name == "r2" and span == "≤ 1"
        )
        assert metric.scales_with_target == (name in ("rmse", "mae", "quantile-0.5"))
