"""Figures 2, 3 and 8 to 15 of the FLIX paper: logistic regression on LIBSVM data.

`python -m coterie.runs.flix_logistic mushrooms FOLDER` writes the curves as web pages.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coterie import models
from coterie.algorithms.flix import FLIX
from coterie.data.clients import Pool
from coterie.data.partition import equal_shares
from coterie.data.readers import libsvm
from coterie.federation import randomness
from coterie.federation.compressors import compressor
from coterie.federation.federation import Federation
from coterie.runs.experiments import Experiment, shared_data
from coterie.runs.plan import Watched
from coterie.theory import flix as theory
from coterie.theory.flix import Mixture

ALPHAS = (0.1, 0.5, 1.0)
SIZES = {"mushrooms": None, "a6a": None, "w8a": 17_188, "ijcnn1": None}  # rows used; w6a had 17,188
EXACT = 1e-10  # gradient norm of the local models


@dataclass(frozen=True)
class Problem:
    """A federation with its local models, and a starting point x0 ~ N(0, I)."""

    fed: Federation
    own: Tensor
    x0: Tensor
    mixture: Mixture  # at alpha = 1

    @classmethod
    def make(cls, name: str, n: int, l2: float, seed: int) -> Problem:
        pool = libsvm(shared_data(f"libsvm/{name}.bz2"))
        rows = SIZES[name]
        pool = pool if rows is None else Pool(pool.x[:rows], pool.y[:rows])
        fed = Federation.from_clients(equal_shares(pool, n), models.logistic(l2=l2), seed=seed)
        asked = FLIX(alpha=1.0)
        mixture = asked.mixture(fed)
        exact = {"local_tol": EXACT} if l2 else {"local": "sgd", "batch": 0, "local_steps": 300}
        lr = 1.0 / float(mixture.smoothness.max())
        trial = fed.fresh()
        trial.enter_round(0, None)
        trial.map(FLIX(alpha=0.5, local_lr=lr, **exact).begin)
        x0 = randomness.normal(randomness.slots(randomness.key(seed, "flix start"), fed.d))
        return cls(fed, trial.runtime.store.columns["own"].rows, x0, mixture)

    def method(self, alpha: float, solver: str, sent: str = "identity") -> FLIX:
        """The solver at theory's step size."""
        return FLIX.from_theory(self.fed, alpha=alpha, solver=solver, compressor=sent)

    def at(self, alpha: float) -> Mixture:
        return Mixture.equal(alpha, self.mixture.smoothness, self.mixture.convexity)

    def iterates(self, algorithm: FLIX, rounds: int) -> Tensor:
        """x after 0, 1, ... rounds from x0, [rounds + 1, d]."""
        return torch.stack(list(self._steps(algorithm, rounds)))

    def _steps(self, algorithm: FLIX, rounds: int) -> Iterator[Tensor]:
        fed = self.fed.fresh()
        fed.runtime.store.write("own", None, self.own)
        fed.enter_round(0, None)
        s = algorithm.start(fed)
        s = s.replace(x=self.x0)
        yield s.x
        for t in range(1, rounds + 1):
            fed.enter_round(t, s)
            s = algorithm.round(fed, s, t)
            yield s.x

    def losses(self, alpha: float, xs: Tensor) -> Tensor:
        """f~ at each x, [k]."""
        probe, fed = Watched(alpha=alpha), self.fed.fresh()
        fed.runtime.store.write("own", None, self.own)
        return torch.stack([fed.map(probe.mixed_loss, x=x).mean(uniform=True).squeeze() for x in xs])

    def minimiser(self, alpha: float) -> Tensor:
        """x* by Newton's method, through the clients' Hessians."""
        x, rows = self.mixture.average(self.own), self.fed.runtime.train
        for _ in range(50):
            slope, bend = torch.zeros_like(x), torch.zeros(len(x), len(x), dtype=x.dtype)
            for place, batch in rows.full(None):
                own = self.own if place is None else self.own[place]
                w = alpha * x + (1 - alpha) * own
                model = self.fed.model
                slope = slope + alpha * model.grad(w, batch.x, batch.y, batch.weight).sum(0)
                bend = bend + alpha**2 * model.hessian(w, batch.x, batch.y, batch.weight).sum(0)  # type: ignore[attr-defined]
            step = torch.linalg.solve(bend, slope)
            x = x - step / max(1.0, float(step.norm()))
            if float(step.norm()) <= 1e-13 * max(1.0, float(x.norm())):
                break
        return x

    def slopes(self, alpha: float, x: Tensor) -> Tensor:
        """G_i(x), [n, d]."""
        fed = self.fed.fresh()
        fed.runtime.store.write("own", None, self.own)
        return fed.map(FLIX(alpha=alpha).slope, x=x).values


def grid(d: int) -> list[int]:
    """The paper's seven values of k, linearly spaced from 1 to d."""
    return [round(1 + j * (d - 1) / 6) for j in range(7)]


def logistic(experiment: Experiment, seed: int) -> dict[str, float]:
    """Rates, stalls, floats and bounds on one data set; settings: data, rounds."""
    plan = experiment.plans[0]
    name, rounds = str(plan.settings["data"]), plan.rounds
    found = regularised(name, rounds, seed)
    return found | stalling(name, rounds, seed) | unregularised(name, rounds // 2, seed)


def regularised(name: str, rounds: int, seed: int) -> dict[str, float]:
    """l2 = 0.1, n = 50: gradient descent and DIANA for every alpha and k."""
    problem = Problem.make(name, 50, 0.1, seed)
    d, found = problem.fed.d, {}
    factors: dict[str, list[float]] = {}
    worst = {"dgd": 0.0, "diana": 0.0}
    first_loss = []
    for alpha in ALPHAS:
        best = problem.minimiser(alpha)
        for k in [d, *grid(d)[:-1]]:
            solver, sent = ("dgd", "identity") if k == d else ("diana", f"rand-{k}")
            xs = problem.iterates(problem.method(alpha, solver, sent), rounds)
            errors = relative(xs, best)
            factors.setdefault(sent, []).append(factor(errors))
            worst[solver] = max(worst[solver], _bound_ratio(problem, alpha, solver, sent, errors))
            if solver == "dgd":
                first_loss.append(float(problem.losses(alpha, xs[:1] * 0)))
    found["gd_rate_gap"] = 100 * (max(factors["identity"]) / min(factors["identity"]) - 1)
    found["diana_rate_gap"] = max(
        100 * (max(values) / min(values) - 1) for sent, values in factors.items() if sent != "identity"
    )
    found |= {f"{solver}_over_bound": value for solver, value in worst.items()}
    found["loss_small_alpha"], found["loss_alpha_1"] = first_loss[0], first_loss[-1]
    return found | _floats(problem, d)


def _floats(problem: Problem, d: int) -> dict[str, float]:
    """Uplink floats per client to a relative error of 1e-8, alpha = 0.5, Rand-7 against whole gradients."""
    best, used = problem.minimiser(0.5), {}
    for solver, sent in (("dgd", "identity"), ("diana", "rand-7")):
        one, reached = compressor(sent), math.inf
        for k, x in enumerate(problem._steps(problem.method(0.5, solver, sent), 3000)):
            if float((x - best).square().sum()) <= 1e-8 * float((problem.x0 - best).square().sum()):
                reached = k
                break
        used[solver] = reached * one.floats(d) + (d if solver == "diana" else 0)
    return {
        "gd_floats": used["dgd"],
        "diana_floats": used["diana"],
        "saving": used["dgd"] / used["diana"],
    }


def stalling(name: str, rounds: int, seed: int) -> dict[str, float]:
    """l2 = 0.1, n = 8: DCGD stalls where DIANA, with the same Rand-k, goes on."""
    problem = Problem.make(name, 8, 0.1, seed)
    kept = f"rand-{grid(problem.fed.d)[3]}"
    omega = compressor(kept).omega(problem.fed.d)
    ends: dict[str, list[float]] = {"dcgd": [], "diana": []}
    over = 0.0
    for alpha in ALPHAS:
        best = problem.minimiser(alpha)
        floor = theory.dcgd_floor(problem.at(alpha), omega, problem.slopes(alpha, best))
        for solver, values in ends.items():
            errors = relative(problem.iterates(problem.method(alpha, solver, kept), 2 * rounds), best)
            values.append(float(errors[-rounds // 4 :].mean()))
            if solver == "dcgd":
                start = float((problem.x0 - best).square().sum())
                over = max(over, values[-1] * start / floor)
    return {
        "dcgd_end": math.log10(max(ends["dcgd"])),
        "diana_end": math.log10(max(max(ends["diana"]), 1e-32)),
        "dcgd_over_floor": over,
    }


def unregularised(name: str, rounds: int, seed: int) -> dict[str, float]:
    """l2 = 0, n = 100: the loss after the last round, for a small and a large alpha."""
    problem = Problem.make(name, 100, 0.0, seed)
    found = {}
    for alpha in (0.1, 1.0):
        for solver, sent in (("dgd", "identity"), ("diana", f"rand-{grid(problem.fed.d)[2]}")):
            xs = problem.iterates(problem.method(alpha, solver, sent), rounds)
            found[f"{solver}_loss_{alpha:g}"] = float(problem.losses(alpha, xs[-1:]))
    return found


def relative(xs: Tensor, best: Tensor) -> Tensor:
    """|x - x*|^2 / |x0 - x*|^2 along the iterates."""
    errors = (xs - best).square().sum(-1)
    return errors / errors[0]


def factor(errors: Tensor) -> float:
    """By how much the error shrinks a round, over the second half of the fall (to 1e-24 at most)."""
    last = int((errors > 1e-24).nonzero()[-1])
    first = last // 2
    return float(errors[last] / errors[first]) ** (1 / (last - first))


def _bound_ratio(problem: Problem, alpha: float, solver: str, sent: str, errors: Tensor) -> float:
    """The largest ratio of what was measured to what theory allows, over rounds."""
    mixture, omega = problem.at(alpha), compressor(sent).omega(problem.fed.d)
    rate = theory.dgd_rate(mixture) if solver == "dgd" else theory.diana_rate(mixture, omega)
    scale = 1.0
    if solver == "diana":
        gamma, beta = theory.diana_step(mixture, omega), theory.diana_beta(omega)
        scale += 4 * gamma**2 * omega / (mixture.n * beta) * float(mixture.curvatures.max()) ** 2
    seen = errors > 1e-24
    bound = scale * rate ** torch.arange(len(errors)).double()
    return float((errors / bound)[seen].max())


def main(name: str, folder: str) -> None:
    """Loss and distance against rounds and against floats, a page each for gradient descent, DIANA and DCGD."""
    from coterie.report.plots import line_plot, save_plot

    for solver, n in (("dgd", 50), ("diana", 50), ("dcgd", 8)):
        problem = Problem.make(name, n, 0.1, 0)
        d = problem.fed.d
        shown: dict[str, dict[str, tuple[list[float], list[float | None]]]] = {}
        for alpha in ALPHAS:
            best = problem.minimiser(alpha)
            least = float(problem.losses(alpha, best.unsqueeze(0)))
            for k in [d] if solver == "dgd" else grid(d):
                sent = "identity" if k == d else f"rand-{k}"
                xs = problem.iterates(problem.method(alpha, solver, sent), 300)[::10]
                places = [float(10 * j) for j in range(len(xs))]
                values = {"distance": relative(xs, best), "loss": problem.losses(alpha, xs) - least}
                for what, curve in values.items():
                    label, points = f"alpha {alpha}, k {k}", curve.tolist()
                    shown.setdefault(f"{what}-rounds", {})[label] = (places, points)
                    shown.setdefault(f"{what}-floats", {})[label] = ([k * place for place in places], points)
        for kind, curves in shown.items():
            what, _, against = kind.partition("-")
            figure = line_plot(curves, title=f"{name}, {solver}: {what}", x=against, y=what, log=True)
            save_plot(Path(folder) / f"{name}-{solver}-{kind}.html", figure)


if __name__ == "__main__":
    main(*sys.argv[1:3])
