"""Models for tables by name, as `--model` and `Federation.from_table(model=...)` take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from coterie._core.errors import SettingError, nearest
from coterie.models.base import Model
from coterie.models.basis import Basis
from coterie.models.counts import negative_binomial, poisson, tweedie
from coterie.models.cumulative_logit import ordinal
from coterie.models.glm import Glm, logistic, softmax
from coterie.models.linear import linear
from coterie.models.network import network
from coterie.models.survival import cox
from coterie.models.trees import trees
from coterie.models.zoo import mlp

LINES: dict[str, Callable[..., Glm]] = {"regression": linear, "binary": logistic, "multiclass": softmax}
QUANTITIES: dict[str, Callable[..., Glm]] = {
    "poisson": poisson,
    "negative_binomial": negative_binomial,
    "tweedie": tweedie,
}


def _linear(task: str, l2: float | None) -> Model:
    """Return a model linear in the features, with an intercept and slight ridge unless `l2` is given."""
    if task == "survival":
        return cox(l2=1e-3 if l2 is None else l2)
    return LINES[task](l2=1e-3 if l2 is None else l2, intercept=l2 is None)


def _mlp(task: str, l2: float | None) -> Model:
    """Return a network with one hidden layer of 64 units."""
    return mlp((64,), l2=0.0 if l2 is None else l2)


def _trees(task: str, l2: float | None) -> Model:
    """Return boosted trees, which the method `trees` grows."""
    return trees()


def _quantity(name: str) -> Callable[[str, float | None], Model]:
    """Return a function that makes a model of counts or amounts, with an intercept and slight ridge as `_linear`."""

    def make(task: str, l2: float | None) -> Model:
        if task != "regression":
            raise SettingError(
                f"the model {name!r} is for counts and amounts, and the target is read as classes: --task regression"
            )
        return QUANTITIES[name](l2=1e-3 if l2 is None else l2, intercept=l2 is None)

    return make


def _ordinal(task: str, l2: float | None) -> Model:
    """Return the cumulative logit model of classes in their order, which is that of their names or numbers."""
    if task not in ("binary", "multiclass"):
        raise SettingError(
            "the model 'ordinal' is for ordered classes, and the target is read as a quantity: --task classification"
        )
    return ordinal(l2=1e-3 if l2 is None else l2)


def _curves(kind: str) -> Callable[[str, float | None], Model]:
    """Return a function that makes a linear model on a basis."""

    def make(task: str, l2: float | None) -> Model:
        return replace(LINES[task](l2=1e-3 if l2 is None else l2, intercept=l2 is None), basis=Basis(kind))

    return make


TABLE_MODELS: dict[str, Callable[[str, float | None], Model]] = {
    "linear": _linear,
    "mlp": _mlp,
    "trees": _trees,
    "splines": _curves("splines"),
    "rff": _curves("rff"),
    "ordinal": _ordinal,
    **{name: _quantity(name) for name in QUANTITIES},
}


def table_model(name: str, task: str, l2: float | None = None) -> Model:
    """Return the model for a table by its name.

    Parameters
    ----------
    name
        A key of `TABLE_MODELS`.
    task
        "regression", "binary", "multiclass" or "survival".
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
        There is no model of this name, or it is not for this task.

    Examples
    --------
    >>> table_model("linear", "binary", l2=0.1).task
    'binary'
    """
    if name not in TABLE_MODELS:
        raise SettingError(f"no model {name!r} for tables.{nearest(name, TABLE_MODELS)}")
    if task == "survival" and name != "linear":
        raise SettingError(
            f"{name} does not train on survival times; take the linear model, which is Cox regression, or predict "
            "whether the event happened by a given time"
        )
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
