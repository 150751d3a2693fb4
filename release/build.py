"""Build wheel, pure wheel and sdist twice, from folders of different names, and compare the bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Built(NamedTuple):
    """What is published."""

    wheel: Path
    pure: Path
    sdist: Path


class Failed(Exception):
    """A check that did not pass, and what was found."""


def run(*words: object, folder: Path | None = None, **environment: str) -> str:
    """Run a command and return what it printed; raise `Failed` with it if the command fails."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise Failed(f"{' '.join(map(str, words))}\n{done.stdout}")
    return done.stdout


def twice(out: Path, work: Path) -> Built:
    """Build everything into `out`; raise `Failed` if a second build of other folders has other bytes.

    Parameters
    ----------
    out
        Folder for wheels and sdist.
    work
        An empty folder for two copies of the committed files.
    """
    first = _build(work / "one", out)
    second = _build(work / "another" / "and deeper", work / "again")
    for one, other in zip(first, second, strict=True):
        if (one.name, one.read_bytes()) != (other.name, other.read_bytes()):
            raise Failed(f"two builds differ: {one} and {other}")
        print(
            f"   {one.name}: {one.stat().st_size / 1e6:.2f} MB, sha256 {sha256(one)[:16]}…, the same bytes twice"
        )
    return first


def _build(source: Path, out: Path) -> Built:
    """Copy the committed files into a new folder and build from the copy."""
    source.mkdir(parents=True)
    archive = source.with_name(f"{source.name}.tar")
    run("git", "archive", "--output", archive, "HEAD", folder=ROOT)
    with tarfile.open(archive) as packed:
        packed.extractall(source, filter="data")
    archive.unlink()
    build = (*_builder(), "--outdir", out)
    for what, plain in (("--sdist", ""), ("--wheel", ""), ("--wheel", "1")):
        run(*build, what, source, **_settings(), COTERIE_PLAIN=plain)
    wheels = {path.name.endswith("none-any.whl"): path for path in out.glob("*.whl")}
    return Built(wheels.get(False, wheels[True]), wheels[True], next(out.glob("*.tar.gz")))


def same_from_sdist(built: Built, work: Path) -> None:
    """Raise `Failed` unless the unpacked sdist has every committed file and builds to the same wheel."""
    with tarfile.open(built.sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
        packed.extractall(work, filter="data")
    committed = set(run("git", "ls-files", folder=ROOT).split("\n")) - {""}
    if missing := committed - names:
        raise Failed(f"the sdist lacks {sorted(missing)}")
    folder = next(path for path in work.iterdir() if path.is_dir())
    for wheel, plain in ((built.wheel, ""), (built.pure, "1")):
        run(*_builder(), "--wheel", folder, **_settings(), COTERIE_PLAIN=plain)
        if sha256(folder / "dist" / wheel.name) != sha256(wheel):
            raise Failed(f"{wheel.name} from the sdist has other bytes")
    print(f"   the sdist has all {len(committed)} files and builds to the same wheels")


def _builder() -> tuple[str, ...]:
    """Return the build command; uv sets up its environments in a tenth of pip's time."""
    return (sys.executable, "-m", "build", *(("--installer", "uv") if find_uv() else ()))


def _settings() -> dict[str, str]:
    """Return what makes builds alike: the time of the commit, and the pinned build backend."""
    seconds = run("git", "log", "-1", "--format=%ct", folder=ROOT).strip()
    pins = str(ROOT / "constraints.txt")
    return {"SOURCE_DATE_EPOCH": seconds, "PIP_CONSTRAINT": pins, "UV_CONSTRAINT": pins}


def find_uv() -> str | None:
    """Return the path of uv, beside this Python or anywhere, or None."""
    return shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def library(wheel: Path, work: Path) -> Path | None:
    """Unpack the C library of a wheel; None if it has none."""
    with zipfile.ZipFile(wheel) as packed:
        inside = [name for name in packed.namelist() if name.endswith(".so")]
        return Path(packed.extract(inside[0], work)) if inside else None
