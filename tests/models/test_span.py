"""Local SGD in the span of the rows is local SGD: against the plain loop over minibatches, client by client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import Algorithm, Federation, fit, models
from coterie.algorithms import make
from coterie.federation.client import Client
from coterie.models import ragged, span
from coterie.models.base import Model

MODELS = {
    "softmax": models.softmax(classes=3, intercept=True),
    "penalised": models.softmax(classes=3, l2=0.3),
    "sum": models.softmax(classes=3, reduction="sum"),
    "logistic": models.logistic(l2=0.1),
    "linear": models.linear(),
}


@dataclass(frozen=True)
class Plain(Algorithm):
    """Two descents that take turns, then a step (a test, 2026)."""

    def train(self, client: Client, x: Tensor, start: Tensor) -> dict[str, Tensor]:
        v, y = start, x
        for _ in range(6):
            v = v - 0.1 * (client.grad(v) + 0.7 * (v - x))
            y = y - 0.1 * client.grad(y)
        return {"v": v, "y": y, "z": y - 0.1 * client.grad(y)}


@dataclass(frozen=True)
class Spanned(Algorithm):
    """The same with `client.sgd` (a test, 2026)."""

    def train(self, client: Client, x: Tensor, start: Tensor) -> dict[str, Tensor]:
        v = client.sgd(start, 0.1, 6, pull=0.7, towards=x, turn=(0, 2))
        y = client.sgd(x, 0.1, 6, turn=(1, 2))
        return {"v": v, "y": y, "z": client.sgd(y, 0.1, 1)}


def federation(model: Model, loop: bool = False, **options: Any) -> Federation:
    draw = torch.Generator().manual_seed(0)
    sizes = [3, 9, 5, 12, 4, 7]
    xs = [torch.randn(n, 30, generator=draw, dtype=torch.float64) for n in sizes]
    ys = [torch.randint(0, 2 if model.task != "multiclass" else 3, (n,), generator=draw) for n in sizes]
    if model.task == "regression":
        ys = [y.double() for y in ys]
    return Federation.from_arrays(xs, ys, model, loop=loop, seed=3, **options)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small clients count as large ones; how often the span was used."""
    seen: list[int] = []
    descend = span.descend

    def counted(*arguments: Any) -> Tensor:
        seen.append(1)
        return descend(*arguments)

    monkeypatch.setattr(span, "FEWEST_PRODUCTS", 1)
    monkeypatch.setattr(span, "descend", counted)
    return seen


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ids", [None, [1, 2, 3], [5, 0, 3], [4, 4, 1]])
def test_the_plain_loop_gives_the_same(name: str, ids: list[int] | None, calls: list[int]) -> None:
    """Draws included: each of two descents takes the minibatches that it takes when they alternate."""
    alone, stacked = federation(MODELS[name], loop=True), federation(MODELS[name])
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(stacked.d, generator=draw, dtype=torch.float64)
    visits = 6 if ids is None else len(ids)
    start = {"start": torch.randn(visits, stacked.d, generator=draw, dtype=torch.float64)}
    found = stacked.map(Spanned(batch=4).train, x=x, each=start, to=ids)
    assert len(calls) == 2, "two long descents in the span, one step in the plain way"
    expected = alone.map(Plain(batch=4).train, x=x, each=start, to=ids)
    for part in "vyz":
        torch.testing.assert_close(found[part], expected[part], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "oracle", "ifca"])
def test_methods_train_the_same_models(name: str, calls: list[int]) -> None:
    options: dict[str, Any] = {"clusters": torch.arange(6) % 2} if name == "oracle" else {}
    method = make(name, batch=4, steps=4, lr=0.2, **({"clusters": 2} if name == "ifca" else {}))
    stacked = fit(federation(MODELS["softmax"], **options), method, 5, evaluate_every=0)
    assert calls
    alone = fit(federation(MODELS["softmax"], loop=True, **options), method, 5, evaluate_every=0)
    torch.testing.assert_close(stacked.personal, alone.personal, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("calls")
def test_when_it_pays() -> None:
    rows = federation(MODELS["softmax"]).runtime.train
    fitted = federation(MODELS["softmax"]).model
    assert span.pays(fitted, rows, 7) and not span.pays(fitted, rows, 6)  # 40 rows of 6 clients
    both = federation(models.softmax(classes=3, l2=0.1, intercept=True))
    assert not span.pays(both.model, both.runtime.train, 100), (
        "an intercept that is not penalised shrinks less"
    )
    assert not span.pays(models.mlp(hidden=(4,)), rows, 100)


@pytest.mark.usefixtures("calls")
def test_a_client_with_nan_spoils_nobody_else() -> None:
    fed = federation(MODELS["softmax"])
    fed.runtime.train.x[0] = torch.nan
    run = fit(fed, make("fedavg", batch=4, steps=4), 3, evaluate_every=0)
    assert torch.isfinite(run.state.x).all() and run.fed.left_out


def test_without_scripts_the_same_products_run_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Any) -> Any:
        raise RuntimeError("no scripts here")

    monkeypatch.setattr(torch.jit, "script", refuse)
    ragged.scripted.cache_clear()
    assert ragged.scripted(ragged.combine_rows) is ragged.combine_rows
    draw = torch.Generator().manual_seed(0)
    x, base, shares = (torch.randn(shape, generator=draw) for shape in ((5, 4), (2, 3, 4), (2, 3, 3)))
    found = ragged.combine_rows(torch.empty(2, 3, 4), base, shares, x, [0, 3], [3, 2])
    expected = torch.stack([base[0] + shares[0] @ x[:3], base[1] + shares[1, :, :2] @ x[3:]])
    torch.testing.assert_close(found, expected)
    scores = ragged.score_rows(torch.empty(3, 5), base, x, [3, 0], [2, 3])
    torch.testing.assert_close(scores, torch.cat([base[0] @ x[3:].T, base[1] @ x[:3].T], 1))
    ragged.scripted.cache_clear()
