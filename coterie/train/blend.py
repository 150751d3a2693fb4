"""Several finished runs of the same clients as one run, whose models are weighted means of theirs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.base import Algorithm, setting
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.models.ensemble import Ensemble, ensemble

if TYPE_CHECKING:
    from coterie.train.run import Run


@dataclass(frozen=True)
class Blended(Algorithm):
    """The weighted mean of the models of several methods, each trained by itself; `auto` makes it.

    Newcomers get the common models of the methods, with the shared weights.
    """

    members: str = setting("", "the methods, with their shared weights")
    best: str = setting("", "the best of them alone")

    name = "ensemble"

    def start(self, fed: Federation) -> State:
        """Raise an error: there is nothing to train."""
        raise SettingError("an ensemble is made of trained models; auto makes one: --algorithm auto")

    def common(self, fed: Federation, s: State) -> Tensor | None:
        """Return the weighted mean of the common models, [d]."""
        shared: Tensor = s.common
        return shared

    def adapt(self, fed: Federation, s: State, personal: Tensor, rounds: int) -> Tensor:
        """Return the common model for each newcomer, [k, d]."""
        shared: Tensor = s.common
        return shared.to(personal).expand(fed.n, -1)


@dataclass
class Blend:
    """What a blended run is made of.

    Attributes
    ----------
    parts : list of Run
        The runs.
    shared : Tensor
        Weights for clients that were not in training, [K].
    weights : Tensor
        Weights of each client, [n, K].
    best : str
        Name of the best method alone.
    """

    parts: list[Run] = field(repr=False)
    shared: Tensor
    weights: Tensor
    best: str

    def models(self, scored: bool = False) -> Tensor:
        """Return the parameters [n, d] of all clients; with `scored` those before refitting, which scores are about."""
        found = [part.scored if scored and part.scored is not None else part.personal for part in self.parts]
        found = [one.expand(len(self.weights), -1) for one in found]
        return self.model.join(found, self.weights)

    def common(self) -> Tensor:
        """Return the parameters [d] for clients that were not in training."""
        return self.model.join([part.common() for part in self.parts], self.shared)

    @property
    def model(self) -> Ensemble:
        """The model that the parameters are of."""
        return ensemble([part.fed.model for part in self.parts], self.best)

    def state(self) -> State:
        """Return what a run folder keeps for newcomers."""
        return State(common=self.common())


def joined(run: Run) -> None:
    """Take the models of a blended run anew from its parts, after these were refitted."""
    assert run.blend is not None
    run.scored, run.personal = run.blend.models(scored=True), run.blend.models()
    run.state, run.refit = run.blend.state(), run.blend.parts[0].refit
    run.seconds = sum(part.seconds for part in run.blend.parts)
    for part in run.blend.parts:
        for entry, counts in part.fed.ledger.entries.items():
            if entry.kind == "refit":
                run.fed.ledger.add(
                    entry, (counts[0], counts[1], counts[2]), (counts[3], counts[4], counts[5])
                )
