"""Pools and clients refuse what the engine could not use, naming the client."""

from __future__ import annotations

import math

import pytest
import torch

from coterie._core.errors import DataError
from coterie.data.clients import Clients, Pool


def _clients(**changes: object) -> Clients:
    fields: dict[str, object] = {
        "xs": [torch.ones(2, 3), torch.ones(1, 3)],
        "ys": [torch.zeros(2), torch.zeros(1)],
        "names": ["anna", "bert"],
    }
    return Clients(**(fields | changes))  # type: ignore[arg-type]


def test_sizes_and_length() -> None:
    clients = _clients(clusters=torch.tensor([1, 0]), cluster_names=["p", "q"], truth=torch.zeros(2, 4))
    assert len(clients) == 2
    assert clients.sizes.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ["anna"]}, "2 inputs, 2 targets and 1 names"),
        ({"xs": [], "ys": [], "names": []}, "no clients"),
        ({"names": ["anna", "anna"]}, "two clients are called 'anna'"),
        ({"ys": [torch.zeros(2), torch.zeros(5)]}, "'bert': 1 rows of inputs but 5 targets"),
        (
            {"xs": [torch.ones(2, 3), torch.ones(0, 3)], "ys": [torch.zeros(2), torch.zeros(0)]},
            "'bert' has no rows",
        ),
        (
            {"xs": [torch.ones(2, 3), torch.ones(1, 4)]},
            r"'bert': inputs are \[4\] float32 .* 'anna' are \[3\]",
        ),
        ({"xs": [torch.ones(2, 3), torch.ones(1, 3).double()]}, "'bert': inputs are .* float64"),
        ({"ys": [torch.zeros(2), torch.zeros(1).long()]}, "'bert': targets are .* int64"),
        (
            {"xs": [torch.tensor([[1.0] * 3, [1, math.nan, 1]]), torch.ones(1, 3)]},
            "'anna': inputs of row 1 hold NaN",
        ),
        ({"ys": [torch.zeros(2), torch.tensor([math.inf])]}, "'bert': targets of row 0 hold NaN or infinity"),
        ({"xs": [torch.ones(2, 3), [1.0]]}, "'bert': inputs must be a tensor"),
        ({"clusters": torch.tensor([0, 2])}, "cluster 1 has no clients"),
        ({"clusters": torch.tensor([0, -1])}, "'bert': cluster -1"),
        ({"clusters": torch.tensor([0, 1]), "cluster_names": ["p"]}, "'bert': cluster 1"),
        ({"clusters": torch.tensor([0.0, 1.0])}, "clusters must be int64"),
        ({"cluster_names": ["p"]}, "cluster names without clusters"),
        ({"truth": torch.zeros(3, 4)}, r"truth must be \[2, d\]"),
        ({"truth": torch.tensor([[0.0], [math.nan]])}, "'bert': its true parameters"),
    ],
)
def test_bad_clients_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _clients(**changes)


def test_bad_pools() -> None:
    with pytest.raises(DataError, match="3 rows of inputs but 2 targets"):
        Pool(torch.ones(3, 1), torch.zeros(2))
    with pytest.raises(DataError, match="label 2 of row 1"):
        Pool(torch.ones(2, 1), torch.tensor([0, 2]), ["a", "b"])
