"""Who races in `auto`: the methods that suit a federation, and the models that race beside the given one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from coterie.algorithms import Algorithm, find
from coterie.algorithms.hierarchical import LARGEST, Hierarchical
from coterie.algorithms.trees import BoostedTrees
from coterie.engine.federation import Federation
from coterie.models.glm import Glm
from coterie.models.linear import Linear
from coterie.models.objectives import COUNTS
from coterie.models.table_models import table_model
from coterie.select.advice import Advice, algorithm
from coterie.select.auto_networks import NETWORK, TASKS, on_network, with_network
from coterie.select.auto_race import cost
from coterie.select.auto_ridge import with_ridge
from coterie.select.cross_validation import can_fold, count_divisions, few_rows
from coterie.select.entrant import Entrant
from coterie.select.grid import candidates, trained_by

PILOTS = ("local", "fedavg")  # the methods that step sizes are settled with
STEPS_SHARE = 5  # each of them gets one place in so many
CROWD = 6  # clients from which groups among them are worth looking for
TREES = 300  # at most
SLOWEST, FASTEST = 0.1, 0.3  # learning rates of trees
TREES_PATH = 10.0  # their learning rates sum to this over all trees
CURVES = "splines"
CURVES_WORK = 1e9  # most rows x parameters^2 of splines: their second derivatives are summed up
SLOPES_WORK = 2e8  # most divisions x clients x parameters^3 for which it is estimated how slopes differ
PAIRS_ELEMENTS = 1 << 24  # most clients x parameters for which pairs are compared


@dataclass(frozen=True)
class Field:
    """Entrants in two parts: step sizes first, then everything else at step sizes that proved good.

    A step size suits the loss and the rows rather than the method: it is settled with the two simplest methods, so that
    no other setting of the others is judged at steps that cannot work.
    """

    first: list[Algorithm]
    others: list[str]
    advised: list[Algorithm]
    places: int

    @classmethod
    def of(
        cls,
        fed: Federation,
        methods: Sequence[str] | None,
        advice: Advice | None,
        effort: float,
        rounds: int,
        trees: Sequence[Algorithm] = (),
    ) -> Field:
        """Return who takes part: the methods named, or those that suit the federation and the advice."""
        names = list(methods) if methods is not None else _sensible(fed)
        names = [name for name in names if name != BoostedTrees.name]
        known = [*trees, *([] if methods is not None else estimated(fed))]
        advised = [] if methods is not None or advice is None else _advised(fed, advice)
        kinds, places = len({"local", *names, *(algorithm.name for algorithm in [*known, *advised])}), 2
        kinds += max(0, len(trees) - 1)  # all of them may stay
        while cost(places + 1, kinds, rounds) <= effort * rounds:
            places += 1
        others = [name for name in names if name not in PILOTS]
        alone = [algorithm for algorithm in advised if algorithm.name in PILOTS]
        first = [find("local")(), *alone[:1], *known, *alone[1:]]
        tried = [candidates(find(name)(), max(1, places // STEPS_SHARE)) for name in PILOTS if name in names]
        _add(first, *tried)
        first = first[: max(1, places // 2, places - len(others))]
        return cls(first, others, [algorithm for algorithm in advised if algorithm not in alone], places)

    def more(self, left: list[Entrant]) -> list[Algorithm]:
        """Return the others, at the step sizes at which the two simplest methods did best, and at a third of them."""
        best: dict[str, Algorithm] = {}
        for entrant in sorted(left, key=lambda entrant: entrant.cost):
            if hasattr(entrant.algorithm, "lr") and not getattr(entrant.algorithm, "exact", False):
                best.setdefault(entrant.algorithm.name, entrant.algorithm)
        pilots = [best[name] for name in reversed(PILOTS) if name in best]
        steps = [step for pilot in pilots for step in (pilot.lr, pilot.lr / 3)]  # type: ignore[attr-defined]
        chosen = [algorithm.replace(lr=steps[0]) if steps else algorithm for algorithm in self.advised]
        _add(chosen, *(candidates(find(name)(), self.places, {"lr": steps}) for name in self.others))
        return chosen[: max(0, self.places - len(self.first))]


def _add(chosen: list[Algorithm], *lists: list[Algorithm]) -> None:
    """Append the algorithms of every list in turn, each once."""
    for turn in itertools.zip_longest(*lists):
        chosen += [algorithm for algorithm in turn if algorithm is not None and algorithm not in chosen]


def _sensible(fed: Federation) -> list[str]:
    names = ["local", "fedavg", "fine-tuned", "ditto", "rtfa"]
    if fed.n >= CROWD:
        names += ["ifca"]
        if fed.n * fed.d <= PAIRS_ELEMENTS:
            names += ["cobo"]
    if fed.clusters is not None:
        names += ["oracle"]
    return names


def estimated(fed: Federation) -> list[Algorithm]:
    """Return hierarchical models, whose pulls are estimated from the data, where clients can send second derivatives.

    By restricted likelihood: the plain one takes few clients with many parameters for all alike. Every step of the
    search for it factorises a matrix of each client; where that is too much work, only intercepts differ.
    """
    model = Hierarchical(grouping="one", choose="reml")
    if not model.newton(fed):
        return []
    known = [] if fed.clusters is None else [Hierarchical(choose="reml")]
    intercept: list[Algorithm] = []
    if getattr(fed.model, "intercept", False):
        intercept = [model.replace(effects="intercept")]
    work = count_divisions(fed) * fed.n * fed.d**3
    return intercept if intercept and work > SLOPES_WORK else [*known, model, *intercept]


def tree_settings(fed: Federation, methods: Sequence[str] | None, rounds: int) -> list[Algorithm]:
    """Return settings of trees, which race beside linear models where the rows of a table are at hand."""
    if BoostedTrees.name not in methods if methods is not None else not isinstance(fed.model, Glm):
        return []
    losses = not fed.model.target_in_units or getattr(fed.model, "name", "") in COUNTS
    if fed.origin is None or not can_fold(fed) or not losses:
        return []
    each = max(1, TREES // rounds)
    rate = min(FASTEST, max(SLOWEST, TREES_PATH / (each * rounds)))
    usual = BoostedTrees(lr=rate, leaves=8, per_round=each)
    apart = usual.replace(profile=True)
    small = usual.replace(leaves=4, least=10.0)
    large = apart.replace(leaves=16)
    return [apart, large, small] if few_rows(fed) else [usual, apart, large, small]


def on_other_models(
    fed: Federation, methods: Sequence[str] | None, trees: Sequence[Algorithm], rounds: int
) -> tuple[dict[str, Federation], dict[str, list[Algorithm]]]:
    """Return the federation with each model that races beside the given one, and who trains it, by name.

    Trees are in the field anyway, and so only in the first.
    """
    others = {trees[0].name: trained_by(trees, fed, rounds)} if trees else {}
    beside: dict[str, list[Algorithm]] = {}
    curves = _with_curves(fed, methods)
    if curves is not None:
        others[CURVES], beside[CURVES] = curves, _on_curves(curves)
    for name, firm in with_ridge(fed, methods).items():
        others[name], beside[name] = firm, _on_ridge(firm)
    network = with_network(fed, methods)
    if network is not None:
        others[NETWORK], beside[NETWORK] = network, on_network()
    return others, beside


def _with_curves(fed: Federation, methods: Sequence[str] | None) -> Federation | None:
    """Return the federation with splines in place of a linear model, where hierarchical models can be fitted to it."""
    if methods is not None or fed.origin is None or not can_fold(fed) or not isinstance(fed.model, Glm):
        return None
    task = TASKS.get(fed.model.name)
    if task is None or fed.model.basis is not None:
        return None
    found = fed.with_model(table_model(CURVES, task))
    work = int(found.rows["train"].sum()) * found.d**2
    return found if found.d > fed.d and found.d <= LARGEST and work <= CURVES_WORK else None


def _on_curves(fed: Federation) -> list[Algorithm]:
    """Return settings of hierarchical models on splines: slopes that differ are worth their time for numbers only."""
    found = estimated(fed)
    return found if isinstance(fed.model, Linear) else found[-1:]


def _on_ridge(fed: Federation) -> list[Algorithm]:
    """Return the settings of a hierarchical model with a stronger penalty: it finds out what differs where it can."""
    return estimated(fed)[:1]


def _advised(fed: Federation, advice: Advice) -> list[Algorithm]:
    """Return the methods of the survey at the penalties it found, where an exact form exists (for rtfa: is cheap)."""
    if not isinstance(fed.model, Glm):
        return [advice.algorithm(fed)]
    found = [algorithm("fedavg", None, fed), algorithm("ftfa", None, fed)]
    for factor in (1.0, 0.3, 3.0):
        for method, lams in (("rtfa", advice.lam_shared), ("ridge-local", advice.lam_alone)):
            usable = lams[torch.isfinite(lams) & (lams > 0)]
            if len(usable) and (method != "rtfa" or fed.d <= LARGEST):
                found.append(algorithm(method, factor * float(usable.median()), fed))
    return found
