"""`run.links()`: pairs of one group and how sure it is that they gain by each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars
import pytest
import torch

import coterie
from coterie._core.errors import SettingError


def federation(seed: int, stray: float = 0.0, rows: int = 40, known: bool = False) -> coterie.Federation:
    """Return six clients around one model and four around another; the sixth is `stray` spreads off."""
    generator = torch.Generator().manual_seed(seed)
    d, truth = 4, torch.zeros(10, 4)
    truth[6:] = 3.0
    truth[5, 0] = stray * (d / rows) ** 0.5
    xs = [torch.randn(rows, d, generator=generator) for _ in truth]
    ys = [x @ w + torch.randn(rows, generator=generator) for x, w in zip(xs, truth, strict=True)]
    options: dict[str, Any] = {"clusters": torch.tensor([0] * 6 + [1] * 4)} if known else {}
    names = [f"c{k}" for k in range(10)]
    return coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear(), names=names, **options)


@pytest.mark.parametrize("method", ["cobo", "pfl-tc", "ifca"])
def test_true_links_are_sure(method: str) -> None:
    table = coterie.fit(federation(0), method, rounds=15).links()
    pairs = {frozenset(pair) for pair in table.select("client", "other").rows()}
    first, second = [f"c{k}" for k in range(6)], [f"c{k}" for k in range(6, 10)]
    assert pairs == {frozenset((a, b)) for part in (first, second) for a in part for b in part if a < b}
    assert float(table["confidence"].median()) > 0.8  # type: ignore[arg-type]
    assert table["confidence"].is_sorted()
    assert (table["weight"].null_count() == 0) == (method == "cobo")


def test_a_member_that_does_not_belong_has_the_least_sure_links() -> None:
    """Known clusters put a client with others; its links are doubted, and the rest of the cluster is not."""
    table = coterie.fit(federation(1, stray=6.0, known=True), "oracle", rounds=15).links()
    odd = (polars.col("client") == "c5") | (polars.col("other") == "c5")
    doubted, rest = table.filter(odd)["confidence"], table.filter(~odd)["confidence"]
    assert len(doubted) == 5 and float(doubted.max()) < 0.2 < 0.8 < float(rest.median())  # type: ignore[arg-type]


def test_links_of_a_folder_are_the_same(tmp_path: Path) -> None:
    fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
    run = coterie.fit(fed, "cobo", rounds=5, out=tmp_path / "run")
    assert coterie.load(tmp_path / "run").links().equals(run.links())


def test_methods_without_groups_say_so() -> None:
    run = coterie.fit(federation(2), "ditto", rounds=2)
    with pytest.raises(SettingError, match="ditto finds no groups"):
        run.links()
