"""What privacy costs in accuracy: methods trained at several values of epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coterie._core.errors import SettingError
from coterie.algorithms import Algorithm, make
from coterie.engine.federation import Federation
from coterie.engine.privacy import Privacy
from coterie.models.metrics import find, main_metric
from coterie.train.fit import fit
from coterie.train.history import mean_over_clients

Watch = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Point:
    """One method at one price.

    Attributes
    ----------
    algorithm : str
        Name of the method.
    epsilon : float
        The price; infinite without noise.
    mean, worst : float
        Its metric on test rows, averaged over clients and repetitions, and that of the worst client.
    """

    algorithm: str
    epsilon: float
    mean: float
    worst: float


@dataclass(frozen=True)
class PrivacyCurve:
    """Methods at several prices.

    Attributes
    ----------
    points : list of Point
        One for each method and epsilon.
    metric : str
        What is measured on test rows.
    unit : str
        What is protected: 'client' or 'row'.
    delta : float
        Probability left out of the guarantee.
    """

    points: list[Point]
    metric: str
    unit: str
    delta: float

    def json(self) -> dict[str, Any]:
        """Return the curve as JSON values; epsilon is null without noise."""
        rows = [
            {**vars(point), "epsilon": point.epsilon if math.isfinite(point.epsilon) else None}
            for point in self.points
        ]
        return {"metric": self.metric, "unit": self.unit, "delta": self.delta, "points": rows}


def privacy_curve(
    federation: Callable[[int, Privacy | None], Federation],
    algorithms: Sequence[Algorithm | str],
    epsilons: Sequence[float] = (1.0, 2.0, 4.0, 8.0),
    *,
    delta: float = 1e-5,
    unit: str = "row",
    rounds: int = 50,
    seeds: int = 3,
    watch: Watch | None = None,
) -> PrivacyCurve:
    """Train methods at several prices and without noise.

    Parameters
    ----------
    federation
        Returns the clients for a seed and a budget, such as `lambda seed, privacy: Federation.from_table(...)`.
    algorithms
        Methods or their names.
    epsilons
        The prices.
    delta, unit
        As in `Privacy`.
    rounds
        Number of rounds.
    seeds
        Splits and repetitions.
    watch
        Called with a method and how many of the runs are done.

    Returns
    -------
    PrivacyCurve
        The metric of every method at every price.

    Examples
    --------
    >>> import coterie
    >>> from coterie.select.privacy_curve import privacy_curve
    >>> def hospitals(seed, privacy):
    ...     return coterie.Federation.from_table("heart_disease", "hospital", "sick", seed=seed, privacy=privacy)
    >>> curve = privacy_curve(hospitals, ["fedavg"], [4.0], rounds=2, seeds=1)
    >>> [point.epsilon for point in curve.points]
    [4.0, inf]
    """
    if seeds < 1 or not epsilons:
        raise SettingError("a curve needs at least one seed and one epsilon")
    prices = [*sorted(epsilons), math.inf]
    methods = [make(one) if isinstance(one, str) else one for one in algorithms]
    points, done, metric = [], 0, ""
    for method in methods:
        for price in prices:
            budget = Privacy(price, delta, unit) if math.isfinite(price) else None
            means, worst = [], []
            for seed in range(seeds):
                fed = federation(seed, budget)
                metric = main_metric(fed.model.task).name
                run = fit(fed, method, rounds, evaluate_every=0, privacy=budget)
                scores = run.score("test", metric)
                means.append(mean_over_clients(scores))
                known = scores[~scores.isnan()]
                worst.append(float(known.min() if find(metric).higher_is_better else known.max()))
                done += 1
                if watch is not None:
                    watch(method.name, done, len(methods) * len(prices) * seeds)
            points.append(Point(method.name, price, sum(means) / seeds, sum(worst) / seeds))
    return PrivacyCurve(points, metric, unit, delta)
