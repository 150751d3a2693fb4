"""Networks in the race of `auto`: a hidden layer that all clients share, and a head of each client's own."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.algorithms import Algorithm
from coterie.algorithms.fedper import FedPer
from coterie.engine.federation import Federation
from coterie.models.glm import Glm
from coterie.models.zoo import mlp
from coterie.select.cross_validation import can_fold

NETWORK = "mlp"
FEWEST = 1000  # training rows of all clients from which a network races
HIDDEN, RIDGE = (64,), 1e-3
TASKS = {"linear": "regression", "logistic": "binary", "softmax": "multiclass"}


def with_network(fed: Federation, methods: Sequence[str] | None) -> Federation | None:
    """Return the federation with a network in place of a linear model, where rows are enough for one.

    All clients are computed at once, whatever timing says, so that a race has the same bytes every time.
    """
    if methods is not None or fed.origin is None or not can_fold(fed) or not isinstance(fed.model, Glm):
        return None
    plain = fed.model.name in TASKS and fed.model.basis is None and fed.model.class_weights is None
    enough = int(fed.rows["train"].sum()) >= FEWEST
    return fed.with_model(mlp(HIDDEN, l2=RIDGE, stacked=True)) if plain and enough else None


def on_network() -> list[Algorithm]:
    """Return settings of networks: steps of Adam in the shared layer and the client's head, two sizes of them."""
    return [FedPer(lr=0.01, steps=20, optimizer="adam"), FedPer(lr=0.03, steps=10, optimizer="adam")]
