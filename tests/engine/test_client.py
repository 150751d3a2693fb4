"""What a phase can ask of its client: gradients on the same rows again, curvature of single rows."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from coterie import Algorithm, Federation, State, models

RNG = np.random.default_rng(5)
XS = [RNG.normal(size=(n, 3)) for n in (1, 4, 9)]
YS = [RNG.integers(2, size=len(x)) for x in XS]


@dataclass(frozen=True)
class Probe(Algorithm):
    """Looks at gradients and curvature (2022)."""

    def start(self, fed):
        return State()

    def look(self, client):
        x = client.initial_model() + 1
        first, again, fresh = client.grad(x), client.grad(x, again=True), client.grad(x)
        return {"first": first, "again": again, "fresh": fresh, "rows": client.row_smoothness()}


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_same_rows_again_and_curvature_of_a_row(loop, reduction):
    model = models.logistic(l2=0.1, reduction=reduction)
    fed = Federation.from_arrays(XS, YS, model, loop=loop)
    replies = fed.map(Probe(batch=2).look)
    assert torch.equal(replies["first"], replies["again"])
    assert not torch.equal(replies["first"][2], replies["fresh"][2])
    for i, x in enumerate(XS):
        largest = 0.25 * (x**2).sum(1).max() + 0.1
        scale = len(x) if reduction == "sum" else 1
        assert abs(float(replies["rows"][i]) / (scale * largest) - 1) < 1e-9


@dataclass(frozen=True)
class Slopes(Algorithm):
    """Losses on minibatches, and their differences in the direction of the gradient (2022)."""

    def start(self, fed):
        return State()

    def look(self, client):
        x, step = client.initial_model() + 1, 1e-5
        slope = client.grad(x)
        ahead = client.batch_loss(x + step * slope, again=True)
        behind = client.batch_loss(x - step * slope, again=True)
        return {
            "steepness": (ahead - behind) / (2 * step) - (slope * slope).sum(-1, keepdim=True),
            "fresh": client.batch_loss(x) - client.batch_loss(x),
            "whole": client.batch_loss(x) - client.loss(x),
        }


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_a_batch_belongs_to_its_gradient(loop, reduction):
    fed = Federation.from_arrays(XS, YS, models.logistic(l2=0.1, reduction=reduction), loop=loop)
    replies = fed.map(Slopes(batch=2).look)
    assert replies["steepness"].abs().max() < 1e-7
    assert replies["fresh"][2] != 0 and replies["whole"][2] != 0
    assert fed.map(Slopes(batch=0).look)["whole"].abs().max() == 0


@dataclass(frozen=True)
class Begins(Algorithm):
    """Keeps a gradient from the start (2022)."""

    def start(self, fed):
        return State()

    def begin(self, client):
        client.keep.slope = client.full_grad(client.initial_model())

    def look(self, client, tag):
        return client.keep.slope + tag


def test_a_client_that_cannot_begin_is_left_out_of_the_call():
    """The others go on, also when rows are sent to each; later calls try it again."""
    fed = Federation.from_arrays([x.astype(float) for x in XS], [x.sum(1) for x in XS], models.linear())
    fed.runtime.train.y[0] = torch.nan
    fed.enter_round(1, State())
    tag = torch.tensor([[0.0], [10.0], [20.0]], dtype=torch.float64)
    replies = fed.map(Begins().look, each={"tag": tag})
    assert replies.ids.tolist() == [1, 2] and torch.isfinite(replies.values).all()
    assert fed.begun.tolist() == [False, True, True]
    assert fed.map(Begins().look, to=[2, 0], each={"tag": tag[:2]}).ids.tolist() == [2]
    assert {(k, why) for _, k, why in fed.left_out} == {(0, "begin: not finite")}


@dataclass(frozen=True)
class Curves(Algorithm):
    """Asks for second derivatives (2022)."""

    def look(self, client):
        return client.hessian(client.initial_model() + 0.3)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("model", [models.linear(l2=0.1), models.logistic(l2=0.1, reduction="sum")])
def test_hessian_is_the_derivative_of_the_gradient(model, loop):
    fed = Federation.from_arrays(XS, YS, model, loop=loop)
    for i, matrix in enumerate(fed.map(Curves().look).values):
        x, y = torch.from_numpy(XS[i]), torch.from_numpy(YS[i]).double()
        weight = torch.full((len(y),), 1.0 if model.reduction == "sum" else 1 / len(y), dtype=torch.float64)
        at, step = torch.full((3,), 0.3, dtype=torch.float64), 1e-6 * torch.eye(3, dtype=torch.float64)
        for c in range(3):
            ahead, back = (fed.model.grad(at + sign * step[c], x, y, weight) for sign in (1, -1))
            torch.testing.assert_close(matrix[:, c], (ahead - back) / 2e-6, atol=1e-6, rtol=1e-6)
