"""Gradients of softmax regressions in C are those of the closed form, and a pull to the start costs no product."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coterie import Federation, fit, models
from coterie._core.native import dual_sgd as native
from coterie.algorithms import make
from coterie.data.rows import Rows
from coterie.models import fast
from coterie.models.fast import dual_sgd, glm_kernel
from coterie.models.glm import Glm

pytestmark = pytest.mark.skipif(not native.available, reason="there is no C library for this processor")


def rows(model: Glm, clients: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    x = model.prepare(torch.randn(clients * count, model.columns - model.intercept))
    y = torch.randint(0, model.outputs, (clients, count))
    weight = torch.rand(clients, count)
    weight[:, (count + 1) // 2 :] = 0.0  # padding
    return x.view(clients, count, -1), y, weight


@pytest.mark.parametrize("features", [15, 16, 50])
@pytest.mark.parametrize("classes", [2, 3, 7, 11])
@pytest.mark.parametrize("lanes", [0, 8])
def test_gradients_are_those_of_the_closed_form(features, classes, lanes, monkeypatch) -> None:
    if not native.library.coterie_dual_sgd_suits(lanes):
        pytest.skip("this processor has no such vectors")
    monkeypatch.setattr(native, "lanes", lanes)
    torch.manual_seed(features + classes)
    weights = tuple(1.0 + k for k in range(classes))
    for model in (
        models.softmax(classes=classes, intercept=True),
        models.softmax(classes=classes, intercept=True, l2=0.3).with_class_weights(weights),
    ):
        model = model.fit_to(torch.randn(classes, features), torch.arange(classes))
        for clients, count in ((1, 1), (3, 5), (4, 33)):
            given = rows(model, clients, count)
            for w in (torch.randn(clients, model.d), torch.randn(model.d).expand(clients, -1)):
                assert glm_kernel.supports(model, w, *given)
                x, y, weight = given
                expected = model.grad(w.double(), x.double(), y, weight.double())
                found = glm_kernel.run(model, w, *given).double()
                assert (found - expected).abs().max() < 2e-6 * expected.abs().max().clamp(min=1.0)


def test_rows_are_read_where_they_are() -> None:
    torch.manual_seed(0)
    model = models.softmax(classes=4, intercept=True).fit_to(torch.randn(4, 20), torch.arange(4))
    x, y = model.prepare(torch.randn(50, 20)), torch.randint(0, 4, (50,))
    held = Rows(x, y, torch.tensor([0, 20, 50]), torch.tensor([20, 30, 0]))
    drawn, weight, w = torch.randint(0, 51, (3, 7)), torch.rand(3, 7), torch.randn(3, model.d)
    assert glm_kernel.supports_drawn(model, w, held)
    there = drawn.clamp(max=49)  # a last client without rows begins after the end
    expected = glm_kernel.run(model, w, x[there], y[there], weight)
    assert torch.equal(glm_kernel.run_drawn(model, w, held, drawn, weight), expected)
    drawn[1, 3] = -1
    with pytest.raises(IndexError):
        glm_kernel.run_drawn(model, w, held, drawn, weight)


def test_labels_that_are_not_classes_are_found() -> None:
    model = models.softmax(classes=3).fit_to(torch.randn(3, 20), torch.arange(3))
    x, y, weight = rows(model, 2, 4)
    for wrong in (3, -1):
        y[1, 2] = wrong
        with pytest.raises(IndexError):
            glm_kernel.run(model, torch.zeros(2, model.d), x, y, weight)


@pytest.mark.parametrize(
    "model", [models.linear(), models.logistic(), models.softmax(classes=3, intercept=True)]
)
def test_what_torch_computes_better_is_left_to_it(model) -> None:
    features = 4 if model.name == "softmax" else 20
    y = torch.randn(6) if model.name == "linear" else torch.arange(6) % (3 if model.name == "softmax" else 2)
    model = model.fit_to(torch.randn(6, features), y)
    given = (torch.randn(2, 3, model.columns), y.view(2, 3), torch.ones(2, 3))
    assert not glm_kernel.supports(model, torch.zeros(2, model.d), *given)


def copy_of(stack: Tensor) -> Tensor:
    """Return a copy that is broadcast if the stack is."""
    return stack[:1].clone().expand_as(stack) if stack.stride(0) == 0 else stack.clone()


def test_a_pull_to_the_start_has_the_bits_of_a_pull_to_its_copy(monkeypatch) -> None:
    """The kernel scores rows once if the anchor is the very tensor that steps start from."""
    monkeypatch.setattr(dual_sgd, "FEWEST_PRODUCTS", 1)
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 30, generator=draw) for n in (12, 9, 15)]
    ys = [torch.randint(0, 3, (n,), generator=draw) for n in (12, 9, 15)]

    def trained(method: str, copies: bool) -> Tensor:
        fed = Federation.from_arrays(xs, ys, models.softmax(classes=3), seed=3)
        with monkeypatch.context() as patched:
            if copies:
                first = fast.PATHS[0]
                copied = replace(first, run=lambda job: first.run(job._replace(anchor=copy_of(job.anchor))))
                patched.setattr(fast, "PATHS", (copied,))
            fast._enabled.cache_clear()
            run = fit(fed, make(method, batch=4, steps=4), 3, evaluate_every=0)
            assert run.fed.runtime.paths_used()["dual-sgd"]
        fast._enabled.cache_clear()
        return run.personal

    for method in ("fedprox", "fedamp"):
        assert torch.equal(trained(method, False), trained(method, True))
