"""The page of a leaderboard: one self-contained HTML file whose tables sort and filter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from coterie._core import html
from coterie.leaderboard import charts
from coterie.models.metrics import find
from coterie.report.numbers import count
from coterie.report.page import TEMPLATES as REPORT_TEMPLATES

TEMPLATES = Path(__file__).parent / "templates"
ALL = ""  # what the script calls all data sets together


def leaderboard_page(result: dict[str, Any]) -> str:
    """Return the page for what leaderboard.json holds.

    Parameters
    ----------
    result
        The content of leaderboard.json.

    Returns
    -------
    str
        HTML that needs no network.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader([TEMPLATES, REPORT_TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pictures = {ALL: _overall_fronts(result)} | {
        card["name"]: _fronts(result, card) for card in result["data"]
    }
    return environment.get_template("leaderboard.html.j2").render(
        result=result,
        title=f"{count(len(result['methods']), 'method')} on {count(len(result['data']), 'data set')}",
        sentences=sentences(result),
        diagram=Markup(_diagram(result["ranking"])),
        fronts={name: [Markup(one) for one in drawn] for name, drawn in pictures.items()},
        missing=list({(c["data"], c["method"]): c for c in result["cells"] if c["status"] != "ok"}.values()),
        data=html.script_json(_data(result)),
    )


def sentences(result: dict[str, Any]) -> list[str]:
    """Say in words what the tables show."""
    overall = [one for one in result["overall"] if one["complete"]]
    told = []
    if overall:
        best = overall[0]
        told.append(
            f"{best['method']} has the best mean rank ({best['mean_rank']:.1f}) of the {count(len(overall), 'method')} "
            f"that ran on all {count(len(result['data']), 'data set')}."
        )
        least = min(overall, key=lambda one: one["error_ratio"] or math.inf)
        if least["error_ratio"] is not None:
            told.append(
                f"{least['method']} has the smallest error relative to training alone: "
                f"{least['error_ratio']:.2f} times, as a geometric mean over data sets."
            )
    ranking = result["ranking"]
    if not ranking["applies"]:
        told.append(f"Friedman's test does not apply: {ranking['why_not']}.")
    else:
        doubt = "differ" if ranking["p"] < ranking["alpha"] else "may all be alike"
        told.append(
            f"Friedman's test says that these methods {doubt} (p = {ranking['p']:.2g}); two of them differ for sure if "
            f"their mean ranks are {ranking['critical_difference']:.1f} or more apart."
        )
    return told


def _diagram(ranking: dict[str, Any]) -> str:
    if not ranking["applies"]:
        return ""
    return charts.critical_difference(
        ranking["methods"], ranking["mean_ranks"], ranking["critical_difference"], ranking["cliques"]
    )


def _overall_fronts(result: dict[str, Any]) -> list[str]:
    """Draw error relative to training alone against bytes, and against the error of the worst-served clients."""
    known = [one for one in result["overall"] if one["complete"] and one["error_ratio"] is not None]
    error = "error relative to training alone"
    by_bytes = [charts.CostPoint(one["method"], one["mb"], one["error_ratio"]) for one in known]
    fair = [charts.CostPoint(one["method"], one["worst_ratio"], one["error_ratio"]) for one in known]
    return [
        charts.front(by_bytes, "megabytes, mean over data sets", error, log=True),
        charts.front(fair, "the same for the worst-served tenth of the clients", error),
    ]


def _fronts(result: dict[str, Any], card: dict[str, Any]) -> list[str]:
    """Draw the score against bytes, and against the score of the worst-served clients, on one data set."""
    mine = [line for line in result["lines"] if line["data"] == card["name"]]
    if not mine:
        return []
    metric = find(mine[0]["metric"])
    by_bytes = [charts.CostPoint(line["method"], line["mb"], line["mean"]) for line in mine]
    fair = [charts.CostPoint(line["method"], line["worst_decile"], line["mean"]) for line in mine]
    title = f"test {metric.name}, mean over clients"
    return [
        charts.front(by_bytes, "megabytes, up and down", title, log=True, higher=metric.higher_is_better),
        charts.front(fair, f"{metric.name} of the worst tenth", title, higher=metric.higher_is_better),
    ]


def _data(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the script draws tables from."""
    percent = {
        card["name"]: card["metric"] is not None and find(card["metric"]).percent for card in result["data"]
    }
    cards = [
        {"name": card["name"], "metric": card["metric"], "higher": card["higher_is_better"]}
        | {"percent": percent[card["name"]], "task": card["task"], "heterogeneity": card["heterogeneity"]}
        for card in result["data"]
    ]
    return {
        "overall": result["overall"],
        "lines": result["lines"],
        "data": cards,
        "summaries": {one["name"]: one["summary"] for one in result["methods"]},
    }
