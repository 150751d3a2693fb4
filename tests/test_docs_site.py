"""The documentation's site builds without a warning, every page can be reached, and notebooks and curves are true."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import coterie
from coterie.algorithms import all_algorithms

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


class Links(HTMLParser):
    """What a page refers to, apart from what it only mentions: links, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(str(found.get("href") or ""))
        elif tag in ("script", "img", "iframe", "source"):
            self.loads.append(str(found.get("src") or ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors and without a network."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    nowhere = {
        name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    }
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def links_of(page: Path) -> Links:
    parser = Links()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


@pytest.mark.slow
def test_every_page_is_reached_from_the_first(site: Path) -> None:
    seen, left = set(), [site / "index.html"]
    while left:
        page = left.pop()
        if page in seen or page.suffix != ".html":
            continue
        seen.add(page)
        for link in links_of(page).links:
            parts = urlsplit(link)
            if parts.scheme or not parts.path:
                continue
            target = (page.parent / unquote(parts.path)).resolve()
            assert target.exists(), f"{page.name}: {link}"
            left.append(target)
    expected = {site / page.relative_to(DOCS).with_suffix(".html") for page in PAGES}
    assert expected <= seen, sorted(expected - seen)


@pytest.mark.slow
def test_reading_needs_no_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        for address in links_of(page).loads:
            assert not address.startswith(("http:", "https:", "//")), f"{page.name} loads {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style.name


@pytest.mark.slow
def test_every_algorithm_is_in_the_menu(site: Path) -> None:
    menu = links_of(site / "index.html").links
    for algorithm in all_algorithms():
        assert f"algorithms/{algorithm}.html" in {unquote(link) for link in menu}


@pytest.mark.slow
def test_everything_coterie_offers_is_in_the_reference(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    for offered in coterie.__all__:
        home = coterie._HOME.get(offered)
        assert (f'id="{home}.{offered}"' if home else f"coterie.{offered}") in page, offered


# The pages of the algorithms


@pytest.mark.parametrize("algorithm", all_algorithms())
def test_a_page_says_what_it_must(algorithm: str) -> None:
    text = (DOCS / "algorithms" / f"{algorithm}.md").read_text(encoding="utf-8")
    for part in (
        "**Symbols.**",
        "ommunicated.**",
        "**Defaults.**",
        "**Source.**",
        "Deviations",
        "**Curve.**",
    ):
        assert part in text, f"{algorithm}.md lacks {part}"
    assert re.search(r"^    .*(←|<-|=)", text, flags=re.MULTILINE) or "**Update.**" in text
    picture = DOCS / "algorithms" / "curves" / f"{algorithm}.svg"
    assert f"](curves/{algorithm}.svg)" in text and picture.stat().st_size < 5_000
    drawn = picture.read_text(encoding="utf-8")
    assert f"<title>{algorithm}: " in drawn and drawn.count("<polyline") == (
        2 if algorithm in ("local", "fedavg") else 3
    )


def test_the_table_of_algorithms_shows_where_the_curves_end() -> None:
    table = (DOCS / "algorithms" / "index.md").read_text(encoding="utf-8")
    for algorithm in all_algorithms():
        drawn = (DOCS / "algorithms" / "curves" / f"{algorithm}.svg").read_text(encoding="utf-8")
        end = re.search(r" to (\d\.\d\d); with", drawn)
        assert end and re.search(
            rf"^\| \[{re.escape(algorithm)}\].*\| {end[1]} \|$", table, flags=re.MULTILINE
        ), algorithm


def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("curves", DOCS / "curves.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("algorithm", ["ditto", "ifca"])
def test_a_curve_is_that_of_a_run(algorithm: str) -> None:
    """Drawn anew, the curve is where it was, within a pixel."""
    curves = drawing()
    points = re.compile(r'stroke="#2f7fd0".*points="(.*)"')
    kept = points.search((DOCS / "algorithms" / "curves" / f"{algorithm}.svg").read_text(encoding="utf-8"))
    drawn = points.search(curves.draw(algorithm))
    assert kept and drawn
    for old, new in zip(kept[1].split(), drawn[1].split(), strict=True):
        pairs = zip(old.split(","), new.split(","), strict=True)
        assert all(abs(float(a) - float(b)) <= 1 for a, b in pairs)


# Notebooks


def test_notebooks_are_kept_without_outputs() -> None:
    assert len(NOTEBOOKS) >= 3
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None, path.name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
    assert len(printed) >= 2
