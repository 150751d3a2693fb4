"""The last layer of a network as a linear model on the features before it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from coterie.models.base import Model
from coterie.models.glm import Glm, Logistic, logistic, softmax
from coterie.models.linear import Linear, linear
from coterie.models.network import Network

RIDGE = 1e-3  # as tables have it


def head_of(model: Model) -> Glm | None:
    """Return a linear model itself, the model of a network's last nn.Linear if that gives the output, or None."""
    if isinstance(model, Glm):
        return model
    if not isinstance(model, Network):
        return None
    last = _last(model.flat_module.module)
    if last is None or last.out_features != model.outputs:
        return None
    columns = last.in_features + 1
    if model.task == "regression":
        return replace(linear(l2=RIDGE), features=columns)
    if model.task == "binary":
        return replace(logistic(l2=RIDGE), features=columns)
    return replace(softmax(l2=RIDGE, classes=model.outputs), features=columns)


def features(model: Model, trunk: Tensor, x: Tensor, lead: int) -> Tensor:
    """Return the last layer's inputs and a one for the intercept, [..., B, columns]; `trunk` [d] are all parameters."""
    if isinstance(model, Glm):
        return x
    assert isinstance(model, Network)
    module = model.flat_module.filled(trunk)
    last, seen = _last(module), []
    assert last is not None
    handle = last.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        module(x.flatten(0, lead - 1) if lead > 1 else x)
    handle.remove()
    found = seen[0] if lead == 1 else seen[0].unflatten(0, x.shape[:lead])
    return torch.cat([found, torch.ones_like(found[..., :1])], -1)


def linearised(model: Model, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and residuals of the least-squares problem that approximates the model near w, zero on padding.

    For classes: the step of iteratively reweighted least squares, one row per class, [..., classes, B, columns].
    """
    assert isinstance(model, Glm)
    real = (weight > 0).to(w.dtype)
    scores = model.scores(w, x).mT
    if isinstance(model, Linear):
        return x * real.unsqueeze(-1), (y - scores.squeeze(-2)) * real
    if isinstance(model, Logistic):
        likely, hit = torch.sigmoid(scores), y.unsqueeze(-2).to(w.dtype)
    else:
        likely = torch.softmax(scores, -2)
        classes = torch.arange(model.outputs, device=w.device).unsqueeze(-1)
        hit = (y.long().unsqueeze(-2) == classes).to(w.dtype)
    root = (likely * (1 - likely)).clamp_min(1e-3).sqrt()
    return x.unsqueeze(-3) * (root * real.unsqueeze(-2)).unsqueeze(-1), (
        hit - likely
    ) / root * real.unsqueeze(-2)


def last_layer(model: Model) -> int:
    """Return how many of a model's last parameters belong to its last layer; all for a linear model."""
    flat_module = getattr(model, "flat_module", None)
    if flat_module is None:
        return model.d
    owner = [name.rpartition(".")[0] for name in flat_module.names]
    return sum(size for name, size in zip(owner, flat_module.sizes, strict=True) if name == owner[-1])


def _last(module: nn.Module) -> nn.Linear | None:
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return layers[-1] if layers else None
