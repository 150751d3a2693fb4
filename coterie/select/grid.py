"""Settings worth trying, derived from what an algorithm declares beside its hyperparameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from coterie.algorithms import Algorithm
from coterie.engine.federation import Federation
from coterie.models.trees import with_loss_of

_PRIMES = (2, 3, 5, 7, 11, 13)


def candidates(
    algorithm: Algorithm,
    budget: int,
    instead: Mapping[str, Sequence[float]] | None = None,
    fixed: Collection[str] = (),
) -> list[Algorithm]:
    """Return settings spread evenly over the declared grid (Halton points), the same for every seed.

    Parameters
    ----------
    algorithm
        Method; its settings without a grid stay as they are.
    budget
        Number of settings at most.
    instead
        Other values for some of the settings that have a grid.
    fixed
        Names of settings that stay as they are although they have a grid.

    Returns
    -------
    list of Algorithm
        Distinct settings of the method.

    Examples
    --------
    >>> from coterie.algorithms import make
    >>> [candidate.lr for candidate in candidates(make("fedavg"), 3)]
    [0.001, 0.1, 0.01]
    """
    tuned = [f for f in dataclasses.fields(algorithm) if f.metadata.get("tune") and f.name not in fixed]
    grids = {f.name: f.metadata["tune"] for f in tuned}
    own = {name: list(dict.fromkeys(values)) for name, values in (instead or {}).items()}
    grids |= {name: values for name, values in own.items() if name in grids and values}
    if not grids:
        return [algorithm]
    budget = min(budget, math.prod(len(values) for values in grids.values()))
    chosen: list[Algorithm] = []
    index = 0
    while len(chosen) < budget:
        settings = {
            name: values[int(_halton(index, prime) * len(values))]
            for (name, values), prime in zip(grids.items(), _PRIMES, strict=False)
        }
        candidate = algorithm.replace(**settings)
        if candidate not in chosen:
            chosen.append(candidate)
        index += 1
    return chosen


def trained_by(algorithms: Sequence[Algorithm], fed: Federation, rounds: int) -> Federation:
    """Return the federation with the model that these settings of a method train, where it has one of its own.

    Parameters
    ----------
    algorithms
        Settings of one method.
    fed
        The federation, made from a table if it has another model.
    rounds
        Rounds of a run.

    Returns
    -------
    Federation
        The same clients and splits; `fed` itself if the method trains any model.
    """
    own = [model for model in (one.own_model(rounds) for one in algorithms) if model is not None]
    if not own or isinstance(fed.model, type(own[0])):
        return fed
    return fed.with_model(with_loss_of(max(own, key=lambda model: getattr(model, "leaves", 0)), fed.model))


def suited(algorithm: Algorithm, fed: Federation) -> Algorithm:
    """Return the method as the model needs it, with one group where it would use known clusters and there are none."""
    algorithm = algorithm.for_model(fed.model)
    if fed.clusters is None and algorithm.settings().get("grouping") == "known":
        return algorithm.replace(grouping="one")
    return algorithm


def _halton(index: int, base: int) -> float:
    """Return the digits of `index` in `base`, mirrored behind the point."""
    value, scale = 0.0, 1.0
    while index:
        scale /= base
        value += scale * (index % base)
        index //= base
    return value
