"""How long a user waits: `import coterie`, `coterie --help`, and `compare` on a bundled table.

    python -m benchmarks.startup [--python PATH] [--json FILE]

pip compiles bytecode when it installs. Other installers may not: their first command compiles every module it imports,
and so does "first compare", which has an empty folder for bytecode.
Seconds of the processor are what an idle machine takes, or more; seconds on the clock include waiting for others.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HEART = ["heart_disease", "--client", "hospital", "--target", "sick"]
BARS = {"import": 0.5, "help": 0.5, "compare": 10.0, "first compare": 10.0}
COMMANDS = {
    "import": ["-c", "import coterie"],
    "help": ["-m", "coterie", "--help"],
    "compare": ["-m", "coterie", "compare", *HEART],
    "first compare": ["-m", "coterie", "compare", *HEART],
}


def seconds(words: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return the seconds of processor and clock that a command takes; raise if it fails."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    clock, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, clock


def measure(python: str, repeats: int = 5) -> dict[str, dict[str, float]]:
    """Return the fewest seconds over repeats, by what was done; a comparison is done once."""
    found: dict[str, dict[str, float]] = {}
    for name, words in COMMANDS.items():
        with tempfile.TemporaryDirectory() as place:
            first = {"PYTHONPYCACHEPREFIX": place} if name.startswith("first") else {}
            taken = [
                seconds([python, *words], {**os.environ, **first})
                for _ in range(1 if "compare" in name else repeats + 1)
            ]
        found[name] = {
            "cpu": min(cpu for cpu, _ in taken),
            "clock": min(clock for _, clock in taken),
            "bar": BARS[name],
        }
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = measure(arguments.python)
    for name, row in found.items():
        print(f"{name:14} {row['cpu']:6.2f} s processor {row['clock']:6.2f} s clock   bar {row['bar']:g} s")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    if arguments.json:
        arguments.json.write_text(json.dumps({**found, "load": os.getloadavg()[0]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
