"""Gradients of chains and mixtures of models in C are what torch computes, to the rounding of float32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from coterie import fit, models
from coterie._core import native, threads
from coterie._core.errors import DataError
from coterie.algorithms import make
from coterie.algorithms.cobo import PRINTED
from coterie.engine.federation import Federation
from coterie.models.fast import mlp_kernel
from coterie.models.network import Network
from coterie.theory.collaboration import midpoints, mixed

pytestmark = pytest.mark.skipif(native.library is None, reason="the package was built without a C compiler")

CLIENTS = 3
library = native.library


@pytest.fixture(params=[4, 8, 16], autouse=True)
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version for vectors so wide, where this processor has it."""
    chosen = torch.backends.cpu.get_cpu_capability()
    if request.param > {"AVX2": 8, "AVX512": 16}.get(chosen, 4):
        pytest.skip(f"{chosen} has no vectors of {request.param} floats")
    if not hasattr(library, f"coterie_mlp_{request.param}"):
        pytest.skip("clang compiles one version")
    names = ("coterie_mlp", "coterie_mixture", "coterie_midpoints")
    versions = {name: getattr(library, f"{name}_{request.param}") for name in names}
    monkeypatch.setattr(native, "library", SimpleNamespace(**versions))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(count: int, rows: int) -> Tensor:
    return torch.randint(0, count, (CLIENTS, rows), generator=torch.Generator().manual_seed(1))


def built(widths: tuple[int, ...], activation: type[nn.Module], bias: bool = True) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def check(
    module: nn.Module, x: Tensor, y: Tensor, make_w: Callable[[int], Tensor] | None = None, loss: str = "auto"
) -> None:
    """In C as through a graph in float64, but for rounding: a few times that of a graph in float32."""
    model = models.network(module, loss=loss, stacked=True).fit_to(x.flatten(0, 1), y.flatten())
    weight = numbers(*y.shape, seed=2).abs()
    w = numbers(CLIENTS, model.d, seed=3) / 2 if make_w is None else make_w(model.d)
    assert mlp_kernel.supports(model, w)
    in_c, exact, rounded = (
        model.grad(w, x, y, weight),
        *(by_graph(model, dtype, w, x, y, weight) for dtype in (torch.float64, torch.float32)),
    )
    allowed = 5 * float((rounded - exact).abs().max()) + 1e-6 * float(exact.abs().max())
    torch.testing.assert_close(in_c.double(), exact, rtol=0, atol=allowed)
    assert torch.equal(model.grad(w, x, y, weight), in_c), "other bits when computed again"


def by_graph(model: Network, dtype: torch.dtype, *stack: Tensor) -> Tensor:
    """Gradients of one client after the other by autograd."""
    slopes = []
    for w, x, y, weight in zip(*stack, strict=True):
        leaf = w.to(dtype).requires_grad_()
        slopes += torch.autograd.grad(model.objective(leaf, x.to(dtype), y, weight.to(dtype)), leaf)
    return torch.stack(slopes)


@pytest.mark.parametrize("rows", [1, 5, 22, 50, 130])
@pytest.mark.parametrize("widths", [(1, 2), (3, 10), (64, 64, 10), (17, 65, 3), (65, 1, 17, 33)])
def test_widths_and_numbers_of_rows(widths: tuple[int, ...], rows: int) -> None:
    check(built(widths, nn.ReLU), numbers(CLIENTS, rows, widths[0]), classes(widths[-1], rows))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity])
def test_activations(activation: type[nn.Module], bias: bool) -> None:
    check(built((7, 20, 9, 4), activation, bias), 3 * numbers(CLIENTS, 11, 7), classes(4, 11))


@pytest.mark.parametrize("last", [nn.Identity, nn.Sigmoid, nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_one_output(loss: str, last: type[nn.Module]) -> None:
    x = numbers(CLIENTS, 9, 6)
    y = classes(2, 9) if loss == "cross-entropy" else x.sum(-1)
    check(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1), last()), x, y, loss=loss)


def test_activations_before_the_first_layer_and_after_each_other() -> None:
    module = nn.Sequential(
        nn.Flatten(), nn.Sigmoid(), nn.Linear(6, 4), nn.Tanh(), nn.ReLU(), nn.Linear(4, 3), nn.Tanh()
    )
    x = numbers(CLIENTS, 5, 2, 3)
    before = x.clone()
    check(module, x, classes(3, 5))
    assert torch.equal(x, before), "rows are overwritten"


def test_parameters_that_clients_share_and_rows_with_gaps() -> None:
    x, y = numbers(CLIENTS, 4, 18)[..., ::2], classes(3, 8)[:, ::2]
    check(built((9, 20, 3), nn.Tanh), x, y, lambda d: numbers(d).expand(CLIENTS, -1))
    check(built((9, 20, 3), nn.Tanh), x, y, lambda d: numbers(d, CLIENTS).T)
    check(built((9, 20, 3), nn.Tanh), numbers(4, CLIENTS, 9).transpose(0, 1), classes(3, 4))


def test_large_and_small_scores() -> None:
    """Probabilities of 0 and 1, slopes of activations at their ends, tangents of next to nothing."""
    for scale in (1e-6, 30.0, 1e4):
        x = scale * numbers(CLIENTS, 5, 6)
        for activation in (nn.Tanh, nn.Sigmoid, nn.ReLU):
            check(built((6, 5, 3), activation), x, classes(3, 5))
        check(built((6, 5, 1), nn.Tanh), x, classes(2, 5))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid])
def test_what_is_not_a_number_stays_so_and_does_not_reach_others(activation: type[nn.Module]) -> None:
    x, y = numbers(CLIENTS, 5, 6), classes(3, 5)
    model = models.network(built((6, 5, 3), activation), stacked=True).fit_to(x.flatten(0, 1), y.flatten())
    w, weight = numbers(CLIENTS, model.d), torch.ones(CLIENTS, 5)
    usual = model.grad(w, x, y, weight)
    for wrong in (torch.nan, torch.inf):
        x[1, 2, 3] = wrong
        found = model.grad(w, x, y, weight)
        expected = by_graph(model, torch.float32, w, x, y, weight)
        assert torch.equal(found.isfinite(), expected.isfinite())
        assert torch.equal(found[::2], usual[::2])


@pytest.mark.parametrize("label", [-1, 3, -100, 2**40])
def test_a_label_without_an_output_is_an_error(label: int) -> None:
    x, y = numbers(CLIENTS, 5, 6), classes(3, 5)
    model = models.network(built((6, 3), nn.ReLU), stacked=True).fit_to(x.flatten(0, 1), y.flatten())
    y[1, 4] = label
    with pytest.raises(DataError, match=r"outside 0\.\.2"):
        model.grad(numbers(CLIENTS, model.d), x, y, torch.ones(CLIENTS, 5))


def test_no_rows_and_no_clients() -> None:
    x, y = numbers(CLIENTS, 5, 6), classes(3, 5)
    model = models.network(built((6, 3), nn.ReLU), stacked=True).fit_to(x.flatten(0, 1), y.flatten())
    w, weight = numbers(CLIENTS, model.d), torch.ones(CLIENTS, 5)
    without_rows = mlp_kernel.run(model, w, x[:, :0], y[:, :0], weight[:, :0])
    assert torch.equal(without_rows, torch.zeros_like(w))
    assert model.grad(w[:0], x[:0], y[:0], weight[:0]).shape == (0, model.d)


def test_parts_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = numbers(CLIENTS, 5, 6), classes(3, 5)
    model = models.network(built((6, 9, 3), nn.ReLU), stacked=True).fit_to(x.flatten(0, 1), y.flatten())
    rows = numbers(CLIENTS, model.d), x, y, torch.ones(CLIENTS, 5)
    whole = model.grad(*rows)
    monkeypatch.setattr(threads, "SHARED_PRODUCTS", 1)
    with threads.helped(3):
        assert torch.equal(model.grad(*rows), whole)


def test_cobo_trains_as_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = numbers(120, 9), torch.arange(120) % 3

    def trained() -> tuple[Tensor, Tensor]:
        fed = Federation.from_rows(
            x,
            labels,
            torch.full((12,), 10),
            model=models.mlp(hidden=(20,), stacked=True),
            names=[str(k) for k in range(12)],
        )
        run = fit(fed, make("cobo", lr=0.1, rho=1.0, gamma=0.1, rate=6.0, **PRINTED), 15, evaluate_every=0)
        return run.personal, run.state.weights

    with_c = trained()
    assert all(torch.equal(a, b) for a, b in zip(trained(), with_c, strict=True))
    monkeypatch.setattr(native, "library", None)
    for found, expected in zip(with_c, trained(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("d", [1, 16, 33, 200])
@pytest.mark.parametrize("m, n", [(1, 1), (3, 5), (12, 12), (13, 30), (40, 25)])
def test_mixtures_of_models(m: int, n: int, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(m * n * d)
    weights = torch.rand(m, n, generator=generator, dtype=torch.float64)
    models, slopes = torch.randn(n, d, generator=generator), torch.randn(m, d, generator=generator)
    exact = weights @ models.double()
    torch.testing.assert_close(mixed(weights, models).double(), exact, rtol=1e-5, atol=1e-5)
    whole = mixed(weights, models, slopes, 0.3)
    torch.testing.assert_close(whole.double(), exact - 0.3 * slopes.double(), rtol=1e-5, atol=1e-5)
    turned = mixed(weights, models.T.contiguous().T, slopes.T.contiguous().T, 0.3)
    assert torch.equal(turned, whole), "depends on the order of memory"
    monkeypatch.setattr(threads, "SHARED_PRODUCTS", 1)
    with threads.helped(2):
        assert torch.equal(mixed(weights, models, slopes, 0.3), whole), "depends on the number of threads"


@pytest.mark.parametrize("d", [1, 16, 33, 200])
def test_midpoints_of_pairs(d: int) -> None:
    all_models, ends = numbers(5, d), torch.tensor([0, 2, 2, 4, 3, 1])
    middle = (all_models[ends[:3]] + all_models[ends[3:]]) / 2
    assert torch.equal(midpoints(all_models, ends), torch.cat([middle, middle]))
    for wrong in (-1, 5):
        ends[4] = wrong
        with pytest.raises(IndexError):
            midpoints(all_models, ends)
