"""What a run folder remembers of its clients."""

from __future__ import annotations

from pathlib import Path

import torch

import coterie
from coterie.train.roster import RunRoster


def test_rows_clusters_and_class_shares_come_back(tmp_path: Path) -> None:
    xs = [torch.randn(4, 2), torch.randn(2, 2)]
    ys = [torch.tensor([0, 0, 0, 1]), torch.tensor([2, 2])]
    fed = coterie.Federation.from_arrays(
        xs, ys, coterie.models.softmax(), names=["a", "b"], clusters=["u", "v"]
    )
    coterie.fit(fed, "local", rounds=1, out=tmp_path / "run")
    found = RunRoster.load(tmp_path / "run")
    assert found is not None and found.names == ["a", "b"]
    assert found.rows["train"] == [4, 2] and found.rows["test"] == [0, 0]
    assert found.clusters == [0, 1] and found.cluster_names == ["u", "v"]
    assert found.targets == {"classes": ["0", "1", "2"], "shares": [[0.75, 0.25, 0.0], [0.0, 0.0, 1.0]]}


def test_means_are_in_the_units_of_the_table(tmp_path: Path) -> None:
    table = {"c": ["a"] * 4 + ["b"] * 4, "x": list(range(8)), "y": [10.5, 12, 11, 13, 100, 104, 102, 98.0]}
    fed = coterie.Federation.from_table(table, "c", "y", split=(1.0, 0.0, 0.0))
    targets = RunRoster.of(fed).targets
    assert targets is not None
    torch.testing.assert_close(torch.tensor(targets["mean"]), torch.tensor([11.625, 101.0]))
    torch.testing.assert_close(torch.tensor(targets["sd"][1]), torch.tensor(5.0).sqrt())


def test_an_older_folder_has_none(tmp_path: Path) -> None:
    assert RunRoster.load(tmp_path) is None
