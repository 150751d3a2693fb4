"""The page of a leaderboard in a real browser: it sorts and filters, fetches nothing, and escapes names."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from coterie.leaderboard import charts, summary
from coterie.leaderboard.page import leaderboard_page, sentences

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = '<img src=x onerror="alert(1)">'
METHODS = ("local", "fedavg", "ditto", EVIL)


def board(data_sets: int = 6) -> dict[str, Any]:
    """Return a result with numbers that are drawn: method k is better by 0.05 k; ditto misses the last data set."""
    draw = np.random.default_rng(0)
    cells = []
    for k in range(data_sets):
        for m, method in enumerate(METHODS):
            one = {"data": f"set-{k}", "method": method, "seed": 0, "key": "", "why": None, "status": "ok"}
            if method == "ditto" and k == data_sets - 1:
                cells.append(one | {"status": "does not apply", "why": EVIL})
                continue
            mean = 0.5 + 0.05 * m + 0.01 * draw.random()
            one |= {"metric": "accuracy", "mean": mean, "worst_decile": mean - 0.1, "clients": 10, "round": 1}
            judged = None if method == "local" else 1
            one |= {"improved": judged, "harmed": judged, "sign": judged, "mb": float(m), "seconds": 1.0}
            cells.append(one | {"cpu_seconds": 1.0, "trials": 2, "settings": {}, "newcomers": mean})
    card = dict.fromkeys(("title", "model", "client", "heterogeneity", "why", "source", "licence"), EVIL)
    card |= {"task": "binary", "metric": "accuracy", "higher_is_better": True, "clients": 8, "newcomers": 2}
    card |= {"rows": 1000, "parameters": 3, "files": []}
    lines = summary.lines(cells)
    return {
        "format": "coterie-leaderboard/1",
        "coterie": "0",
        "settings": {"rounds": 1, "trials": 2, "seeds": 1},
        "methods": [{"name": name, "summary": EVIL, "code": "", "file": None} for name in METHODS],
        "data": [card | {"name": f"set-{k}"} for k in range(data_sets)],
        "overall": summary.overall(lines),
        "ranking": summary.ranking(lines),
        "lines": lines,
        "cells": cells,
    }


def test_what_is_not_complete_is_left_out_of_the_test_and_said():
    ranking = board()["ranking"]
    assert ranking["applies"] and ranking["left_out"] == ["ditto"]
    assert ranking["methods"] == ["local", "fedavg", EVIL]
    few = board(3)
    assert not few["ranking"]["applies"] and "does not apply" in sentences(few)[-1]
    assert "Friedman&#39;s test does not apply" in leaderboard_page(few)


def test_pictures_are_well_formed_and_escape_names():
    drawn = charts.critical_difference(["a", EVIL, "c"], [1.0, 2.2, 2.8], 1.0, [[EVIL, "c"]])
    assert "<img" not in drawn and len(ElementTree.fromstring(drawn).findall("circle")) == 3
    points = [
        charts.CostPoint(EVIL, 0.0, 0.9),
        charts.CostPoint("b", 1.0, 0.95),
        charts.CostPoint("c", 2.0, 0.8),
    ]
    root = ElementTree.fromstring(charts.front(points, "MB", "accuracy", log=True, higher=True))
    kinds = {one.find("title").text.split(":")[0]: one.get("class") for one in root.findall("circle")}
    assert kinds == {EVIL: "front", "b": "front", "c": "behind"}
    assert charts.front([], "x", "y") == ""
    for same in (
        [charts.CostPoint("a", 3.0, 3.0)],
        [charts.CostPoint("a", 0.0, 0.0), charts.CostPoint("b", 0.0, 0.0)],
    ):
        ElementTree.fromstring(charts.front(same, "x", "y", log=True))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page; at the end nothing was complained about and nothing was fetched."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; on Debian: apt-get install chromium")
    place = tmp_path_factory.mktemp("page") / "leaderboard.html"
    place.write_text(leaderboard_page(board()), encoding="utf-8")
    complaints: list[str] = []
    with playwright.sync_playwright() as engine:
        running = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = running.new_page(viewport={"width": 1200, "height": 900})
        opened.on("console", lambda said: complaints.append(said.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("dialog", lambda dialog: complaints.append(dialog.message))
        opened.on(
            "request",
            lambda asked: None if asked.url.startswith("file:") else complaints.append(asked.url),
        )
        opened.goto(place.as_uri())
        yield opened
        running.close()
    assert complaints == []


def names(page: Any) -> list[str]:
    return list(page.locator("#board tbody th").all_inner_texts())


@pytest.mark.slow
@pytest.mark.browser
def test_it_sorts_filters_and_switches_data_sets(page: Any) -> None:
    assert names(page) == [EVIL, "ditto", "fedavg", "local"]  # by mean rank
    page.click("[data-sort=method]")
    assert names(page) == sorted(METHODS)
    page.click("[data-sort=method]")
    assert names(page) == sorted(METHODS, reverse=True)
    assert page.locator("[aria-sort=descending]").inner_text() == "Method"
    page.fill("#search", "FED")
    assert names(page) == ["fedavg"] and "1 of 4 methods" in page.inner_text("#status")
    page.fill("#search", "")
    page.check("#complete")
    assert "ditto" not in names(page) and len(names(page)) == 3
    page.uncheck("#complete")
    page.select_option("#data-set", "set-5")
    assert names(page) == [EVIL, "fedavg", "local"]
    assert page.locator("#board tbody tr").first.locator("td").first.inner_text() == "1"
    assert page.locator(".fronts:visible").get_attribute("data-of") == "set-5"
    page.click("[data-sort=mb]")
    assert names(page) == ["local", "fedavg", EVIL]
    page.select_option("#data-set", "")


@pytest.mark.slow
@pytest.mark.browser
def test_it_has_themes_and_fits_a_phone(page: Any) -> None:
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 1200, "height": 900})


@pytest.mark.slow
@pytest.mark.browser
def test_it_is_accessible(page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    result = axe.Axe().run(page)
    assert result.response["violations"] == [], result.generate_report()


def test_templates_are_in_the_package() -> None:
    from coterie.leaderboard.page import TEMPLATES

    assert {path.name for path in Path(TEMPLATES).iterdir()} == {"leaderboard.html.j2", "leaderboard.js"}


def test_the_documented_table_is_that_of_the_committed_results() -> None:
    import importlib.util
    import json

    place = Path(__file__).parents[2] / "docs" / "leaderboard.py"
    spec = importlib.util.spec_from_file_location("docs_leaderboard", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text, result = module.PAGE.read_text(encoding="utf-8"), json.loads(module.RESULT.read_text())
    assert module.written(text, result) == text, "run python docs/leaderboard.py"
    page = leaderboard_page(result)
    assert (module.RESULT.parent / "leaderboard.html").read_text(encoding="utf-8") == page
    assert len(result["data"]) >= 12 and result["settings"]["seeds"] >= 3
