"""Models for tables by name, as `--model` and `Federation.from_table(model=...)` take them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from coterie._core.errors import SettingError, nearest
from coterie.models.base import Model
from coterie.models.glm import logistic, softmax
from coterie.models.linear import linear
from coterie.models.network import network
from coterie.models.trees import trees
from coterie.models.zoo import mlp


def _linear(task: str, l2: float | None) -> Model:
    """Return a model linear in the features, with an intercept and slight ridge unless `l2` is given."""
    make = {"regression": linear, "binary": logistic, "multiclass": softmax}[task]
    return make(l2=1e-3, intercept=True) if l2 is None else make(l2=l2)


def _mlp(task: str, l2: float | None) -> Model:
    """Return a network with one hidden layer of 64 units."""
    return mlp((64,), l2=0.0 if l2 is None else l2)


def _trees(task: str, l2: float | None) -> Model:
    """Return boosted trees, which the method `trees` grows."""
    return trees()


TABLE_MODELS: dict[str, Callable[[str, float | None], Model]] = {
    "linear": _linear,
    "mlp": _mlp,
    "trees": _trees,
}


def table_model(name: str, task: str, l2: float | None = None) -> Model:
    """Return the model for a table by its name.

    Parameters
    ----------
    name
        A key of `TABLE_MODELS`.
    task
        "regression", "binary" or "multiclass".
    l2
        Ridge penalty; the model's own if not given. A linear model with a penalty of yours has no intercept, which
        makes its loss strongly convex.

    Returns
    -------
    Model
        The model, not fitted to shapes yet.

    Raises
    ------
    SettingError
        There is no model of this name.

    Examples
    --------
    >>> table_model("linear", "binary", l2=0.1).task
    'binary'
    """
    if name not in TABLE_MODELS:
        raise SettingError(f"no model {name!r} for tables.{nearest(name, TABLE_MODELS)}")
    return TABLE_MODELS[name](task, l2)


def as_model(model: object) -> Model:
    """Return a model of Coterie for what a user gave as one.

    Parameters
    ----------
    model
        One of `coterie.models`, an `nn.Module`, or a class or function without arguments that returns one.

    Returns
    -------
    Model
        The model itself, or the module wrapped by `network`.

    Raises
    ------
    SettingError
        It is neither.

    Examples
    --------
    >>> from torch import nn
    >>> type(as_model(nn.Linear(3, 1))).__name__
    'Network'
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, nn.Module) or callable(model):
        return network(model)
    raise SettingError(
        f"model is {type(model).__name__}; give one of coterie.models, such as coterie.models.linear(), or an nn.Module"
    )
