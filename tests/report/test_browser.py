"""The report in a real browser: no errors, no requests, sorting, filtering, hovering, themes, phones, paper."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.report.page import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; on Debian: apt-get install chromium"),
]

Open = Callable[..., Any]
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 23, 27)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as engine:
        running = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def pages(
    comparison: Path, twelve: Path, thousand: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        "four": write_report([comparison], folder / "four.html"),
        "twelve": write_report([twelve / name for name in ("cobo", "ifca", "flix")], folder / "twelve.html"),
        "thousand": write_report([thousand / "ifca"], folder / "thousand.html"),
    }


@pytest.fixture
def visit(browser: Any, pages: dict[str, Path]) -> Iterator[Open]:
    """`visit("four", width=390)`: the page; at the end nothing was complained about and nothing was fetched."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def go(name: str, width: int = 1200, height: int = 900, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda asked: (
                complaints.append(asked.url)
                if "://" in asked.url[:8] and not asked.url.startswith("file:")
                else None
            ),
        )
        page.goto(pages[name].as_uri())
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []


def draw_everything(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for chart in page.query_selector_all(".chart"):
        chart.scroll_into_view_if_needed()
    playwright.expect(page.locator(".chart:not([data-drawn])")).to_have_count(0)


def column(page: Any, number: int) -> list[str]:
    return page.eval_on_selector_all(
        f"#client-table tbody tr > *:nth-child({number})", "cells => cells.map(cell => cell.textContent)"
    )


def as_numbers(texts: list[str]) -> list[float]:
    return [float(text.replace("−", "-").replace("%", "").replace(",", "")) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["four", "twelve", "thousand"])
def test_every_chart_is_drawn_without_complaint(visit: Open, name: str) -> None:
    page = visit(name)
    draw_everything(page)
    assert page.locator(".chart .main-svg").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200


@pytest.mark.slow
def test_the_summary_comes_first(visit: Open) -> None:
    page = visit("four")
    assert page.locator("main section").first.get_attribute("id") == "summary"
    assert "4 clients" in page.locator("#summary").inner_text()
    assert [page.locator(tag).count() for tag in ("header", "nav", "main", "footer", "h1")] == [1] * 5


@pytest.mark.slow
def test_sorting_by_any_column(visit: Open) -> None:
    page = visit("thousand")
    head = page.locator("#client-table thead th")
    page.get_by_role("button", name="Training rows").click()
    assert head.nth(1).get_attribute("aria-sort") == "ascending"
    up = as_numbers(column(page, 2))
    assert up == sorted(up) and len(up) == 25
    page.get_by_role("button", name="Training rows").click()
    assert head.nth(1).get_attribute("aria-sort") == "descending"
    down = as_numbers(column(page, 2))
    assert down == sorted(down, reverse=True) and down[0] > up[0]
    page.keyboard.press("Enter")  # the button has kept the focus
    assert as_numbers(column(page, 2)) == up
    page.get_by_role("button", name="Client", exact=True).click()
    assert [name for name in column(page, 1) if name.startswith("clinic")][:3] == [
        "clinic 0",
        "clinic 1",
        "clinic 2",
    ]


@pytest.mark.slow
def test_searching_filtering_and_paging(visit: Open) -> None:
    page = visit("thousand")
    assert page.locator("#page").inner_text() == "Page 1 of 40"
    page.get_by_role("button", name="Next").click()
    assert page.locator("#page").inner_text() == "Page 2 of 40"
    page.get_by_label("Search").fill("clinic 99")
    assert sorted(column(page, 1)) == sorted(["clinic 99", *(f"clinic {k}" for k in range(990, 1000))])
    assert "11 of 1,000 clients" in page.locator("#status").inner_text()
    page.get_by_label("Search").fill("<b>7")
    assert column(page, 1) == ["</script><b>7</b> & 'co'"]
    page.get_by_label("Search").fill("")
    page.locator("#verdict").select_option("up")
    assert set(column(page, 7)) == {"△ up, may be chance"}
    page.locator("#verdict").select_option("")


@pytest.mark.slow
def test_cards_tell_sizes_metrics_and_confidence(visit: Open) -> None:
    page = visit("twelve")
    page.get_by_label("Cards").check()
    cards = page.locator(".card")
    assert cards.count() == 12 and page.locator("#client-table").is_hidden()
    text = cards.first.inner_text()
    for part in ("training", "test", "cobo", "local", "95 % interval", "Learns most from"):
        assert part in text


@pytest.mark.slow
def test_another_method_in_the_table(visit: Open) -> None:
    page = visit("four")
    before = column(page, 4)
    page.locator("#run").select_option(label="fedavg")
    assert page.get_by_role("button", name="fedavg").is_visible()
    assert column(page, 4) != before


@pytest.mark.slow
def test_hovering_shows_numbers(visit: Open) -> None:
    page = visit("four")
    chart = page.locator("[data-panel=gain]")
    chart.scroll_into_view_if_needed()
    page.wait_for_selector("[data-panel=gain][data-drawn]")
    boxes = [point.bounding_box() for point in chart.locator(".point").all()]
    box = max(
        (box for box in boxes if box is not None), key=lambda box: box["width"]
    )  # a gain of zero has no bar
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("[data-panel=gain] .hoverlayer .hovertext", timeout=60_000)
    assert chart.locator(".hovertext").first.text_content() != ""


@pytest.mark.slow
def test_both_themes(visit: Open) -> None:
    page = visit("four", scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == DARK
    page.locator("[data-panel=gain]").scroll_into_view_if_needed()
    page.wait_for_selector("[data-panel=gain][data-drawn=dark]")
    page.get_by_role("button", name="Light colours").click()
    assert page.evaluate(background) == LIGHT
    page.wait_for_selector("[data-panel=gain][data-drawn=light]")
    tick = page.locator("[data-panel=gain] .xtick text").first
    assert "rgb(27, 31, 36)" in tick.evaluate("one => getComputedStyle(one).fill")


@pytest.mark.quick("four")
@pytest.mark.parametrize("name", ["four", "thousand"])
def test_a_phone_shows_cards_and_never_scrolls_sideways(visit: Open, name: str) -> None:
    page = visit(name, width=390, height=844)
    assert page.locator(".card").first.is_visible()
    draw_everything(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
def test_everything_can_be_reached_by_keyboard(visit: Open) -> None:
    page = visit("four")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the summary"
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.dataset.sort || ''"))
    assert {"theme", "search", "run", "verdict", "gain", "name"} <= reached
    style = "getComputedStyle(document.querySelector('#theme')).outlineStyle"
    page.locator("#theme").focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert page.evaluate(style) == "solid"


@pytest.mark.slow
def test_every_control_and_picture_has_a_name(visit: Open) -> None:
    page = visit("twelve")
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, input, select, [role=group], table')].filter((one) =>
            !(one.textContent.trim() || one.getAttribute('aria-label') || one.labels?.length || one.caption)).length"""
    )
    assert nameless == 0


@pytest.mark.slow
def test_a_thousand_clients_do_not_lag(visit: Open) -> None:
    page = visit("thousand")
    milliseconds = page.evaluate(
        """() => {
            const started = performance.now();
            for (let k = 0; k < 10; k++) document.querySelector('[data-sort=rows]').click();
            return (performance.now() - started) / 10;
        }"""
    )
    assert milliseconds < 100


@pytest.mark.slow
def test_it_prints(visit: Open, tmp_path: Path) -> None:
    page = visit("four", scheme="dark")
    page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").stat().st_size > 30_000


@pytest.mark.slow
def test_the_command_prints_all_charts(comparison: Path, tmp_path: Path) -> None:
    write_report([comparison], tmp_path / "page.html", pdf=True)
    printed = (tmp_path / "page.pdf").read_bytes()
    assert printed.startswith(b"%PDF") and printed.count(b"/Type /Page\n") > 8
    assert len(printed) > 200_000  # charts are drawn as vectors; without them it is a tenth of this


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_axe_finds_nothing_to_complain_about(visit: Open, width: int, scheme: str) -> None:
    """WCAG 2.2 A and AA and best practices, contrast included, with everything open and drawn."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    page = visit("four", width=width, scheme=scheme)
    draw_everything(page)
    found = axe.run(page).response
    complaints = [
        (one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in found["violations"]
    ]
    assert complaints == []
    assert "color-contrast" in {one["id"] for one in found["passes"]}


@pytest.mark.slow
def test_every_client_has_a_page_and_the_column_its_name(visit: Open) -> None:
    page = visit("four")
    clients = page.locator("details.client")
    assert clients.count() == 4
    text = clients.filter(has_text="cleveland").inner_text()
    for part in (
        "hospital:",
        "training rows",
        "trained alone",
        "sensitivity",
        "95 % interval",
        "Largest coefficients",
    ):
        assert part in text
    assert page.get_by_role("button", name="Client (hospital)").is_visible()
    assert page.locator(".tile").count() == 4
    assert "AUC" in page.locator("#quality").inner_text()
