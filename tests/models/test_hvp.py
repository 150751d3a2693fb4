"""Hessian times vector against a central difference of the gradient, for every kind of model."""

import pytest
import torch

from coterie import models
from coterie._core import randomness


def normal(name, *shape):
    return randomness.normal(randomness.slots(randomness.key(3, name), torch.Size(shape).numel())).view(shape)


MODELS = {
    "linear": (models.linear(l2=0.3), "numbers"),
    "linear with intercept": (models.linear(l2=0.3, intercept=True), "numbers"),
    "logistic": (models.logistic(l2=0.1, intercept=True), "two"),
    "softmax": (models.softmax(l2=0.1), "four"),
    "network": (models.mlp(hidden=(5,), l2=0.2, stacked=False), "four"),
    "network, stacked": (models.mlp(hidden=(5,), l2=0.2, stacked=True), "four"),
}


@pytest.mark.parametrize("name", MODELS)
def test_hessian_vector_product(name):
    model, kind = MODELS[name]
    x = normal("x", 3, 7, 4)
    labels = torch.arange(21).view(3, 7)
    y = {"numbers": normal("y", 3, 7), "two": (labels % 2).double(), "four": labels % 4}[kind]
    model = model.fit_to(x.flatten(0, 1), y.flatten())
    x = model.prepare(x.flatten(0, 1)).unflatten(0, (3, 7))
    weight = torch.full((3, 7), 1 / 7, dtype=torch.float64)
    w, v = normal("w", 3, model.d), normal("v", 3, model.d)
    slope = [model.grad(w + sign * 1e-5 * v, x, y, weight) for sign in (1, -1)]
    expected = (slope[0] - slope[1]) / 2e-5
    found = model.hvp(w, v, x, y, weight)
    assert torch.allclose(found, expected, atol=1e-7)
    assert torch.allclose(model.hvp(w[1], v[1], x[1], y[1], weight[1]), found[1], atol=1e-12)
