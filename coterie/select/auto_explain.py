"""What `auto` says about its choice, in plain words."""

from __future__ import annotations

from coterie.algorithms import Algorithm
from coterie.select.advice import Advice
from coterie.select.auto_ensemble import Finalists
from coterie.select.auto_race import Race, clearly
from coterie.select.entrant import Entrant
from coterie.select.guard import kept_sentence


def reasons(
    race: Race, winner: Entrant, advice: Advice | None, mixture: Finalists | None = None
) -> tuple[list[str], bool]:
    """Say why the winner won; return the sentences and whether its gain over training alone is more than chance.

    With a mixture, the gain is that of the weighted mean.
    """
    lines = [] if advice is None else [f"Theory first: {advice.verdict()}"]
    methods = dict.fromkeys(entrant.title for entrant in race.everybody)
    lines.append(
        f"Then a race on validation rows: {len(race.everybody)} settings of {len(methods)} methods "
        f"({', '.join(methods)}), {race.spent()} rounds and {race.megabytes():.3g} MB for all of them together."
    )
    lines += [f"Could not take part: {problem}" for problem in race.refused]
    if len(race.feds) > 1:
        lines.append(
            f"Validation rows are few: everybody trained {len(race.feds)} times, so that every row that is not a test "
            "row was held out once."
        )
    metric, judge = race.metric, race.judge
    alone = race.alone()
    mean = float(winner.validation(metric.name).nanmean())
    on = f" on {winner.on}" if winner.title != winner.algorithm.name else ""
    said = f"Chosen: {_described(winner.algorithm)}{on}, validation {metric.name} {mean:.3g}"
    best = min(race.finalists, key=Entrant.held_out_cost)
    if best is not winner:
        lines.append(
            f"{best.algorithm.name} is as good as one can tell ({judge.name} {best.held_out():.4g} against "
            f"{winner.held_out():.4g}); {winner.algorithm.name} is simpler."
        )
    if advice is not None and advice.algorithm(race.fed).name != winner.algorithm.name:
        lines.append(_differs(advice, winner))
    if mixture is not None:
        lines += [f"{said} is the best alone.", mixture_sentence(mixture, race)]
        if mixture.own:
            lines.append(kept_sentence([race.fed.names[k] for k in mixture.own], race.fed.n, "the ensemble"))
        if mixture.verdict is None:
            return lines, False
        return [*lines, mixture.verdict.sentence("ensemble", "training alone")], mixture.verdict.sign > 0
    if winner.algorithm.name == "local" or alone is None:
        others = [e for e in race.finalists if e.algorithm.name != "local" and e.scores]
        return [*lines, f"{said}: every client trains alone."], all(clearly(winner, e) for e in others)
    verdict = race.verdict(winner, alone)
    lines.append(f"{said} against {float(alone.validation(metric.name).nanmean()):.3g} for training alone.")
    lines.append(verdict.sentence(winner.algorithm.name, "training alone"))
    return lines, verdict.sign > 0


def mixture_sentence(mixture: Finalists, race: Race) -> str:
    """Say what is averaged, and what that saves."""
    pairs = zip(mixture.members, mixture.shared.tolist(), strict=True)
    told = " + ".join(f"{share:.2f} {one.title}" for one, share in pairs if share)
    tilted = ", tilted by how well each does on a client's own rows" if mixture.personal else ""
    return (
        f"Deployed: the weighted mean {told}{tilted}; on {race.held_out_name} its loss is {mixture.loss:.4g} against "
        f"{mixture.best_loss:.4g} for the best alone (--no-ensemble deploys that one)."
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
