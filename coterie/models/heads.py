"""The last layer of a network as a linear model on the features before it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from coterie._core.errors import SettingError
from coterie.models.base import Model
from coterie.models.class_weights import weigh
from coterie.models.glm import Glm, Logistic, logistic, softmax
from coterie.models.groups import Part
from coterie.models.linear import Linear, linear
from coterie.models.network import Network

RIDGE = 1e-3  # as tables have it


def head_of(model: Model) -> Glm | None:
    """Return a linear model itself, the model of a network's last nn.Linear if that gives the output, or None."""
    if isinstance(model, Glm):
        return None if model.whole_clients else model
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
    real = weigh((weight > 0).to(w.dtype), y, model.class_weights).sqrt()
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


@dataclass(frozen=True)
class LastLayer:
    """Where the last linear layer is in a model's parameters: weights [outputs, width] and biases [outputs].

    The model's scores are `scale` times what this layer gives.
    """

    weight: Part
    bias: Part
    whole: Part
    outputs: int
    width: int
    scale: float

    def filled(self, w: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return parameters w [..., d] with another last layer, [..., outputs, width] and [..., outputs]."""
        return self.bias.into(self.weight.into(w, weight.flatten(-2)), bias)


@functools.lru_cache(maxsize=16)
def last_linear(model: Model, method: str) -> LastLayer:
    """Return the last layer of a model; raise `SettingError` if it has no biases or does not give the scores."""
    groups, outputs = model.groups, model.outputs or 1
    if isinstance(model, Network) and model.flat_module.head is not None:
        weight, bias = f"{model.flat_module.head}.weight", f"{model.flat_module.head}.bias"
    else:
        weight, bias = "weights", "intercept"
    lacks = weight not in groups or bias not in groups or int(groups[bias].sum()) != outputs
    if lacks or (
        not isinstance(model, Network) and type(model).__name__ not in ("Linear", "Logistic", "Softmax")
    ):
        raise SettingError(
            f"{method} needs a last linear layer with biases that gives the scores; use a network (--model mlp), or a "
            "linear model with an intercept (no --l2)"
        )
    parts = Part(groups[weight]), Part(groups[bias])
    both = Part(groups[weight] | groups[bias])
    return LastLayer(*parts, both, outputs, parts[0].size // outputs, _scale(model, parts[1]))


def _scale(model: Model, bias: Part) -> float:
    """Return how far scores move when all biases move by one."""
    if not isinstance(model, Network):
        return 1.0
    assert model.features is not None
    w = model.initial(0, torch.float64)
    x = torch.zeros(1, *model.features, dtype=torch.int64 if model.tokens else torch.float64)
    moved = bias.into(w, bias.of(w) + 1.0)
    return round(float((model.scores(moved, x) - model.scores(w, x)).mean()), 9)
