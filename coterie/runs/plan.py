"""What a communication budget buys with FLIX: alpha, rounds and certificates before anything is trained."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm
from coterie.algorithms.flix import FLIX, FULL
from coterie.errors import SettingError
from coterie.federation.client import Client
from coterie.federation.compressors import compressor
from coterie.federation.federation import Federation
from coterie.runs.flix_runs import states
from coterie.theory import flix as theory
from coterie.theory.flix import Mixture

ALPHAS = tuple(k / 20 for k in range(21))


@dataclass(frozen=True)
class Option:
    """One mixing weight: what is certain after the one-shot round, and what more accuracy costs."""

    alpha: float
    certificate: float
    bound: float
    rounds: int | None
    megabytes: float | None


@dataclass(frozen=True)
class Plan:
    """The choice for a budget and a target, and the trade-off curve it lies on.

    `rounds` counts communication rounds, the one-shot average included; `certificate` and `bound` hold after it.
    """

    algorithm: FLIX
    alpha: float
    rounds: int
    megabytes: float
    target: float
    certificate: float
    bound: float
    closed_form_alpha: float | None
    options: tuple[Option, ...]

    def json(self) -> dict[str, Any]:
        chosen = {**dataclasses.asdict(self), "options": [dataclasses.asdict(one) for one in self.options]}
        return {**chosen, "algorithm": {"name": self.algorithm.name, **self.algorithm.settings()}}


@dataclass(frozen=True)
class Survey(FLIX):
    """One round of FLIX with two more numbers (Gasanov et al., AISTATS 2022, section 3)."""

    def excess(self, client: Client, x: Tensor, count: int) -> Tensor:
        """f_i(T_i(x)) - f_i(x_i) for count + 1 equally spaced alphas from 0 to 1, [..., count + 1]."""
        own = client.keep.own
        losses = [client.loss(own + k / count * (x - own)) for k in range(count + 1)]
        return torch.cat(losses, -1) - losses[0]


@dataclass(frozen=True)
class Facts:
    """What the clients told: L_i and mu_i [n], local models' average and spread, certificates by alpha."""

    smoothness: Tensor
    convexity: Tensor
    average: Tensor
    spread: float
    certificates: dict[float, float]


def survey(fed: Federation, alphas: Sequence[float] = ALPHAS, **local: Any) -> Facts:
    """Run the one-shot round on a copy of the federation and ask for the loss that mixing costs.

    The weights of the average are those of equal alphas, L_i / sum L_j. The clients answer on a grid of alphas
    with steps of 1/20 at most; one scalar each is enough for a single alpha.
    """
    count = max(20, *(round(1 / a) for a in alphas if a > 0))
    asked, trial = Survey(alpha=0.5, solver="one-shot", **local), fed.fresh(dropout=0.0)
    trial.enter_round(0, None)
    trial.map(asked.begin)
    told, own = trial.map(asked.constants), trial.map(asked.local_model)
    mixture = Mixture.equal(1.0, told["smoothness"], told["convexity"])
    x = mixture.average(own["x"])
    excess = trial.map(asked.excess, x=x, count=count).values.mean(0)
    grid = {k / count: max(0.0, float(excess[k])) for k in range(count + 1)}
    return Facts(mixture.smoothness, mixture.convexity, x, mixture.spread(own["x"]), grid)


def plan(
    fed: Federation,
    target: float,
    *,
    rounds: int | None = None,
    megabytes: float | None = None,
    solver: str = "dgd",
    encoding: str = "identity",
    **local: Any,
) -> Plan:
    """The largest alpha for which theory promises `target` accuracy within a budget, and what each alpha needs.

    The target is f~(x) - min f~. The budget is a number of communication rounds or megabytes (both directions,
    all clients); without one the plan is for alpha = 1. For dgd the promise is certain, for diana in the mean.
    """
    if solver not in ("dgd", "diana"):
        raise SettingError(f"plan: no rate to a target for solver {solver!r}; choose dgd or diana")
    if not target > 0:
        raise SettingError(f"plan: the target accuracy is {target}; it must be positive")
    if rounds is not None and rounds < 1:
        raise SettingError(f"plan: a budget of {rounds} rounds is too small for one round")
    settings = {"solver": solver, "compressor": encoding, "start_at": "average", **local}
    model = FLIX(alpha=1.0, **settings)
    if megabytes is not None:
        affordable = rounds_within(model.replace(lr=1.0), fed, 1e6 * megabytes)  # type: ignore[arg-type]
        rounds = affordable if rounds is None else min(rounds, affordable)
    facts = survey(fed, **local)
    options = tuple(_option(fed, facts, alpha, target, settings) for alpha in facts.certificates)
    within = [one for one in options if rounds is None or (one.rounds is not None and one.rounds <= rounds)]
    best = within[-1]
    if best.rounds is None:
        raise SettingError(f"plan: {theory.NOT_STRONGLY_CONVEX}")
    mixture = Mixture.equal(best.alpha, facts.smoothness, facts.convexity)
    lr = theory.step(solver, mixture, _omega(encoding, fed.d))
    mean_l, mean_mu = float(facts.smoothness.mean()), float(facts.convexity.mean())
    return Plan(
        algorithm=FLIX(alpha=best.alpha, lr=lr, **settings),
        alpha=best.alpha,
        rounds=best.rounds,
        megabytes=best.megabytes or 0.0,
        target=target,
        certificate=best.certificate,
        bound=best.bound,
        closed_form_alpha=None
        if rounds is None or solver != "dgd"
        else theory.alpha_for_rounds(rounds - 1, target, mean_l, mean_mu, facts.spread),
        options=options,
    )


def _option(fed: Federation, facts: Facts, alpha: float, target: float, settings: dict[str, Any]) -> Option:
    mixture = Mixture.equal(alpha, facts.smoothness, facts.convexity)
    bound = theory.one_shot_bound(mixture, facts.spread)
    gap = min(facts.certificates[alpha], bound)
    if alpha == 0.0:
        return Option(0.0, 0.0, 0.0, 0, 0.0)
    if mixture.mu <= 0 and gap > target:
        return Option(alpha, gap, bound, None, None)
    steps = steps_needed(mixture, settings["solver"], _omega(settings["compressor"], fed.d), gap, target)
    size = cost(FLIX(alpha=alpha, lr=1.0, **settings), fed, steps + 1)
    return Option(alpha, gap, bound, steps + 1, size / 1e6)


def steps_needed(mixture: Mixture, solver: str, omega: float, gap: float, target: float) -> int:
    """Gradient steps from a point with this gap to the target."""
    if solver == "diana":
        return theory.diana_rounds(mixture, omega, gap, target)
    return theory.dgd_rounds(mixture, gap, target)


def measure(fed: Federation, chosen: Plan, rounds: int) -> tuple[list[float], list[float]]:
    """The gap f~(x) - min f~ of the plan's solver after 1, 2, ... rounds as theory bounds it and as it is.

    min f~ is taken from a run of gradient descent that theory says is exact to a thousandth of the last bound.
    """
    solver, method = chosen.algorithm.solver, chosen.algorithm
    mixture, omega = method.mixture(fed), _omega(method.compressor, fed.d)
    bound = theory.gap_bounds(solver, mixture, omega, chosen.certificate, rounds)
    enough = theory.dgd_rounds(mixture, max(bound[0], 1e-300), max(1e-3 * bound[-1], 1e-15))
    descent = method.replace(solver="dgd", compressor="identity", lr=theory.dgd_step(mixture))
    exact = mixed_losses(fed, descent, enough + 1)  # type: ignore[arg-type]
    curve = mixed_losses(fed, method, rounds)
    least = min(exact + curve)
    return bound, [max(0.0, value - least) for value in curve]


def mixed_losses(fed: Federation, algorithm: FLIX, rounds: int) -> list[float]:
    """f~(x) after each round, with the regulariser, which evaluation leaves out."""
    probe = Watched(**algorithm.settings())
    every = itertools.islice(states(fed, probe, rounds), 1, None)
    return [float(trial.map(probe.mixed_loss, x=s.x).mean(uniform=True)) for trial, s in every]


@dataclass(frozen=True)
class Watched(FLIX):
    """FLIX that also tells its objective (Gasanov et al., AISTATS 2022)."""

    def mixed_loss(self, client: Client, x: Tensor) -> Tensor:
        return client.loss(self._mixed(client, x, self.alpha))


def cost(algorithm: FLIX, fed: Federation, rounds: int) -> int:
    """Bytes, up and down together, of so many rounds in which everybody asked answers; as the ledger has it."""
    number, d, n = fed.dtype.itemsize, fed.d, fed.n
    if rounds < 1 or algorithm.alpha == 0.0:
        return 0
    total, left = 0, rounds
    if algorithm.solver == "one-shot" or algorithm.start_at == "average":
        total, left = n * (d + 1) * number, rounds - 1
    if algorithm.solver == "one-shot" or left < 1:
        return total
    own, report = int(isinstance(algorithm.alpha, tuple)), int(algorithm.alpha == "auto")
    if algorithm.solver in FULL and algorithm.lr == 0 and algorithm.start_at != "average":
        total += 2 * n * number
    if algorithm.solver == "diana" and algorithm.shift == "gradient":
        total += n * (2 * d + own) * number
    asked = n if algorithm.participation >= 1 else max(1, round(algorithm.participation * n))
    sent = compressor(algorithm.compressor).size(d, fed.dtype)
    return total + left * asked * ((d + own + report) * number + sent)


def rounds_within(algorithm: FLIX, fed: Federation, budget: float) -> int:
    """The most rounds whose traffic stays within a budget in bytes; one must fit."""
    first, second, third = (cost(algorithm, fed, rounds) for rounds in (1, 2, 3))
    if not math.isfinite(budget) or first > budget:
        raise SettingError(
            f"a budget of {budget / 1e6:g} MB is too small: the first round of {algorithm.solver} with {fed.n} "
            f"clients and {fed.d} parameters takes {first / 1e6:g} MB"
        )
    if second > budget:
        return 1
    return 1 if third == second else 2 + int((budget - second) // (third - second))


def rounds_within_budget(algorithm: Algorithm, fed: Federation, megabytes: float) -> int:
    """`rounds_within` for an algorithm that has a cost formula."""
    if not isinstance(algorithm, FLIX):
        raise SettingError(f"a budget in megabytes is for flix; give {algorithm.name} a number of rounds")
    return rounds_within(algorithm, fed, 1e6 * megabytes)


def _omega(text: str, d: int) -> float:
    return compressor(text).omega(d)
