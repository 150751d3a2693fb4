"""The gallery's reports: mkdocs trains small runs and puts their pages on the site (a hook, see mkdocs.yml).

The pages are large, because each is complete in itself, so they are made when the site is built, and kept under build/
until the package changes. `python docs/gallery.py` also takes their pictures, with Chromium.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "gallery"
WIDTH, HEIGHT = 960, 720


def hospitals(out: Path) -> list[Path]:
    """Four hospitals, methods side by side."""
    from coterie import compare
    from coterie.data import bundled

    table = bundled.path("heart_disease")
    compare(table, "hospital", "sick", algorithms=["ditto", "hierarchical"], rounds=30, budget=2, out=out)
    return [out]


def clinics(out: Path) -> list[Path]:
    """Forty small clinics, one model whose effects vary from clinic to clinic, beside training alone."""
    from coterie import Federation, fit
    from coterie.algorithms import make
    from coterie.data import bundled

    names = ("hierarchical", "local")
    for name in names:
        fed = Federation.from_table(bundled.path("clinics"), client="clinic", target="readmitted")
        fit(fed, make(name), 30, out / name)
    return [out / name for name in names]


def clusters(out: Path) -> list[Path]:
    """Sixteen clients of four kinds that nobody named: CoBo finds who belongs together."""
    from coterie import Federation, fit, models
    from coterie.algorithms import make
    from coterie.data.generate import hierarchical_linear

    rows = hierarchical_linear(
        clusters=4, clients=4, rows=40, features=6, between=1.0, within=0.1, noise=0.5, seed=3
    )
    for name in ("cobo", "local"):
        fed = Federation.from_clients(rows, models.linear(), split=(0.5, 0.25, 0.25))
        fit(fed, make(name), 60, out / name)
    return [out / "cobo", out / "local"]


def quantity(out: Path) -> list[Path]:
    """Patients with diabetes by age group: a number is predicted, with intervals."""
    from coterie import fit
    from coterie.algorithms import make
    from coterie.engine.from_recipe import from_recipe

    for name in ("ditto", "local"):
        fit(from_recipe("diabetes"), make(name), 40, out / name)
    return [out / "ditto", out / "local"]


REPORTS: dict[str, Callable[[Path], list[Path]]] = {
    one.__name__: one for one in (hospitals, clinics, clusters, quantity)
}


def page(name: str) -> Path:
    """Return the report of this name; train its runs if the package has changed since."""
    state = hashlib.sha256(Path(__file__).read_bytes())
    for file in sorted((ROOT / "coterie").rglob("*.py")):
        state.update(file.read_bytes())
    made = ROOT / "build" / "gallery" / state.hexdigest()[:16] / f"{name}.html"
    if not made.exists():
        from coterie.report import write_report

        with tempfile.TemporaryDirectory() as place:
            write_report(REPORTS[name](Path(place, name)), made)
    return made


def on_files(files: Any, config: Any) -> Any:
    """Add the reports to the files of the site; mkdocs calls this."""
    from mkdocs.structure.files import File

    for name in REPORTS:
        files.append(File.generated(config, f"gallery/{name}.html", abs_src_path=str(page(name))))
    return files


if __name__ == "__main__":
    from playwright.sync_api import sync_playwright

    from coterie.report.pdf import find_browser

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_browser())
        view = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=0.5)
        for name, part in zip(REPORTS, ("summary", "quality", "map", "quality"), strict=True):
            view.goto(f"{page(name).as_uri()}#{part}")
            view.wait_for_timeout(4000)
            view.screenshot(path=PICTURES / f"{name}.png")
            print(PICTURES / f"{name}.png", (PICTURES / f"{name}.png").stat().st_size)
