"""Rows divided in other ways: nothing is lost, every row is tested once, and values of rows are those of metrics."""

from __future__ import annotations

import pytest
import torch

from coterie import models
from coterie._core.errors import SettingError
from coterie.engine.federation import Federation
from coterie.engine.resplit import TEST, TRAIN, AllRows, merged
from coterie.models.metrics import find


def labelled(sizes: list[int]) -> Federation:
    """Rows that know their client and place."""
    xs = [torch.stack([torch.full((m,), float(k)), torch.arange(m).double()], 1) for k, m in enumerate(sizes)]
    return Federation.from_arrays(xs, [x[:, 1] for x in xs], models.linear(), split=(0.6, 0.2, 0.2))


def rows(fed: Federation, split: str) -> set[tuple[int, int]]:
    part = fed.runtime.rows(split)
    owner = torch.repeat_interleave(part.size)
    assert torch.equal(part.x[:, 0].long(), owner) and torch.equal(part.x[:, 1], part.y)
    return {(int(k), int(m)) for k, m in part.x.tolist()}


SIZES = [20, 1, 2, 3, 4, 55]
EVERY = {(k, m) for k, size in enumerate(SIZES) for m in range(size)}


def test_folds_test_every_row_once() -> None:
    fed = labelled(SIZES)
    everything, tested = AllRows.of(fed), []
    for split in everything.folds(5, seed=0):
        fold = everything.divided(split)
        train, held, test = (rows(fold, name) for name in ("train", "validation", "test"))
        assert train | held | test == EVERY and len(train) + len(held) + len(test) == len(EVERY)
        assert (fold.rows["train"] > 0).all(), "everybody trains"
        assert rows(fold, "test") == {
            (int(k), int(m)) for k, m in everything.x[everything.places(split, TEST)].tolist()
        }
        tested += list(test)
    assert sorted(tested) == sorted(EVERY - {(1, 0)}), "each row once; the only row of a client never"


def test_the_division_of_a_federation_gives_it_back() -> None:
    fed = labelled(SIZES)
    everything = AllRows.of(fed)
    same = everything.divided(everything.split)
    for name in ("train", "validation", "test"):
        assert torch.equal(same.runtime.rows(name).x, fed.runtime.rows(name).x)
        assert torch.equal(same.rows[name], fed.rows[name])
    again = [everything.divided(everything.again((0.6, 0.2, 0.2), seed)) for seed in (1, 1, 2)]
    assert rows(again[0], "test") == rows(again[1], "test") != rows(again[2], "test")
    assert torch.equal(again[0].rows["test"], fed.rows["test"])


def test_merged_rows_train_together() -> None:
    fed = labelled(SIZES)
    both = merged(fed, ("train", "validation"))
    assert rows(both, "train") == rows(fed, "train") | rows(fed, "validation")
    assert not both.has_rows("validation") and not both.has_rows("test")
    assert torch.equal(both.sizes.squeeze(1).long(), fed.rows["train"] + fed.rows["validation"])
    assert rows(merged(fed, ("train", "validation", "test")), "train") == EVERY
    assert int((AllRows.of(fed).split == TRAIN).sum()) == len(rows(fed, "train"))


def test_values_of_rows_have_the_metrics_as_means() -> None:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(m, 3, generator=draw) for m in (1, 40, 7, 150, 0)]
    for model, target in (
        (models.linear(), lambda x: x.sum(1)),
        (models.logistic(), lambda x: (x[:, 0] > 0).long()),
        (models.softmax(), lambda x: (x > 0.3).sum(1).clamp(max=2)),
        (models.mlp([4]), lambda x: (x[:, 0] > 0).long()),
    ):
        fed = Federation.from_arrays(xs[:4], [target(x) for x in xs[:4]], model)
        personal = torch.randn(4, fed.d, generator=draw)
        asked = [find("mae" if fed.model.task == "regression" else "brier"), find("r2"), find("auc")]
        asked = [metric for metric in asked if fed.model.task in metric.tasks]
        found = fed.row_values(personal, "train", asked)
        expected = fed.score(personal, "train", asked)
        assert set(found) == {name for name in expected if find(name).is_mean}
        client = torch.repeat_interleave(fed.rows["train"])
        for name, values in found.items():
            mean = torch.zeros(4, dtype=torch.float64).index_add_(0, client, values) / fed.rows["train"]
            mean = mean.sqrt() if find(name).is_root else mean
            torch.testing.assert_close(mean, expected[name].double(), rtol=1e-5, atol=1e-6)


def table(rows: int = 60) -> dict[str, list]:
    """Rows whose target says which row it is, with a category and gaps."""
    site = [("a", "b", "c")[k % 3] for k in range(rows)]
    kind = [None if k % 7 == 0 else ("u", "v")[k % 2] for k in range(rows)]
    return {
        "site": site,
        "x": [k * 0.37 % 1 for k in range(rows)],
        "kind": kind,
        "y": [k + 0.5 for k in range(rows)],
    }


def test_another_model_sees_the_same_rows_in_the_same_splits() -> None:
    fed = Federation.from_table(table(), "site", "y", seed=3)
    everything = AllRows.of(fed)
    ways = [
        fed,
        fed.fresh(),
        everything.divided(everything.again((0.5, 0.2, 0.3), 4)),
        merged(fed, ("train", "test")),
    ]
    for mine in ways:
        other = mine.with_model(models.trees(3, 4))
        assert other.model.levels == (0, 2) and other.names == mine.names
        for split in ("train", "validation", "test"):
            first, second = mine.runtime.rows(split), other.runtime.rows(split)
            assert torch.equal(first.y, second.y) and torch.equal(first.size, second.size)
    with pytest.raises(SettingError, match="from a table"):
        labelled(SIZES).with_model(models.linear())
