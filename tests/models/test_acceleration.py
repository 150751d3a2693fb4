from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coterie import models
from coterie._core.errors import SettingError
from coterie.models import compiling, measuring
from coterie.models.cuda_replay import SHAPES
from coterie.models.fast import cuda_graphs


def stack(model: models.base.Model, clients: int = 5) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    w = model.initial(0, torch.float32) + 0.1 * torch.randn(clients, model.d)
    return w, torch.randn(clients, 7, 6), torch.randint(0, 3, (clients, 7)), torch.full((clients, 7), 1 / 7)


@pytest.fixture(scope="module")
def net() -> models.network.Network:
    return models.mlp(hidden=(5,)).fit_to(torch.randn(9, 6), torch.arange(9) % 3)


def test_bf16_gradients_are_near_the_full_ones_and_keep_their_type(net) -> None:
    inputs = stack(net)
    full = net.grad(*inputs)
    for stacked in (True, False):
        rough = replace(net, precision="bf16", stacked=stacked).grad(*inputs)
        assert rough.dtype == torch.float32
        assert 1e-5 < (rough - full).norm() / full.norm() < 0.03


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(SettingError, match="precision='fp8'"):
        models.mlp(precision="fp8")


def test_precision_and_compilation_are_part_of_the_description() -> None:
    model = models.mlp(precision="bf16", compiled=True).fit_to(torch.randn(9, 6), torch.arange(9) % 3)
    said = model.describe()
    assert (said["precision"], said["compiled"]) == ("bf16", True)
    again = models.description.from_description(said)
    assert (again.precision, again.compiled) == ("bf16", True)


@pytest.mark.quick("cnn")
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet9"])
def test_a_compiler_sees_a_network_as_one_graph(name: str) -> None:
    options = {"mlp": {"hidden": (3,)}, "cnn": {"channels": (2,), "hidden": 3}, "resnet9": {"width": 2}}
    x, y = torch.randn(4, 1, 8, 8), torch.arange(4) % 3
    model = getattr(models, name)(**options[name], classes=3, precision="bf16").fit_to(x, y)
    w = model.initial(0, torch.float32).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch._dynamo.explain(model.objective)(w, x, y, torch.full((4,), 0.25))
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [True, False])
def test_compiled_gradients_equal_plain_ones(net, stacked: bool) -> None:
    inputs = stack(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = replace(net, compiled=True, stacked=stacked).grad(*inputs)
    torch.testing.assert_close(found, replace(net, stacked=stacked).grad(*inputs), rtol=1e-4, atol=1e-6)


def test_a_compiler_that_errs_is_not_used(monkeypatch) -> None:
    def objective(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).sum()

    monkeypatch.setattr(torch, "compile", lambda f, dynamic: lambda w, x: 2 * f(w, x))
    wrong = compiling.compiled(objective, objective)
    w, x = torch.ones(3), torch.arange(3.0)
    with pytest.warns(UserWarning, match=r"off by 1.0e\+00, plain ones by 0.0e\+00"):
        assert wrong(w, x) == 3.0

    def broken(w: Tensor, x: Tensor) -> Tensor:
        raise ValueError("no compiler here\nat all")

    monkeypatch.setattr(torch, "compile", lambda f, dynamic: broken)
    with pytest.warns(
        UserWarning, match="torch.compile failed and is not used: ValueError: no compiler here"
    ):
        assert compiling.compiled(objective, objective)(w, x) == 3.0


def test_the_fastest_way_is_found_and_ways_that_fail_are_out() -> None:
    import time

    def slow(w: Tensor) -> Tensor:
        time.sleep(0.01)
        return w

    def fails(w: Tensor) -> Tensor:
        raise RuntimeError

    backends = {"looped": slow, "stacked": torch.clone, "captured": fails}
    name, result = measuring.fastest(backends, False, torch.ones(2, 3))
    assert name == "stacked" and torch.equal(result, torch.ones(2, 3))


def test_graphs_are_made_for_a_few_shapes_whatever_the_number_of_clients(net) -> None:
    captured = cuda_graphs.Captured(lambda w, *rows: w)
    made = [(*stack(net)[:1], torch.zeros(5, rows, 6)) for rows in range(1, SHAPES + 2)]
    for inputs in made[:-1]:
        assert captured.takes(*inputs)
        captured.shapes[cuda_graphs._shape(*inputs)] = None  # type: ignore[assignment]
    assert not captured.takes(*made[-1])
    assert captured.takes(*(part[:2] for part in made[0]))


def test_curvature_and_solutions_do_not_drown_in_rounding(net) -> None:
    exact = replace(net, l2=0.5, stacked=True)
    rough = replace(exact, precision="bf16")
    w, *rows = stack(net, 2)
    torch.testing.assert_close(rough.smoothness(w, *rows), exact.smoothness(w, *rows))
    torch.testing.assert_close(rough.solve(w, *rows, tol=1e-4), exact.solve(w, *rows, tol=1e-4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captured graphs need a GPU")
def test_captured_gradients_have_the_bits_of_the_loop(net) -> None:
    for clients in (1, 3, 8, 21):
        inputs = tuple(part.cuda() for part in stack(net, clients))
        assert torch.equal(cuda_graphs.run(net, *inputs), net.backends.looped(*inputs))
