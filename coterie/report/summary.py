"""Sentences of the report, for a reader who has never heard of federated learning."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from coterie._core import systems
from coterie._core.amounts import size
from coterie.data.grouping import names_of
from coterie.models.metrics import find
from coterie.models.table_models import TABLE_MODELS
from coterie.report.baseline import same_rows
from coterie.report.facts import RunFacts
from coterie.report.gains import Scores
from coterie.report.numbers import count, listed, show
from coterie.select.verdict import Verdict

GLOSSARY = (
    ("client", "somebody whose data stay where they are: a hospital, a shop, a phone"),
    ("row", "one example: one patient, one sale, one sentence"),
    (
        "test rows",
        "rows of a client that were set aside before training and used once, at the end; they show how well the model "
        "does on data it has not seen",
    ),
    (
        "validation rows",
        "rows set aside to choose between settings and rounds, so that test rows need not be touched",
    ),
    (
        "training alone",
        "every client learns from its own rows only and nothing is sent; the other methods are compared with it",
    ),
    ("federated learning", "clients learn together by exchanging parameters of their models, never rows"),
    ("personalized", "every client ends up with a model of its own instead of one model for all"),
    ("round", "one exchange: models go out, clients work on their rows, results come back"),
    (
        "95 % interval",
        "the range in which the true value plausibly lies; with few rows it is wide",
    ),
    (
        "gain of a client",
        "by how much the model trained together is better than the one trained alone, on the same rows. What other "
        "clients show counts too, so that a few lucky rows do not decide; a client is called better or worse off only "
        "if that is 97.5 % certain and, over all clients, at most 5 % of what is said is expected to be wrong",
    ),
)


def headline(main: RunFacts, alone: RunFacts | None, verdict: Verdict | None) -> str:
    """Return the verdict in a few words."""
    if main.alone:
        return "Every client trained alone"
    if alone is None or verdict is None:
        if main.sure is not None:
            what = "helped" if main.sure else "made no clear difference"
            return f"Training together {what} on the rows that auto held out"
        return "Trained together; not yet compared with training alone"
    if verdict.sign:
        return "Training together helped" if verdict.sign > 0 else "Training together did harm"
    return "No clear difference between training together and alone"


def sentences(
    runs: Sequence[RunFacts], all_scores: Sequence[Scores], main: RunFacts, alone: RunFacts | None
) -> list[str]:
    """Return the sentences at the top of the page."""
    scores = all_scores[list(runs).index(main)]
    return [
        _setting(main),
        _quality(main),
        *_gain(main, scores, alone),
        *guard(main),
        _price(main),
        *_refitted(main),
        *_trouble(main),
        *_others(runs, main),
    ]


def _setting(run: RunFacts) -> str:
    """Say who learned what, and by which method."""
    n = len(run.names)
    rows = run.rows("train")
    held = "" if rows is None else f" with {rows.sum():,} training rows between them"
    target = f" to predict “{run.data['target']}”" if "target" in run.data else ""
    chosen = ", which auto chose" if run.label.startswith("auto") else ""
    if run.alone:
        return f"{count(n, 'client')}{held} each learned{target} from their own rows only; nothing was sent."
    return (
        f"{count(n, 'client')}{held} learned{target} together by the method “{run.algorithm}”{chosen}. "
        "No row left its client: only model parameters were exchanged."
    )


def _quality(run: RunFacts) -> str:
    """Say how well the models do on average and for the client served worst."""
    known = [(value, name) for value, name in zip(run.scores, run.names, strict=True) if not np.isnan(value)]
    values = [value for value, _ in known]
    metric = find(run.metric)
    if not known:
        return f"{metric.title} is not known for any client ({metric.undefined or 'no finite values'})."
    mean = show(run.metric, float(np.mean(values)))
    worst = min(known) if metric.higher_is_better else max(known)
    seen = {
        "test": "On rows that nobody had trained on",
        "validation": "On validation rows (there are no test rows)",
        "train": "On the training rows themselves (there are no others, so this is optimistic)",
    }[run.split]
    folds = "windows in time" if run.data.get("time") else "folds in which every row is tested once"
    ways = folds if run.folds > 1 else "random splits"
    seeds = f", averaged over {run.seeds} {ways}" if run.seeds > 1 else ""
    if run.metric == "accuracy":
        text = f"{seen}{seeds}, a client's model gives the right answer {mean} of the time on average"
    elif run.metric == "perplexity":
        text = (
            f"{seen}{seeds}, a client's model is as unsure about the next piece of text as if it had to choose "
            f"among {mean} equally likely ones (its perplexity)"
        )
    elif run.metric == "rmse":
        text = f"{seen}{seeds}, a client's model is typically off by {mean} ({run.metric}, in the target's units)"
    else:
        units = ", in the target's units" if metric.scales_with_target else ""
        text = (
            f"{seen}{seeds}, the {metric.title} of a client's model is {mean} on average "
            f"({metric.direction}{units})"
        )
    if len(known) == 1:
        return f"{text}."
    return f"{text}; the client served worst is {worst[1]} with {show(run.metric, worst[0])}."


def _gain(run: RunFacts, scores: Scores, alone: RunFacts | None) -> list[str]:
    """Say who gained over training alone, as far as the test rows allow."""
    if run.alone:
        return []
    if alone is None or scores.verdict is None:
        return [missing_baseline(run)]
    return [scores.verdict.sentence(run.label, "training alone")]


def guard(run: RunFacts) -> list[str]:
    """Say who keeps a model of its own, and what that saved and cost."""
    return [] if run.guard is None or "text" not in run.guard else [run.guard["text"]]


def missing_baseline(run: RunFacts) -> str:
    """Say how to train the baseline from which gains are computed."""
    how = repeat_command(run, alone=True) or "coterie.fit(fed, 'local', out=FOLDER)"
    known = (
        "It is not known yet whether collaborating paid off"
        if run.sure is None
        else "What auto found on rows it held out is said below; on test rows it is not known yet whether "
        "collaborating paid off"
    )
    return (
        f"{known}: no run trained alone on the same rows. Train one and report both: {how}, then coterie report "
        f"{run.folder.name} FOLDER."
    )


def _price(run: RunFacts) -> str:
    """Say what the deployed models cost in rounds, time and traffic, and what the race did that chose them."""
    rounds, traffic, _ = run.price
    took = f"{rounds:,.0f} round{'' if rounds == 1 else 's'} and {_seconds(run)}"
    race = run.race
    chosen = "" if race is None else f" The race that chose them took {race.rounds:,.0f} rounds"
    if race is not None:
        chosen += f" and moved {size(race.megabytes)}, theirs included."
    if run.alone or traffic == 0:
        return f"The models took {took}; nothing crossed the network for them.{chosen}"
    each = traffic / max(1, len(run.names))
    return f"The models took {took}, and moved {size(traffic)} over the network ({size(each)} per client).{chosen}"


def _refitted(run: RunFacts) -> list[str]:
    """Say which rows the deployed models have seen, where that is not the training rows alone."""
    if run.trained_on == ["train"]:
        return []
    rows = "all rows, test rows included" if "test" in run.trained_on else "training and validation rows"
    return [f"Then the models were trained again on {rows}; the scores on this page are from before."]


def _trouble(run: RunFacts) -> list[str]:
    """Report replies that could not be used, and rounds in which no client replied."""
    texts = []
    left_out, lost = len(run.result["left_out"]), int(run.result["lost_rounds"])
    if left_out:
        texts.append(
            f"{count(left_out, 'reply', 'replies')} of clients could not be used: missing, not finite numbers, or "
            "too far from the others."
        )
    shortened = len(run.result.get("shortened", ()))
    if shortened:
        texts.append(
            f"{count(shortened, 'reply', 'replies')} of clients would have moved a mean too far and were shortened."
        )
    if lost:
        texts.append(
            f"{count(lost, 'round')} of {run.result['rounds']:,} were lost because no client replied."
        )
    return texts


def _seconds(run: RunFacts) -> str:
    """Format the duration of the run."""
    seconds = run.price.seconds
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.1f} seconds"


def _others(runs: Sequence[RunFacts], main: RunFacts) -> list[str]:
    """Say whether another run on the page has a better mean, and which were tested on other rows."""
    alike = [run for run in runs if run is main or same_rows(main, run)]
    apart = [run.label for run in runs if run not in alike]
    unlike = [f"Tested on other rows, so that means cannot be compared: {listed(apart)}."] if apart else []
    if len(alike) < 2:
        return unlike
    sign = find(main.metric).sign
    means = {run.label: float(np.nanmean(run.scores)) for run in alike}
    best = max(means, key=lambda label: sign * means[label])
    others = [run.label for run in alike if run is not main]
    if best == main.label:
        return [f"No other run on this page ({listed(others)}) has a better mean.", *unlike]
    return [
        f"Of the runs on this page {best} has the best mean, {show(main.metric, means[best])}. Do not choose a method "
        "by test rows, though: choose by validation rows.",
        *unlike,
    ]


def repeat_command(run: RunFacts, alone: bool = False) -> str | None:
    """Return the command that repeats this run, or trains alone on its rows; None if they came from no table.

    Beside a run of `auto`, training alone has its best settings and as many rounds as anybody had in the race: the
    winner itself may have been trained for few.
    """
    data = run.data
    if not data.get("source"):
        return None
    plan, federation = run.config["plan"], run.config["federation"]
    parts = [
        "coterie fit",
        _quoted(data["source"]),
        "--client",
        _quoted(data["client"]),
        "--target",
        _quoted(data["target"]),
    ]
    if data.get("event"):
        parts += ["--event", _quoted(data["event"])]
    if data.get("time"):
        parts += ["--time", _quoted(data["time"])]
    for column in names_of(data.get("cluster")):
        parts += ["--cluster", _quoted(column)]
    if data.get("task"):
        parts += ["--task", _quoted(data["task"])]
    for column in data.get("drop", []):
        parts += ["--drop", _quoted(column)]
    for column in data.get("keep", []):
        parts += ["--keep", _quoted(column)]
    if data.get("split") and list(data["split"]) != [0.6, 0.2, 0.2]:
        parts += ["--split", ",".join(map(str, data["split"]))]
    rounds, select, settings = plan["rounds"], plan["select"], {} if alone else run.settings
    if alone and run.alone_in_race is not None:
        (rounds, settings), select = run.alone_in_race, "best"
    parts += ["--rounds", str(rounds), "--seed", str(federation["seed"])]
    parts += ["--refit", plan.get("refit", "none")]
    if select != "last":
        parts += ["--select", select]
    if "metric" in plan:
        parts += ["--metric", _quoted(plan["metric"])]
    model = json.loads(data.get("model", "{}")).get("model")
    if model in TABLE_MODELS and model != "linear" and not (alone and model == "trees"):
        parts += ["--model", model]
    if "aggregate" in plan:
        parts += ["--aggregate", plan["aggregate"]]
    if "epsilon" in plan:
        parts += ["--epsilon", str(plan["epsilon"]), "--delta", str(plan["delta"]), "--unit", plan["unit"]]
    if federation.get("dropout"):
        parts += ["--dropout", str(federation["dropout"])]
    parts += ["--algorithm", "local" if alone else run.algorithm]
    for name, value in settings.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        parts += ["--set", _quoted(f"{name}={text}")]
    return " ".join([*parts, "--out", "FOLDER"])


def _quoted(value: object) -> str:
    """Quote a value for the shell."""
    return systems.quoted([str(value)])
