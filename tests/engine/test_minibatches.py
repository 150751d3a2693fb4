"""Keys and minibatches drawn ahead are those drawn in their round."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from coterie._core import randomness
from coterie.data.rows import Rows
from coterie.engine import minibatches
from coterie.engine.minibatches import MinibatchPrefetch
from coterie.engine.protocol import Call, Visits, visit_keys

IDS = torch.tensor([3, 8, 9, 20, 31])


def rows() -> Rows:
    size = torch.tensor([9, 3, 30, 7, 12])
    total = int(size.sum())
    return Rows(torch.zeros(total, 2), torch.zeros(total), size.cumsum(0) - size, size)


def cohort(t: int) -> Tensor:
    return randomness.choose(randomness.key(7, t), 5, 2)


def one_by_one(t: int, call: int, at: Tensor | None, numbers: range) -> tuple[Tensor, Tensor, Tensor]:
    ids = IDS if at is None else IDS[at]
    keys = visit_keys(4, Call(None, "train", t, call, {}, {}), ids, None)
    keys = randomness.fold(keys.unsqueeze(-1), torch.tensor(numbers))
    return (*rows().draw(at, keys, 4), keys)


def check(
    found: MinibatchPrefetch,
    t: int,
    at: Tensor | None,
    coming: Callable[[int], Tensor] | None,
    numbers: range,
    call: int = 0,
) -> None:
    asked, visits = Call(None, "train", t, call, {}, {}), Visits(at, None, coming)
    assert torch.equal(found.keys(asked, visits), visit_keys(4, asked, IDS if at is None else IDS[at], None))
    got = found.of(asked, visits, "", numbers, 4)
    for part, expected in zip(got, one_by_one(t, call, at, numbers), strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("sampled", [False, True])
def test_rounds_drawn_ahead(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 round, then 2, 4 and 8, the rest cut off; two kinds of calls side by side."""
    found, made = MinibatchPrefetch(4, rows(), IDS), []
    draw = Rows.draw

    def counted(self: Rows, at: Tensor, keys: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        if self is found.rows:
            made.append(len(at))
        return draw(self, at, keys, batch)

    monkeypatch.setattr(Rows, "draw", counted)
    for t in range(1, 17):
        at = cohort(t) if sampled else None
        check(found, t, at, cohort if sampled else None, range(1, 4))
        check(found, t, at, cohort if sampled else None, range(2, 7, 2), call=1)
    assert made == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]


def test_who_comes_otherwise_than_foretold() -> None:
    found = MinibatchPrefetch(4, rows(), IDS)
    for t in range(1, 12):
        check(found, t, cohort(2 * t), cohort, range(1, 4))
        check(found, t, None, None, range(1, 4))
        check(found, 3 * t, torch.tensor([0, 4]), None, range(1, 4))


def test_little_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minibatches, "NUMBERS", 3 * 5 * 4 * 2)
    monkeypatch.setattr(minibatches, "KINDS", 2)
    found = MinibatchPrefetch(4, rows(), IDS)
    for t in range(1, 9):
        for call in range(3):
            check(found, t, None, None, range(1, 4), call)
        check(found, t, None, None, range(1, 9))
        assert len(found._known) <= 2  # of keys and of minibatches together
        assert all(known.parts[0].numel() <= minibatches.NUMBERS for known in found._known.values())
