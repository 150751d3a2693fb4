"""Make a model from its JSON description."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from coterie._core.errors import SettingError, nearest
from coterie.models.assorted import assorted
from coterie.models.base import Model
from coterie.models.causal_lm import causal_lm
from coterie.models.counts import NegativeBinomial, Poisson, Tweedie
from coterie.models.cumulative_logit import Ordinal
from coterie.models.ensemble import Ensemble
from coterie.models.glm import Logistic, Softmax
from coterie.models.installed import NAME, installed
from coterie.models.installed import restore as restore_installed
from coterie.models.linear import Linear
from coterie.models.neighbours import with_neighbours
from coterie.models.survival import Cox
from coterie.models.trees import restore as restore_trees
from coterie.models.zoo import FACTORIES, restore


def from_description(description: dict[str, Any]) -> Model:
    """Return the model that `Model.describe` described.

    Parameters
    ----------
    description
        Its settings and shapes, with the kind of model under "model".

    Returns
    -------
    Model
        A model that computes the same.

    Raises
    ------
    SettingError
        If there is no such kind, or an entry does not fit.

    Examples
    --------
    >>> import torch, coterie
    >>> model = coterie.models.linear(l2=0.1).fit_to(torch.zeros(4, 3), torch.zeros(4))
    >>> coterie.models.from_description(model.describe()) == model
    True
    """
    kinds: dict[str, Callable[..., Model]] = {"linear": Linear, "logistic": Logistic, "softmax": Softmax}
    kinds |= {
        "poisson": Poisson,
        "tweedie": Tweedie,
        "negative_binomial": NegativeBinomial,
        "ordinal": Ordinal,
    }
    kinds |= {"cox": Cox, "causal_lm": causal_lm, "trees": restore_trees}
    kinds |= {name: functools.partial(restore, name) for name in FACTORIES}
    kinds |= {"with_neighbours": lambda base, rows: with_neighbours(from_description(base), rows)}
    kinds |= {"ensemble": _ensemble}
    kinds |= {"assorted": lambda bases: assorted(*(from_description(base) for base in bases))}
    settings = dict(description)
    name = settings.pop("model", None)
    if name not in kinds and isinstance(name, str) and NAME.fullmatch(name) and name in installed():
        kinds[name] = functools.partial(restore_installed, name)
    if name not in kinds:
        raise SettingError(f"There is no model {name!r} to load.{nearest(str(name), kinds)}")
    try:
        return kinds[name](**settings)
    except TypeError as problem:
        raise SettingError(f"The description of model {name!r} does not fit: {problem}") from problem


def _ensemble(bases: list[dict[str, Any]], members: list[int], best: str) -> Model:
    return Ensemble(tuple(map(from_description, bases)), tuple(members), best)


CUSTOM = "custom"


def description(model: Model) -> dict[str, Any]:
    """Return a model's description; for a user's own module, only that it is one."""
    try:
        return model.describe()
    except SettingError:
        return {"model": CUSTOM}
