"""Table 1 of the FLIX paper: networks, FLIX over alpha against training alone, one shared model and FedAvg."""

from __future__ import annotations

from torch import Tensor

from coterie.algorithms import Algorithm, make
from coterie.algorithms.flix import FLIX
from coterie.federation.federation import Federation
from coterie.runs.experiments import Experiment
from coterie.runs.fit import fit
from coterie.runs.flix_runs import local_models, states
from coterie.runs.history import mean_over_clients
from coterie.runs.jobs import federation


def mixtures(experiment: Experiment, seed: int) -> dict[str, float]:
    """Test accuracy for every alpha, and what validation chooses; local models are found once for all alphas.

    Settings: alphas, flix (settings of FLIX), fedavg (settings of FedAvg) and fedavg_lr (those tried). FLIX computes
    one gradient per visit and gets as many rounds as FedAvg makes local steps, `rounds` times `steps`.
    """
    plan = experiment.plans[0]
    asked = dict(plan.settings)
    fed, steps = federation(experiment, plan, seed), plan.rounds * asked["fedavg"]["steps"]
    own = local_models(fed, FLIX(alpha=0.5, **asked["flix"]))
    scores = {}
    for alpha in (0.0, *asked["alphas"], 1.0):
        scores[alpha] = _scores(fed, mixed(fed, own, FLIX(alpha=alpha, **asked["flix"]), steps))
    inside = {alpha: score for alpha, score in scores.items() if 0 < alpha < 1}
    chosen = min(inside, key=lambda alpha: inside[alpha][0])
    averaged = min(
        _scores(fed, _trained(fed, make("fedavg", lr=lr, **asked["fedavg"]), plan.rounds))
        for lr in asked["fedavg_lr"]
    )
    found = {f"flix_{alpha:g}": score[1] for alpha, score in scores.items()}
    found |= {"alpha": chosen, "flix": scores[chosen][1], "fedavg": averaged[1]}
    best = max(score[1] for score in inside.values())
    rivals = {"local": scores[0.0][1], "shared": scores[1.0][1], "fedavg": averaged[1]}
    found |= {f"gain_over_{name}": found["flix"] - value for name, value in rivals.items()}
    return {**found, "best_inside": best, "best_over_fedavg": best - averaged[1]}


def mixed(fed: Federation, own: Tensor, algorithm: FLIX, rounds: int) -> Tensor:
    """The deployed mixtures [n, d] after so many rounds, the local models being given."""
    *_, (trial, s) = states(fed, algorithm, 0 if algorithm.alpha == 0.0 else rounds, own)
    return trial.personal(algorithm, s)


def _trained(fed: Federation, algorithm: Algorithm, rounds: int) -> Tensor:
    return fit(fed, algorithm, rounds, evaluate_every=0, score_test=False).personal


def _scores(fed: Federation, personal: Tensor) -> tuple[float, float]:
    """Mean loss on validation rows, by which settings are chosen, and mean accuracy in percent on test rows."""
    loss = mean_over_clients(fed.score(personal, "validation")["loss"])
    return loss, 100.0 * mean_over_clients(fed.score(personal, "test")["accuracy"])
