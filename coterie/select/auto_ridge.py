"""Stronger ridge penalties in the race of `auto`, for columns with more levels than rows can tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coterie.engine.federation import Federation
from coterie.models.glm import Glm

RIDGES = {"ridge": 10.0, "strong ridge": 50.0}  # penalties on the sum of the losses over all training rows
GIVEN = ("", *RIDGES)  # models that are the given one, with whatever penalty
STRONGER = 5.0  # times the given penalty, or it is left out: with many rows such a ridge changes nothing


def with_ridge(fed: Federation, methods: Sequence[str] | None) -> dict[str, Federation]:
    """Return the federation of a table with stronger penalties on all coefficients but the intercept, by name.

    A column of many levels has a coefficient for each, and where most of them mean nothing, estimates without a
    penalty fit noise. Coefficients of standardised columns have a prior variance of 1/10 and 1/50.
    """
    model = fed.model
    if methods is not None or fed.origin is None or not isinstance(model, Glm) or model.whole_clients:
        return {}
    rows = int(fed.rows["train"].sum())
    scale = 1.0 if model.reduction == "sum" else 1 / max(1, rows)
    penalties = {name: strength * scale for name, strength in RIDGES.items()}
    return {
        name: fed.with_model(replace(model, l2=l2))
        for name, l2 in penalties.items()
        if l2 >= STRONGER * model.l2
    }
