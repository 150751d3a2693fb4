"""Clients that lie: what each attack sends, who is left out, and that nobody else is touched."""

from dataclasses import dataclass

import pytest
import torch

from coterie import Algorithm, fit
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.conformance import federation
from coterie.engine.byzantine import Attack
from coterie.engine.ledger import INSIDE


@dataclass(frozen=True)
class Echo(Algorithm):
    """Returns what it was sent (made for tests, 2026)."""

    def echo(self, client, z):
        client.keep.z = z
        return {"z": z, "size": client.size.long()}

    def recall(self, client):
        return client.keep.z


Z = torch.arange(12.0, dtype=torch.float64).view(6, 2) + 1


def told(attack, liars=(1, 4)):
    fed = federation(byzantine=dict.fromkeys(liars, attack))
    return fed, fed.map(Echo().echo, each={"z": Z})


def test_each_attack_sends_what_it_says():
    honest = Z[[0, 2, 3, 5]]
    _, replies = told("sign-flip")
    assert torch.equal(replies["z"][[1, 4]], -Z[[1, 4]]) and torch.equal(replies["z"][[0, 2, 3, 5]], honest)
    assert torch.equal(told("large:100")[1]["z"][1], 100 * Z[1])
    _, replies = told("shift:2")
    torch.testing.assert_close(replies["z"][1], honest.mean(0) - 2 * honest.std(0, correction=0))
    assert torch.equal(replies["z"][1], replies["z"][4])
    _, replies = told(Attack("random", 3.0))
    assert not torch.equal(replies["z"][1], replies["z"][4]) and replies["z"][1].abs().max() < 20 * 3 * 12
    assert replies["size"].squeeze(-1).tolist() == [1, 2, 5, 9, 30, 14]


def test_nan_is_left_out_and_what_a_liar_keeps_is_its_own():
    fed, replies = told("nan")
    assert replies.ids.tolist() == [0, 2, 3, 5] and [k for _, k, _ in fed.left_out] == [1, 4]
    fed, _ = told("sign-flip")
    assert torch.equal(fed.runtime.store.read("z", None), Z)


def test_lies_are_a_function_of_the_seed_and_survive_fresh():
    one, two = (told("random")[1]["z"] for _ in range(2))
    assert torch.equal(one, two)
    fed = federation().fresh(byzantine={"1": "nan"})
    assert fed.fresh().byzantine == {1: Attack("nan")}
    run = fit(fed, make("fedavg"), rounds=2)
    assert {name for _, name, _ in run.left_out} == {"1"} and torch.isfinite(run.personal).all()


def test_wrong_names_are_named():
    with pytest.raises(SettingError, match="no attack 'sing-flip'"):
        federation(byzantine={0: "sing-flip"})
    with pytest.raises(SettingError, match="no client 9; there are 6"):
        federation(byzantine={9: "nan"})
    with pytest.raises(SettingError, match="no client 'x'"):
        federation(byzantine={"x": "nan"})
    with pytest.raises(SettingError, match="'much' is not a number"):
        federation(byzantine={0: "large:much"})


def test_what_crosses_no_wire_is_not_counted():
    fed = federation()
    fed.map(Echo().echo, each={"z": Z}, link=INSIDE)
    assert fed.ledger.entries == {}
