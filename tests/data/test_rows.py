import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie._core import randomness
from coterie.data import rows as rows_module
from coterie.data.rows import Rows


def ragged(sizes):
    size = torch.tensor(sizes)
    total = int(size.sum())
    x = torch.arange(total, dtype=torch.float64).unsqueeze(-1) + 1
    return Rows(x, x.squeeze(-1) * 10, size.cumsum(0) - size, size)


def minibatch(rows, at, keys, batch):
    return rows.take(*rows.draw(at, keys, batch), keys)


def full_means(rows, at, sizes):
    result = torch.full((len(sizes),), -1.0, dtype=torch.float64)
    for place, batch in rows.full(at):
        mean = (batch.x.squeeze(-1) * batch.weight).sum(-1)
        result[slice(None) if place is None else place] = mean
    return result


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.booleans())
def test_full_batches_hold_every_row_once(sizes, small):
    """A client without rows, wherever it stands, has weight 0 everywhere."""
    rows = ragged(sizes)
    expected = torch.stack([rows.of(k)[0].sum() / max(1, size) for k, size in enumerate(sizes)])
    limit = rows_module.PADDED_ELEMENTS
    rows_module.PADDED_ELEMENTS = 16 if small else limit
    try:
        torch.testing.assert_close(full_means(rows, None, sizes), expected)
        at = torch.arange(len(sizes)).flip(0)
        torch.testing.assert_close(full_means(rows, at, sizes), expected.flip(0))
    finally:
        rows_module.PADDED_ELEMENTS = limit


def test_clients_of_equal_size_are_taken_from_the_copy_of_everybody(monkeypatch):
    rows, at = ragged([3, 3, 3, 3]), torch.tensor([2, 0, 2])
    ((_, gathered),) = rows.full(at)
    list(rows.full(None))
    monkeypatch.setattr(Rows, "_groups", None)
    ((place, taken),) = rows.full(at)
    assert place is None
    for name in ("x", "y", "weight"):
        assert torch.equal(getattr(taken, name), getattr(gathered, name))


def test_one_client_needs_no_leading_axis():
    rows = ragged([2, 3])
    ((place, batch),) = rows.full(torch.tensor(1))
    assert place is None and batch.x.squeeze(-1).tolist() == [3, 4, 5]
    keys = randomness.key(0, torch.tensor(1))
    assert minibatch(rows, torch.tensor(1), keys, 2).x.shape == (2, 1)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 12))
def test_minibatches_stay_inside_their_client(sizes, batch):
    rows = ragged(sizes)
    keys = randomness.key(5, torch.arange(len(sizes)))
    drawn = minibatch(rows, None, keys, batch)
    torch.testing.assert_close(drawn.weight.sum(-1), torch.ones(len(sizes), dtype=torch.float64))
    for k, size in enumerate(sizes):
        mine = set(rows.of(k)[0].squeeze(-1).tolist())
        values = drawn.x[k].squeeze(-1)
        assert set(values.tolist()) <= mine and torch.equal(drawn.y[k], values * 10)
        if size <= batch:
            torch.testing.assert_close((values * drawn.weight[k]).sum(), rows.of(k)[0].mean())


def test_a_draw_does_not_depend_on_the_stack():
    rows = ragged([50, 60, 70])
    keys = randomness.key(5, torch.arange(3))
    all_three, one = minibatch(rows, None, keys, 8), minibatch(rows, torch.tensor([2]), keys[2:], 8)
    assert torch.equal(all_three.x[2], one.x[0])


def test_subset_holds_the_rows_of_its_clients():
    rows = ragged([2, 3, 1, 4])
    part = rows.subset(torch.tensor([3, 1]))
    assert part.x.squeeze(-1).tolist() == [7, 8, 9, 10, 3, 4, 5] and part.size.tolist() == [4, 3]
