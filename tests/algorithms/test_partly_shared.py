"""Methods that share some layers and keep others, against plain PyTorch on the same minibatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie import Federation, models
from coterie._core.errors import SettingError
from coterie.algorithms import make
from tests.algorithms.reference import State, federation, flat, mean, minibatches, sgd, start

ROUNDS, LR = 3, 0.2
HEAD = ["4.weight", "4.bias"]
BODY = ["1.weight", "1.bias", "2.weight", "2.bias"]  # a linear layer, and its normalisation
NORM = ["2.weight", "2.bias"]
ALL = BODY + HEAD


def network() -> Any:
    return models.mlp((5,), norm="layer", activation="tanh", classes=3, stacked=False)


def in_turns(
    fed: Federation, algorithm: Any, personal: list[str], turns: list[tuple[str, list[str], int]]
) -> Tensor:
    """Rounds in which each client takes turns (stream, parameters, steps); what is not personal is averaged."""
    module, first = start(fed)
    shared: State = {name: value for name, value in first.items() if name not in personal}
    own = [{name: first[name] for name in personal} for _ in range(fed.n)]
    for t in range(1, ROUNDS + 1):
        ends = []
        for k in range(fed.n):
            w = {name: {**shared, **own[k]}[name] for name in first}
            for stream, names, steps in turns:
                w = sgd(module, w, minibatches(fed, algorithm, k, t, steps, stream), LR, names)
            own[k] = {name: w[name] for name in personal}
            ends.append({name: w[name] for name in shared})
        shared = mean(ends, fed.rows["train"])
    return torch.stack([flat({name: {**shared, **mine}[name] for name in first}) for mine in own])


@pytest.mark.parametrize(
    ("name", "personal", "turns"),
    [
        ("fedper", HEAD, [("", ALL, 4)]),
        ("lg-fedavg", BODY, [("", ALL, 4)]),
        ("fedbn", NORM, [("", ALL, 4)]),
        ("fedrep", HEAD, [("head", HEAD, 6), ("", BODY, 4)]),
    ],
)
def test_rounds_are_those_of_torch(name: str, personal: list[str], turns: list[Any]) -> None:
    fed = federation(network())
    more = {"head_steps": 6} if name == "fedrep" else {}
    algorithm = make(name, lr=LR, steps=4, batch=5, **more)
    run = coterie.fit(fed, algorithm, ROUNDS)
    torch.testing.assert_close(run.personal, in_turns(fed, algorithm, personal, turns), rtol=0, atol=1e-12)
    sent = fed.d - sum(int(fed.model.groups[part].sum()) for part in personal)
    assert run.fed.ledger.total("floats_up") == run.fed.ledger.total("floats_down") == ROUNDS * fed.n * sent
    assert run.fed.ledger.total("bytes_up") == 8 * ROUNDS * fed.n * sent


@pytest.mark.parametrize(("tuning", "names"), [("all", ALL), ("head", HEAD), ("body", BODY)])
def test_fedbabu_trains_the_body_and_then_tunes(tuning: str, names: list[str]) -> None:
    fed = federation(network())
    algorithm = make("fedbabu", lr=LR, steps=4, batch=0, tuning=tuning, tuning_lr=0.1, tuning_steps=3)
    run = coterie.fit(fed, algorithm, ROUNDS)
    module, w = start(fed)
    head = {name: w[name] for name in HEAD}
    for t in range(1, ROUNDS + 1):
        ends = [sgd(module, w, minibatches(fed, algorithm, k, t, 4), LR, BODY) for k in range(fed.n)]
        w = mean(ends, fed.rows["train"])
    assert all(torch.equal(w[name], head[name]) for name in HEAD)
    for k in range(fed.n):
        tuned = sgd(module, w, minibatches(fed, algorithm, k, 1, 3), 0.1, names)
        torch.testing.assert_close(run.personal[k], flat(tuned), rtol=0, atol=1e-12)
    assert run.fed.ledger.total("floats_up") == ROUNDS * fed.n * int(fed.model.groups["body"].sum())


def test_fedper_with_nothing_personal_is_fedavg() -> None:
    fed = federation(network())
    one, other = (
        coterie.fit(fed, make(name, lr=LR, batch=0, **more), ROUNDS)
        for name, more in (("fedper", {"personal": ""}), ("fedavg", {}))
    )
    torch.testing.assert_close(one.personal, other.personal, rtol=0, atol=1e-12)
    assert one.fed.ledger.total("bytes_up") == other.fed.ledger.total("bytes_up")


def test_layers_can_be_named() -> None:
    fed = federation(network())
    algorithm = make("fedper", lr=LR, steps=4, batch=5, personal="1 + head")
    run = coterie.fit(fed, algorithm, ROUNDS)
    expected = in_turns(fed, algorithm, ["1.weight", "1.bias", *HEAD], [("", ALL, 4)])
    torch.testing.assert_close(run.personal, expected, rtol=0, atol=1e-12)


def test_fedrep_of_a_linear_model_is_the_alternating_computation() -> None:
    """Slopes are shared and intercepts personal: gradient steps of each in turn, in closed form."""
    fed = federation(models.linear(intercept=True), classes=0)
    run = coterie.fit(fed, make("fedrep", lr=0.05, head_steps=3, steps=2, batch=0), ROUNDS)
    w, b = torch.zeros(4, dtype=torch.float64), torch.zeros(fed.n, dtype=torch.float64)
    for _ in range(ROUNDS):
        ends = []
        for k in range(fed.n):
            x, y = fed.runtime.rows("train").of(k)
            x, mine = x[:, :4], w
            for _ in range(3):
                b[k] -= 0.05 * (x @ mine + b[k] - y).mean()
            for _ in range(2):
                mine = mine - 0.05 * x.T @ (x @ mine + b[k] - y) / len(y)
            ends.append(mine)
        share = fed.rows["train"].double() / fed.rows["train"].sum()
        w = share @ torch.stack(ends)
    expected = torch.cat([w.expand(fed.n, -1), b.unsqueeze(1)], 1)
    torch.testing.assert_close(run.personal, expected, rtol=0, atol=1e-12)


def test_fedbn_keeps_the_statistics_of_batch_norm() -> None:
    """With averaged buffers FedAvg mixes running statistics of all clients; FedBN's are each client's own."""

    def module() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))

    fed = federation(models.network(module, buffers="averaged"))
    run = coterie.fit(fed, make("fedbn", lr=LR, batch=5), ROUNDS)
    buffers, norm = fed.model.groups["buffers"], fed.model.groups["norm"]
    assert (run.personal[0] != run.personal[1]).equal(buffers | norm)
    sent = int((~(buffers | norm)).sum())
    assert (
        run.fed.ledger.total("floats_up") == ROUNDS * fed.n * sent == ROUNDS * fed.n * (4 * 5 + 5 + 5 * 3 + 3)
    )
    shared = coterie.fit(fed, make("fedavg", lr=LR, batch=5), ROUNDS)
    assert torch.equal(shared.personal[0], shared.personal[1])


@pytest.mark.parametrize(
    ("name", "model", "said"),
    [
        (
            "fedper",
            models.softmax(classes=3),
            "fedper: .* no parameters in the group 'head'.*--model mlp.*intercept",
        ),
        ("lg-fedavg", models.softmax(classes=3), "lg-fedavg: .*nothing would be shared.*--model mlp"),
        ("fedbn", models.mlp((5,), classes=3), "fedbn: .*'norm\\+buffers'.*normalisation, such as resnet9"),
        ("fedbn", models.softmax(classes=3), "fedbn: .*normalisation"),
    ],
)
def test_a_model_that_cannot_be_parted_is_refused_with_the_remedy(name: str, model: Any, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        coterie.fit(federation(model), make(name), 1)


def test_an_unknown_group_is_named() -> None:
    with pytest.raises(SettingError, match=r"no parameter group 'haed'.*head"):
        coterie.fit(federation(network()), make("fedper", personal="haed"), 1)
