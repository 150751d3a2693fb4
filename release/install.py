"""Install what was built into empty environments, in the ways that users do, and try it there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from release import smoke
from release.build import ROOT, Built, Failed, run

NATIVE = "from coterie._core.native import library; print(library is not None)"


def extras() -> list[str]:
    """Return the extras for users: those that `all` takes together."""
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    return str(optional["all"][0]).removeprefix("coterie[").removesuffix("]").split(",")


def everywhere(built: Built, only: list[str] | None = None) -> dict[str, float]:
    """Install in every way; return megabytes on disk by way.

    Parameters
    ----------
    built
        What to install.
    only
        Names of ways, such as `core`, `pure`, `sdist`, `sdist without compiler` or an extra; None takes all.
    """
    ways: dict[str, tuple[Path, list[str]]] = {
        "core": (built.wheel, []),
        "newest": (built.wheel, []),  # of all packages but torch, as users get them
        **{extra: (built.wheel, [extra]) for extra in extras()},
        "all": (built.wheel, extras()),
        "sdist": (built.sdist, []),
        "sdist without compiler": (built.sdist, []),
        "pure": (built.pure, []),
    }
    sizes = {}
    for way, (file, wanted) in ways.items():
        if only is not None and way not in only:
            continue
        compiler = {"CC": "no-such-compiler"} if way.endswith("without compiler") else {}
        with environment(file, wanted, pinned=way != "newest", **compiler) as (python, folder):
            sizes[way] = megabytes(python)
            native = run(python, "-c", NATIVE, folder=folder).strip() == "True"
            if native != (file == built.wheel or way == "sdist") and built.wheel != built.pure:
                raise Failed(f"{way}: the C library is {'' if native else 'not '}there")
            count = smoke.commands(python, set(wanted), folder, core=way in ("core", "pure"))
            if way.startswith(("sdist", "newest")):
                run(
                    python,
                    "-m",
                    "coterie",
                    "fit",
                    *smoke.HEART,
                    "--rounds",
                    "2",
                    "--out",
                    "run",
                    folder=folder,
                )
                count += 1
        print(
            f"   {way}: {sizes[way]:.0f} MB, C library {'yes' if native else 'no'}, {count} commands",
            flush=True,
        )
    return sizes


@contextmanager
def environment(
    file: Path, wanted: list[str], pinned: bool = True, **variables: str
) -> Iterator[tuple[Path, Path]]:
    """Install a file into a new environment; yield its Python and an empty folder elsewhere."""
    with tempfile.TemporaryDirectory(prefix="coterie-release-") as place:
        run(sys.executable, "-m", "venv", Path(place, "venv"))
        python = Path(place, "venv", *(("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")))
        folder = Path(place, "elsewhere")
        folder.mkdir()
        target = f"{file}[{','.join(wanted)}]" if wanted else str(file)
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        constraints = Path(place, "constraints.txt")
        constraints.write_text("".join(pin for pin in pins if pinned or pin.startswith("torch==")))
        run(*pip, "--constraint", constraints, target, folder=folder, **variables)
        yield python, folder


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
