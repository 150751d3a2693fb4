"""Who takes part in a race: a method at some settings, trained once for every division of the rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import Algorithm
from coterie.engine.federation import Federation
from coterie.models.metrics import LOSS, Metric
from coterie.models.metrics.over_rows import row_scores
from coterie.select.held_out import HeldOutRows
from coterie.train.contestant import Contestant
from coterie.train.history import mean_over_clients

PATIENCE = (
    3  # scores without a lower mean after which a method that stops by itself, or has converged, is done
)
SOLVED = ("hierarchical",)  # methods that reach their solution in a few rounds


@dataclass(eq=False)
class Entrant:
    """A method at some settings in the race; once out, only its numbers are left.

    With several divisions of the rows it trains on each, and its numbers are means over them.
    """

    algorithm: Algorithm
    parts: list[Contestant] = field(default_factory=list, repr=False)
    rounds: int = 0
    cost: float = math.inf  # the lowest mean validation loss, or cost of another judge
    best_round: int = 0
    megabytes: float = 0.0
    scores: dict[str, Tensor] = field(default_factory=dict, repr=False)  # validation metrics [n], best round
    judge: Metric = LOSS
    on: str = ""  # the model that it trains instead of the given one
    every: int = 1
    number: int = 0  # in the order of starting

    def start(
        self,
        feds: Sequence[Federation],
        rounds: int,
        every: int,
        metric: Metric | None,
        checkpoints: Sequence[Path] | None = None,
    ) -> None:
        """Begin to train on each of these divisions, or go on from their checkpoints.

        With several, the best round is the one with the lowest mean over them, so that nobody stops at a lucky one.
        """
        together, self.every = len(feds) > 1, every
        method = self.algorithm.without_stopping() if together else self.algorithm
        places: Sequence[Path | None] = checkpoints or [None] * len(feds)
        self.parts = [
            Contestant(fed, method, rounds, every, metric, together, place)
            for fed, place in zip(feds, places, strict=True)
        ]
        if together and checkpoints is None:
            self._mark()

    def advance(self, until: int) -> None:
        """Train up to a round, and note how good the best round was."""
        if len(self.parts) == 1 and not self.done:
            self.parts[0].advance(until)
        while len(self.parts) > 1 and self.round < until and not self.done:
            stop = min(until, (self.round // self.every + 1) * self.every)
            for part in self.parts:
                part.advance(stop)
            self._mark()
        best = self.parts[0].progress.best
        self.rounds = sum(part.progress.round for part in self.parts)
        self.cost, self.best_round = best.loss, best.round
        self.megabytes = sum(part.megabytes() for part in self.parts)
        self.scores = self._means() if math.isfinite(self.cost) else {}

    @property
    def round(self) -> int:
        """The last round that was trained."""
        return self.parts[0].progress.round

    def _mark(self) -> None:
        """Take the models of this round for the best ones if the mean over divisions says so."""
        now = self._means(self.round)
        cost = self.judge.cost(mean_over_clients(now[self.judge.name])) if now else math.nan
        if cost < self.parts[0].progress.best.loss:
            for part in self.parts:
                part.mark_best(cost)

    def _means(self, t: int | None = None) -> dict[str, Tensor]:
        """Return the validation metrics [n] of a round, by default the best one: means over divisions."""
        found = [
            one for one in (part.scores(t) for part in self.parts) if one
        ]  # a division may hold nothing out
        return {name: torch.stack([one[name] for one in found]).nanmean(0) for name in (found or [{}])[0]}

    @property
    def running(self) -> Contestant | None:
        """Return the run on the federation as it was given, or None if it is out."""
        return self.parts[0] if self.parts else None

    @property
    def done(self) -> bool:
        """Return True if further rounds would change nothing."""
        stops = len(self.parts) > 1 and self.algorithm.without_stopping() != self.algorithm
        if self.parts and (stops or self.algorithm.name in SOLVED):
            return self.round - self.parts[0].progress.best.round >= PATIENCE * self.every
        return bool(self.parts) and all(part.done for part in self.parts)

    @property
    def name(self) -> str:
        """Its number, as the name of a folder."""
        return f"{self.number:04d}"

    @property
    def title(self) -> str:
        """The method, and what it trains where that is not the given model."""
        named = not self.on or self.on == self.algorithm.name
        return self.algorithm.name if named else f"{self.algorithm.name} on {self.on}"

    def retire(self) -> None:
        """Forget models and scores."""
        self.parts, self.scores = [], {}

    def validation(self, metric: str) -> Tensor:
        """Return a metric [n] on rows held out."""
        return self.scores[metric]

    def held_out_cost(self) -> float:
        """Return the judge's mean over clients so that lower is better; infinite for a method that diverged."""
        return self.judge.cost(self.held_out()) if self.scores else math.inf

    def held_out(self) -> float:
        """Return the judge's mean over clients."""
        return mean_over_clients(self.scores[self.judge.name])

    def held_out_rows(self, metrics: Sequence[Metric]) -> HeldOutRows | None:
        """Return the values of the rows held out at the best round, or None where rows are elsewhere."""
        values = [
            part.fed.row_values(part.best_models(), "validation", metrics)
            for part in self.parts
            if part.fed.runtime.capabilities.rows_visible
        ]
        if not values or not values[0]:
            return None
        joined = {name: torch.cat([one[name].cpu() for one in values]) for name in values[0]}
        return HeldOutRows(self._owners(), joined)

    def predictions(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return scores [rows, outputs], targets, clients and divisions [rows] of the rows held out."""
        parts = [(part.fed.runtime.rows("validation"), part) for part in self.parts]
        scores = [row_scores(part.fed.model, part.best_models(), rows) for rows, part in parts]
        division = torch.repeat_interleave(torch.tensor([len(rows.y) for rows, _ in parts]))
        return torch.cat(scores), torch.cat([rows.y.cpu() for rows, _ in parts]), self._owners(), division

    def _owners(self) -> Tensor:
        return torch.cat([torch.repeat_interleave(part.fed.rows["validation"].cpu()) for part in self.parts])

    def row(self) -> dict[str, Any]:
        """Return the entrant's line in choice.json."""
        return {
            "method": self.algorithm.name,
            **({"model": self.on} if self.on else {}),
            "settings": self.algorithm.settings(),
            "rounds": self.rounds,
            f"validation_{self.judge.name}": self.judge.cost(self.cost) if math.isfinite(self.cost) else None,
            "megabytes": self.megabytes,
        }
