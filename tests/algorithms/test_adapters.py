"""Methods of low-rank adapters against plain PyTorch on the same minibatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import coterie
from coterie import models
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.models.low_rank import LowRank, component, low_rank, product_norms
from tests.algorithms.reference import SIZES, State, federation, flat, mean, minibatches, sgd, start

ROUNDS, LR = 3, 0.3
A, B = ["1.lora_A", "3.lora_A"], ["1.lora_B", "3.lora_B"]
ALL = ["1.lora_A", "1.lora_B", "3.lora_A", "3.lora_B"]
D = 3 * (4 + 5) + 3 * (5 + 3)  # rank 3


def network() -> Any:
    return models.mlp((5,), activation="tanh", adapters=3, classes=3, stacked=False)


def test_an_adapted_layer_is_the_layer_plus_a_product() -> None:
    plain = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2, bias=False)).double()
    adapted, x = low_rank(plain, rank=2, alpha=6.0), torch.randn(7, 4).double()
    torch.testing.assert_close(adapted(x), plain(x))
    assert {name for name, p in adapted.named_parameters() if p.requires_grad} == {
        "0.lora_A", "0.lora_B", "2.lora_A", "2.lora_B"
    }  # fmt: skip
    layer = adapted[0]
    assert isinstance(layer, LowRank)
    layer.lora_B.data.normal_()
    weight = plain[0].weight + 3.0 * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(layer(x), x @ weight.T + plain[0].bias)
    with pytest.raises(SettingError, match=r"no nn\.Linear"):
        low_rank(nn.Sequential(nn.Conv2d(1, 1, 1)))


def test_groups_of_adapters_cover_them() -> None:
    fed = federation(network())
    groups = fed.model.groups
    assert fed.d == D and torch.equal(groups["lora_A"] ^ groups["lora_B"], groups["all"])
    ranks = torch.stack([groups[f"rank {k}"] for k in range(3)])
    assert torch.equal(ranks.sum(0), torch.ones(D, dtype=torch.long)) and torch.equal(
        ranks.int().argmax(0), component(fed.model)
    )
    w = torch.randn(D, generator=torch.Generator().manual_seed(0)).double()
    module = fed.model.flat_module.filled(w)
    products = [layer.lora_B @ layer.lora_A for layer in (module[1], module[3])]
    whole = torch.cat([one.flatten() for one in products]).norm()
    torch.testing.assert_close(product_norms(fed.model, w).squeeze(), whole.detach())
    first = torch.where(groups["rank 0"], w, 0.0)
    layer = fed.model.flat_module.filled(first)[1]
    torch.testing.assert_close((layer.lora_B @ layer.lora_A), module[1].lora_B[:, :1] @ module[1].lora_A[:1])


def test_ffa_lora_moves_b_alone_and_its_averages_are_exact() -> None:
    fed = federation(network())
    algorithm = make("ffa-lora", lr=LR, steps=4, batch=5)
    run = coterie.fit(fed, algorithm, ROUNDS)
    module, w = start(fed)
    for t in range(1, ROUNDS + 1):
        ends = [sgd(module, w, minibatches(fed, algorithm, k, t, 4), LR, B) for k in range(fed.n)]
        products = mean([{"1": one["1.lora_B"] @ one["1.lora_A"]} for one in ends], fed.rows["train"])
        w = mean(ends, fed.rows["train"])
        torch.testing.assert_close(w["1.lora_B"] @ w["1.lora_A"], products["1"], rtol=0, atol=1e-14)
    torch.testing.assert_close(run.personal, flat(w).expand(fed.n, -1), rtol=0, atol=1e-12)
    frozen = fed.model.groups["lora_A"]
    assert torch.equal(run.personal[0][frozen], fed.initial_model()[frozen])
    assert run.fed.ledger.total("floats_up") == ROUNDS * fed.n * 3 * (5 + 3)


@pytest.mark.parametrize("name", ["fedsa-lora", "dual-adapters"])
def test_shared_and_personal_adapters_are_those_of_torch(name: str) -> None:
    """FedSA-LoRA shares A; dual adapters share the first adapter of rank one and keep the other two."""
    fed, dual = federation(network()), name == "dual-adapters"
    more = {"shared_rank": 1, "head_steps": 2} if dual else {}
    algorithm = make(name, lr=LR, steps=4, batch=5, **more)
    run = coterie.fit(fed, algorithm, ROUNDS)
    module, first = start(fed)

    def of(w: State) -> tuple[State, State]:
        """The shared and the personal part."""
        if not dual:
            return {name: w[name] for name in A}, {name: w[name] for name in B}
        cut = {name: (w[name][:1], w[name][1:]) for name in A}
        cut |= {name: (w[name][:, :1], w[name][:, 1:]) for name in B}
        return {name: one for name, (one, _) in cut.items()}, {
            name: other for name, (_, other) in cut.items()
        }

    def joined(shared: State, own: State) -> State:
        if not dual:
            return {name: (shared | own)[name] for name in ALL}
        return {name: torch.cat([shared[name], own[name]], 0 if name in A else 1) for name in ALL}

    shared, _ = of(first)
    own = [of(first)[1] for _ in range(fed.n)]
    for t in range(1, ROUNDS + 1):
        ends = []
        for k in range(fed.n):
            if dual:  # the personal part moves on its own draws, then the shared part
                for rows in minibatches(fed, algorithm, k, t, 2, "head"):
                    own[k] = of(sgd(module, joined(shared, own[k]), iter([rows]), LR, ALL))[1]
                mine = shared
                for rows in minibatches(fed, algorithm, k, t, 4):
                    mine = of(sgd(module, joined(mine, own[k]), iter([rows]), LR, ALL))[0]
            else:
                mine, own[k] = of(
                    sgd(module, joined(shared, own[k]), minibatches(fed, algorithm, k, t, 4), LR, ALL)
                )
            ends.append(mine)
        shared = mean(ends, fed.rows["train"])
    expected = torch.stack([flat(joined(shared, one)) for one in own])
    torch.testing.assert_close(run.personal, expected, rtol=0, atol=1e-12)
    size = sum(value.numel() for value in shared.values())
    assert run.fed.ledger.total("floats_up") == ROUNDS * fed.n * size


def test_hetlora_with_equal_ranks_and_weights_by_rows_is_fedavg() -> None:
    fed = federation(network())
    one = coterie.fit(fed, make("hetlora", lr=LR, batch=5, ranks=(3,), weighting="size"), ROUNDS)
    other = coterie.fit(fed, make("fedavg", lr=LR, batch=5), ROUNDS)
    torch.testing.assert_close(one.personal, other.personal, rtol=0, atol=1e-12)
    assert one.fed.ledger.total("bytes_up") == other.fed.ledger.total("bytes_up")


def test_hetlora_sends_as_many_adapters_as_a_client_has_room_for() -> None:
    fed = federation(network())
    algorithm = make("hetlora", lr=LR, steps=4, batch=0)
    assert algorithm.ranks_of(fed).tolist() == [2, 1, 3]  # by rows: 12, 7, 20
    run = coterie.fit(fed, algorithm, ROUNDS)
    module, x = start(fed)

    def cut(w: State, rank: int) -> State:
        """The first adapters of rank one, zeros for the others."""
        keep = torch.arange(3) < rank
        return {
            name: torch.where(keep.unsqueeze(1) if name in A else keep, value, 0.0)
            for name, value in w.items()
        }

    for _ in range(ROUNDS):
        ends, weights = [], []
        for k, rank in enumerate((2, 1, 3)):
            w = cut(x, rank)
            for rows in minibatches(fed, algorithm, k, 1, 4):
                w = cut(sgd(module, w, iter([rows]), LR, ALL), rank)
            ends.append(w)
            lengths = [w[b] @ w[a] for a, b in zip(A, B, strict=True)]
            weights.append(torch.cat([one.flatten() for one in lengths]).norm())
        x = mean(ends, torch.stack(weights))
    expected = torch.stack([flat(cut(x, rank)) for rank in (2, 1, 3)])
    torch.testing.assert_close(run.personal, expected, rtol=0, atol=1e-12)
    assert (
        run.fed.ledger.total("floats_up")
        == run.fed.ledger.total("floats_down")
        == ROUNDS * (2 + 1 + 3) * D // 3
    )
    assert len(SIZES) == 3


@pytest.mark.parametrize("name", ["ffa-lora", "fedsa-lora", "dual-adapters", "hetlora"])
def test_a_model_without_adapters_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match=rf"{name}: .*low_rank"):
        coterie.fit(federation(models.mlp((5,), classes=3)), make(name), 1)
