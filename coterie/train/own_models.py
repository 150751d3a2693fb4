"""Clients of a run that keep the models they have in another run: those whom a guard sent back to training alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from coterie.train.run import Run


@dataclass
class OwnModels:
    """Who keeps a model of its own, where it is from, and what the client would have had instead.

    Attributes
    ----------
    clients
        Indices of the clients.
    alone
        The run that their models are from.
    instead
        The models that they would have had, [clients, d].
    test_rows
        Values of all test rows without their own models, once test rows were scored.
    effect
        What that saved and cost on test rows, once it was judged; JSON values.
    """

    clients: list[int]
    alone: Run
    instead: Tensor
    test_rows: dict[str, Tensor] = field(default_factory=dict)
    effect: dict[str, Any] = field(default_factory=dict)

    def without(self, personal: Tensor) -> Tensor:
        """Return personal models [n, d] as they would be if nobody had kept a model of its own."""
        return replaced(personal, self.clients, self.instead)


def replaced(personal: Tensor, clients: Sequence[int], models: Tensor) -> Tensor:
    """Return personal models [n, d] with those of some clients replaced, [clients, d]."""
    at = torch.tensor(list(clients), device=personal.device)
    return personal.clone().index_copy(0, at, models.to(personal))


def keep_own(run: Run, alone: Run, clients: Sequence[int]) -> None:
    """Give clients of a run the models, and the scores, that they have in the other run.

    Parameters
    ----------
    run
        The run, which is changed. Its test rows are not scored yet.
    alone
        The run in which every client trained alone, with the same model on the same rows.
    clients
        Indices of the clients.

    Examples
    --------
    >>> import coterie
    >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> run, alone = (coterie.fit(fed, name, rounds=2, score_test=False) for name in ("fedavg", "local"))
    >>> keep_own(run, alone, [1])
    >>> bool((run.personal == alone.personal)[1].all()), run.own.clients
    (True, [1])
    """
    at = torch.tensor(list(clients))
    run.own = OwnModels(list(clients), alone, run.personal[at].clone())
    run.personal = replaced(run.personal, clients, alone.personal[at])
    blocks = run.history.blocks
    for k, (t, split, metric, value) in enumerate(blocks):
        other = alone.history.at(alone.deployed_round, split, metric)
        if t == run.deployed_round and split != "server" and other is not None:
            blocks[k] = t, split, metric, value.index_copy(0, at, other[at])
