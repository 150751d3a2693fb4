"""Compile the C library for systems that this machine is not: clang, with the headers that Zig has of each."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from release.build import ROOT, run

# The oldest systems that wheels are for: [tool.cibuildwheel] in pyproject.toml.
TARGETS = {
    "Linux x86-64": "x86_64-linux-gnu.2.28",
    "Linux on ARM": "aarch64-linux-gnu.2.28",
    "macOS": "aarch64-macos.11.0",
}


def check(work: Path) -> None:
    """Raise `Failed` if a compiler warns of the sources, or a function is missing on one of the systems.

    Wheels for macOS are compiled by clang, and those for Linux by gcc; a machine of a developer has one of the two.
    """
    folder = ROOT / "coterie" / "_core" / "native"
    found = re.search(r'^OPTIONS = "(.+)"', (ROOT / "hatch_build.py").read_text(encoding="utf-8"), re.M)
    assert found is not None
    sources = sorted(path.name for path in folder.glob("*.c"))
    compiler = (sys.executable, "-m", "ziglang", "cc")
    for system, target in TARGETS.items():
        words = (*found[1].split(), "-Werror", "-o", work / f"{target}.so", *sources, "-lm")
        cache = {f"ZIG_{name}_CACHE_DIR": str(work / "zig") for name in ("GLOBAL", "LOCAL")}
        run(*compiler, "-target", target, *words, folder=folder, **cache)
        print(f"   {system} ({target}): compiled without a warning", flush=True)
