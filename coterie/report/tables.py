"""Runs, searches and predictions as tables and notes for the terminal, and as JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from coterie.data.column_types import some
from coterie.models.metrics import find, main_metric
from coterie.report.cells import Column, Decimals, direction, number_table, text_table, titled
from coterie.report.numbers import far_clients
from coterie.train import private
from coterie.train.drift import Drift

if TYPE_CHECKING:
    import polars

    from coterie.select.privacy_curve import PrivacyCurve
    from coterie.select.tune import Search
    from coterie.train.adapt import Adapted
    from coterie.train.run import Run


def privacy_table(curve: PrivacyCurve) -> Table:
    """Return a table of a privacy curve: a row per method, a column per epsilon."""
    prices = list(dict.fromkeys(point.epsilon for point in curve.points))
    names = list(dict.fromkeys(point.algorithm for point in curve.points))
    show = Decimals.for_metric(curve.metric, (point.mean for point in curve.points))
    found = {(point.algorithm, point.epsilon): show(point.mean) for point in curve.points}
    shown = [f"epsilon {price:g}" if math.isfinite(price) else "no noise" for price in prices]
    values = [
        (title, [found[name, price] for name in names]) for title, price in zip(shown, prices, strict=True)
    ]
    title = (
        f"Mean test {curve.metric} ({direction(curve.metric)}); every {curve.unit} is protected with delta "
        f"{curve.delta:g}"
    )
    return number_table(title, ("method", names), values, None)


def run_table(run: Run, most: int = 20) -> Table:
    """Return a table of the metric of every client's deployed model.

    Parameters
    ----------
    run
        What `coterie.fit` returned.
    most
        Clients listed; with more, the middle ones are left out.

    Returns
    -------
    rich.table.Table
    """
    split, metric, scores = _scores(run)
    show = Decimals.for_metric(metric, scores)
    title = f"{run.algorithm.name}, models of round {run.deployed_round}: {split} {metric}"
    title += f" ({direction(metric)}), mean {show(_mean(run, split, metric, scores))}"
    shown: list[int | None] = list(range(run.fed.n))
    if run.fed.n > most:
        shown = [*range(most // 2), None, *range(run.fed.n - most // 2, run.fed.n)]
    sizes, scored = run.fed.rows["train"].tolist(), run.fed.rows[split].tolist()

    def value(k: int) -> str:
        if not scored[k]:
            return "no rows"
        return "not defined" if math.isnan(scores[k]) and find(metric).undefined else show(scores[k])

    lines = [
        ("…",) * 4 if k is None else (run.fed.names[k], str(sizes[k]), str(scored[k]), value(k))
        for k in shown
    ]
    clients, rows, held, values = (list(column) for column in zip(*lines, strict=True))
    counts = [("training rows", rows), *([] if split == "train" else [(f"{split} rows", held)])]
    return number_table(title, ("client", clients), [*counts, (metric, values)])


def run_summary(run: Run) -> dict[str, Any]:
    """Return what `coterie fit --json` and `coterie resume --json` write."""
    split, metric, scores = _scores(run)
    return {
        "algorithm": run.algorithm.name,
        "settings": run.algorithm.settings(),
        "rounds": run.rounds,
        "deployed_round": run.deployed_round,
        "metric": f"{split} {metric} ({direction(metric)})",
        "mean": _finite(_mean(run, split, metric, scores)),
        "clients": {name: _finite(value) for name, value in zip(run.fed.names, scores, strict=True)},
        "observed": {name: _finite(value) for name, value in _observed(run).items()},
        "trained_on": list(run.trained_on),
        "mb_up": run.traffic()[0],
        "mb_down": run.traffic()[1],
        "privacy": private.report(run.fed),
        "seconds": run.seconds,
        "folder": str(run.folder) if run.folder is not None else None,
    }


def _scores(run: Run) -> tuple[str, str, list[float]]:
    """Return the split (test if there is one), the run's metric, and its value for each client."""
    metric = run.metric or main_metric(run.fed.model.task).name
    split = next(split for split in ("test", "validation", "train") if run.fed.has_rows(split))
    return split, metric, run.score(split, metric).tolist()


def _mean(run: Run, split: str, metric: str, scores: Sequence[float]) -> float:
    """Average over the clients that have rows in the split and for which the metric is defined."""
    known = [score for score, size in zip(scores, run.fed.rows[split].tolist(), strict=True) if size]
    if find(metric).undefined:
        known = [score for score in known if not math.isnan(score)]
    return sum(known) / len(known) if known else math.nan


def _finite(value: float) -> float | None:
    """Replace NaN and infinities, which JSON has not, by None."""
    return value if math.isfinite(value) else None


def screened(run: Run) -> str:
    """Say whose replies were shortened, or left out because they were too far from the others; empty if nobody's."""
    long = [name for _, name, why in run.left_out if "too far" in why] + [
        name for _, name, _ in run.shortened
    ]
    if not long:
        return ""
    return (
        f"{some(dict.fromkeys(long))}: {len(long)} replies would have moved the mean too far. They were shortened to "
        "the median step, or left out if more than 100 times as long."
    )


def run_notes(run: Run) -> list[str]:
    """Return notes on scores of training rows, replies that could not be used, lost rounds, and what was recorded."""
    notes = []
    if not run.fed.has_rows("test") and not run.fed.has_rows("validation"):
        notes.append(
            "No rows were held out, so the scores are those of training rows: they do not say how good the models are "
            "on new rows."
        )
    wild = [(t, name) for t, name, why in run.left_out if "not finite" in why]
    missed = [(t, name) for t, name, why in run.left_out if "not finite" not in why and "too far" not in why]
    if wild:
        notes.append(
            f"{len(wild)} replies, from round {wild[0][0]} on, were not finite and were left "
            f"out ({some(dict.fromkeys(name for _, name in wild))}). A smaller step size may help."
        )
    if missed:
        notes.append(
            f"{len(missed)} replies, from round {missed[0][0]} on, did not come or could not be used "
            f"({some(dict.fromkeys(name for _, name in missed))})."
        )
    if screened(run):
        notes.append(screened(run))
    if run.refit != "none":
        rows = "all rows" if run.refit == "all" else "training and validation rows"
        notes.append(f"The models were trained again on {rows}; the scores are from before.")
    elif run.fed.models_stay and run.fed.has_rows("validation"):
        notes.append(
            "The models saw training rows only. --refit validation trains them again with validation rows, at nodes "
            "whose policies allow it."
        )
    if run.lost_rounds:
        notes.append(f"{run.lost_rounds} of {run.rounds} rounds were lost because no client replied.")
    drift = Drift.of(run) if run.folder is None else Drift.load(run.folder)
    if drift is not None and drift.sentence():
        notes.append(drift.sentence())
    cost = private.explain(run.fed)
    if cost is not None:
        notes.append(cost)
    weights = [value for _, split, name, value in run.history.blocks if (split, name) == ("server", "weight")]
    strangers = far_clients(run.fed.names, weights[-1].numpy()) if weights else ""
    if strangers:
        notes.append(strangers)
    seen = _observed(run)
    if seen:
        values = ", ".join(f"{name} {value:.3g}" for name, value in seen.items())
        notes.append(
            f"After round {run.rounds} {run.algorithm.name} recorded {values}; metrics.parquet has every round."
        )
    return notes


def certified(run: Run, target: float) -> str:
    """Return a sentence on whether a run proved its accuracy."""
    bound = run.algorithm.certificate(run.state)
    if bound <= target:
        return f"Proved after {run.deployed_round} rounds: the training loss is at most {bound:.3g} above its minimum."
    return (
        f"Not proved in {run.deployed_round} rounds: the training loss may be {bound:.3g} above its minimum, the "
        f"target is {target:g}. Give more --rounds, a larger --l2 or a smaller alpha."
    )


def _observed(run: Run) -> dict[str, float]:
    """Return the scalars recorded after the last round, such as the number and purity of clusters."""
    return {
        metric: float(value)
        for t, split, metric, value in run.history.blocks
        if t == run.rounds and split == "server" and value.dim() == 0
    }


def adapted_table(found: Adapted) -> Table:
    """Return a table of new clients: test scores of their model, the common one, and one trained alone."""
    show = Decimals.for_metric(found.metric, found.scores["common"])
    title = f"New clients, test {found.metric} ({direction(found.metric)})"
    columns: list[Column] = [("training rows", [str(rows) for rows in found.rows["train"]])]
    for name, values in found.scores.items():
        columns.append((name, ["no rows" if math.isnan(value) else show(value) for value in values]))
    return number_table(title, ("client", found.names), [*columns, ("how", found.how)])


def search_table(found: Search, most: int = 10) -> Table:
    """Return a table of the best trials of a hyperparameter search."""
    names, score = list(found.trials[0]["settings"]), f"validation_{found.metric}"
    rows = [
        [
            str(trial["number"]),
            "" if trial[score] is None else f"{trial[score]:.4f}",
            trial["state"],
            *(_setting(trial["settings"].get(name)) for name in names),
        ]
        for trial in found.trials[:most]
    ]
    title = titled(f"{found.algorithm.name}: mean validation {found.metric} over clients", found.trials, most)
    return text_table(title, ["trial", f"validation {found.metric}", "", *names], rows)


def _setting(value: Any) -> str:
    """Format the value of a hyperparameter."""
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def prediction_notes(predictions: polars.DataFrame, client: str) -> list[str]:
    """Return a note that names the clients predicted by the common model, if any."""
    rows = predictions.filter(predictions["warning"].is_not_null())
    names = rows[client].unique(maintain_order=True).to_list()
    who = f"{len(names)} client(s) not seen in training, {some(names)}"
    return [f"{who}: the common model predicts their {len(rows)} row(s)."] if names else []
