"""Where a race is, on disk, so that an interrupted one goes on and ends with the same bytes."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coterie
from coterie._core import files
from coterie.algorithms import make
from coterie.engine.federation import Federation
from coterie.models.description import description
from coterie.select.entrant import Entrant
from coterie.train import checkpoint
from coterie.train.folder import fingerprint

if TYPE_CHECKING:
    from coterie.select.auto_race import Race

POSITION = "race.json"
NUMBERS = ("number", "heat", "stop", "count", "at")  # of a stage


@dataclass
class Stage:
    """Part of a race: entrants that are advanced to a round, one after the other.

    Attributes
    ----------
    number, heat, stop : int
        Which part of the race, its heat, and the round to advance to.
    starters : list of Entrant
        Who takes part.
    count : int
        How many are to stay.
    at : int
        How many of the starters were advanced.
    kept : list of Entrant
        Who of them stays so far.
    """

    number: int
    heat: int
    stop: int
    starters: list[Entrant]
    count: int
    at: int = 0
    kept: list[Entrant] = field(default_factory=list)


class Journal:
    """A folder with the position of a race and a checkpoint of everybody who is in it.

    Parameters
    ----------
    folder
        Where to write; what is there of another race is overwritten.
    key
        Hash of the data and settings: a race goes on if it has the same.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.clock, self.changed = checkpoint.Clock(0), list[Entrant]()

    @classmethod
    def of(cls, folder: Path, fed: Federation, *settings: object) -> Journal:
        """Return the journal of a race on these rows with these settings."""
        parts = (coterie.__version__, fingerprint(fed), str(fed.seed), str(description(fed.model)), *settings)
        return cls(folder, hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest())

    def note(self, race: Race, stage: Stage, entrant: Entrant) -> None:
        """Remember that an entrant was advanced, and write that down if it is time."""
        self.changed.append(entrant)
        if self.clock.due(0):
            with self.clock.saving():
                self._write(race, stage)

    def restore(self, race: Race) -> Stage | None:
        """Bring a race to where it was interrupted and return the stage; None if there is nothing to go on from."""
        path = self.folder / POSITION
        if not path.is_file() or (found := files.read_json(path))["key"] != self.key:
            return None
        entrants = [self._entrant(race, record) for record in found["entrants"]]

        def listed(name: str) -> list[Entrant]:
            return [entrants[k] for k in found[name]]

        race.everybody, race.refused = listed("everybody"), found["refused"]
        race.made = max(one.number for one in entrants)
        numbers = {name: int(found[name]) for name in NUMBERS}
        return Stage(starters=listed("starters"), kept=listed("kept"), **numbers)

    def _write(self, race: Race, stage: Stage) -> None:
        entrants = list({id(one): one for one in [*race.everybody, *stage.starters]}.values())
        place = {id(one): k for k, one in enumerate(entrants)}
        for one in {id(one): one for one in self.changed}.values():
            for k, part in enumerate(one.parts):
                checkpoint.save(self._made(one, k), part.fed, part.progress)
        self.changed = []
        records = [_record(one) for one in entrants]
        lists = {"everybody": race.everybody, "starters": stage.starters, "kept": stage.kept}
        position = {name: [place[id(one)] for one in some] for name, some in lists.items()}
        numbers = {name: getattr(stage, name) for name in NUMBERS}
        told = {"key": self.key, **numbers, **position, "refused": race.refused, "entrants": records}
        files.write_json(self.folder / POSITION, told)
        for one in entrants:
            if not one.parts:
                shutil.rmtree(self.folder / one.name, ignore_errors=True)

    def _made(self, entrant: Entrant, part: int) -> Path:
        path = self.folder / entrant.name / str(part)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _entrant(self, race: Race, record: dict[str, Any]) -> Entrant:
        """Return an entrant with its numbers, and with what it trained if it is still in the race."""
        one = Entrant(make(record["method"], **record["settings"]), judge=race.judge, on=record["on"])
        one.number = record["number"]
        if record["parts"]:
            feds: Sequence[Federation] = race.others.get(one.on, race.feds)
            folders = [self.folder / one.name / str(k) for k in range(record["parts"])]
            one.start(feds, race.rounds, record["every"], race.asked, folders)
            one.advance(0)
            for part, seconds in zip(one.parts, record["seconds"], strict=True):
                part.seconds = seconds
        one.rounds, one.best_round, one.megabytes = (
            record["rounds"],
            record["best_round"],
            record["megabytes"],
        )
        one.cost = math.inf if record["cost"] is None else record["cost"]
        return one


def _record(one: Entrant) -> dict[str, Any]:
    return {
        "number": one.number,
        "method": one.algorithm.name,
        "settings": one.algorithm.settings(),
        "on": one.on,
        "every": one.every,
        "parts": len(one.parts),
        "seconds": [part.seconds for part in one.parts],
        "rounds": one.rounds,
        "best_round": one.best_round,
        "megabytes": one.megabytes,
        "cost": one.cost if math.isfinite(one.cost) else None,
    }
