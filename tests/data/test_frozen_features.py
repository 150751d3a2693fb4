"""Frozen features: the network's output row by row, whatever the batch, and the network as it was."""

import pytest
import torch
from torch import nn

import coterie
from coterie import Federation, models
from coterie._core.errors import DataError
from coterie.data import Clients, frozen_features


def images(seed=0):
    draw = torch.Generator().manual_seed(seed)
    xs = [torch.rand(rows, 1, 6, 6, generator=draw) for rows in (30, 41)]
    return Clients(xs, [(x.mean((1, 2, 3)) > 0.5).long() for x in xs], ["a", "b"])


def test_rows_go_through_the_network_and_nothing_of_it_changes():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    body.train()
    before = {name: value.clone() for name, value in body.state_dict().items()}
    found = frozen_features(images(), body, batch=7)
    assert body.training and all(
        torch.equal(value, before[name]) for name, value in body.state_dict().items()
    )
    body.eval()
    for x, given in zip(found.xs, images().xs, strict=True):
        torch.testing.assert_close(x, body(given).flatten(1).detach())
    assert found.names == ["a", "b"] and not found.xs[0].requires_grad


def test_linear_methods_train_the_last_layer():
    body = nn.Sequential(nn.Flatten(), nn.Linear(36, 8, bias=False))
    nn.init.constant_(body[1].weight, 1 / 36)  # the mean of the image, which the classes depend on
    found = frozen_features(images(), body)
    fed = Federation.from_clients(found, models.logistic(intercept=True), split=(0.6, 0.0, 0.4))
    run = coterie.fit(fed, coterie.algorithms.FedAvg(lr=20.0, steps=20), 40)
    assert run.score("test", "accuracy").min() >= 0.8


def test_a_network_that_gives_no_features_is_named():
    for body in (nn.Flatten(0), nn.Sequential(nn.Flatten(), nn.Threshold(9.0, float("nan")))):
        with pytest.raises(DataError, match="client 'a'"):
            frozen_features(images(), body)
