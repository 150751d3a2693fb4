"""Compressors: lossless codes, stated variance and bias, honest byte counts, and the same through every door."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie import Algorithm
from coterie._core import randomness
from coterie._core.errors import SettingError
from coterie.conformance import federation
from coterie.deploy.loopback import LoopbackRuntime
from coterie.engine.compressors import compressor

ALL = "identity rand-7 top-7 top-7-plain natural qsgd-1 qsgd-4 qsgd-255 sign sign-plain".split()
UNBIASED = [name for name in ALL if compressor(name).unbiased]
BIASED = [name for name in ALL if not compressor(name).unbiased]


def vector(d: int, *lead: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    keys = randomness.slots(randomness.key(3, "vector"), d * max(1, torch.Size(lead).numel()))
    wide = torch.exp(2 * randomness.normal(randomness.fold(keys, "size")))
    return (randomness.normal(keys) * wide).view(*lead, d).to(dtype)


def keys_for(count: int) -> torch.Tensor:
    return randomness.key(5, "compress", torch.arange(count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("d", [7, 8, 37])
def test_bytes_decode_to_what_the_client_computed_and_are_as_many_as_stated(name, dtype, d):
    one, x, keys = compressor(name), vector(d, 5, dtype=dtype), keys_for(5)
    packed = one.encode(x, keys)
    assert str(one) == name and packed.dtype == torch.uint8
    assert packed.shape == (5, one.size(d, dtype))
    assert torch.equal(one.decode(packed, keys, d, dtype), one(x, keys))
    assert torch.equal(one(x[2], keys[2]), one(x, keys)[2]), "a client alone gives another result"
    assert one(x, keys).dtype == dtype


@given(
    st.sampled_from(ALL),
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=7, max_size=20),
)
def test_any_finite_vector_survives_the_bytes(name, values):
    one, x, keys = compressor(name), torch.tensor(values, dtype=torch.float32), keys_for(1)[0]
    decoded = one.decode(one.encode(x, keys), keys, len(values), torch.float32)
    assert torch.equal(decoded, one(x, keys)) or decoded.isnan().any()


@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased_ones_are_unbiased_and_within_their_omega(name):
    d, draws = 24, 40_000
    one, x = compressor(name), vector(d)
    sent = one(x.expand(draws, d), keys_for(draws))
    error = (sent - x).square().sum(-1)
    spread = sent.std(0) / draws**0.5
    assert ((sent.mean(0) - x).abs() <= 5 * spread + 1e-12).all()
    assert error.mean() <= one.omega(d) * x.square().sum() * 1.02 + 1e-24
    if name.startswith("rand"):
        torch.testing.assert_close(error.mean(), one.omega(d) * x.square().sum(), rtol=0.05, atol=0)


def test_the_worst_case_of_natural_compression_is_one_eighth():
    x = torch.full((16,), 4 / 3, dtype=torch.float64)
    sent = compressor("natural")(x.expand(40_000, 16), keys_for(40_000))
    share = (sent - x).square().sum(-1).mean() / x.square().sum()
    torch.testing.assert_close(share, torch.tensor(0.125, dtype=torch.float64), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", BIASED)
def test_biased_ones_contract_and_have_no_omega(name):
    one, x = compressor(name), vector(24)
    sent = one(x, keys_for(1)[0])
    assert (sent - x).square().sum() < x.square().sum()
    with pytest.raises(SettingError, match="biased"):
        one.omega(24)


def test_top_and_sign_by_hand():
    x = torch.tensor([3.0, -5.0, 1.0, 0.0])
    assert compressor("top-2")(x, keys_for(1)[0]).tolist() == [3, -5, 0, 0]
    assert compressor("sign")(x, keys_for(1)[0]).tolist() == [2.25, -2.25, 2.25, 2.25]


def test_floats_are_those_of_the_table():
    d = 112
    counts = {"identity": d, "rand-7": 7, "top-7": 14, "natural": 32, "qsgd-4": 15, "sign": 5}
    assert {name: compressor(name).floats(d) for name in counts} == counts
    assert compressor("rand-7").omega(112) == 15 and compressor("qsgd-4").omega(112) == 112**0.5 / 4


@pytest.mark.parametrize(
    "text", ["rand", "rand-0", "rand--1", "rand-1.5", "top-3-best", "rand-3-plain", "zip"]
)
def test_unknown_names_are_refused(text):
    with pytest.raises(SettingError, match="write one of"):
        compressor(text)


@pytest.mark.parametrize("text", ["rand-8", "top-8"])
def test_more_coordinates_than_there_are_is_refused(text):
    with pytest.raises(SettingError, match="choose k from 1 to 7"):
        compressor(text)(torch.zeros(7), keys_for(1)[0])
    with pytest.raises(SettingError, match="choose k from 1 to 3"):
        federation().map(Sender().send, x=torch.ones(3, dtype=torch.float64), compress=text)


def test_infinity_and_nan_do_not_become_numbers():
    x = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    for name in ("identity", "natural", "qsgd-2", "top-2", "sign"):
        assert not compressor(name)(x, keys_for(1)[0]).isfinite().all(), name


@dataclass(frozen=True)
class Sender(Algorithm):
    """Phases that send vectors (made for tests, 2026)."""

    reveals: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("send", "know", "twice", "recall", "spoil", "table"), "gradient"
    )

    def send(self, client, x):
        return {"v": client.full_grad(x), "size": client.size}

    def know(self, client, x):
        client.keep.sent = client.compress(client.full_grad(x))
        return {"sent": client.keep.sent, "own": client.full_grad(2 * x)}

    def twice(self, client, x):
        first, second = client.compress(x + client.size), client.compress(x - client.size)
        return {"b": second, "a": first}

    def recall(self, client):
        return client.keep.sent

    def spoil(self, client, bad):
        return bad

    def table(self, client, x):
        return x.unsqueeze(-1) * x.unsqueeze(-2)


DOORS = {
    "stacked": lambda: federation(),
    "loop": lambda: federation(loop=True),
    "nodes": lambda: LoopbackRuntime.split(federation(), 3),
}


@pytest.mark.parametrize("name", ["identity", "rand-2", "top-1", "natural", "qsgd-2", "sign"])
@pytest.mark.parametrize("phase", ["send", "know", "twice"])
def test_every_door_gives_the_same_values_and_ledger(name, phase):
    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    found = []
    for door in DOORS.values():
        fed = door()
        replies = [
            fed.map(getattr(Sender(), phase), x=x, compress=name),
            fed.map(getattr(Sender(), phase), x=x, to=[4, 1], compress=name),
        ]
        found.append((replies, fed.ledger.entries))
    for replies, ledger in found[1:]:
        assert ledger == found[0][1]
        for one, other in zip(found[0][0], replies, strict=True):
            for value in one.named:
                torch.testing.assert_close(one[value], other[value], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("door", DOORS)
def test_the_ledger_counts_what_is_sent_and_numbers_go_as_they_are(door):
    fed = DOORS[door]()
    replies = fed.map(Sender().send, x=torch.ones(3, dtype=torch.float64), compress="rand-2")
    assert replies["size"].squeeze(-1).tolist() == [1, 2, 5, 9, 30, 14]
    assert (replies["v"] != 0).sum(-1).tolist() == [2] * 6
    assert fed.ledger.total("floats_up") == 6 * (2 + 1) and fed.ledger.total("bytes_up") == 6 * 8 * 3
    assert fed.ledger.total("floats_down") == 18


@pytest.mark.parametrize("door", DOORS)
def test_a_client_knows_what_the_server_decodes(door):
    fed = DOORS[door]()
    sent = fed.map(Sender().know, x=torch.ones(3, dtype=torch.float64), compress="rand-1")["sent"]
    assert torch.equal(fed.map(Sender().recall).values, sent)
    assert torch.equal(
        fed.map(Sender().know, x=torch.ones(3, dtype=torch.float64))["sent"] != 0, sent == sent
    )


@pytest.mark.quick("stacked", "nodes")
@pytest.mark.parametrize("door", DOORS)
def test_error_feedback_sends_everything_in_the_end(door):
    fed = DOORS[door]()
    x = torch.ones(3, dtype=torch.float64)
    whole = fed.map(Sender().send, x=x)["v"]
    total, rounds = torch.zeros_like(whole), 300
    fed.map(Sender().send, x=x, compress="top-1", to=[0])
    total[0] += whole[0] * 0
    for t in range(rounds):
        fed.enter_round(t, None)
        total += fed.map(Sender().send, x=x, compress="top-1")["v"]
    torch.testing.assert_close(total / rounds, whole, atol=0.02 * float(whole.abs().max()), rtol=0)
    plain = fed.map(Sender().send, x=x, compress="top-1-plain")["v"]
    assert (plain == 0).sum() == 12


def test_random_choices_change_with_round_and_client():
    fed = federation((4,) * 40)
    x = torch.ones(3, dtype=torch.float64)
    masks = []
    for t in (1, 2):
        fed.enter_round(t, None)
        masks.append(fed.map(Sender().send, x=x, compress="rand-1")["v"] != 0)
    assert not torch.equal(*masks) and (masks[0].double().mean(0) > 0.1).all()


def test_a_client_with_an_infinite_vector_is_left_out_even_if_it_would_not_be_sent():
    bad = torch.ones(6, 3, dtype=torch.float64)
    bad[1, 2] = torch.inf
    for t in range(6):
        fed = federation()
        fed.enter_round(t, None)
        assert fed.map(Sender().spoil, each={"bad": bad}, compress="rand-1").ids.tolist() == [0, 2, 3, 4, 5]


def test_only_vectors_can_be_compressed():
    with pytest.raises(SettingError, match="only vectors"):
        federation().map(Sender().table, x=torch.ones(3, dtype=torch.float64), compress="rand-1")
