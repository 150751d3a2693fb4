"""Further splits: every training row is held out once, nobody is left without rows, test rows are gone."""

from __future__ import annotations

from itertools import combinations

import torch

from coterie import models
from coterie.engine.federation import Federation
from coterie.select.cross_validation import folds
from coterie.select.divisions import divisions


def labelled(sizes: list[int]) -> Federation:
    """Rows that know their client and place."""
    xs = [torch.stack([torch.full((m,), float(k)), torch.arange(m).double()], 1) for k, m in enumerate(sizes)]
    return Federation.from_arrays(xs, [x[:, 1] for x in xs], models.linear(), split=(0.6, 0.2, 0.2))


def rows(fed: Federation, split: str) -> list[tuple[int, int]]:
    part = fed.runtime.splits[split]
    owner = torch.repeat_interleave(part.size)
    assert torch.equal(part.x[:, 0].long(), owner) and torch.equal(part.x[:, 1], part.y)
    return [(int(k), int(m)) for k, m in part.x.tolist()]


def test_every_training_row_is_held_out_once() -> None:
    fed = labelled([20, 1, 2, 3, 55])
    before, held, test = (rows(fed, split) for split in ("train", "validation", "test"))
    out: list[tuple[int, int]] = []
    for fold in folds(fed, 3):
        train, now = rows(fold, "train"), rows(fold, "validation")
        assert sorted(train + now) == sorted(before + held) and not set(now) & set(held)
        assert (fold.rows["train"] > 0).all() and not fold.has_rows("test") and not set(train) & set(test)
        assert torch.equal(fold.sizes.squeeze(1).long(), fold.rows["train"])
        out += now
    alone = {k for k, m in enumerate((fed.rows["train"] + fed.rows["validation"]).tolist()) if m == 1}
    assert sorted(out) == sorted(row for row in before if row[0] not in alone)
    sizes = torch.stack([fold.rows["validation"] for fold in folds(fed, 3)])
    assert (sizes.max(0).values - sizes.min(0).values <= 1).all()


def test_folds_depend_on_the_seed_alone() -> None:
    first, again = ([rows(fold, "validation") for fold in folds(labelled([9, 12]), 3)] for _ in range(2))
    assert first == again


def test_every_seed_divides_a_table_anew() -> None:
    fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    tested = [set(one.tested.tolist()) for one in divisions(fed, seeds=3, folds=1)]
    assert all(0 < len(first & second) < len(first) for first, second in combinations(tested, 2))
