"""Parameter groups, masks, features of the last hidden layer, and the statistics of batch normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie import Algorithm, Federation, State, fit, models, resume
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.engine.client import Client
from coterie.models.groups import Part


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def federation(
    model: Any, loop: bool = False, sizes: tuple[int, ...] = (12, 9, 5), **options: Any
) -> Federation:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 4, generator=draw, dtype=torch.float64) * (k + 1) + k for k, n in enumerate(sizes)]
    ys = [torch.arange(n) % 3 for n in sizes]
    return Federation.from_arrays(xs, ys, model, loop=loop, **options)


def test_groups_of_a_network_cover_it_once() -> None:
    model = models.network(body).fit_to(torch.zeros(6, 4), torch.arange(6) % 3)
    groups = model.groups
    assert groups["head"].sum() == 6 * 3 + 3 and groups["buffers"].sum() == 12
    parts = sum(groups[name].int() for name in ("head", "body", "buffers"))
    assert torch.equal(parts, torch.ones(model.d, dtype=torch.int32))
    assert torch.equal(groups["0"], groups["0.weight"] | groups["0.bias"]) and groups["0.weight"].sum() == 24
    assert torch.equal(groups["3"], groups["head"])
    with pytest.raises(SettingError, match=r"no parameter group 'haed'.*head"):
        groups["haed"]


def test_groups_of_a_linear_model() -> None:
    groups = models.softmax(intercept=True, classes=3).fit_to(torch.zeros(6, 4), torch.arange(6) % 3).groups
    assert groups["head"].all() and not groups["body"].any()
    assert groups["intercept"].nonzero().flatten().tolist() == [4, 9, 14]
    assert torch.equal(groups["weights"], ~groups["intercept"])


@dataclass(frozen=True)
class HeadOnly(Algorithm):
    """Trains the last layer alone, by steps or by `client.sgd` (a test, 2026)."""

    steps: bool = False

    def start(self, fed: Federation) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        return State(x=fed.map(self.train, x=s.x).mean())

    def train(self, client: Client, x: Tensor) -> Tensor:
        mask = client.groups["head"]
        if not self.steps:
            return client.sgd(x, 0.1, 3, mask=mask)
        for _ in range(3):
            x = x - 0.1 * client.grad(x, mask=mask)
        return x

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("batch", [0, 4])
def test_masks_leave_the_rest_where_it_was(batch: int) -> None:
    fed = federation(models.mlp((5,), classes=3))
    mask = fed.model.groups["head"]
    run = fit(fed, HeadOnly(batch=batch), 4)
    assert torch.equal(run.state.x[~mask], fed.initial_model()[~mask])
    assert ((run.state.x - fed.initial_model())[mask].abs() > 0).all()
    again = fit(fed, HeadOnly(batch=batch, steps=True), 4)
    torch.testing.assert_close(run.state.x, again.state.x)


@dataclass(frozen=True)
class Prototypes(Algorithm):
    """Mean features of every class (a test, 2026)."""

    def look(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        features, targets, weight = client.features(x)
        hit = (targets.unsqueeze(-1) == torch.arange(3)).to(features.dtype) * (weight > 0).unsqueeze(-1)
        sums = hit.mT @ features
        return {"sums": sums, "counts": hit.sum(-2), "total": weight.sum(-1, keepdim=True)}


@pytest.mark.parametrize("loop", [False, True])
def test_features_are_what_reaches_the_last_layer(loop: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    fed = federation(models.network(module), loop=loop)
    found = fed.map(Prototypes().look, x=fed.initial_model())
    for k in range(3):
        x, y = fed.runtime.train.of(k)
        hidden = module[:2](x)
        for label in range(3):
            torch.testing.assert_close(found["sums"][k, label], hidden[y == label].sum(0))
        assert found["counts"][k].tolist() == [(y == label).sum() for label in range(3)]
    torch.testing.assert_close(found["total"], torch.ones(3, 1, dtype=torch.float64))


@pytest.mark.parametrize("stacked", [True, False])
def test_gradients_with_batch_norm_are_those_of_torch_without_padding(stacked: bool) -> None:
    fed = federation(models.network(body, stacked=stacked))
    module, flat = fed.model.flat_module.original.double(), fed.model.flat_module
    w = fed.initial_model()
    weight = torch.zeros(3, 12, dtype=torch.float64)
    x, y = torch.full((3, 12, 4), 1e3, dtype=torch.float64), torch.zeros(3, 12, dtype=torch.long)
    for k in range(3):
        rows, labels = fed.runtime.train.of(k)
        x[k, : len(rows)], y[k, : len(rows)], weight[k, : len(rows)] = rows, labels, 1 / len(rows)
    found = fed.model.grad(w.expand(3, -1), x, y, weight)
    assert not found[:, flat.trainable :].any(), "statistics have no gradient"
    for k in range(3):
        rows, labels = fed.runtime.train.of(k)
        module.train().zero_grad()
        nn.functional.cross_entropy(module(rows), labels).backward()
        expected = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
        torch.testing.assert_close(found[k, : flat.trainable], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("loop", [False, True])
def test_personal_statistics_are_those_of_a_clients_own_rows(loop: bool) -> None:
    fed = federation(models.network(body), loop=loop, split=(0.6, 0.2, 0.2), sizes=(30, 20, 11))
    run = fit(fed, make("fedavg", batch=4, lr=0.1), 5)
    trainable = fed.model.flat_module.trainable
    assert torch.equal(run.personal[0, :trainable], run.personal[1, :trainable])
    for k, name in enumerate(fed.names):
        rows, _ = fed.runtime.train.of(k)
        module = run.model(name).network
        hidden = module[0](rows.to(module[0].weight.dtype))
        torch.testing.assert_close(module[1].running_mean, hidden.mean(0))
        torch.testing.assert_close(module[1].running_var, hidden.var(0))
    assert isinstance(run.model("0").network[1], nn.BatchNorm1d) and not run.model("0").training
    assert torch.isfinite(run.score("test", "accuracy")).all()


def test_averaged_statistics_are_the_momentum_of_torch() -> None:
    fed = federation(models.network(body, buffers="averaged"), sizes=(9,))
    run = fit(fed, make("fedavg", batch=0, lr=0.1, steps=3), 2)
    module = fed.model.flat_module.filled(fed.initial_model()).train()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x, y = fed.runtime.train.of(0)
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    own = run.personal[0, : fed.model.flat_module.trainable]
    torch.testing.assert_close(
        own, torch.cat([p.detach().flatten() for p in module.parameters()]), rtol=1e-8, atol=1e-9
    )
    buffers = run.personal[0, fed.model.flat_module.trainable :]
    torch.testing.assert_close(buffers, torch.cat([module[1].running_mean, module[1].running_var]))


def test_averaged_statistics_need_client_sgd() -> None:
    fed = federation(models.network(body, buffers="averaged"))
    with pytest.raises(SettingError, match='buffers="personal"'):
        fit(fed, make("cobo", lr=0.1), 2)


def test_shared_statistics_stay_as_they_are() -> None:
    module = body()
    module[1].running_mean.fill_(0.3)
    model = models.network(module, buffers="shared")
    fed = federation(model)
    assert fed.d == sum(p.numel() for p in module.parameters())
    run = fit(fed, make("fedavg", batch=4), 3)
    assert torch.equal(run.model("1").network[1].running_mean, module[1].running_mean.double())


@pytest.mark.quick("ditto-personal", "fedavg-averaged")
@pytest.mark.parametrize("buffers", ["personal", "averaged"])
@pytest.mark.parametrize("name", ["fedavg", "ditto", "local"])
def test_methods_train_networks_with_batch_norm_stacked_and_one_by_one(name: str, buffers: str) -> None:
    method = make(name, batch=4, lr=0.05)
    if name == "local" and buffers == "averaged":
        method = make("ditto", batch=4, lam=0.0)
    runs = [
        fit(federation(models.network(body, buffers=buffers), loop=loop), method, 4) for loop in (False, True)
    ]
    torch.testing.assert_close(runs[0].personal, runs[1].personal, rtol=1e-9, atol=1e-10)


def test_a_run_with_batch_norm_resumes_to_the_same_bits(tmp_path: Any) -> None:
    fed = federation(models.network(body), split=(0.6, 0.2, 0.2), sizes=(30, 20, 11))
    method = make("ditto", batch=4)
    whole = fit(fed, method, 6, tmp_path / "whole")

    def stop(t: int, rounds: int) -> None:
        if t == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(fed, method, 6, tmp_path / "cut", checkpoint_every=2, watch=stop)
    assert torch.equal(resume(tmp_path / "cut", fed).personal, whole.personal)


@pytest.mark.parametrize("columns", [slice(0, 3), slice(3, 4), slice(1, 3)])
def test_the_same_columns_of_every_row_are_taken_and_put_back_as_by_an_index(columns: slice) -> None:
    mask = torch.zeros(5, 4, dtype=torch.bool)
    mask[:, columns] = True
    part, index = Part(mask.flatten()), mask.flatten().nonzero().squeeze(1)
    assert part._columns is not None
    x, y = torch.randn(6, 20), torch.randn(6, len(index))
    assert torch.equal(part.of(x), x[:, index])
    expected = x.clone()
    expected[:, index] = y
    assert torch.equal(part.into(x, y), expected)
    shared = part.into(x[0], y[0].expand(6, -1))
    assert torch.equal(shared, part.into(x[0], y[:1])[0].expand(6, -1))


def test_parts_that_are_no_columns_are_indexed() -> None:
    mask = torch.tensor([True, False, True, True, False, False, True, False])
    part = Part(mask)
    assert part._columns is None
    assert part.of(torch.arange(8)).tolist() == [0, 2, 3, 6]
