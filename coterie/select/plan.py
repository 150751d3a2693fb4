"""Plan FLIX for a communication budget: alpha, rounds and certificates, before training."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.base import Algorithm
from coterie.algorithms.flix import FLIX, SHIFTED
from coterie.engine.client import Client
from coterie.engine.compressors import compressor
from coterie.engine.federation import Federation
from coterie.select.flix_runs import states
from coterie.theory import flix, flix_rates, flix_rounds, flix_steps
from coterie.theory.flix import Mixture

PLAIN = 8  # bytes of a plain number in a message
ALPHAS = tuple(k / 20 for k in range(21))
PLANNED = ("dgd", "diana", "ef21", "scaffnew")  # solvers with a rate to a target


@dataclass(frozen=True)
class AlphaOption:
    """One mixing weight and its cost.

    Attributes
    ----------
    alpha
        Mixing weight: 0 trains alone, 1 shares one model.
    certificate, bound
        Upper limits on the loss above its minimum after the one-shot round: from the clients' losses, and from
        constants alone.
    rounds, megabytes
        Cost of the target accuracy; None if theory has no rate.
    """

    alpha: float
    certificate: float
    bound: float
    rounds: int | None
    megabytes: float | None


@dataclass(frozen=True)
class BudgetPlan:
    """The plan for a budget and a target, and the trade-off curve it lies on.

    Attributes
    ----------
    algorithm
        FLIX with the chosen alpha and step sizes, ready for `coterie.fit`.
    alpha, rounds, megabytes
        The choice and its cost; `rounds` includes the one-shot average.
    target
        Accuracy asked for.
    certificate, bound
        Upper limits on the loss above its minimum after the one-shot round.
    closed_form_alpha
        The alpha of the closed form, for solver dgd and a budget.
    options
        Every alpha with its cost.
    """

    algorithm: FLIX
    alpha: float
    rounds: int
    megabytes: float
    target: float
    certificate: float
    bound: float
    closed_form_alpha: float | None
    options: tuple[AlphaOption, ...]

    def json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        chosen = {**dataclasses.asdict(self), "options": [dataclasses.asdict(one) for one in self.options]}
        return {**chosen, "algorithm": {"name": self.algorithm.name, **self.algorithm.settings()}}


@dataclass(frozen=True)
class CurvatureSurvey(FLIX):
    """One round of FLIX that also asks for the loss at every alpha (Gasanov et al., AISTATS 2022, section 3)."""

    def excess(self, client: Client, x: Tensor, count: int) -> Tensor:
        """Return f_i(T_i(x)) - f_i(x_i) for count + 1 equally spaced alphas from 0 to 1, [..., count + 1]."""
        own = client.keep.own
        losses = [client.loss(own + k / count * (x - own)) for k in range(count + 1)]
        return torch.cat(losses, -1) - losses[0]


@dataclass(frozen=True)
class ClientConstants:
    """What the clients report: L_i and mu_i [n], average and spread of the local models, certificates by alpha."""

    smoothness: Tensor
    convexity: Tensor
    average: Tensor
    spread: float
    certificates: dict[float, float]


def survey(fed: Federation, alphas: Sequence[float] = ALPHAS, **local: Any) -> ClientConstants:
    """Run the one-shot round on a copy of the federation, and ask how much loss mixing costs.

    The weights of the average are those of equal alphas, L_i / sum L_j. The clients answer for a grid of alphas
    with steps of at most 1/20; one scalar each would be enough for a single alpha.
    """
    count = max(20, *(round(1 / a) for a in alphas if a > 0))
    asked, trial = CurvatureSurvey(alpha=0.5, solver="one-shot", **local), fed.fresh(dropout=0.0)
    trial.enter_round(0, None)
    trial.map(asked.begin)
    told, own = trial.map(asked.constants), trial.map(asked.local_model)
    mixture = Mixture.equal(1.0, told["smoothness"], told["convexity"])
    x = mixture.average(own["x"])
    excess = trial.map(asked.excess, x=x, count=count).values.mean(0)
    grid = {k / count: max(0.0, float(excess[k])) for k in range(count + 1)}
    return ClientConstants(mixture.smoothness, mixture.convexity, x, mixture.spread(own["x"]), grid)


def plan(
    fed: Federation,
    target: float,
    *,
    rounds: int | None = None,
    megabytes: float | None = None,
    solver: str = "dgd",
    encoding: str = "identity",
    **local: Any,
) -> BudgetPlan:
    """Find the largest alpha that theory allows for a target accuracy and a communication budget.

    Parameters
    ----------
    fed
        The federation; it is left unchanged.
    target
        Wanted f~(x) - min f~, the loss of the mixtures above its minimum.
    rounds, megabytes
        Budget in communication rounds, or in megabytes up and down of all clients together. Without a budget the
        plan is for alpha = 1.
    solver
        "dgd" or "ef21", for which the promise is certain, or "diana" or "scaffnew", for which it holds in expectation.
    encoding
        Compressor: for diana such as "rand-3", for ef21 such as "top-3".
    **local
        Settings of FLIX for the local models.

    Returns
    -------
    BudgetPlan

    Raises
    ------
    SettingError
        If the target, the budget or the solver is invalid, or theory has no rate because the loss is not strongly
        convex.

    Examples
    --------
    >>> import coterie
    >>> from coterie.select.plan import plan
    >>> fed = coterie.Federation.from_table("heart_disease", "hospital", "sick", l2=0.1)
    >>> chosen = plan(fed, target=1e-3, rounds=10)
    >>> chosen.alpha, chosen.rounds
    (0.15, 8)
    >>> run = coterie.fit(fed, chosen.algorithm, rounds=chosen.rounds)
    """
    if solver not in PLANNED:
        raise SettingError(f"plan: no rate to a target for solver {solver!r}; choose {', '.join(PLANNED)}")
    if not fed.model.convex:
        raise SettingError(
            f"plan: {type(fed.model).__name__} has no certificates: they need a convex loss, and a mixture of two "
            "networks may be worse than both. Train for a number of rounds and look at validation rows."
        )
    if not target > 0:
        raise SettingError(f"plan: the target accuracy is {target}; it must be positive")
    if rounds is not None and rounds < 1:
        raise SettingError(f"plan: a budget of {rounds} rounds is too small for one round")
    settings = {"solver": solver, "compressor": encoding, "start_at": "average", **local}
    model = FLIX(alpha=1.0, **settings)
    if megabytes is not None:
        affordable = rounds_within(model.replace(lr=1.0, chance=1.0), fed, 1e6 * megabytes)
        rounds = affordable if rounds is None else min(rounds, affordable)
    constants = survey(fed, **local)
    options = tuple(_option(fed, constants, alpha, target, settings) for alpha in constants.certificates)
    within = [one for one in options if rounds is None or (one.rounds is not None and one.rounds <= rounds)]
    best = within[-1]
    if best.rounds is None:
        raise SettingError(f"plan: {flix_rounds.NOT_STRONGLY_CONVEX}")
    mixture = Mixture.equal(best.alpha, constants.smoothness, constants.convexity)
    lr = flix_steps.step(solver, mixture, *_quality(solver, encoding, fed.d))
    mean_l, mean_mu = float(constants.smoothness.mean()), float(constants.convexity.mean())
    return BudgetPlan(
        algorithm=FLIX(alpha=best.alpha, lr=lr, **settings, **_chance(solver, mixture)),
        alpha=best.alpha,
        rounds=best.rounds,
        megabytes=best.megabytes or 0.0,
        target=target,
        certificate=best.certificate,
        bound=best.bound,
        closed_form_alpha=None
        if rounds is None or solver != "dgd"
        else flix_rounds.alpha_for_rounds(rounds - 1, target, mean_l, mean_mu, constants.spread),
        options=options,
    )


def _chance(solver: str, mixture: Mixture) -> dict[str, Any]:
    return {"chance": flix_steps.scaffnew_chance(mixture)} if solver == "scaffnew" else {}


def _option(
    fed: Federation, constants: ClientConstants, alpha: float, target: float, settings: dict[str, Any]
) -> AlphaOption:
    """Return what an alpha guarantees after the one-shot round, and what the target costs."""
    mixture = Mixture.equal(alpha, constants.smoothness, constants.convexity)
    bound = flix.one_shot_bound(mixture, constants.spread)
    gap = min(constants.certificates[alpha], bound)
    if alpha == 0.0:
        return AlphaOption(0.0, 0.0, 0.0, 0, 0.0)
    if mixture.mu <= 0 and gap > target:
        return AlphaOption(alpha, gap, bound, None, None)
    quality = _quality(settings["solver"], settings["compressor"], fed.d)
    steps = steps_needed(mixture, settings["solver"], *quality, gap, target)
    size = cost(FLIX(alpha=alpha, lr=1.0, chance=1.0, **settings), fed, steps + 1)
    return AlphaOption(alpha, gap, bound, steps + 1, size / 1e6)


def steps_needed(mixture: Mixture, solver: str, omega: float, delta: float, gap: float, target: float) -> int:
    """Return the number of rounds that theory needs from a point with this gap to the target."""
    if solver == "diana":
        return flix_rounds.diana_rounds(mixture, omega, gap, target)
    if solver == "ef21":
        return flix_rounds.ef21_rounds(mixture, delta, gap, target)
    if solver == "scaffnew":
        return flix_rounds.scaffnew_rounds(mixture, gap, target)
    return flix_rounds.dgd_rounds(mixture, gap, target)


def measure(fed: Federation, chosen: BudgetPlan, rounds: int) -> tuple[list[float], list[float]]:
    """Return the bound on the gap f~(x) - min f~ of the plan's solver and the measured gap, round by round.

    Parameters
    ----------
    fed
        The federation; it is left unchanged.
    chosen
        What `plan` returned.
    rounds
        Rounds to run.

    Returns
    -------
    tuple of list of float
        Bound and measured gap after 1, 2, ..., `rounds` rounds. min f~ is the end of a run of gradient descent that
        theory makes exact to a thousandth of the last bound.
    """
    solver, method = chosen.algorithm.solver, chosen.algorithm
    mixture, quality = method.mixture(fed), _quality(solver, method.compressor, fed.d)
    bound = flix_rates.gap_bounds(solver, mixture, *quality, chosen.certificate, rounds)
    enough = flix_rounds.dgd_rounds(mixture, max(bound[0], 1e-300), max(1e-3 * bound[-1], 1e-15))
    descent = method.replace(solver="dgd", compressor="identity", lr=flix_steps.dgd_step(mixture))
    exact = mixed_losses(fed, descent, enough + 1)
    curve = mixed_losses(fed, method, rounds)
    least = min(exact + curve)
    return bound, [max(0.0, value - least) for value in curve]


def mixed_losses(fed: Federation, algorithm: FLIX, rounds: int) -> list[float]:
    """Return f~(x) after each round, with the regulariser, which evaluation leaves out."""
    probe = MonitoredFLIX(**algorithm.settings())
    every = itertools.islice(states(fed, probe, rounds), 1, None)
    return [float(trial.map(probe.mixed_loss, x=s.x).mean(uniform=True)) for trial, s in every]


@dataclass(frozen=True)
class MonitoredFLIX(FLIX):
    """FLIX that also reports its objective (Gasanov et al., AISTATS 2022)."""

    def mixed_loss(self, client: Client, x: Tensor) -> Tensor:
        """Return the client's loss at its mixture."""
        return client.loss(self._mixed(client, x, self._number(None)))


def cost(algorithm: FLIX, fed: Federation, rounds: int) -> int:
    """Return the bytes that the ledger counts, up and down, for this many rounds in which all clients reply."""
    number, d, n = fed.dtype.itemsize, fed.d, fed.n
    if rounds < 1 or algorithm.alpha == 0.0:
        return 0
    total, left = 0, rounds
    if algorithm.solver == "one-shot" or algorithm.start_at == "average":
        total, left = n * (d + 1) * number, rounds - 1
        total += n * (d * number + PLAIN) if algorithm.solver == "scaffnew" else 0
    if algorithm.solver == "one-shot" or left < 1:
        return total
    own, report = int(isinstance(algorithm.alpha, tuple)), int(algorithm.alpha == "auto")
    if algorithm.asks:
        total += 2 * n * number
    if algorithm.solver == "scaffnew":
        return total + left * n * ((2 * d + own) * number + 3 * PLAIN)
    if algorithm.solver in SHIFTED and algorithm.shift == "gradient":
        total += n * (2 * d + own) * number
    asked = n if algorithm.participation >= 1 else max(1, round(algorithm.participation * n))
    sent = compressor(algorithm.compressor).size(d, fed.dtype)
    return total + left * asked * ((d + own + report) * number + sent)


def rounds_within(algorithm: FLIX, fed: Federation, budget: float) -> int:
    """Return the largest number of rounds within a budget in bytes; raise SettingError if one does not fit."""
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
    """Return the largest number of rounds within a budget in megabytes, for FLIX, whose cost has a formula."""
    if not isinstance(algorithm, FLIX):
        raise SettingError(f"a budget in megabytes is for flix; give {algorithm.name} a number of rounds")
    return rounds_within(algorithm, fed, 1e6 * megabytes)


def _quality(solver: str, text: str, d: int) -> tuple[float, float]:
    """Return omega and delta of a compressor by name; where a solver does not need one, that of sending everything."""
    return (0.0, compressor(text).delta(d)) if solver == "ef21" else (compressor(text).omega(d), 1.0)
