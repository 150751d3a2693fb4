"""Weights of classes: rows of a rare class count for more while a model is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from coterie._core.errors import SettingError, nearest

BALANCED = "balanced"


def balanced(y: Tensor, classes: int) -> tuple[float, ...]:
    """Return rows / (classes x rows of the class) for each class, as scikit-learn does; 1 for a class without rows.

    Parameters
    ----------
    y
        Labels 0, 1, ... of rows, [rows].
    classes
        Number of classes.

    Returns
    -------
    tuple of float
        Weights whose mean over the rows is one.

    Examples
    --------
    >>> balanced(torch.tensor([0, 0, 0, 1]), 2)
    (0.6666666666666666, 2.0)
    """
    counts = torch.bincount(y.long(), minlength=classes).double()
    return tuple(torch.where(counts > 0, len(y) / (classes * counts), 1.0).tolist())


def chosen(asked: str | Mapping[str, float], names: Sequence[str], y: Tensor) -> tuple[float, ...]:
    """Return the weight of each class as a user asked for it: "balanced", or numbers by the names of classes.

    Parameters
    ----------
    asked
        "balanced", or weights by class; a class that is not named has weight one.
    names
        Names of the classes.
    y
        Labels of the training rows, [rows].

    Returns
    -------
    tuple of float
        A weight for each class.

    Raises
    ------
    SettingError
        The target has no classes, or no class of a name.

    Examples
    --------
    >>> chosen({"sick": 4.0}, ["sick", "well"], torch.tensor([0, 1]))
    (4.0, 1.0)
    """
    if not names:
        raise SettingError("class weights are for a target with classes; this one has numbers")
    if isinstance(asked, str):
        if asked != BALANCED:
            raise SettingError(f"class weights {asked!r}: give 'balanced', or numbers such as 'yes=5, no=1'")
        return balanced(y, len(names))
    for name in asked:
        if str(name) not in names:
            raise SettingError(f"class weights: the target has no class {name!r}.{nearest(str(name), names)}")
    given = {str(name): float(weight) for name, weight in asked.items()}
    return checked([given.get(name, 1.0) for name in names])


def checked(weights: Sequence[float]) -> tuple[float, ...]:
    """Return weights as a tuple; raise `SettingError` unless all are positive and finite."""
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise SettingError(f"class weights are positive numbers, not {list(weights)}")
    return tuple(map(float, weights))


def weigh(weight: Tensor, y: Tensor, weights: tuple[float, ...] | None) -> Tensor:
    """Return the weights [..., B] of rows with labels y [..., B], times those of their classes.

    Examples
    --------
    >>> weigh(torch.ones(3), torch.tensor([0, 1, 1]), (1.0, 3.0))
    tensor([1., 3., 3.])
    """
    return weight if weights is None else weight * of_rows(weights, y, weight)


def of_rows(weights: tuple[float, ...], y: Tensor, like: Tensor) -> Tensor:
    """Return the weight of each row's class, [..., B]."""
    return like.new_tensor(weights)[y.long().clamp(0, len(weights) - 1)]
