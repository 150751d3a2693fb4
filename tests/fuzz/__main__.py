"""`python -m tests.fuzz --tables 10000`: random tables, all commands; prints counts and what went wrong."""

from __future__ import annotations

import argparse
import os
import time

from tests.fuzz.workers import Progress, fuzz


def main() -> int:
    """Run the fuzzer and return the exit code: 1 if something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=10_000, help="number of tables")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes side by side")
    parser.add_argument(
        "--processes", type=int, default=500, help="every so many tables, a process per command"
    )
    parser.add_argument("--pages", action="store_true", help="also write the page beside every run")
    asked = parser.parse_args()
    began = time.monotonic()

    def show(progress: Progress) -> None:
        for fault in progress.new_faults():
            print(fault, flush=True)
        if progress.tables % 100 == 0:
            spent = time.monotonic() - began
            left = spent / progress.tables * (asked.tables - progress.tables) / 60
            calls, faults = sum(progress.counts.values()), len(progress.faults)
            print(
                f"{progress.tables} of {asked.tables} tables, {calls} commands, {faults} faults, {left:.0f} min left",
                flush=True,
            )

    found = fuzz(asked.first, asked.tables, asked.workers, asked.processes, asked.pages, show)
    print(f"{found.text()}\n{(time.monotonic() - began) / 60:.0f} minutes")
    return int(bool(found.faults))


if __name__ == "__main__":
    raise SystemExit(main())
