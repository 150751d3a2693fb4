"""The door between server and clients: what goes in, what comes out, what is counted."""

from dataclasses import dataclass

import pytest
import torch

import coterie
from coterie import Algorithm, Federation, State, models
from coterie._core.errors import CoterieError, NobodyAnswered, SettingError
from coterie.conformance import federation


@dataclass(frozen=True)
class Probe(Algorithm):
    """Phases that show what a client receives (made for tests, 2026)."""

    def begin(self, client, x):
        client.keep.first = x

    def add(self, client, x, z):
        return {"sum": x + z, "size": client.size}

    def remember(self, client, x):
        client.keep.seen = x

    def recall(self, client):
        return client.keep.seen

    def draw(self, client):
        return client.uniform("test", 2)

    def spoil(self, client, bad):
        client.keep.seen = bad
        return bad

    def lose_axis(self, client, x):
        return x.sum()

    def peek(self, client, x):
        return client.loss(x, split="test")


@pytest.fixture(params=["stacked", "loop"])
def fed(request):
    return federation(loop=request.param == "loop")


def test_shared_goes_to_all_and_each_to_its_own(fed):
    z = torch.arange(6.0, dtype=torch.float64).unsqueeze(-1).expand(6, 3)
    replies = fed.map(Probe().add, x=torch.ones(3, dtype=torch.float64), each={"z": z})
    assert torch.equal(replies["sum"], z + 1)
    assert replies["size"].squeeze(-1).tolist() == [1, 2, 5, 9, 30, 14]


def test_rows_follow_ids_that_repeat(fed):
    z = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64).expand(3, 3)
    replies = fed.map(Probe().add, x=torch.zeros(3), each={"z": z}, to=[4, 1, 4])
    assert replies.ids.tolist() == [4, 1, 4] and torch.equal(replies["sum"], z)
    assert replies.weights.squeeze(-1).tolist() == [30, 2, 30]


def test_a_repeated_visit_draws_anew_and_a_single_one_does_not_depend_on_company(fed):
    draws = fed.map(Probe().draw, to=[2, 2, 3]).values
    assert not torch.equal(draws[0], draws[1])
    fed.enter_round(0, None)
    assert torch.equal(fed.map(Probe().draw, to=[3]).values[0], draws[2])


def test_a_phase_that_keeps_may_not_visit_twice(fed):
    with pytest.raises(CoterieError, match="more than once"):
        fed.map(Probe().remember, x=torch.zeros(3), to=[2, 2])


def test_kept_rows_belong_to_their_clients(fed):
    probe = Probe()
    fed.map(probe.remember, x=torch.tensor([5.0]), to=[3])
    fed.map(probe.remember, x=torch.tensor([7.0]), to=[0, 4])
    assert fed.map(probe.recall, to=[4, 3, 0]).values.squeeze(-1).tolist() == [7, 5, 7]
    with pytest.raises(CoterieError, match="kept nothing under 'seen'"):
        fed.map(probe.recall, to=[1])


def test_a_client_that_answers_nan_is_left_out_and_keeps_what_it_had(fed):
    probe = Probe()
    fed.map(probe.remember, x=torch.tensor([1.0]))
    bad = torch.tensor([[2.0], [float("nan")], [2.0], [2.0], [float("inf")], [2.0]])
    replies = fed.map(probe.spoil, each={"bad": bad})
    assert replies.ids.tolist() == [0, 2, 3, 5]
    assert [(k, why) for _, k, why in fed.left_out] == [(1, "spoil: not finite"), (4, "spoil: not finite")]
    assert fed.map(probe.recall).values.squeeze(-1).tolist() == [2, 1, 2, 2, 1, 2]


def test_ledger_counts_messages_floats_and_bytes(fed):
    fed.map(Probe().add, x=torch.zeros(3), each={"z": torch.zeros(2, 3, dtype=torch.float64)}, to=[1, 2])
    ((entry, counts),) = fed.ledger.entries.items()
    assert (entry.phase, entry.link, entry.kind) == ("add", "client-server", "setup")
    assert counts == [2, 12, 2 * 3 * 4 + 2 * 3 * 8, 2, 8, 8 * 8]


def test_a_phase_must_keep_the_client_axis():
    with pytest.raises(CoterieError, match="client axis"):
        federation().map(Probe().lose_axis, x=torch.zeros(3))


def test_rows_for_each_must_match_the_visits(fed):
    with pytest.raises(SettingError, match="'z' has 2 rows for 6 visits"):
        fed.map(Probe().add, x=torch.zeros(3), each={"z": torch.zeros(2, 3)})


def test_a_phase_cannot_look_at_test_rows():
    with pytest.raises(SettingError, match="not at 'test'"):
        federation(split=(0.6, 0.2, 0.2)).map(Probe().peek, x=torch.zeros(3))


def test_clients_begin_on_their_first_visit_from_the_state_of_that_round():
    fed, probe = federation(), Probe()
    for t, ids in ((1, [0, 2]), (2, [2, 3])):
        fed.enter_round(t, State(x=torch.tensor([float(t)])))
        fed.map(probe.remember, x=torch.zeros(1), to=ids)
    kept = fed.runtime.store.columns["first"]
    assert kept.read(torch.tensor([0, 2, 3])).squeeze(-1).tolist() == [1, 1, 2]
    assert kept.slot.tolist()[1] == -1 and fed.begun.tolist() == [True, False, True, True, False, False]
    assert fed.ledger.total("floats_down", phase="begin") == 3


def test_dropout_takes_its_share_and_is_a_function_of_the_seed():
    fed = federation((2,) * 400, dropout=0.25)
    answered = [len(fed.map(Probe().draw)) for _ in range(20)]
    assert abs(sum(answered) / 20 / 400 - 0.75) < 0.03 and len(set(answered)) > 1
    again = federation((2,) * 400, dropout=0.25)
    assert [len(again.map(Probe().draw)) for _ in range(20)] == answered


def test_mean_weights_by_rows_or_not_or_by_cluster():
    fed = federation()
    z = torch.randn(6, 3, dtype=torch.float64)
    replies = fed.map(Probe().add, x=torch.zeros(3), each={"z": z})
    sizes = torch.tensor([1.0, 2, 5, 9, 30, 14], dtype=torch.float64).unsqueeze(-1)
    torch.testing.assert_close(replies.mean("sum"), (z * sizes).sum(0) / sizes.sum())
    torch.testing.assert_close(replies.mean("sum", uniform=True), z.mean(0))
    by = replies.mean("sum", by=fed.clusters, uniform=True)
    torch.testing.assert_close(by, torch.stack([z[::2].mean(0), z[1::2].mean(0)]))
    new = replies.put(torch.zeros(6, 3, dtype=torch.float64), "sum")
    torch.testing.assert_close(new, z)


def test_a_cluster_without_an_answer_keeps_its_default():
    fed = federation()
    replies = fed.map(Probe().add, x=torch.zeros(3), each={"z": torch.ones(2, 3)}, to=[0, 2])
    default = torch.full((2, 3), 9.0, dtype=torch.float64)
    mean = replies.mean("sum", by=fed.clusters, default=default)
    assert mean[0].tolist() == [1, 1, 1] and mean[1].tolist() == [9, 9, 9]


def test_nobody_answers():
    replies = federation().map(Probe().draw, to=[])
    assert len(replies) == 0
    with pytest.raises(NobodyAnswered):
        replies.mean()
    assert replies.mean(default=torch.ones(2)).tolist() == [1, 1]


def test_sampling_costs_and_size():
    fed = federation((2,) * 1000)
    assert fed.sample(3, 1.0) is None
    assert len(fed.sample(3, 0.05)) == 50 and len(fed.sample(3, 1e-9)) == 1
    assert not torch.equal(fed.sample(3, 0.05), fed.sample(4, 0.05))


def test_state_holds_only_what_a_checkpoint_can():
    with pytest.raises(SettingError, match="'x' is a list"):
        State(x=[1, 2])
    with pytest.raises(AttributeError, match="no field 'y'"):
        State(x=1).y  # noqa: B018


def test_public_names_are_few_and_importable():
    assert len(coterie.__all__) <= 25
    for name in coterie.__all__:
        assert getattr(coterie, name) is not None


def test_arrays_of_any_kind_become_clients():
    import numpy

    fed = Federation.from_arrays(
        [numpy.ones((2, 3)), numpy.ones((1, 3))],
        [[0.0, 1.0], [2.0]],
        models.linear(),
        clusters=["b", "a"],
        names=["p", "q"],
    )
    assert fed.dtype == torch.float64 and fed.names == ["p", "q"]
    assert fed.clusters.tolist() == [1, 0] and fed.cluster_names == ["a", "b"]
    with pytest.raises(CoterieError, match="client 1 has no cluster"):
        Federation.from_arrays([[[1.0]], [[1.0]]], [[1.0], [1.0]], models.linear(), clusters=["a", None])


def test_a_phase_without_numbers_sends_no_message_in_that_direction(fed):
    fed.map(Probe().draw, to=[2, 3])
    entry = next(counts for where, counts in fed.ledger.entries.items() if where.phase == "draw")
    down, up = entry[:3], entry[3:]
    assert down == [0, 0, 0] and up[:2] == [2, 4]
    fed.map(Probe().remember, x=torch.ones(3, dtype=torch.float64), to=[2, 3])
    entry = next(counts for where, counts in fed.ledger.entries.items() if where.phase == "remember")
    assert entry[:2] == [2, 6] and entry[3:] == [0, 0, 0]
