"""Print a page to PDF with a browser that is installed."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from coterie._core import systems
from coterie._core.errors import SettingError
from coterie._core.files import write_with

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "microsoft-edge",
    "msedge",
    "brave-browser",
    "Google/Chrome/Application/chrome.exe",
    "Microsoft/Edge/Application/msedge.exe",
    "Google Chrome.app",
    "Microsoft Edge.app",
    "Chromium.app",
)
SECONDS = 120


def find_browser() -> str:
    """Return the path of a browser that prints; raise `SettingError` if there is none."""
    found = systems.find_program(BROWSERS)
    if found is None:
        raise SettingError(
            "printing to PDF needs Chromium, Chrome or Edge, and none is installed (on Debian: apt-get install "
            "chromium). Or open the page in any browser and print it there."
        )
    return found


def print_page(page: Path, out: Path) -> Path:
    """Print a page of the report to PDF.

    Parameters
    ----------
    page
        The HTML file.
    out
        The PDF file to write.

    Returns
    -------
    Path
        The PDF file.

    Raises
    ------
    SettingError
        No browser is installed, or it could not print.
    """
    browser = find_browser()

    def write(temporary: Path) -> None:
        with tempfile.TemporaryDirectory(
            ignore_cleanup_errors=True
        ) as profile:  # the browser may still be in it
            command = [
                browser,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                "--no-pdf-header-footer",
                "--virtual-time-budget=60000",
                f"--print-to-pdf={temporary}",
                f"{page.resolve().as_uri()}?print",
            ]
            try:
                done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
            except subprocess.TimeoutExpired:
                raise SettingError(f"{browser} did not print {page} within {SECONDS} seconds") from None
        if not temporary.exists() or not temporary.stat().st_size:
            raise SettingError(
                f"{browser} could not print {page}: {done.stderr.decode(errors='replace').strip()[-300:]}"
            )

    write_with(out, write)
    return out
