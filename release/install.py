"""Install what was built into empty environments, in the ways that users do, and try it there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from release import smoke
from release.build import ROOT, Built, Failed, find_uv, run, sha256

NATIVE = "from coterie._core.native import library; print(library is not None)"
VERSIONS = """
import importlib.metadata as installed, json, re
asked = [re.split(r"[^A-Za-z0-9_.-]", one, maxsplit=1)[0] for one in installed.requires("coterie")]
found = {one.metadata["Name"].lower(): one.version for one in installed.distributions()}
print(", ".join(f"{name} {found[name]}" for name in sorted(set(asked)) if name in found and name != "coterie"))
"""
RECORD = ROOT / "build" / "release-passed.json"  # so that a check that was stopped goes on
INDEXES = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")  # where pip is told to look for torch for the CPU


def extras() -> list[str]:
    """Return the extras for users: those that `all` takes together."""
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    return str(optional["all"][0]).removeprefix("coterie[").removesuffix("]").split(",")


class Way(NamedTuple):
    """How to install: a file with extras, and which versions of what it needs."""

    file: Path
    extras: list[str]
    versions: str = "pinned"  # those of constraints.txt, or the newest or lowest of all packages but torch
    compiler: bool = True
    pip: bool = False  # otherwise uv, which links files that it has instead of unpacking them again


def ways(built: Built) -> dict[str, Way]:
    """Return every way to install, by name."""
    everything = extras()
    return {
        "core": Way(built.wheel, [], pip=True),
        **{extra: Way(built.wheel, [extra]) for extra in everything},
        "all": Way(built.wheel, everything),
        "newest": Way(built.wheel, everything, "newest"),  # as users get them
        "lowest": Way(built.wheel, everything, "lowest"),  # the bounds of pyproject.toml
        "sdist": Way(built.sdist, []),
        "sdist without compiler": Way(built.sdist, [], compiler=False, pip=True),
        "pure": Way(built.pure, []),
    }


def everywhere(
    built: Built, step: Callable[[str], None], only: list[str] | None = None, again: bool = False
) -> None:
    """Install in every way; a way that the same bytes have passed before is left out.

    Parameters
    ----------
    built
        What to install.
    step
        Told what comes next.
    only
        Names of ways, such as `core`, `pure`, `sdist`, `sdist without compiler` or an extra; None takes all.
    again
        Leave nothing out.
    """
    chosen = ways(built)
    if only is not None:
        if unknown := set(only) - set(chosen):
            raise Failed(f"no way {sorted(unknown)}; there are {list(chosen)}")
        chosen = {name: chosen[name] for name in only}
    passed = set() if again else _passed(built)
    with tempfile.TemporaryDirectory(prefix="coterie-release-") as place:
        for number, (name, way) in enumerate(chosen.items(), 1):
            step(f"install and try, {number} of {len(chosen)}: {name}")
            if name in passed:
                print("   passed before, with the same bytes")
                continue
            _try(name, way, built, Path(place), step)
            passed |= {name}
            RECORD.parent.mkdir(exist_ok=True)
            RECORD.write_text(
                json.dumps({"files": _hashes(built), "passed": sorted(passed)}), encoding="utf-8"
            )


def _try(name: str, way: Way, built: Built, place: Path, step: Callable[[str], None]) -> None:
    """Install in one way and run the commands; raise `Failed` at what is wrong."""
    with environment(way, place) as (python, folder):
        step("installed")
        size = megabytes(python)
        native = run(python, "-I", "-c", NATIVE, folder=folder).strip() == "True"
        expected = way.file == built.wheel or (way.file == built.sdist and way.compiler)
        if native != expected and built.wheel != built.pure:
            raise Failed(f"{name}: the C library is {'' if native else 'not '}there")
        count = smoke.commands(python, set(way.extras), folder, core=name in ("core", "pure"))
        if way.file == built.sdist or way.versions != "pinned":
            run(python, "-m", "coterie", "fit", *smoke.HEART, "--rounds", "2", "--out", "run", folder=folder)
            count += 1
        versions = (
            run(python, "-I", "-c", VERSIONS, folder=folder).strip() if way.versions != "pinned" else ""
        )
    print(f"   {name}: {size:.0f} MB, C library {'yes' if native else 'no'}, {count} commands", flush=True)
    if versions:
        print(f"   {versions}", flush=True)


def _hashes(built: Built) -> list[str]:
    return [sha256(file) for file in built]


def _passed(built: Built) -> set[str]:
    """Return the ways that these files have passed, as the last check wrote them down."""
    if not RECORD.exists():
        return set()
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return set(record["passed"]) if record["files"] == _hashes(built) else set()


@contextmanager
def environment(way: Way, place: Path) -> Iterator[tuple[Path, Path]]:
    """Install into a new environment; yield its Python and an empty folder elsewhere, and delete both.

    Environments follow each other at one place, so that they share bytecode (`smoke` keeps it beside them).
    """
    venv, folder = place / "venv", place / "elsewhere"
    python = venv.joinpath(*(("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")))
    uv = None if way.pip else find_uv()
    variables = {} if way.compiler else {"CC": "no-such-compiler"}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    constraints = place / "constraints.txt"
    constraints.write_text(
        "".join(pin for pin in pins if way.versions == "pinned" or pin.startswith("torch=="))
    )
    target = f"{way.file}[{','.join(way.extras)}]" if way.extras else str(way.file)
    folder.mkdir()
    try:
        if uv is None:
            run(sys.executable, "-m", "venv", venv)
            pip: tuple[object, ...] = (python, "-m", "pip", "install", "--quiet", "--no-compile")
        else:
            run(uv, "venv", "--quiet", "--python", sys.executable, venv)
            pip = (uv, "pip", "install", "--quiet", "--python", python)
            pip += ("--index-strategy", "unsafe-best-match")
            variables |= {
                name.replace("PIP", "UV"): os.environ[name] for name in INDEXES if name in os.environ
            }
        if way.versions == "lowest":
            if uv is None:
                raise Failed("the lowest versions are found by uv: pip install uv")
            asked = [word for extra in way.extras for word in ("--extra", extra)]
            pip += ("--resolution", "lowest-direct", "--requirement", ROOT / "pyproject.toml", *asked)
        run(*pip, "--constraint", constraints, target, folder=folder, **variables)
        yield python, folder
    finally:
        shutil.rmtree(venv, ignore_errors=True)
        shutil.rmtree(folder)


def megabytes(python: Path) -> float:
    """Return the size of the packages of an environment, without pip."""
    code = "import sysconfig; print(sysconfig.get_path('platlib'))"
    place = Path(
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    )
    files = (
        path for path in place.rglob("*") if path.is_file() and path.relative_to(place).parts[0] != "pip"
    )
    return sum(path.stat().st_size for path in files) / 1e6
