import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.engine.store import Store

N = 6
writes = st.lists(
    st.tuples(st.one_of(st.none(), st.sets(st.integers(0, N - 1), min_size=1)), st.integers(-99, 99)),
    max_size=8,
)


@given(writes, st.sampled_from([None, 0, 40]))
def test_store_behaves_like_a_dict_of_rows(steps, memory):
    """Any order of partial and whole writes leaves each client its own newest row, also after a checkpoint."""
    store, model, lent = Store(N, memory), {}, []
    for who, value in steps:
        at = None if who is None else torch.tensor(sorted(who))
        ids = list(range(N)) if who is None else sorted(who)
        rows = torch.tensor([[value + k, k] for k in ids], dtype=torch.float64)
        store.write("v", at, rows)
        model.update({k: [value + k, k] for k in ids})
        if len(model) == N:
            lent.append((store.read("v", None), [list(model[k]) for k in range(N)]))
    if model:
        again = Store(N, memory)
        again.restore({name: value.clone() for name, value in store.snapshot().items()})
        for place in (store, again):
            have = torch.tensor(sorted(model))
            assert place.read("v", have).tolist() == [model[int(k)] for k in have]
    for value, expected in lent:
        assert value.tolist() == expected


def test_memory_follows_the_visited_clients():
    store = Store(1_000_000)
    store.write("v", torch.tensor([999_999, 5]), torch.ones(2, 100))
    assert store.columns["v"].rows.shape[0] <= 4
    assert store.snapshot()["v.rows"].shape == (2, 100)


def test_one_client_without_a_leading_axis():
    store = Store(3)
    store.write("v", torch.tensor(1), torch.tensor([4.0, 5.0]))
    assert store.read("v", torch.tensor(1)).tolist() == [4, 5]
    assert store.read("v", torch.tensor([1])).tolist() == [[4, 5]]


def test_rows_beyond_the_memory_are_in_a_file_of_which_the_disk_holds_what_was_written():
    store = Store(1_000_000, memory=1000)
    store.write("small", torch.tensor([7]), torch.ones(1, 2))
    store.write("large", torch.tensor([999_999, 5]), torch.ones(2, 100_000))
    assert not store.columns["small"].on_disk
    assert store.columns["large"].on_disk
    assert store.columns["large"].rows.shape == (1_000_000, 100_000)
    assert store.read("large", torch.tensor([5, 999_999])).sum() == 200_000
    assert store.snapshot()["large.rows"].shape == (2, 100_000)


@pytest.mark.parametrize("at", [torch.tensor(2), torch.tensor([2])])
def test_one_client_on_disk(at):
    store = Store(3, memory=0)
    store.write("v", at, torch.ones(*at.shape, 4))
    assert store.columns["v"].on_disk
    assert store.read("v", at).shape == (*at.shape, 4)


@pytest.mark.parametrize("memory", [None, 0])
def test_what_is_held_stays_as_it_was_and_can_be_put_back(memory):
    store, some = Store(3, memory), torch.tensor([1, 2])
    store.write("v", some, torch.tensor([[1.0], [2.0]]))
    held = store.held()
    for client in (2, 0):
        store.write("v", torch.tensor([client]), torch.tensor([[5.0]]))
    assert torch.equal(held["v"].read(some), torch.tensor([[1.0], [2.0]]))
    store.columns = held
    assert torch.equal(store.read("v", some), torch.tensor([[1.0], [2.0]]))
    with pytest.raises(KeyError):
        store.read("v", torch.tensor([0]))
