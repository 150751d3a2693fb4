"""Write the report: one self-contained HTML file about finished runs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie._core import files, html
from coterie._core.amounts import size
from coterie._core.errors import SettingError
from coterie.models.metrics import find
from coterie.report import charts, collaboration, drift, summary
from coterie.report.baseline import baseline, with_baseline
from coterie.report.board import Quality, client_column, tiles
from coterie.report.client_pages import client_pages
from coterie.report.differences import heterogeneity
from coterie.report.facts import RunFacts, read_runs
from coterie.report.gains import VERDICTS, Scores, scores
from coterie.report.numbers import show, show_gain
from coterie.report.panels import Panel, numbers
from coterie.report.pdf import find_browser, print_page
from coterie.report.privacy_panels import privacy

TEMPLATES = Path(__file__).parent / "templates"
REPORT = "report.html"


def write_report(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    by: Sequence[str] = (),
    threshold: float = 0.5,
    pdf: bool | str | Path = False,
) -> Path:
    """Write one self-contained page about runs and comparisons.

    Parameters
    ----------
    paths
        Run folders, or folders of `coterie compare --out`. A run of the method `local` on the same rows beside the
        first one is found by itself and serves as the baseline.
    out
        File to write; `report.html` in the first folder if not given.
    by
        Columns of the table, such as 'sex', by whose values the quality is shown as well.
    threshold
        For two classes: the probability from which a row is called positive.
    pdf
        Also print the page with an installed browser: True beside the page, or the file to write.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    RunError
        If a folder holds no finished run, or the runs have different clients or metrics.
    SettingError
        If the threshold is not between 0 and 1, or there is no browser to print with.

    Examples
    --------
    >>> import tempfile
    >>> import coterie
    >>> fed = coterie.Federation.from_table("heart_disease", "hospital", "sick")
    >>> with tempfile.TemporaryDirectory() as runs:
    ...     for name in ("local", "ditto"):
    ...         run = coterie.fit(fed, name, rounds=2, out=f"{runs}/{name}")
    ...     page = coterie.report.write_report([f"{runs}/ditto"])
    ...     text = page.read_text(encoding="utf-8")
    >>> page.name, "Who gained, who lost" in text
    ('report.html', True)
    """
    if not 0 < threshold < 1:
        raise SettingError(f"threshold is {threshold}; give a probability between 0 and 1")
    if pdf:
        find_browser()
    folders = [Path(path) for path in paths]
    place = folders[0] / REPORT if out is None else Path(out)
    files.write_text(place, report(folders, by, threshold))
    if pdf:
        print_page(place, place.with_suffix(".pdf") if pdf is True else Path(pdf))
    return place


def report(paths: Sequence[Path], by: Sequence[str] = (), threshold: float = 0.5) -> str:
    """Return the page that `write_report` writes, as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a run that diverged is shown too
        shown = contents(paths, by, threshold)
    return environment.get_template("page.html.j2").render(plotly=get_plotlyjs(), **shown)


def contents(paths: Sequence[Path], by: Sequence[str] = (), threshold: float = 0.5) -> dict[str, Any]:
    """Collect everything the template shows."""
    runs = with_baseline(read_runs(paths))
    main = _main(runs)
    alone = baseline(main, runs)
    all_scores = [scores(run, baseline(run, runs)) for run in runs]
    main_scores = all_scores[runs.index(main)]
    quality = [charts.gain_chart(main, main_scores), charts.size_chart(runs, all_scores)]
    maps = [
        (run, collaboration.explain(run), collaboration.collaboration(run, str(k)))
        for k, run in enumerate(runs)
    ]
    maps.sort(key=lambda entry: entry[0] is not main)
    shown = Quality.of(main, alone, by, threshold)
    sections = {
        "quality": shown.panels,
        "columns": [] if shown.coefficients is None else [shown.coefficients.panel()],
        "fairness": [part.panel for part in shown.groups],
        "gains": [panel for panel in quality if panel is not None],
        "progress": charts.curves(runs),
        "spread": [charts.distribution(runs)],
        "differences": [*heterogeneity(main), *drift.panels(main)],
        "traffic": [panel for panel in [charts.communication(runs)] if panel is not None],
        "privacy": privacy(runs),
    }
    panels = [panel for group in sections.values() for panel in group]
    panels += [panel for _, _, group in maps for panel in group]
    return {
        "title": _title(runs, main),
        "headline": summary.headline(main, alone, main_scores.verdict),
        "summary": summary.sentences(runs, all_scores, main, alone),
        "glossary": summary.GLOSSARY,
        "main": main,
        "alone": alone,
        "runs": runs,
        "side_by_side": _side_by_side(runs, all_scores, main),
        "guards": [f"{run.label}: {text}" for run in runs if run is not main for text in summary.guard(run)],
        "sections": sections,
        "quality": shown,
        "tiles": tiles(main, alone, main_scores, shown),
        "pages": client_pages(main, alone, main_scores, shown.held, shown.coefficients, threshold),
        "client_column": client_column(main),
        "maps": maps,
        "verdicts": VERDICTS,
        "gain_unit": "" if main_scores.verdict is None else f" in {main_scores.verdict.title}",
        "direction": charts.direction(main),
        "percent": find(main.metric).percent,
        "repeat": [_repeat(run) for run in runs],
        "data": html.script_json(_data(runs, all_scores, main, alone, panels)),
    }


def _main(runs: Sequence[RunFacts]) -> RunFacts:
    """Return the run the summary is about: the best by validation in a comparison, else the first that collaborates."""
    together = [run for run in runs if not run.alone]
    if not together:
        return runs[0]
    if all(run.averages is not None for run in together):
        return min(together, key=RunFacts.validation_cost)
    return together[0]


def _title(runs: Sequence[RunFacts], main: RunFacts) -> str:
    """Return the title of the page: the table and the method, or the number of methods."""
    source = Path(str(main.data.get("source", ""))).stem.replace("_", " ")
    what = f"{source}: " if source else ""
    return f"{what}{main.label}" if len(runs) == 1 else f"{what}{len(runs)} methods side by side"


def _side_by_side(
    runs: Sequence[RunFacts], all_scores: Sequence[Scores], main: RunFacts
) -> list[dict[str, Any]]:
    """Return a row for each run: quality, who gained and lost, and cost."""
    rows = []
    judged = all_scores[list(runs).index(main)].verdict
    for run, one in zip(runs, all_scores, strict=True):
        verdict = None if run.alone else one.verdict
        gain = None if verdict is None else verdict.by_rows
        values = run.scores[~np.isnan(run.scores)]
        low, high = (values.min(), values.max()) if len(values) else (np.nan, np.nan)
        interval = (
            ""
            if verdict is None or gain is None or gain.low is None or gain.high is None
            else (
                f"{show_gain(verdict.metric.name, gain.low, unit=False)} to "
                f"{show_gain(verdict.metric.name, gain.high, unit=False)}"
            )
        )
        other = (
            "" if verdict is None or judged is None or verdict.title == judged.title else f" {verdict.title}"
        )
        rows.append(
            {
                "label": run.label,
                "main": run is main,
                "mean": show(run.metric, float(values.mean())),
                "worst": show(run.metric, float(low if find(run.metric).higher_is_better else high)),
                "improved": "" if verdict is None else f"{verdict.improved:,}",
                "harmed": "" if verdict is None else f"{verdict.harmed:,}",
                "gain": ""
                if verdict is None or gain is None
                else show_gain(verdict.metric.name, gain.value, unit=False) + other,
                "interval": interval,
                "rounds": f"{run.price.rounds:.0f}",
                "traffic": size(run.price.megabytes),
                "seconds": f"{run.price.seconds:.1f}",
            }
        )
    return rows


def _repeat(run: RunFacts) -> dict[str, Any]:
    """Return what it takes to repeat a run: command, settings and environment."""
    data = {name: value for name, value in run.data.items() if value not in (None, "", [])}
    return {
        "label": run.label,
        "folder": run.folder.name,
        "command": summary.repeat_command(run),
        "tables": [
            ("Method", run.config["algorithm"]),
            ("Training", run.config["plan"]),
            ("Federation", run.config["federation"]),
            ("Data", data),
            ("Environment", run.environment),
        ],
        "left_out": run.result["left_out"][:20],
        "left_out_count": len(run.result["left_out"]),
        "lost_rounds": run.result["lost_rounds"],
    }


def _data(
    runs: Sequence[RunFacts],
    all_scores: Sequence[Scores],
    main: RunFacts,
    alone: RunFacts | None,
    panels: Sequence[Panel],
) -> dict[str, Any]:
    """Return the data from which the page's script draws the table, the cards and the charts."""
    roster = main.roster
    names: list[str] | None = None
    if roster is not None and roster.clusters is not None:
        known = roster.cluster_names or [str(k) for k in range(max(roster.clusters) + 1)]
        names = [known[k] for k in roster.clusters]
    return {
        "metric": main.metric,
        "percent": find(main.metric).percent,
        "higher": find(main.metric).higher_is_better,
        "split": main.split,
        "names": main.names,
        "client_column": client_column(main),
        "rows": None if roster is None else roster.rows,
        "clusters": names,
        "main": runs.index(main),
        "alone": None if alone is None else runs.index(alone),
        "verdicts": VERDICTS,
        "runs": [_columns(run, one) for run, one in zip(runs, all_scores, strict=True)],
        "panels": {panel.key: panel.json() for panel in panels},
    }


def _columns(run: RunFacts, one: Scores) -> dict[str, Any]:
    """Return what the table of clients shows of one run."""
    found = run.observed("cluster")
    groups = next(reversed(found.values())) if found else None
    return {
        "label": run.label,
        "alone": run.alone,
        "value": numbers(one.value),
        "low": numbers(one.low, 4),
        "high": numbers(one.high, 4),
        "gain": numbers(one.gain),
        "gain_low": numbers(one.gain_low, 4),
        "gain_high": numbers(one.gain_high, 4),
        "verdict": one.verdicts,
        "group": None if groups is None else [None if np.isnan(g) else int(g) + 1 for g in groups],
        "learns_from": collaboration.neighbours(run) if collaboration.recorded(run) is not None else None,
    }
