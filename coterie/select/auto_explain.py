"""What `auto` says about its choice, in plain words."""

from __future__ import annotations

from coterie.algorithms import Algorithm
from coterie.select.advice import Advice
from coterie.select.auto_race import Entrant, Race, clearly


def reasons(race: Race, winner: Entrant, advice: Advice | None) -> tuple[list[str], bool]:
    """Say why the winner won; return the sentences and whether its gain over training alone is more than chance."""
    lines = [] if advice is None else [f"Theory first: {advice.verdict()}"]
    methods = dict.fromkeys(entrant.algorithm.name for entrant in race.everybody)
    lines.append(
        f"Then a race on validation rows: {len(race.everybody)} settings of {len(methods)} methods "
        f"({', '.join(methods)}), {race.spent()} rounds and {race.megabytes():.3g} MB for all of them together."
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
        lines.append(
            f"{best.algorithm.name} is as good as one can tell ({judge.name} {best.held_out():.4g} against "
            f"{winner.held_out():.4g}); {winner.algorithm.name} is simpler."
        )
    if advice is not None and advice.algorithm(race.fed).name != winner.algorithm.name:
        lines.append(_differs(advice, winner))
    if winner.algorithm.name == "local" or alone is None:
        others = [e for e in race.finalists if e.algorithm.name != "local" and e.scores]
        return [*lines, f"{said}: every client trains alone."], all(clearly(winner, e) for e in others)
    verdict = race.verdict(winner, alone)
    lines.append(
        f"{said} against {float(alone.validation(metric.name, checks).nanmean()):.3g} for training alone."
    )
    lines.append(verdict.sentence(winner.algorithm.name, "training alone"))
    return lines, verdict.sign > 0


def guard_sentence(names: list[str], clients: int) -> str:
    """Say who keeps a model of its own."""
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{len(names)} of {clients} clients ({shown}) keep the model that they trained alone, because rows held out "
        "speak against the other one for them."
    )


def _differs(advice: Advice, winner: Entrant) -> str:
    """Say why the race need not agree with the advisor."""
    return (
        "Theory and race differ: theory predicts the errors of exact estimators from sums over training rows, and "
        f"recommends {advice.method}; the race measured losses on rows held out, with the rounds and steps that are "
        f"really taken, and {winner.algorithm.name} came first. The race decides."
    )


def _described(algorithm: Algorithm) -> str:
    usual = type(algorithm)().settings()
    changed = {name: value for name, value in algorithm.settings().items() if value != usual[name]}
    told = ", ".join(
        f"{name} = {value:.3g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in changed.items()
    )
    return f"{algorithm.name} ({told})" if told else algorithm.name
