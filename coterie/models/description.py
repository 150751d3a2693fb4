"""From the JSON description of a model back to the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from coterie.errors import SettingError, nearest
from coterie.models.base import Model
from coterie.models.causal_lm import causal_lm
from coterie.models.glm import Logistic, Softmax
from coterie.models.linear import Linear
from coterie.models.zoo import FACTORIES, restore


def from_description(description: dict[str, Any]) -> Model:
    """The model that `describe()` described."""
    kinds: dict[str, Callable[..., Model]] = {"linear": Linear, "logistic": Logistic, "softmax": Softmax}
    kinds["causal_lm"] = causal_lm
    kinds |= {name: functools.partial(restore, name) for name in FACTORIES}
    settings = dict(description)
    name = settings.pop("model", None)
    if name not in kinds:
        raise SettingError(f"There is no model {name!r} to load.{nearest(str(name), kinds)}")
    try:
        return kinds[name](**settings)
    except TypeError as problem:
        raise SettingError(f"The description of model {name!r} does not fit: {problem}") from problem


CUSTOM = "custom"


def description(model: Model) -> dict[str, Any]:
    """What can be written down of a model; a module of the user's own is only known to be one."""
    try:
        return model.describe()
    except SettingError:
        return {"model": CUSTOM}
