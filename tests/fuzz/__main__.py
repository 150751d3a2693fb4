"""`python -m tests.fuzz --tables 10000`: random tables, all commands; prints counts and what went wrong."""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path

import torch

from tests.fuzz.commands import Fuzzer


def main() -> int:
    """Run the fuzzer and return the exit code: 1 if something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=10_000, help="number of tables")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--processes", type=int, default=200, help="every so many tables, real processes")
    parser.add_argument("--pages", action="store_true", help="also write the page beside every run")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not asked.pages:
        import coterie.cli.training

        coterie.cli.training.report_beside = lambda *_: None
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder))
        known = 0
        for k in range(asked.tables):
            fuzzer.try_table(asked.first + k, processes=bool(asked.processes) and k % asked.processes == 7)
            for fault in fuzzer.found.faults[known:]:
                print(fault, flush=True)
            known = len(fuzzer.found.faults)
            if (k + 1) % 100 == 0:
                spent = time.monotonic() - began
                left = spent / (k + 1) * (asked.tables - k - 1)
                print(
                    f"{k + 1} of {asked.tables} tables, {known} faults, {left / 60:.0f} min left", flush=True
                )
    print(fuzzer.found.text())
    return int(bool(fuzzer.found.faults))


if __name__ == "__main__":
    raise SystemExit(main())
