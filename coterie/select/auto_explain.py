"""What `auto` says about its choice, in plain words."""

from __future__ import annotations

import math

from torch import Tensor

from coterie.algorithms import Algorithm
from coterie.models.metrics import LOSS, Metric
from coterie.select.advice import Advice
from coterie.select.auto_race import Entrant, Race, clearly


def reasons(race: Race, winner: Entrant, advice: Advice | None) -> tuple[list[str], bool]:
    """Say why the winner won; return the sentences and whether its gain over training alone is more than chance."""
    lines = [] if advice is None else [f"Theory first: {advice.verdict()}"]
    methods = dict.fromkeys(entrant.algorithm.name for entrant in race.everybody)
    lines.append(
        f"Then a race on validation rows: {len(race.everybody)} settings of {len(methods)} methods "
        f"({', '.join(methods)}), {race.spent()} rounds and {race.megabytes():.3g} MB in all."
    )
    lines += [f"Could not take part: {problem}" for problem in race.refused]
    judged = [entrant for entrant in race.finalists if len(entrant.checks) == race.checks]
    if race.checks:
        lines.append(
            f"{len(judged)} finalists were too close to tell: they trained again on {race.checks} further splits of "
            "the training and validation rows, and what follows is from those."
        )
    metric, judge = race.metric, race.judge
    alone = race.alone()
    checks = race.checks if alone is None else min(race.checks, len(alone.checks))
    mean = float(winner.validation(metric.name, checks).nanmean())
    said = f"Chosen: {_described(winner.algorithm)}, validation {metric.name} {mean:.3g}"
    best = min(judged, key=Entrant.held_out_cost)
    if best is not winner:
        extreme, below = ("highest", "above") if judge.higher_is_better else ("lowest", "below")
        better = "" if metric is judge else f"has the better {metric.name} or "
        lines.append(
            f"The {extreme} validation {judge.name} is that of {best.algorithm.name}, {best.held_out():.4g}, less than "
            f"a standard error {below} the {winner.held_out():.4g} of {winner.algorithm.name}, which {better}is "
            "simpler and as good as one can tell."
        )
    if winner.algorithm.name == "local" or alone is None:
        others = [e for e in race.finalists if e.algorithm.name != "local" and e.scores]
        return [*lines, f"{said}: every client trains alone."], all(clearly(winner, e) for e in others)
    lines.append(
        f"{said} against {float(alone.validation(metric.name, checks).nanmean()):.3g} for training alone."
    )
    lines.append(gains(race.fed.names, winner, alone, metric))
    sure = clearly(winner, alone)
    what = "lower loss" if judge is LOSS else f"better {judge.name}"
    lines.append(
        f"The {what} is more than chance between clients (95 %)."
        if sure
        else "The difference could be chance: with other validation rows another method might have won."
    )
    return lines, sure


def _described(algorithm: Algorithm) -> str:
    usual = type(algorithm)().settings()
    changed = {name: value for name, value in algorithm.settings().items() if value != usual[name]}
    told = ", ".join(
        f"{name} = {value:.3g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in changed.items()
    )
    return f"{algorithm.name} ({told})" if told else algorithm.name


def gains(names: list[str], winner: Entrant, alone: Entrant, metric: Metric) -> str:
    """Say who gains and who does not, on rows held out."""
    scale, unit = (100.0, " points") if metric.percent else (1.0, f" in {metric.name}")
    checks = min(len(winner.checks), len(alone.checks))
    difference = winner.validation(metric.name, checks) - alone.validation(metric.name, checks)
    gain = scale * metric.sign * difference
    known = ~gain.isnan()
    ahead, behind = known & (gain >= 0), known & (gain < 0)

    def amount(who: Tensor) -> str:
        values = gain[who]
        half = 1.96 * float(values.std()) / math.sqrt(len(values)) if len(values) > 2 else 0.0
        return f"{float(values.mean()):.2g}" + (f" ± {half:.1g}" if half else "") + unit

    if not behind.any():
        return f"Every client is as well off or better: {amount(ahead)} on average."
    alone_better = int(behind.sum())
    if not ahead.any():
        return f"No client's {metric.name} improves, although the losses fall: {amount(behind)} on average."
    who = ", ".join(name for name, is_behind in zip(names, behind.tolist(), strict=True) if is_behind)
    told = who if alone_better <= 3 else f"{alone_better} of {int(known.sum())} clients"
    verb = "is" if alone_better == 1 else "are"
    return f"{told} {verb} better off alone ({amount(behind)}); the other {int(ahead.sum())} gain {amount(ahead)}."
