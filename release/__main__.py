"""`python -m release`: build twice, check what was built, install it everywhere, try every command."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from release import build, elsewhere, install, symbols
from release.build import ROOT, Failed, run


def main() -> None:
    """Run the checks; the first that fails ends with exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder for wheels and sdist, emptied first"
    )
    parser.add_argument(
        "--install",
        metavar="WAYS",
        help="ways to install, with commas (core, pure, sdist, tune, lowest …); '' for none",
    )
    parser.add_argument(
        "--again", action="store_true", help="also the ways that these very files passed before"
    )
    arguments = parser.parse_args()
    started = time.monotonic()

    def step(words: str) -> None:
        print(f"== {time.monotonic() - started:4.0f} s: {words}", flush=True)

    try:
        if changed := run("git", "status", "--porcelain", "--untracked-files=no", folder=ROOT):
            print(f"what is not committed is not built:\n{changed}")
        with tempfile.TemporaryDirectory(prefix="coterie-build-") as place:
            shutil.rmtree(arguments.out, ignore_errors=True)
            step("build twice")
            built = build.twice(arguments.out, Path(place, "twice"))
            step("build from the sdist")
            build.same_from_sdist(built, Path(place, "sdist"))
            step("metadata")
            run(sys.executable, "-m", "twine", "check", "--strict", *built)
            print("   twine finds nothing")
            library = build.library(built.wheel, Path(place, "library"))
            if symbols.applies() and library is not None:
                step("symbols")
                symbols.check(library)
                print(
                    "   "
                    + " ".join(run(sys.executable, "-m", "auditwheel", "show", built.wheel).split())[:160]
                    + " …"
                )
            if sys.platform == "linux":
                step("compile for other systems")
                elsewhere.check(Path(place))
        ways = None if arguments.install is None else [way for way in arguments.install.split(",") if way]
        install.everywhere(built, step, ways, again=arguments.again)
    except Failed as problem:
        print(f"FAILED: {problem}", file=sys.stderr)
        sys.exit(1)
    step("all is well")


if __name__ == "__main__":
    main()
