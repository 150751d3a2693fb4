"""Metrics by name: those of this package, those of installed packages, and a user's own."""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points

import torch

from coterie._core.errors import SettingError, nearest
from coterie.models.metrics import classification, regression, survival
from coterie.models.metrics.metric import Metric

GROUP = "coterie.metrics"

LOSS = Metric("loss", sums=lambda rows: rows.mean(rows.row_loss), title="mean loss", low=0.0)
PERPLEXITY = Metric(
    "perplexity",
    sums=lambda rows: rows.mean(rows.row_loss),
    finish=torch.exp,
    tasks=("language",),
    low=1.0,
)
BUILT_IN = {
    metric.name: metric
    for metric in (
        LOSS,
        classification.ACCURACY,
        classification.BALANCED_ACCURACY,
        classification.AUC,
        classification.LOG_LOSS,
        classification.BRIER,
        classification.ECE,
        classification.F1,
        regression.RMSE,
        regression.MAE,
        regression.R2,
        PERPLEXITY,
        survival.CONCORDANCE,
    )
}
MAIN = {
    "regression": regression.RMSE,
    "binary": classification.ACCURACY,
    "multiclass": classification.ACCURACY,
    "language": PERPLEXITY,
    "survival": survival.CONCORDANCE,
}
_registered: dict[str, Metric] = {}


def main_metric(task: str) -> Metric:
    """Return the metric that reports show for a task unless another is asked for.

    Parameters
    ----------
    task
        'regression', 'binary', 'multiclass', 'language' or 'survival'.

    Returns
    -------
    Metric
        rmse, accuracy, perplexity or concordance.

    Examples
    --------
    >>> main_metric("binary").name
    'accuracy'
    """
    return MAIN[task]


def register(metric: Metric) -> Metric:
    """Make a metric of your own known by its name.

    Parameters
    ----------
    metric
        The metric. One that was registered before under this name is replaced.

    Returns
    -------
    Metric
        The same metric.

    Raises
    ------
    SettingError
        If the name is that of a metric of this package.

    Examples
    --------
    >>> bias = register(Metric("bias", sums=lambda rows: rows.mean(rows.error), tasks=("regression",)))
    >>> find("bias") is bias
    True
    """
    if metric.name in BUILT_IN or metric.name.startswith(regression.QUANTILE):
        raise SettingError(f"{metric.name!r} is a metric of coterie; give yours another name")
    _registered[metric.name] = metric
    return metric


def lookup(name: str) -> Metric | None:
    """Return the metric of this name, or None if there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name in _registered:
        return _registered[name]
    if name.startswith(regression.QUANTILE):
        return _quantile(name)
    point = _installed().get(name)
    return None if point is None else _loaded(point)


def find(name: str) -> Metric:
    """Return the metric of this name.

    Parameters
    ----------
    name
        Name of a built-in or registered metric, of an entry point of the group 'coterie.metrics', or 'quantile-' and a
        level, such as 'quantile-0.9'.

    Returns
    -------
    Metric
        The metric.

    Raises
    ------
    SettingError
        If there is no such metric; the message names similar ones.

    Examples
    --------
    >>> find("auc").direction
    'higher is better'
    """
    metric = lookup(name)
    if metric is None:
        raise SettingError(f"no metric {name!r}.{nearest(name, names())}")
    return metric


def names(task: str | None = None) -> list[str]:
    """Return the names of all metrics, or of those that apply to a task.

    Parameters
    ----------
    task
        'regression', 'binary', 'multiclass', 'language' or 'survival'; all metrics if not given.

    Returns
    -------
    list of str
        Names that `find` takes. 'quantile-0.5' stands for every level.

    Examples
    --------
    >>> names("language")
    ['loss', 'perplexity']
    """
    known = dict.fromkeys([*BUILT_IN, "quantile-0.5", *_registered, *_installed()])
    return [name for name in known if task is None or task in _tasks(name)]


def resolve(metric: str | Metric, task: str) -> Metric:
    """Return the metric given by name or as an object, if it applies to the task.

    Parameters
    ----------
    metric
        A name, or a metric, which is registered if it is not one of this package.
    task
        'regression', 'binary', 'multiclass', 'language' or 'survival'.

    Returns
    -------
    Metric
        The metric.

    Raises
    ------
    SettingError
        If the metric is unknown or does not apply to the task; the message names those that do.

    Examples
    --------
    >>> resolve("rmse", "regression").name
    'rmse'
    """
    if isinstance(metric, str):
        found = find(metric)
    else:
        found = metric if lookup(metric.name) is metric else register(metric)
    if task not in found.tasks:
        raise SettingError(
            f"metric {found.name!r} does not apply to {task} targets; choose from {', '.join(names(task))}"
        )
    return found


def _tasks(name: str) -> tuple[str, ...]:
    try:
        return find(name).tasks
    except SettingError:  # a package whose metric cannot be loaded
        return ()


def _quantile(name: str) -> Metric:
    try:
        level = float(name.removeprefix(regression.QUANTILE))
    except ValueError:
        raise SettingError(
            f"metric {name!r}: give a level above 0 and below 1, such as quantile-0.9"
        ) from None
    return regression.quantile_loss(level)


@functools.cache
def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


@functools.cache
def _loaded(point: EntryPoint) -> Metric:
    try:
        metric = point.load()
    except Exception as problem:
        raise SettingError(f"metric {point.name!r} ({point.value}) cannot be loaded: {problem}") from problem
    if not isinstance(metric, Metric) or metric.name != point.name:
        raise SettingError(f"entry point {point.name!r} ({point.value}) is not a metric of that name")
    return metric
