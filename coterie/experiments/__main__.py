"""Run one job (one run on one seed): `python -m coterie.experiments NAME --job KEY --seed S --out DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from coterie._core.errors import CoterieError
from coterie.experiments.jobs import load, run_job


def main(arguments: list[str] | None = None) -> int:
    """Run one job and save its result."""
    parser = argparse.ArgumentParser(prog="coterie.experiments", description=main.__doc__)
    parser.add_argument("name")
    parser.add_argument("--job", required=True, help="key of the run")
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    try:
        experiment = load(given.name, given.quick)
        run_job(experiment, experiment.plan(given.job), given.seed, given.out)
    except CoterieError as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
