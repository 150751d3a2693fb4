"""The guard of `auto`: clients against whom rows held out speak keep the model that they trained alone."""

from __future__ import annotations

from coterie.select.auto_race import Race
from coterie.select.auto_ridge import GIVEN
from coterie.select.entrant import Entrant
from coterie.select.guard import harmed


def who_keeps_its_own(race: Race, winner: Entrant) -> list[int]:
    """Return the clients for whom training alone is better with a probability of at least 0.8, on rows held out.

    Nobody, if training alone won or trains another kind of model than the winner, or if rows are elsewhere.
    """
    alone = race.alone()
    if alone is None or alone.running is None or winner.title == "local":
        return []
    if winner.on not in GIVEN or not race.fed.runtime.capabilities.rows_visible:
        return []
    return harmed(race.verdict(winner, alone))
