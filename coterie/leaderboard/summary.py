"""Sum cells up: what each one says, means over seeds by method and data set, and methods over all data sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.leaderboard.plan import REFERENCE
from coterie.models.metrics import Metric, find
from coterie.select.verdict import Verdict
from coterie.theory.ranking import friedman, ranks, why_not

Record = dict[str, Any]
Records = Mapping[tuple[str, str, int], Record]  # by data set, method and seed
TENTH = 10
SMALLEST_ERROR = 1e-3  # errors below it count as this one in ratios
WORST = "worst_decile"


def cell(record: Record, reference: Record | None) -> Record:
    """Return what is published of a cell.

    Parameters
    ----------
    record
        What `measure` returned.
    reference
        The same for training alone, with the same rows.

    Returns
    -------
    dict
        See docs/leaderboard.md for the fields.
    """
    found = {name: record[name] for name in ("data", "method", "seed", "status", "why", "key")}
    found |= {"coterie": record["environment"]["coterie"], "torch": record["environment"]["torch"]}
    if record["status"] != "ok":
        return found
    metric = find(record["metric"])
    test = _known(record["test"])
    late = record["newcomers"]
    found |= {
        "metric": metric.name,
        "mean": float(test.mean()),
        WORST: worst_decile(test, metric),
        "clients": len(test),
        "improved": None,
        "harmed": None,
        "sign": None,
        "mb": record["mb_up"] + record["mb_down"],
        "seconds": record["seconds"],
        "cpu_seconds": record["cpu_seconds"],
        "trials": record["trials"],
        "round": record["round"],
        "settings": record["settings"],
        "newcomers": None if late is None or late["test"] is None else _mean(late["test"]),
    }
    if reference is not None and reference["status"] == "ok" and record["method"] != REFERENCE:
        verdict = _against(record, reference)
        found |= {"improved": verdict.improved, "harmed": verdict.harmed, "sign": verdict.sign}
    return found


def worst_decile(values: np.ndarray, metric: Metric) -> float:
    """Return the mean over the tenth of the clients that are served worst, at least one of them.

    Examples
    --------
    >>> import numpy as np
    >>> worst_decile(np.arange(20.0), find("accuracy")), worst_decile(np.arange(5.0), find("rmse"))
    (0.5, 4.0)
    """
    ordered = np.sort(metric.sign * values)
    return float(metric.sign * ordered[: math.ceil(len(ordered) / TENTH)].mean())


def _against(record: Record, reference: Record) -> Verdict:
    """Judge the rows of a method against those of training alone: who gained, who lost."""
    client = np.repeat(np.arange(len(record["test_rows"])), record["test_rows"])
    first, second = (np.array(one["row_values"], dtype=float) for one in (record, reference))
    return Verdict.of_rows(
        first, second, client, record["names"], find(record["row_metric"]), task=record["task"]
    )


def error(value: float, metric: Metric) -> float:
    """Return a score as an error: what is missing to 1 for shares such as accuracy, else the value itself."""
    return max(1.0 - value if metric.higher_is_better else value, SMALLEST_ERROR)


def lines(cells: Sequence[Record]) -> list[Record]:
    """Return a line for each method and data set: means over seeds, ranks, and errors relative to training alone.

    Parameters
    ----------
    cells
        What `cell` returned.

    Returns
    -------
    list of dict
        Only where every seed worked.
    """
    grouped: dict[tuple[str, str], list[Record]] = {}
    for one in cells:
        grouped.setdefault((one["data"], one["method"]), []).append(one)
    whole = {pair: group for pair, group in grouped.items() if all(one["status"] == "ok" for one in group)}
    made = {pair: _line(group) for pair, group in whole.items()}
    for (data, _), line in made.items():
        alone, metric = made.get((data, REFERENCE)), find(line["metric"])
        for name, of in (("error_ratio", "mean"), ("worst_ratio", WORST), ("newcomer_ratio", "newcomers")):
            known = alone is not None and line[of] is not None and alone[of] is not None
            line[name] = error(line[of], metric) / error(alone[of], metric) if known and alone else None
    for data in dict.fromkeys(data for data, _ in made):
        mine = [line for (where, _), line in made.items() if where == data]
        cost = np.array([[find(line["metric"]).cost(line["mean"]) for line in mine]])
        for line, rank in zip(mine, ranks(cost)[0].tolist(), strict=True):
            line["rank"] = rank
    return list(made.values())


def _line(group: Sequence[Record]) -> Record:
    first = group[0]
    means = [one["mean"] for one in group]
    judged = [one for one in group if one["improved"] is not None]
    clients = sum(one["clients"] for one in judged)
    late = [one["newcomers"] for one in group]
    return {
        "data": first["data"],
        "method": first["method"],
        "metric": first["metric"],
        "seeds": len(group),
        "mean": float(np.mean(means)),
        "sd": float(np.std(means, ddof=1)) if len(means) > 1 else None,
        WORST: _mean([one[WORST] for one in group]),
        "improved": sum(one["improved"] for one in judged) / clients if clients else None,
        "harmed": sum(one["harmed"] for one in judged) / clients if clients else None,
        "ahead": _mean([one["sign"] > 0 for one in judged]),
        "behind": _mean([one["sign"] < 0 for one in judged]),
        "mb": _mean([one["mb"] for one in group]),
        "seconds": _mean([one["seconds"] for one in group]),
        "cpu_seconds": _mean([one["cpu_seconds"] for one in group]),
        "trials": first["trials"],
        "newcomers": None if None in late else _mean(late),
    }


def overall(found: Sequence[Record]) -> list[Record]:
    """Return a line for each method over all data sets, best mean rank first.

    Parameters
    ----------
    found
        What `lines` returned.

    Returns
    -------
    list of dict
        Ratios are geometric means over data sets of errors relative to training alone.
    """
    count = len({line["data"] for line in found})
    made = []
    for method in dict.fromkeys(line["method"] for line in found):
        mine = [line for line in found if line["method"] == method]
        made.append(
            {
                "method": method,
                "data_sets": len(mine),
                "complete": len(mine) == count,
                "mean_rank": _mean([line["rank"] for line in mine]),
                "wins": sum(line["rank"] == 1 for line in mine),
                **{
                    name: _geometric([line[name] for line in mine])
                    for name in ("error_ratio", "worst_ratio", "newcomer_ratio")
                },
                **{
                    name: _mean([line[name] for line in mine if line[name] is not None])
                    for name in ("improved", "harmed", "ahead", "behind", "mb", "seconds", "cpu_seconds")
                },
            }
        )
    return sorted(made, key=lambda one: (not one["complete"], one["mean_rank"]))


def ranking(found: Sequence[Record]) -> Record:
    """Return Friedman's test and the critical difference for the methods that ran on every data set.

    Parameters
    ----------
    found
        What `lines` returned.

    Returns
    -------
    dict
        `applies` and `why_not`; if it applies, `methods`, `mean_ranks`, `p`, `critical_difference` and `cliques`.
    """
    data = list(dict.fromkeys(line["data"] for line in found))
    cost = {(line["data"], line["method"]): find(line["metric"]).cost(line["mean"]) for line in found}
    every = dict.fromkeys(line["method"] for line in found)
    methods = [name for name in every if all((one, name) in cost for one in data)]
    problem = why_not(len(data), len(methods))
    told: Record = {
        "applies": problem is None,
        "why_not": problem,
        "data_sets": len(data),
        "left_out": [name for name in every if name not in methods],
    }
    if problem is not None:
        return told
    result = friedman(np.array([[cost[one, name] for name in methods] for one in data]))
    return told | {
        "methods": methods,
        "mean_ranks": result.mean_ranks.tolist(),
        "statistic": result.statistic,
        "p": result.p,
        "critical_difference": result.critical_difference,
        "alpha": result.alpha,
        "cliques": [[methods[k] for k in group] for group in result.cliques()],
    }


def _known(values: Sequence[float | None]) -> np.ndarray:
    return np.array([value for value in values if value is not None], dtype=float)


def _mean(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return float(known.mean()) if len(known) else None


def _geometric(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return float(np.exp(np.log(known).mean())) if len(known) else None
