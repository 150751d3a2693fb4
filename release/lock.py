"""`python -m release.lock`: write requirements/*.txt, the pins of constraints.txt with the hashes of their files.

A file for each purpose: `torch`; `cuda`, which its usual wheel for Linux needs and the one for the CPU does not;
`core`; every extra; `build`. A file has what its purpose adds to the core, for all systems and versions of Python:
`pip install --require-hashes --no-deps -r requirements/torch.txt -r requirements/core.txt` is complete on a CPU.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
import urllib.request
from pathlib import Path

from release.build import ROOT, find_uv, run

FOLDER = ROOT / "requirements"
CPU = "https://download.pytorch.org/whl/cpu/torch/"  # wheels of torch that PyPI does not have
OF_CUDA = re.compile(r"nvidia-|cuda-|triton$")
HEAD = "# Written by `make lock`: the versions of constraints.txt with the hashes of their files.\n"

Pins = dict[str, str]  # the lines of each package: version, marker, hashes


def purposes() -> list[str]:
    """Return the names of the files: the core, the build backend, and the extras but those that only name others."""
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    return ["torch", "cuda", "core", "build", *(name for name in optional if name != "all")]


def name_of(requirement: str) -> str:
    """Return the package of a requirement, as PyPI normalises it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]).lower()


def direct(purpose: str) -> list[str]:
    """Return the packages that pyproject.toml asks for."""
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if purpose == "build":
        asked = [
            *whole["build-system"]["requires"],
            "editables",
        ]  # hatchling needs it for `make`'s editable install
    elif purpose == "core":
        asked = whole["project"]["dependencies"]
    else:
        asked = whole["project"]["optional-dependencies"].get(purpose, [])
    return [name_of(one) for one in asked]


def read(text: str) -> Pins:
    """Return the pins of a requirements file by package."""
    parts = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    return {name_of(part): part for part in parts}


def resolve(*what: str) -> Pins:
    """Let uv look up a set of packages with all that they need, for every system."""
    uv = find_uv() or "uv"
    options = (
        "--universal --python-version 3.11.5 --generate-hashes --no-annotate --no-header --quiet".split()
    )
    return read(run(uv, "pip", "compile", *options, "--constraint", "constraints.txt", *what, folder=ROOT))


def cpu_hashes(version: str) -> set[str]:
    """Return the hashes of torch's wheels for the CPU: those at hand, on its own index, and known before."""
    found: set[str] = set()
    for place in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in Path(place).glob(f"torch-{version}+cpu-*.whl"):
            found.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    try:
        with urllib.request.urlopen(CPU, timeout=20) as page:
            text = page.read().decode()
        found |= set(re.findall(rf"torch-{re.escape(version)}%2Bcpu-[^#\"]+#sha256=(\w+)", text))
    except OSError as problem:
        print(f"{CPU} cannot be read ({problem}); hashes of other CPU wheels stay as they are")
    known = FOLDER / "torch.txt"
    before = read(known.read_text(encoding="utf-8")).get("torch", "") if known.exists() else ""
    if before.startswith(f"torch=={version} "):
        found |= set(re.findall(r"sha256:(\w+)", before))
    return found


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    core = resolve("pyproject.toml")
    version = core["torch"].partition("==")[2].split()[0]
    hashes = sorted(set(re.findall(r"sha256:(\w+)", core["torch"])) | cpu_hashes(version))
    lines = [f"torch=={version}", *(f"    --hash=sha256:{one}" for one in hashes)]
    written = {
        "torch": {"torch": " \\\n".join(lines) + "\n"},
        "cuda": {name: pin for name, pin in core.items() if OF_CUDA.match(name)},
        "core": {name: pin for name, pin in core.items() if not OF_CUDA.match(name) and name != "torch"},
    }
    for purpose in purposes():
        if purpose == "build":
            asked = FOLDER / "build.in"
            asked.write_text("\n".join(direct(purpose)) + "\n", encoding="utf-8")
            found = resolve(str(asked))
            asked.unlink()
        elif purpose not in written:
            found = resolve("pyproject.toml", "--extra", purpose)
        wanted = set(direct(purpose))
        pins = written.get(purpose) or {
            name: pin
            for name, pin in found.items()
            if name not in core or (name in wanted and name not in written["core"])
        }
        (FOLDER / f"{purpose}.txt").write_text(HEAD + "".join(pins.values()), encoding="utf-8")
        print(f"requirements/{purpose}.txt: {len(pins)} packages")


if __name__ == "__main__":
    main()
