"""Masked sums: they are exact, single contributions look random, and nodes that vanish do not spoil them."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from coterie.deploy import secure_aggregation as secure
from coterie.deploy.secure_aggregation import Party, unmask
from coterie.deploy.wire import WireError

CONTEXT = b"round 1"


def prepared(count: int, slots: int = 1) -> tuple[dict[str, Party], dict]:
    """Nodes that have exchanged keys and shares."""
    parties = {f"n{k:02d}": Party(f"n{k:02d}", slots) for k in range(count)}
    roster = {name: party.public() for name, party in parties.items()}
    sent = {name: party.shares(roster) for name, party in parties.items()}
    for name, party in parties.items():
        party.receive({owner: out[name] for owner, out in sent.items() if name in out})
    return parties, roster


def contributions(parties) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randint(-(2**40), 2**40, (50,)) for name in parties}


@pytest.mark.parametrize("count", [3, 4, 11, 40])
def test_the_sum_is_exact(count):
    parties, roster = prepared(count)
    values = contributions(parties)
    masked = {name: party.masked(0, values[name], CONTEXT) for name, party in parties.items()}
    revealed = {name: party.reveal(0, list(masked)) for name, party in parties.items()}
    assert torch.equal(unmask(roster, 0, masked, revealed, CONTEXT), sum(values.values()))
    assert {len(near) for near in secure.neighbours(roster).values()} == {secure.degree(count)}


@pytest.mark.parametrize("count", [4, 11, 40])
def test_nodes_that_vanish_before_and_after_masking_are_recovered_from(count):
    parties, roster = prepared(count)
    values = contributions(parties)
    names = list(parties)
    before, after = (
        names[1],
        names[2],
    )  # one sends nothing; in larger federations another does not help to unmask
    masked = {name: parties[name].masked(0, values[name], CONTEXT) for name in names if name != before}
    helping = [name for name in masked if name != after or count == 4]
    revealed = {name: parties[name].reveal(0, list(masked)) for name in helping}
    total = unmask(roster, 0, masked, revealed, CONTEXT)
    assert torch.equal(total, sum(values[name] for name in masked))


def test_too_many_vanish():
    parties, roster = prepared(9)
    values = contributions(parties)
    masked = {name: party.masked(0, values[name], CONTEXT) for name, party in parties.items()}
    few = list(parties)[:5]
    revealed = {name: parties[name].reveal(0, list(masked)) for name in few}
    with pytest.raises(WireError, match="hold shares"):
        unmask(roster, 0, masked, revealed, CONTEXT)


def uniform(values: torch.Tensor) -> float:
    """Return the p-value of a chi-square test that the bytes of whole numbers are uniform."""
    counts = torch.bincount(values.contiguous().view(torch.uint8).long(), minlength=256)
    return float(stats.chisquare(counts.numpy()).pvalue)


def test_a_single_masked_answer_is_uniform_and_the_answer_is_not():
    parties, _ = prepared(4)
    plain = torch.full((50_000,), 12345)
    assert uniform(plain) < 1e-12
    for party in parties.values():
        assert uniform(party.masked(0, plain, CONTEXT)) > 1e-6


def test_all_masks_but_those_of_two_honest_nodes_leave_them_hidden():
    """Server and all other nodes together see the sum of the two and nothing else."""
    parties, roster = prepared(5)
    plain = torch.full((50_000,), 7)
    masked = {name: party.masked(0, plain, CONTEXT) for name, party in parties.items()}
    revealed = {name: party.reveal(0, list(masked)) for name, party in parties.items()}
    one, two, *bad = parties

    def combined(name: str) -> bytes:
        near, commitment = secure.neighbours(roster)[name], roster[name]["selves"][0]
        return secure._combined(name, near, revealed, commitment, secure._self_commitment)

    seeds = {name: combined(name) for name in parties}
    use = secure.digest(roster) + (0).to_bytes(4, "big") + CONTEXT
    seen = masked[one].numpy().view("u8") - secure.stream(seeds[one], use, len(plain))
    for other in bad:  # who know their masks with `one`
        pair = secure.agreed(secure._mask_key(parties[other]._masks[0]), roster[one]["masks"][0])
        mask = secure.stream(pair, use, len(plain))
        seen = seen - mask if one < other else seen + mask
    assert uniform(torch.from_numpy(seen.view("i8"))) > 1e-6
    pair = secure.agreed(secure._mask_key(parties[two]._masks[0]), roster[one]["masks"][0])
    mask = secure.stream(pair, use, len(plain))
    assert (seen - mask if one < two else seen + mask).tolist() == [7] * len(plain)  # the last mask was all


def test_a_node_masks_once_reveals_once_and_never_both_seeds():
    parties, roster = prepared(4, slots=2)
    names, party = list(parties), next(iter(parties.values()))
    party.masked(0, torch.ones(3, dtype=torch.long), CONTEXT)
    with pytest.raises(WireError, match="used"):
        party.masked(0, torch.ones(3, dtype=torch.long), CONTEXT)
    with pytest.raises(WireError, match="never masked"):
        party.reveal(1, names)
    with pytest.raises(WireError, match="fewer than 3"):
        party.reveal(0, names[:2])
    party.reveal(0, names)
    with pytest.raises(WireError, match="unmasked already"):
        party.reveal(0, names[:3])
    with pytest.raises(WireError, match="already"):
        party.shares(roster)


def test_a_server_that_tells_nodes_different_things_gets_noise():
    parties, roster = prepared(4)
    plain = torch.full((50_000,), 7)
    masked = {
        name: party.masked(0, plain, CONTEXT if name != "n00" else b"another sum")
        for name, party in parties.items()
    }
    revealed = {name: party.reveal(0, list(masked)) for name, party in parties.items()}
    assert uniform(unmask(roster, 0, masked, revealed, CONTEXT)) > 1e-6


def test_shares_that_were_changed_and_keys_that_are_none_are_refused():
    parties = {name: Party(name, 1) for name in "abc"}
    roster = {name: party.public() for name, party in parties.items()}
    sent = {name: party.shares(roster) for name, party in parties.items()}
    bad = bytearray.fromhex(sent["b"]["a"])
    bad[-1] ^= 1
    with pytest.raises(WireError, match="changed on the way"):
        parties["a"].receive({"b": bad.hex()})
    fresh = Party("a", 1)
    with pytest.raises(WireError, match="own keys"):
        fresh.shares(roster)
    other = Party("d", 1)
    told = {
        "d": other.public(),
        **{n: {"channel": "00" * 32, "masks": ["00" * 32], "selves": ["00" * 32]} for n in "ef"},
    }
    with pytest.raises(WireError, match="public key"):
        other.shares(told)


@pytest.mark.parametrize("count", [4, 11])
def test_wrong_shares_do_not_spoil_a_sum(count):
    """A node that helps to unmask with nonsense: its shares fit no commitment, so those of the others are taken."""
    parties, roster = prepared(count)
    values = contributions(parties)
    liar, gone, *_ = parties
    masked = {name: party.masked(0, values[name], CONTEXT) for name, party in parties.items() if name != gone}
    revealed = {name: parties[name].reveal(0, list(masked)) for name in masked}
    revealed[liar] = {name: [index, "ab" * 16] for name, (index, _) in revealed[liar].items()}
    if count == 4:  # three hold shares of a node that is gone, and three are needed
        with pytest.raises(WireError, match="fit together"):
            unmask(roster, 0, masked, revealed, CONTEXT)
    else:
        total = unmask(roster, 0, masked, revealed, CONTEXT)
        assert torch.equal(total, sum(values[name] for name in masked))


def test_no_two_nodes_are_summed():
    party = Party("a", 1)
    with pytest.raises(WireError, match="needs 3 nodes"):
        party.shares({"a": party.public(), "b": Party("b", 1).public()})


@pytest.mark.parametrize("weight", [1.0, 5.0, 1e6])
def test_quantisation_is_as_stated(weight):
    bits = secure.fraction_bits(weight)
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * weight
    back = secure.decode(secure.encode(values, bits, weight), bits)
    assert float((back - values).abs().max()) <= 2.0 ** -(bits + 1)
    with pytest.raises(WireError, match="cannot be added"):
        secure.encode(torch.tensor([2.0**21 * weight]), bits, weight)
    with pytest.raises(WireError, match="cannot be added"):
        secure.encode(torch.tensor([torch.nan]), bits, weight)


def test_keys_are_new_every_time():
    assert len({tuple(Party("a", 1).public()["masks"]) for _ in range(3)}) == 3
