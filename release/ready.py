"""`python -m release.ready v1.2.3`: may this commit be published under this tag? The release workflow asks first."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from release.build import ROOT


def problems(tag: str, root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return what has to be put right before a release, each with its file.

    Parameters
    ----------
    tag
        The tag of the commit, `v` and the version.
    root
        Folder of the sources.
    environment
        Variables of the process; GitHub's name the repository that publishes.

    Returns
    -------
    list of str
        A sentence for each problem; empty if there is none.
    """
    found = []
    version = _first(r'^__version__ = "(.+)"', root / "coterie" / "__init__.py")
    if tag != f"v{version}":
        found.append(f"coterie/__init__.py: the version is {version}, and the tag {tag}")
    if (cited := _first(r"^version: (.+)", root / "CITATION.cff")) != version:
        found.append(f"CITATION.cff: the version is {cited}, not {version}")
    sections = dict(re.findall(r"^## \[(.+?)\](.*?)(?=^## \[|\Z)", _read(root / "CHANGELOG.md"), re.M | re.S))
    if version not in sections:
        found.append(f"CHANGELOG.md: there is no section [{version}]")
    if waiting := re.findall(r"^- ", sections.get("Unreleased", ""), re.M):
        found.append(f"CHANGELOG.md: {len(waiting)} entries under [Unreleased]; move them to [{version}]")
    return found + _about_the_address(root, environment)


def _about_the_address(root: Path, environment: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the address that the links on PyPI begin with."""
    project = tomllib.loads(_read(root / "pyproject.toml"))
    address = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    where = 'pyproject.toml: `repository = "…"` under [tool.hatch.metadata.hooks.custom]'
    publisher = "/".join(environment.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY"))
    here = f", {publisher}" if publisher != "/" else ""
    if not address:
        return [f"{where} is empty; fill in the public address of this repository{here}"]
    if not re.fullmatch(r"https://[^/\s]+(/[^/\s]+)+", address):
        return [f"{where} is {address}; write https://HOST/OWNER/NAME, without a slash at the end"]
    if here and address.lower() != publisher.lower():
        return [f"{where} is {address}, and {publisher} publishes"]
    return []


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _first(pattern: str, path: Path) -> str:
    found = re.search(pattern, _read(path), re.M)
    return found[1] if found else "missing"


def main() -> None:
    """Print all problems; exit with code 1 if there are any."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m release.ready TAG")
    found = problems(sys.argv[1])
    sys.exit("\n".join(["not ready for a release:", *found]) if found else 0)


if __name__ == "__main__":
    main()
