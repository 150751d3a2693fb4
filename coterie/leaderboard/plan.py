"""What is compared, and under which budget: the same number of settings tried and of rounds for every method."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coterie import __version__
from coterie._core import files
from coterie._core.errors import RunError, SettingError
from coterie.leaderboard.entries import DataSet, Method

PLAN = "plan.json"
SCHEMA = 1
REFERENCE = "local"  # what clients could have had without anybody
SHARE = 5  # one client in so many is held out of training, to join afterwards
FEWEST_CLIENTS = 10  # below which nobody is held out


@dataclass(frozen=True)
class Budget:
    """What every method gets on every data set.

    Attributes
    ----------
    rounds
        Communication rounds of a run.
    trials
        Settings tried at most; all of them begin, and the best third by validation goes on twice.
    seeds
        Partitions and splits, numbered from 0.
    """

    rounds: int = 50
    trials: int = 6
    seeds: int = 3

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise SettingError(f"{name} = {value}; it must be at least 1")


@dataclass(frozen=True)
class Job:
    """One cell: a method on a data set with a seed. `key` is a hash of all that its result depends on."""

    method: Method
    data: DataSet
    seed: int
    rounds: int
    trials: int
    key: str

    @property
    def title(self) -> str:
        """Name for people."""
        return f"{self.data.name}, {self.method.name}, seed {self.seed}"

    def place(self, folder: Path) -> Path:
        """Return the file of the cell's result."""
        return folder / "cells" / self.data.name / f"{self.method.name}-{self.seed}-{self.key[:12]}.json"

    def json(self) -> dict[str, Any]:
        """Return what a worker needs to run the cell."""
        return {
            "method": self.method.json(),
            "data": self.data.json(),
            "seed": self.seed,
            "rounds": self.rounds,
            "trials": self.trials,
            "key": self.key,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Job:
        """Return the job that `json` described."""
        return cls(
            Method(**stored["method"]),
            DataSet(**stored["data"]),
            *(stored[name] for name in ("seed", "rounds", "trials", "key")),
        )


@dataclass(frozen=True)
class Plan:
    """Methods, data sets and budget of a leaderboard, as its folder keeps them."""

    budget: Budget
    methods: tuple[Method, ...]
    data: tuple[DataSet, ...]
    files: str | None = None

    def with_entries(self, methods: Sequence[Method] = (), data: Sequence[DataSet] = ()) -> Plan:
        """Return the plan with more methods and data sets; those of the same name are replaced."""
        every = {one.name: one for one in (*self.methods, *methods)}
        sets = {one.name: one for one in (*self.data, *data)}
        return replace(self, methods=tuple(every.values()), data=tuple(sets.values()))

    def jobs(self) -> Iterator[Job]:
        """Yield all cells: by data set and seed, the reference first."""
        methods = sorted(self.methods, key=lambda one: one.name != REFERENCE)
        code = {one.name: one.code() for one in methods}
        for data in self.data:
            rows = data.code(self.files)
            for seed in range(self.budget.seeds):
                for method in methods:
                    yield self._job(method, data, seed, code[method.name], rows)

    def _job(self, method: Method, data: DataSet, seed: int, code: str, rows: str) -> Job:
        content = {
            "schema": SCHEMA,
            "coterie": __version__,
            "method": [method.name, code],
            "data": [data.name, rows],
            "seed": seed,
            "rounds": self.budget.rounds,
            "trials": self.budget.trials,
        }
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return Job(method, data, seed, self.budget.rounds, self.budget.trials, key)

    def save(self, folder: Path) -> None:
        """Write plan.json."""
        files.write_json(
            folder / PLAN,
            {
                "schema": SCHEMA,
                "budget": asdict(self.budget),
                "methods": [one.json() for one in self.methods],
                "data": [one.json() for one in self.data],
                "files": self.files,
            },
        )

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read plan.json.

        Raises
        ------
        RunError
            If the folder holds none that this version can read.
        """
        try:
            stored = files.read_json(folder / PLAN)
            return cls(
                Budget(**stored["budget"]),
                tuple(Method(**one) for one in stored["methods"]),
                tuple(DataSet(**one) for one in stored["data"]),
                stored["files"],
            )
        except (KeyError, TypeError) as problem:
            raise RunError(
                f"{folder / PLAN} is not the plan of a leaderboard ({problem}); use another folder"
            ) from None
