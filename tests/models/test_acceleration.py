from __future__ import annotations

import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coterie import models
from coterie._core.errors import SettingError
from coterie.models import compiling, fast, gradient_backends, measuring
from coterie.models.cuda_replay import SHAPES
from coterie.models.fast import compiled_graphs, cuda_graphs


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


@pytest.mark.slow
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


class Late:
    """A path that is measured late, which computes what the loop does and sleeps first."""

    def __init__(self, model: models.network.Network, seconds: float, monkeypatch) -> None:
        self.seconds, self.calls = seconds, 0
        loop = replace(model, decisions={}).backends.looped

        def run(_: models.network.Network, *inputs: Tensor) -> Tensor:
            self.calls += 1
            time.sleep(self.seconds)
            return loop(*inputs)

        path = fast.FastPath("late", "gradient", lambda *_: True, run, family="compiled", late=True)
        monkeypatch.setattr(fast, "PATHS", (path,))
        fast._enabled.cache_clear()


@pytest.fixture
def slow_loop(net, monkeypatch):
    """A network whose loop takes 10 ms, beside a path for later; nothing of them is left behind."""
    model = replace(net, stacked=False, decisions={})
    loop = model.backends.looped

    def slow(*inputs: Tensor) -> Tensor:
        time.sleep(0.01)
        return loop(*inputs)

    monkeypatch.setattr(model.backends, "looped", slow)
    yield model
    monkeypatch.undo()
    fast._enabled.cache_clear()


def test_a_late_path_is_measured_once_training_has_lasted(slow_loop, monkeypatch) -> None:
    model, inputs = slow_loop, stack(slow_loop)
    late, now = Late(model, 0.0, monkeypatch), [100.0]
    monkeypatch.setattr(gradient_backends.time, "monotonic", lambda: now[0])
    expected = model.grad(*inputs)
    now[0] += gradient_backends.PATIENCE - 1
    model.grad(*inputs)
    assert late.calls == 0 and set(model.paths_used()) == {"loop"}
    now[0] += 2
    assert torch.equal(model.grad(*inputs), expected)
    assert model.paths_used()["late"] == 1 and set(model.decisions.values()) == {"compiled"}
    again = replace(model)  # what a checkpoint brings back
    again.grad(*inputs)
    assert set(again.paths_used()) == {"late"}


def test_a_late_path_that_is_slower_is_not_measured_twice(slow_loop, monkeypatch) -> None:
    model, inputs = slow_loop, stack(slow_loop)
    late, now = Late(model, 0.25, monkeypatch), [100.0]  # beyond what is measured again
    monkeypatch.setattr(gradient_backends.time, "monotonic", lambda: now[0])
    for _ in range(3):
        model.grad(*inputs)
        now[0] += 2 * gradient_backends.PATIENCE
    assert late.calls == 2 and set(model.paths_used()) == {"loop"}  # one call prepares, one is timed


def test_nothing_is_measured_late_where_digits_must_not_depend_on_time(slow_loop, monkeypatch) -> None:
    model, inputs = slow_loop, stack(slow_loop)
    late, now = Late(model, 0.0, monkeypatch), [100.0]
    monkeypatch.setattr(gradient_backends.time, "monotonic", lambda: now[0])
    with measuring.untimed():
        for _ in range(2):
            model.grad(*inputs)
            now[0] += 2 * gradient_backends.PATIENCE
    assert late.calls == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captured graphs need a GPU")
def test_compiled_graphs_have_the_gradients_of_the_loop(net) -> None:
    for clients in (1, 3, 8):
        inputs = tuple(part.cuda() for part in stack(net, clients))
        assert compiled_graphs.supports(net, *inputs)
        torch.testing.assert_close(
            compiled_graphs.run(net, *inputs), net.backends.looped(*inputs), rtol=1e-4, atol=1e-5
        )
