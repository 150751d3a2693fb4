"""Clients of one to five rows, in every order and every split: nothing crashes, wherever the small one stands."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

import coterie
from coterie._core.errors import DataError, SettingError
from coterie.select.advise import advise

TARGETS = {
    "binary": lambda k: ("no", "yes")[(k * 3) % 7 > 3],
    "multiclass": lambda k: "uvw"[k % 3],
    "regression": lambda k: float(k * k % 17) / 7,
}
SPLITS = ((0.6, 0.2, 0.2), (1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.1, 0.1, 0.8))


def table(sizes: tuple[int, ...], kind: str) -> dict[str, list[Any]]:
    rows = range(sum(sizes))
    return {
        "site": [f"c{client}" for client, size in enumerate(sizes) for _ in range(size)],
        "a": [k * 7 % 13 for k in rows],
        "b": [float(k * 5 % 11) / 3 for k in rows],
        "y": [TARGETS[kind](k) for k in rows],
    }


def cases(seed: int, count: int) -> list[tuple[tuple[int, ...], str, tuple[float, ...]]]:
    every = [sizes for n in (2, 3, 4) for sizes in itertools.product(range(1, 6), repeat=n)]
    drawn = random.Random(seed)
    return [(drawn.choice(every), drawn.choice(list(TARGETS)), drawn.choice(SPLITS)) for _ in range(count)]


@pytest.mark.quick("local", "ditto")
@pytest.mark.parametrize("method", ["local", "fedavg", "ditto", "cobo"])
def test_any_sizes_are_fitted(method: str) -> None:
    found = [((30, 5, 30, 2), "binary", SPLITS[0]), ((40, 5, 1), "regression", SPLITS[0])]
    for sizes, kind, split in [*found, *cases(7, 25)]:
        try:
            fed = coterie.Federation.from_table(table(sizes, kind), "site", "y", split=split)
        except DataError as problem:
            assert "varies over the training rows" in str(problem) or "one value only" in str(problem)
            continue
        assert coterie.fit(fed, method, rounds=2).personal.isfinite().all(), (sizes, kind, split)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 1), (5, 2), (1, 5, 40), (3, 3, 3, 2), (30, 5, 30, 2)])
def test_any_sizes_are_compared_and_advised(sizes: tuple[int, ...]) -> None:
    rows = table(sizes, "regression")
    found = coterie.compare(rows, "site", "y", seeds=1, rounds=2, budget=1)
    assert [row["algorithm"] for row in found.rows] == ["local", "fedavg", "fine-tuned", "ditto"]
    fed = coterie.Federation.from_table(rows, "site", "y")
    assert advise(fed, 3).json()
    coterie.fit(fed, "auto", rounds=3)


@pytest.mark.parametrize(("sizes", "folds"), [((3, 3, 3, 2), 3), ((4, 4, 1), 4), ((5, 2), 5)])
def test_clients_of_few_rows_are_compared_in_as_many_folds_as_they_have_rows(
    sizes: tuple[int, ...], folds: int
) -> None:
    rows = table(sizes, "regression")
    found = coterie.compare(rows, "site", "y", algorithms=[], seeds=1, rounds=2, budget=1)
    assert found.folds == folds
    with pytest.raises(SettingError, match=f"the largest client has {folds} rows"):
        coterie.compare(rows, "site", "y", algorithms=[], seeds=1, rounds=2, budget=1, folds=folds + 1)


def test_a_table_without_validation_rows_is_not_printed() -> None:
    with pytest.raises(DataError, match=r"^the table needs validation rows: .*three rows"):
        coterie.compare(table((2, 2), "regression"), "site", "y", seeds=1, rounds=2, budget=1)
