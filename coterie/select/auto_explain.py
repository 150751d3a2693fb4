"""What `auto` says about its choice, in plain words."""

from __future__ import annotations

from coterie._core.amounts import size
from coterie.algorithms import Algorithm
from coterie.select.advice import Advice
from coterie.select.auto_ensemble import Finalists
from coterie.select.auto_race import Race, clearly
from coterie.select.entrant import Entrant
from coterie.select.guard import kept_sentence


def reasons(
    race: Race, winner: Entrant, advice: Advice | None, mixture: Finalists | None = None
) -> tuple[list[str], bool]:
    """Say why the winner won; return at most four lines and whether its gain over training alone is more than chance.

    The lines are theory, race, choice and verdict; who keeps a model of its own is a fifth. With a mixture, the gain is
    that of the weighted mean, and its fifth line is among them.
    """
    metric, alone = race.metric, race.alone()
    lines = [] if advice is None else [_theory(race, winner, advice)]
    lines.append(_race(race))
    mean = float(winner.validation(metric.name).nanmean())
    on = f" on {winner.on}" if winner.title != winner.algorithm.name else ""
    said = f"Chosen: {_described(winner.algorithm)}{on}, validation {metric.name} {mean:.3g}"
    draw = _draw(race, winner)
    if mixture is not None:
        lines.append(f"{draw}{said} is the best alone. {mixture_sentence(mixture, race)}")
        verdict = mixture.verdict
        lines += [] if verdict is None else [verdict.sentence("ensemble", "training alone")]
        if mixture.own:
            lines.append(kept_sentence([race.fed.names[k] for k in mixture.own], race.fed.n, "the ensemble"))
        return lines, verdict is not None and verdict.sign > 0
    if winner.algorithm.name == "local" or alone is None:
        others = [e for e in race.finalists if e.algorithm.name != "local" and e.scores]
        lines.append(f"{draw}{said}: every client trains alone.")
        return lines, all(clearly(winner, e) for e in others)
    found = race.verdict(winner, alone)
    against = float(alone.validation(metric.name).nanmean())
    lines.append(f"{draw}{said} against {against:.3g} for training alone.")
    lines.append(found.sentence(winner.algorithm.name, "training alone"))
    return lines, found.sign > 0


def _theory(race: Race, winner: Entrant, advice: Advice) -> str:
    """Say what theory recommends, and why the race need not agree."""
    said = f"Theory first: {advice.verdict()}"
    if advice.algorithm(race.fed).name == winner.algorithm.name:
        return said
    return (
        f"{said} Theory and race differ: theory predicts the errors of exact estimators from sums over training rows; "
        "the race measured losses on rows held out, with the rounds and steps that are really taken, and decides."
    )


def _race(race: Race) -> str:
    """Say who raced, on what, and who could not."""
    methods = dict.fromkeys(entrant.title for entrant in race.everybody)
    parts = [
        f"Then a race on validation rows: {len(race.everybody)} settings of {len(methods)} methods "
        f"({', '.join(methods)}), {race.spent()} rounds and {size(race.megabytes())} for all of them together."
    ]
    if len(race.feds) > 1:
        parts.append(
            f"Validation rows are few: everybody trained {len(race.feds)} times, so that every row that is not a test "
            "row was held out once."
        )
    return " ".join([*parts, *(f"Could not take part: {problem}" for problem in race.refused)])


def _draw(race: Race, winner: Entrant) -> str:
    """Say who is as good as the winner and less simple, if somebody is."""
    best = min(race.finalists, key=Entrant.held_out_cost)
    if best is winner:
        return ""
    return (
        f"{best.algorithm.name} is as good as one can tell ({race.judge.name} {best.held_out():.4g} against "
        f"{winner.held_out():.4g}); {winner.algorithm.name} is simpler. "
    )


def mixture_sentence(mixture: Finalists, race: Race) -> str:
    """Say what is averaged, and what that saves."""
    pairs = zip(mixture.members, mixture.shared.tolist(), strict=True)
    told = " + ".join(f"{share:.2f} {one.title}" for one, share in pairs if share)
    tilted = ", tilted by how well each does on a client's own rows" if mixture.personal else ""
    return (
        f"Deployed: the weighted mean {told}{tilted}; on {race.held_out_name} its loss is {mixture.loss:.4g} against "
        f"{mixture.best_loss:.4g} for the best alone (--no-ensemble deploys that one)."
    )


def _described(algorithm: Algorithm) -> str:
    usual = type(algorithm)().settings()
    changed = {name: value for name, value in algorithm.settings().items() if value != usual[name]}
    told = ", ".join(
        f"{name} = {value:.3g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in changed.items()
    )
    return f"{algorithm.name} ({told})" if told else algorithm.name
