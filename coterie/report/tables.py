"""Format results as tables for the terminal and as JSON values."""

from __future__ import annotations

import dataclasses
import inspect
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.data.column_types import some
from coterie.models.metrics import find, main_metric
from coterie.train import private

if TYPE_CHECKING:
    import polars

    from coterie.algorithms.base import Algorithm
    from coterie.data.recipes import Recipe
    from coterie.select.compare import Comparison
    from coterie.select.privacy_curve import PrivacyCurve
    from coterie.select.tune import Search
    from coterie.train.adapt import Adapted
    from coterie.train.run import Run

LEGEND = "against training alone, on the same test rows; bold: chosen by validation"

OVER_ROWS = {"loss": "log-loss", "auc": "AUC"}  # columns over all rows; the metric itself is "all rows"

Column = tuple[str, list[str]]


def comparison_tables(comparison: Comparison, width: int) -> list[Table]:
    """Return the table of a comparison, or three tables if one would be too wide.

    Parameters
    ----------
    comparison
        What `coterie.compare` returned.
    width
        Columns of the terminal.

    Returns
    -------
    list of rich.table.Table
        A row per method: quality, clients improved and harmed, and cost.
    """
    title = f"Test {comparison.metric} over {comparison.clients} clients ({direction(comparison.metric)})"
    if comparison.folds > 1:
        title += f", every row tested once in {comparison.folds} folds"
    method: Column = ("method", [row["algorithm"] for row in comparison.rows])
    quality, gains, price = _quality(comparison), _gains(comparison), _price(comparison.rows)
    quartiles, best = _quartiles(comparison), method[1].index(comparison.chosen())
    whole = _number_table(title, method, [*quality, quartiles, *gains, *price], best, LEGEND)
    if Console(width=1000).measure(whole).maximum <= width:
        return [whole]
    return [
        _number_table(title, method, quality, best),
        _number_table("", method, gains, best, LEGEND),
        _number_table("", method, [quartiles, *price], best),
    ]


def direction(metric: str) -> str:
    """Return "higher is better" or "lower is better"."""
    return find(metric).direction


def _quality(comparison: Comparison) -> list[Column]:
    """Return the columns about the metrics: means over clients, and over the rows of all of them."""
    rows, show = comparison.rows, _format(comparison)
    sd = len({trial.seed for trial in comparison.trials}) > 1
    spread = [f" ± {show(row['sd'])}" if sd else "" for row in rows]
    beside = [
        (OVER_ROWS.get(name, "all rows"), [_optional(row["over_rows"][name]) for row in rows])
        for name in rows[0]["over_rows"]
    ]
    return [
        (
            "mean ± sd" if sd else "mean",
            [show(row["mean"]) + off for row, off in zip(rows, spread, strict=True)],
        ),
        ("worst", [show(row["worst"]) for row in rows]),
        *beside,
    ]


def _optional(value: float | None) -> str:
    """Format a value over all rows; empty if it is not defined."""
    return "" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def _gains(comparison: Comparison) -> list[Column]:
    """Return the columns about the gain over training alone, by paired rows."""
    rows = comparison.rows
    show = _Decimals.for_metric(comparison.row_metric.name, _ends(rows))
    pairs = [(row, row["algorithm"] == "local") for row in rows]
    name = "log-loss" if comparison.row_metric.name == "loss" else comparison.row_metric.name
    return [
        ("clients better", ["" if own else f"{row['improved']:.0f} %" for row, own in pairs]),
        ("worse", ["" if own else f"{row['harmed']:.0f} %" for row, own in pairs]),
        (f"{name} gain, 95 %", ["" if own else _interval(row, show) for row, own in pairs]),
    ]


def _ends(rows: list[dict[str, Any]]) -> list[float]:
    """Return the ends of all intervals."""
    ends = [row[end] for row in rows for end in ("gain_low", "gain_high")]
    return [10 * abs(end) for end in ends if end]


def _interval(row: dict[str, Any], show: _Decimals) -> str:
    """Format the 95 % interval of the mean gain; empty if unknown."""
    if row["gain_low"] is None:
        return ""
    return f"{show(row['gain_low'], '+')} … {show(row['gain_high'], '+')}"


def _quartiles(comparison: Comparison) -> Column:
    """Return the column with the quartiles over clients."""
    show = _format(comparison)
    return (
        "quartiles",
        [" ".join(show(row[name]) for name in ("q25", "median", "q75")) for row in comparison.rows],
    )


def _price(rows: list[dict[str, Any]]) -> list[Column]:
    """Return the columns about rounds, traffic and time."""
    return [
        ("rounds", [f"{row['rounds']:.0f}" for row in rows]),
        ("MB up", [f"{row['mb_up']:.3f}" for row in rows]),
        ("MB down", [f"{row['mb_down']:.3f}" for row in rows]),
        ("s", [f"{row['seconds']:.1f}" for row in rows]),
    ]


def _format(comparison: Comparison) -> _Decimals:
    """Return the number format of a comparison's metric."""
    return _Decimals.for_metric(comparison.metric, (row["mean"] for row in comparison.rows))


@dataclasses.dataclass(frozen=True)
class _Decimals:
    """Format numbers with the same number of decimals; very long ones with three significant digits."""

    places: int

    @classmethod
    def for_metric(cls, metric: str, values: Iterable[float]) -> _Decimals:
        """Use three decimals for accuracy, else enough for four digits of a typical value."""
        sizes = [abs(value) for value in values if value and math.isfinite(value)]
        if find(metric).percent or not sizes:
            return cls(3)
        return cls(min(max(3 - math.floor(math.log10(statistics.median(sizes))), 0), 8))

    def __call__(self, value: float, sign: str = "") -> str:
        if not math.isfinite(value):
            return "not finite"
        text = f"{value:{sign}.{self.places}f}"
        return text if len(text) <= self.places + 8 else f"{value:{sign}.3g}"


def privacy_table(curve: PrivacyCurve) -> Table:
    """Return a table of a privacy curve: a row per method, a column per epsilon."""
    prices = list(dict.fromkeys(point.epsilon for point in curve.points))
    names = list(dict.fromkeys(point.algorithm for point in curve.points))
    show = _Decimals.for_metric(curve.metric, (point.mean for point in curve.points))
    found = {(point.algorithm, point.epsilon): show(point.mean) for point in curve.points}
    shown = [f"epsilon {price:g}" if math.isfinite(price) else "no noise" for price in prices]
    values = [
        (title, [found[name, price] for name in names]) for title, price in zip(shown, prices, strict=True)
    ]
    title = (
        f"Mean test {curve.metric} ({direction(curve.metric)}); every {curve.unit} is protected with delta "
        f"{curve.delta:g}"
    )
    return _number_table(title, ("method", names), values, None)


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
    show = _Decimals.for_metric(metric, scores)
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

    lines = [("…", "…", "…") if k is None else (run.fed.names[k], str(sizes[k]), value(k)) for k in shown]
    clients, rows, values = (list(column) for column in zip(*lines, strict=True))
    return _number_table(title, ("client", clients), [("training rows", rows), (metric, values)])


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


def run_notes(run: Run) -> list[str]:
    """Return notes on replies that could not be used, lost rounds, and what the method recorded last."""
    notes = []
    wild = [(t, name) for t, name, why in run.left_out if "not finite" in why]
    missed = [(t, name) for t, name, why in run.left_out if "not finite" not in why]
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
    if run.refit != "none":
        rows = "all rows" if run.refit == "all" else "training and validation rows"
        notes.append(f"The models were trained again on {rows}; the scores are from before.")
    if run.lost_rounds:
        notes.append(f"{run.lost_rounds} of {run.rounds} rounds were lost because no client replied.")
    cost = private.explain(run.fed)
    if cost is not None:
        notes.append(cost)
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
    show = _Decimals.for_metric(found.metric, found.scores["common"])
    title = f"New clients, test {found.metric} ({direction(found.metric)})"
    columns: list[Column] = [("training rows", [str(rows) for rows in found.rows["train"]])]
    for name, values in found.scores.items():
        columns.append((name, ["no rows" if math.isnan(value) else show(value) for value in values]))
    return _number_table(title, ("client", found.names), [*columns, ("how", found.how)])


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
    title = _some(f"{found.algorithm.name}: mean validation {found.metric} over clients", found.trials, most)
    return _text_table(title, ["trial", f"validation {found.metric}", "", *names], rows)


def _setting(value: Any) -> str:
    """Format the value of a hyperparameter."""
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def prediction_notes(predictions: polars.DataFrame, client: str) -> list[str]:
    """Return a note that names the clients predicted by the common model, if any."""
    rows = predictions.filter(predictions["warning"].is_not_null())
    names = rows[client].unique(maintain_order=True).to_list()
    who = f"{len(names)} client(s) not seen in training, {some(names)}"
    return [f"{who}: the common model predicts their {len(rows)} row(s)."] if names else []


def describe_algorithm(cls: type[Algorithm]) -> dict[str, Any]:
    """Return name, one-line summary and hyperparameters of a method as JSON values."""
    return {
        "name": cls.name,
        "class": cls.__name__,
        "summary": _summary(cls),
        "settings": [
            {"name": field.name, "default": field.default}
            | {key: value for key, value in field.metadata.items() if value is not None}
            for field in dataclasses.fields(cls)
        ],
    }


def algorithms_table(classes: Sequence[type[Algorithm]]) -> Table:
    """Return a table of methods with their one-line summaries."""
    rows = [(cls.name, _summary(cls)) for cls in classes]
    return _text_table("Methods", ("name", "what it does"), rows)


def recipes_table(recipes: Sequence[Recipe]) -> Table:
    """Return a table of data sets: task, model, how clients differ, and the files that they need."""
    rows = [(one.name, one.task, one.model, one.heterogeneity, ", ".join(one.files)) for one in recipes]
    return _text_table("Data sets", ("name", "task", "model", "how clients differ", "files needed"), rows)


def recipe_card(recipe: Recipe) -> Table:
    """Return the card of a data set."""
    names = ("title", "task", "model", "client", "heterogeneity", "why", "source", "licence")
    rows = [(name, str(getattr(recipe, name))) for name in names]
    return _text_table(recipe.name, ("", ""), [*rows, ("files needed", ", ".join(recipe.files) or "none")])


def algorithm_page(cls: type[Algorithm]) -> list[str | Table]:
    """Return the docstring of a method and a table of its hyperparameters."""
    rows = [
        (field.name, str(field.default), _allowed(field.metadata), field.metadata.get("help", ""))
        for field in dataclasses.fields(cls)
    ]
    headers = ("hyperparameter", "default", "range", "meaning")
    return [f"{cls.name}\n\n{inspect.getdoc(cls)}\n", _text_table("", headers, rows)]


def _allowed(limits: Any) -> str:
    """Format the allowed values of a hyperparameter."""
    if limits.get("options"):
        return ", ".join(limits["options"])
    signs = (("low", "≥"), ("above", ">"), ("high", "≤"))
    return ", ".join(f"{sign} {limits[key]}" for key, sign in signs if limits.get(key) is not None)


def _summary(cls: type[Algorithm]) -> str:
    """Return the first line of a method's docstring."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def experiments_table(found: list[tuple[str, str]]) -> Table:
    """Return a table of experiments with their titles."""
    return _text_table("Experiments", ("name", "what it reproduces"), found)


def description_tables(description: dict[str, Any], most: int = 30) -> list[str | Table]:
    """Return what `coterie data describe` prints: a summary line, columns and clients."""
    sizes = description["client_sizes"]
    summary = (
        f"{description['rows']} rows of {description['clients']} clients "
        f"({sizes['min']:.0f} to {sizes['max']:.0f} rows, median {sizes['median']:.0f}); "
        f"target {description['target']}: {description['task']}"
    )
    columns = [
        (
            column["column"],
            column["read_as"],
            "yes" if column["used"] else "no",
            _percent(column["missing_percent"] / 100),
            _values(column),
        )
        for column in description["columns"]
    ]
    clients = [
        (client["client"], str(client["rows"]), _percent(client["missing_share"]), _target(client))
        for client in description["per_client"]
    ]
    return [
        summary,
        _text_table(
            _some("Columns", columns, most),
            ("column", "read as", "used", "missing", "values"),
            columns[:most],
        ),
        _text_table(_some("Clients", clients, most), ("client", "rows", "missing", "target"), clients[:most]),
    ]


def _some(title: str, rows: Sequence[Any], most: int) -> str:
    """Add to a title how many rows are shown, if not all are."""
    return title if len(rows) <= most else f"{title} (first {most} of {len(rows)})"


def _values(column: dict[str, Any], most: int = 5) -> str:
    """Describe the values of a column: mean and standard deviation, or its levels."""
    if not column["used"]:
        return str(column["why"])
    if column["kind"] == "numeric":
        text = f"mean {_short(column['mean'])}, sd {_short(column['sd'])}"
    else:
        levels = column["levels"]
        text = f"{len(levels)} levels: {', '.join(levels[:most])}" + (", …" if len(levels) > most else "")
    return f"{text}; {column['why']}" if column["why"] else text


def _target(client: dict[str, Any], most: int = 4) -> str:
    """Describe a client's target: its mean, or its most frequent classes."""
    if "target_mean" in client:
        return f"mean {_short(client['target_mean'])}"
    shares = sorted(client["class_shares"].items(), key=lambda pair: -pair[1])
    if len(shares) <= most:
        shares = list(client["class_shares"].items())
    text = ", ".join(f"{name}: {_percent(share)}" for name, share in shares[:most])
    rest = sum(share for _, share in shares[most:])
    return f"{text}, others: {_percent(rest)}" if len(shares) > most else text


def _short(value: float | None) -> str:
    """Format a number with four significant digits, large ones without exponent."""
    if value is None:
        return "too large"
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e10 else f"{value:.4g}"


def _percent(share: float) -> str:
    """Format a share in per cent."""
    return f"{100 * share:.1f} %"


def _number_table(
    title: str, first: Column, columns: Sequence[Column], best: int | None = None, legend: str | None = None
) -> Table:
    """Return a table of one column of names and columns of numbers, which are never truncated."""
    table = Table(title=Text(title) if title else None, caption=legend)
    table.add_column(first[0], overflow="fold", min_width=min(max(map(len, first[1])), 12))
    for header, cells in columns:
        longest = max(map(len, (header, *cells)))
        table.add_column(header, justify="right", no_wrap=True, min_width=longest)
    for k, name in enumerate(first[1]):
        cells = [name, *(cells[k] for _, cells in columns)]
        table.add_row(*map(Text, cells), style="bold" if k == best else None)
    return table


def _text_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of text, folded where it is too wide."""
    table = Table(title=Text(title) if title else None)
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
