"""What `auto` says about its choice, in plain words."""

from __future__ import annotations

import math

from torch import Tensor

from coterie.algorithms import Algorithm
from coterie.models.metrics import HIGHER_IS_BETTER, main_metric
from coterie.runs.auto_race import Entrant, Race, clearly
from coterie.theory.advisor import Advice


def reasons(race: Race, winner: Entrant, advice: Advice | None) -> tuple[list[str], bool]:
    """Why the winner, in plain words, and whether its gain over training alone is more than chance."""
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
    metric = main_metric(race.fed.model.task)
    alone = race.alone()
    checks = race.checks if alone is None else min(race.checks, len(alone.checks))
    mean = float(winner.validation(metric, checks).nanmean())
    said = f"Chosen: {_described(winner.algorithm)}, validation {metric} {mean:.3g}"
    best = min(judged, key=Entrant.held_out_loss)
    if best is not winner:
        lines.append(
            f"The lowest validation loss is that of {best.algorithm.name}, {best.held_out_loss():.4g}, less than a "
            f"standard error below the {winner.held_out_loss():.4g} of {winner.algorithm.name}, which has the better "
            f"{metric} or is simpler and as good as one can tell."
        )
    if winner.algorithm.name == "local" or alone is None:
        others = [e for e in race.finalists if e.algorithm.name != "local" and e.scores]
        return [*lines, f"{said}: every client trains alone."], all(clearly(winner, e) for e in others)
    lines.append(
        f"{said} against {float(alone.validation(metric, checks).nanmean()):.3g} for training alone."
    )
    lines.append(gains(race.fed.names, winner, alone, metric))
    sure = clearly(winner, alone)
    lines.append(
        "The lower loss is more than chance between clients (95 %)."
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


def gains(names: list[str], winner: Entrant, alone: Entrant, metric: str) -> str:
    """Who gains and who does not, on rows held out."""
    sign = 1.0 if HIGHER_IS_BETTER[metric] else -1.0
    scale, unit = (100.0, " points") if metric == "accuracy" else (1.0, f" in {metric}")
    checks = min(len(winner.checks), len(alone.checks))
    gain = scale * sign * (winner.validation(metric, checks) - alone.validation(metric, checks))
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
        return f"No client's {metric} rises, although the losses fall: {amount(behind)} on average."
    who = ", ".join(name for name, is_behind in zip(names, behind.tolist(), strict=True) if is_behind)
    told = who if alone_better <= 3 else f"{alone_better} of {int(known.sum())} clients"
    verb = "is" if alone_better == 1 else "are"
    return f"{told} {verb} better off alone ({amount(behind)}); the other {int(ahead.sum())} gain {amount(ahead)}."
