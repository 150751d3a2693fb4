"""Compiles coterie/_core/native/*.c into one library; without a compiler the package is installed without it."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

OPTIONS = "-std=gnu11 -O3 -fPIC -shared -pthread -ffp-contract=fast -fno-math-errno -Wall -Wextra -Wno-psabi".split()


class Kernels(BuildHookInterface):
    """Wheels are those of a platform where the library could be built, and pure Python elsewhere."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root, "coterie", "_core", "native")
        library: Path = runpy.run_path(str(folder / "sources.py"))["library"](folder)
        sources = sorted(str(path) for path in folder.glob("*.c"))
        fresh = library.with_suffix(f".{os.getpid()}")
        command = [os.environ.get("CC", "cc"), *OPTIONS, "-o", str(fresh), *sources, "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as problem:
            print(f"no C library: {getattr(problem, 'stderr', problem)}", file=sys.stderr)
            return
        for old in set(folder.glob("kernels*")) - {fresh}:
            old.unlink()
        fresh.replace(library)
        build_data["artifacts"].append(f"coterie/_core/native/{library.name}")
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{next(platform_tags())}"
