"""Local SGD in the dual is local SGD: against the plain loop over minibatches, client by client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import Algorithm, Federation, fit, models
from coterie._core import threads
from coterie.algorithms import make
from coterie.engine import local_runtime
from coterie.engine.calls import payload
from coterie.engine.client import Client
from coterie.engine.replies import Replies
from coterie.models.base import Model
from coterie.models.fast import dual_sgd, ragged
from coterie.models.fast.lazy_models import LazyModels

MODELS = {
    "softmax": models.softmax(classes=3, intercept=True),
    "penalised": models.softmax(classes=3, l2=0.3),
    "sum": models.softmax(classes=3, reduction="sum"),
    "logistic": models.logistic(l2=0.1),
    "linear": models.linear(),
}


@dataclass(frozen=True)
class Descents(Algorithm):
    """Two descents with minibatches of their own, then a step (a test, 2026)."""

    def train(self, client: Client, x: Tensor, start: Tensor) -> dict[str, Tensor]:
        v = client.sgd(start, 0.1, 6, prox=0.7, anchor=x, stream="other")
        y = client.sgd(x, 0.1, 6)
        return {"v": v, "y": y, "z": client.sgd(y, 0.1, 1)}


@dataclass(frozen=True)
class ByGradients(Algorithm):
    """The descent of the unnamed stream with `client.grad` (a test, 2026)."""

    def train(self, client: Client, x: Tensor, start: Tensor) -> dict[str, Tensor]:
        y = x
        for _ in range(6):
            y = y - 0.1 * client.grad(y)
        return {"y": y, "z": y - 0.1 * client.grad(y)}


def federation(model: Model, loop: bool = False, **options: Any) -> Federation:
    draw = torch.Generator().manual_seed(0)
    sizes = [3, 9, 5, 12, 4, 7]
    xs = [torch.randn(n, 30, generator=draw, dtype=torch.float64) for n in sizes]
    ys = [torch.randint(0, 2 if model.task != "multiclass" else 3, (n,), generator=draw) for n in sizes]
    if model.task == "regression":
        ys = [y.double() for y in ys]
    return Federation.from_arrays(xs, ys, model, loop=loop, seed=3, **options)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small clients count as large ones."""
    monkeypatch.setattr(dual_sgd, "FEWEST_PRODUCTS", 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ids", [None, [1, 2, 3], [5, 0, 3], [4, 4, 1]])
@pytest.mark.usefixtures("small")
def test_the_plain_loop_gives_the_same(name: str, ids: list[int] | None) -> None:
    """Draws included."""
    alone, stacked = federation(MODELS[name], loop=True), federation(MODELS[name])
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(stacked.d, generator=draw, dtype=torch.float64)
    visits = 6 if ids is None else len(ids)
    start = {"start": torch.randn(visits, stacked.d, generator=draw, dtype=torch.float64)}
    found = stacked.map(Descents(batch=4).train, x=x, each=start, to=ids)
    assert stacked.runtime.used == {"dual-sgd": 2, "plain steps": 1}, "two long descents and one step"
    expected = alone.map(Descents(batch=4).train, x=x, each=start, to=ids)
    gradients = alone.fresh().map(ByGradients(batch=4).train, x=x, each=start, to=ids)
    for part in "vyz":
        torch.testing.assert_close(found[part], expected[part], rtol=1e-11, atol=1e-12)
    for part in "yz":
        torch.testing.assert_close(found[part], gradients[part], rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("small")
def test_streams_draw_minibatches_of_their_own() -> None:
    @dataclass(frozen=True)
    class Streams(Algorithm):
        """The same descent with minibatches of two streams (a test, 2026)."""

        def train(self, client: Client, x: Tensor) -> dict[str, Tensor]:
            return {name or "none": client.sgd(x, 0.1, 6, stream=name) for name in ("", "a", "b")}

    for loop in (False, True):
        fed = federation(MODELS["softmax"], loop=loop)
        found = fed.map(Streams(batch=4).train, x=torch.zeros(fed.d, dtype=torch.float64))
        differ = [(found["none"] - found[name]).norm(dim=1) for name in "ab"]
        large = torch.tensor([1, 2, 3, 5])  # the others have no more rows than a minibatch
        assert all((part[large] > 1e-3).all() for part in differ)
        assert ((found["a"] - found["b"]).norm(dim=1)[large] > 1e-3).all()


@pytest.mark.parametrize("name", ["fedavg", "ditto", "oracle", "ifca"])
@pytest.mark.usefixtures("small")
def test_methods_train_the_same_models(name: str) -> None:
    options: dict[str, Any] = {"clusters": torch.arange(6) % 2} if name == "oracle" else {}
    method = make(name, batch=4, steps=4, lr=0.2, **({"clusters": 2} if name == "ifca" else {}))
    stacked = fit(federation(MODELS["softmax"], **options), method, 5, evaluate_every=0)
    assert stacked.fed.runtime.used["dual-sgd"]
    alone = fit(federation(MODELS["softmax"], loop=True, **options), method, 5, evaluate_every=0)
    torch.testing.assert_close(stacked.personal, alone.personal, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("small")
def test_when_it_pays() -> None:
    rows = federation(MODELS["softmax"]).runtime.train
    fitted = federation(MODELS["softmax"]).model
    assert dual_sgd.pays(fitted, rows, 7) and not dual_sgd.pays(fitted, rows, 6)  # 40 rows of 6 clients
    both = federation(models.softmax(classes=3, l2=0.1, intercept=True))
    assert not dual_sgd.pays(both.model, both.runtime.train, 100), (
        "an intercept that is not penalised shrinks less"
    )
    assert not dual_sgd.pays(models.mlp(hidden=(4,)), rows, 100)


@pytest.mark.usefixtures("small")
def test_a_client_with_nan_spoils_nobody_else() -> None:
    fed = federation(MODELS["softmax"])
    fed.runtime.train.x[0] = torch.nan
    run = fit(fed, make("fedavg", batch=4, steps=4), 3, evaluate_every=0)
    assert torch.isfinite(run.state.x).all() and run.fed.left_out


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
@pytest.mark.usefixtures("two_threads", "small")
def test_threads_take_parts_of_one_stack(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts have about as many rows each: 3 + 9 + 5 + 12 and 4 + 7, and for three clients 9 + 12 and 7."""
    method = make(name, batch=4, steps=4)
    alone = fit(federation(MODELS["penalised"]), method, 4, evaluate_every=0)
    monkeypatch.setattr(local_runtime, "WORKERS_ELEMENTS", 1)
    seen: list[list[int]] = []
    together = dual_sgd.side_by_side

    def counted(function: Any, parts: list[slice]) -> list[Any]:
        seen.append([part.stop - part.start for part in parts])
        return together(function, parts)

    monkeypatch.setattr(dual_sgd, "side_by_side", counted)
    found = fit(federation(MODELS["penalised"]), method, 4, evaluate_every=0)
    assert seen == [[4, 2]] * len(seen) and len(seen) == (9 if name == "ditto" else 5)
    torch.testing.assert_close(found.personal, alone.personal, rtol=1e-12, atol=1e-13)
    assert ragged.cuts(torch.tensor([9, 12, 7]), 2) == [slice(0, 2), slice(2, 3)]
    assert ragged.cuts(torch.tensor([5]), 1) == ragged.cuts(torch.tensor([5]), 2) == [slice(0, 1)]


@pytest.mark.usefixtures("two_threads", "small")
def test_threads_take_parts_of_plain_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase with other steps is computed as one stack, and gives what one thread gives."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(federation(MODELS["softmax"]).d, generator=draw, dtype=torch.float64)
    start = {"start": torch.randn(6, len(x), generator=draw, dtype=torch.float64)}
    alone = federation(MODELS["softmax"]).map(Descents(batch=4).train, x=x, each=start)
    monkeypatch.setattr(local_runtime, "WORKERS_ELEMENTS", 1)
    monkeypatch.setattr(threads, "SHARED_PRODUCTS", 1)
    fed = federation(MODELS["softmax"])
    assert fed.runtime.threads(4) == 1 and fed.runtime.workers == 2
    with threads.helped(2):
        found = fed.map(Descents(batch=4).train, x=x, each=start)
    for part in "vyz":
        torch.testing.assert_close(found[part], alone[part], rtol=1e-12, atol=1e-13)


@dataclass(frozen=True)
class Answers(Algorithm):
    """Both descents as they are, and their ends (a test, 2026)."""

    def train(self, client: Client, x: Tensor, start: Tensor) -> dict[str, Tensor]:
        v = client.sgd(start, 0.1, 6, prox=0.7, anchor=x, stream="other")
        y = client.sgd(x, 0.1, 6)
        return {"v": v, "y": y, "written": v + 0}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ids", [None, [5, 0, 3], [4, 4, 1]])
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.usefixtures("small")
def test_the_mean_needs_no_models(name: str, ids: list[int] | None, uniform: bool) -> None:
    fed = federation(MODELS[name])
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(fed.d, generator=draw, dtype=torch.float64)
    start = torch.randn(6 if ids is None else len(ids), fed.d, generator=draw, dtype=torch.float64)
    replies = fed.map(Answers(batch=4).train, x=x, each={"start": start}, to=ids)
    for part in "vy":
        kept = replies.named[part]
        assert isinstance(kept, LazyModels)
        mean = replies.mean(part, uniform=uniform)
        assert (kept._written is not None) == (part == "v"), "by the phase, not for the mean"
        weights = torch.ones_like(replies.weights) if uniform else replies.weights
        expected = (weights * replies[part]).sum(0) / weights.sum()
        torch.testing.assert_close(mean, expected, rtol=1e-11, atol=1e-12)
    assert torch.equal(replies["v"], replies["written"])
    by = torch.arange(6) % 2
    plain = Replies(replies.ids, {"y": replies["y"]}, replies.weights)
    rest = torch.zeros(2, fed.d, dtype=torch.float64)
    assert torch.equal(replies.mean("y", by=by, default=rest), plain.mean("y", by=by, default=rest))
    assert fed.ledger.entries and payload([replies.named["y"]]) == payload([replies["y"]])


@pytest.mark.usefixtures("small")
def test_what_is_compressed_or_comes_from_a_liar_is_written_out() -> None:
    x = torch.zeros(federation(MODELS["softmax"]).d, dtype=torch.float64)
    method = make("fedavg", batch=4, steps=4)
    honest = federation(MODELS["softmax"]).map(method.train, x=x)
    assert isinstance(honest.named[""], LazyModels)
    packed = federation(MODELS["softmax"]).map(method.train, x=x, compress="rand-7")
    assert not isinstance(packed.named[""], LazyModels)
    liars = federation(MODELS["softmax"], byzantine={"1": "sign-flip"}).map(method.train, x=x)
    assert torch.equal(liars.values[[0, 2]], honest.values[[0, 2]])
    assert not torch.equal(liars.values[1], honest.values[1])


def test_without_scripts_the_same_products_run_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Any) -> Any:
        raise RuntimeError("no scripts here")

    monkeypatch.setattr(torch.jit, "script", refuse)
    monkeypatch.setattr(dual_sgd, "FEWEST_PRODUCTS", 1)
    scripted = fit(federation(MODELS["sum"]), make("ditto", batch=4, steps=4), 3, evaluate_every=0)
    ragged.scripted.cache_clear()
    ragged.stepper.cache_clear()
    assert ragged.scripted(ragged.combine_rows) is ragged.combine_rows
    plain = fit(federation(MODELS["sum"]), make("ditto", batch=4, steps=4), 3, evaluate_every=0)
    assert torch.equal(plain.personal, scripted.personal)
    ragged.scripted.cache_clear()
    ragged.stepper.cache_clear()


@dataclass(frozen=True)
class Parts(Algorithm):
    """Descents of the intercept alone, of the weights alone, and of rows that do not count alike (a test, 2026)."""

    def train(self, client: Client, x: Tensor, importance: Tensor) -> dict[str, Tensor]:
        found = {
            name: client.sgd(x, 0.1, 6, mask=client.groups[name], stream=name)
            for name in ("weights", "intercept")
        }
        first = client.sgd(x, 0.1, 6, importance=importance)
        again = client.sgd(x, 0.1, 6, importance=torch.ones_like(importance), again=True)
        return {**found, "first": first, "again": again, "next": client.sgd(x, 0.1, 6)}


@pytest.mark.parametrize("ids", [None, [5, 0, 3]])
@pytest.mark.usefixtures("small")
def test_masks_and_weights_of_rows_in_c_are_those_of_the_plain_loop(ids: list[int] | None) -> None:
    """In C, which has float32 alone; the loop in float64 is taken for the truth."""
    model, draw = models.softmax(classes=3, intercept=True), torch.Generator().manual_seed(1)
    alone, stacked = federation(model, loop=True), federation(model, dtype=torch.float32)
    x = torch.randn(stacked.d, generator=draw, dtype=torch.float64)
    importance = torch.rand(6 if ids is None else len(ids), 12, generator=draw, dtype=torch.float64)
    expected = alone.map(Parts(batch=4).train, x=x, each={"importance": importance}, to=ids)
    found = stacked.map(Parts(batch=4).train, x=x.float(), each={"importance": importance.float()}, to=ids)
    if dual_sgd.native.available:
        assert stacked.runtime.used == {"dual-sgd": 5}, "all descents are computed in C"
    for name, values in expected.named.items():
        torch.testing.assert_close(found[name].double(), values, rtol=1e-5, atol=1e-6, msg=name)
    still = ~stacked.model.groups["weights"]
    assert torch.equal(found["weights"][:, still], x.float()[still].expand(len(importance), -1))
    torch.testing.assert_close(
        expected["again"], alone.fresh().map(ByGradients(batch=4).train, x=x, start=x, to=ids)["y"]
    )
    assert (expected["next"] - expected["again"]).norm(dim=1).max() > 1e-3, "the stream goes on afterwards"


def test_a_mean_of_masked_descents_needs_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over rows leaves out the columns that stay, as the models do."""
    monkeypatch.setattr(dual_sgd, "FEWEST_PRODUCTS", 1)

    @dataclass(frozen=True)
    class Weights(Algorithm):
        """Weights descend and the intercept stays (a test, 2026)."""

        def train(self, client: Client, x: Tensor) -> Tensor:
            return client.sgd(x, 0.1, 6, mask=client.groups["weights"])

    fed = federation(models.softmax(classes=3, intercept=True), dtype=torch.float32)
    x = torch.randn(fed.d, generator=torch.Generator().manual_seed(2))
    mean = fed.map(Weights(batch=4).train, x=x).mean(uniform=True)
    written = fed.fresh().map(Weights(batch=4).train, x=x).values.clone().mean(0)
    torch.testing.assert_close(mean, written, rtol=1e-5, atol=1e-6)
