"""The guard of `auto`: clients against whom rows held out speak keep the model that they trained alone."""

from __future__ import annotations

import torch

from coterie.select.auto_race import Entrant, Race
from coterie.theory.verdicts import guarded
from coterie.train.run import Run


def who_keeps_its_own(race: Race, winner: Entrant) -> list[int]:
    """Return the clients for whom training alone is better with a probability of at least 0.8, on rows held out.

    Nobody, if training alone won or trains another kind of model than the winner, or if rows are elsewhere.
    """
    alone = race.alone()
    if alone is None or alone.running is None or "local" in (winner.algorithm.name, *race.others):
        return []
    if winner.algorithm.name in race.others or not race.fed.runtime.capabilities.rows_visible:
        return []
    return [int(k) for k in guarded(race.verdict(winner, alone).judged).nonzero()[0]]


def keep_own(run: Run, alone: Run, clients: list[int]) -> None:
    """Give clients of a run the models, and the scores, that they have in the other run."""
    at = torch.tensor(clients)
    run.personal = run.personal.clone().index_copy(0, at, alone.personal[at].to(run.personal))
    blocks = run.history.blocks
    for k, (t, split, metric, value) in enumerate(blocks):
        other = alone.history.at(alone.deployed_round, split, metric)
        if t == run.deployed_round and split != "server" and other is not None:
            blocks[k] = t, split, metric, value.index_copy(0, at, other[at])
