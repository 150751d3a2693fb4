"""Build hooks: the C library, and the links that PyPI shows.

coterie/_core/native/*.c are compiled into one library; without a compiler the package is installed without it.

Environment: `CC` names the compiler. `COTERIE_PLAIN=1` leaves the library out, for the wheel that runs everywhere;
`COTERIE_NATIVE=1` makes a failing compiler an error, for wheels that must have it.
"""

import os
import platform
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# Paths are relative to the sources, and there is no build number, so that the same sources give the same bytes.
OPTIONS = "-std=gnu11 -O3 -g0 -fPIC -shared -pthread -ffp-contract=fast -fno-math-errno -Wall -Wextra".split()
LINUX = ["-Wno-psabi", "-Wl,--build-id=none", "-Wl,--strip-all", "-Wl,-z,noexecstack"]


class Kernels(BuildHookInterface):
    """Wheels are those of a platform where the library could be built, and pure Python elsewhere."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root, "coterie", "_core", "native")
        library: Path = runpy.run_path(str(folder / "sources.py"))["library"](folder)
        problem = "COTERIE_PLAIN is set" if os.environ.get("COTERIE_PLAIN") else compile_to(library)
        if problem and os.environ.get("COTERIE_NATIVE"):
            raise RuntimeError(f"COTERIE_NATIVE is set, and there is no C library: {problem}")
        if problem:
            print(f"no C library: {problem}", file=sys.stderr)
            return
        for old in set(folder.glob("kernels*")) - {library}:
            old.unlink()
        build_data["artifacts"].append(f"coterie/_core/native/{library.name}")
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform_tag()}"


class Links(MetadataHookInterface):
    """Addresses on PyPI, all of which begin with the one of the repository that pyproject.toml names."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = self.config["repository"]
        files = f"{repository}/blob/v{metadata['version']}" if repository else ""
        metadata["readme"] = {"content-type": "text/markdown", "text": for_pypi(text, files)}
        metadata["urls"] = (
            {
                "Documentation": f"{files}/docs/index.md",
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
                "Repository": repository,
            }
            if repository
            else {}
        )


def for_pypi(text: str, files: str) -> str:
    """Return a README whose links to files of the repository begin with their address, or are words if it is ""."""
    there = rf"[\1]({files}/\2)" if files else r"\1"
    return re.sub(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)", there, text)


def compile_to(library: Path) -> str:
    """Compile the sources beside the library into it; return why not, "" if it was."""
    if os.name == "nt":
        return "the sources need POSIX threads"
    folder, fresh = library.parent, library.with_suffix(f".{os.getpid()}")
    options = [*OPTIONS, *(LINUX if sys.platform == "linux" else [])]
    sources = sorted(path.name for path in folder.glob("*.c"))
    command = [*shlex.split(os.environ.get("CC", "cc")), *options, "-o", fresh.name, *sources, "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
        fresh.replace(library)
    except (OSError, subprocess.CalledProcessError) as problem:
        return str(getattr(problem, "stderr", problem))
    finally:
        fresh.unlink(missing_ok=True)
    return ""


def platform_tag() -> str:
    """Return the tag of this machine. On Linux `auditwheel` puts the oldest that the library allows in its place."""
    if sys.platform != "darwin":
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    target = os.environ.get("MACOSX_DEPLOYMENT_TARGET") or platform.mac_ver()[0]
    major, minor = (int(part) for part in f"{target}.0".split(".")[:2])
    return f"macosx_{major}_{0 if major > 10 else minor}_{platform.machine()}"
