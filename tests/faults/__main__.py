"""`python -m tests.faults --moments 20`: kill commands and federations at random moments, fill disks, age certificates.

Commands die with SIGKILL and must end with the same bytes when they go on; a federation must lose no round and no run.
Prints a line for every fault, and exits with 1 if something was not as promised. `--record FILE` notes the moments that
were as promised and does not repeat them: a check that was stopped goes on. Remove the file when the code has changed.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults import moments, traced

PARTS = ("commands", "federation", "disks")
INSIDE = "COTERIE_FAULTS_INSIDE"  # set in a mount namespace of our own


Found = tuple[str, int, str, bool]  # name, number of the moment, what happened, whether it was as promised


class Record:
    """Moments that were as promised in an earlier call, by name and number; kept in a file if there is one."""

    def __init__(self, path: Path | None, seed: int) -> None:
        self.path, self.seed = path, seed
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self.done = {(int(part[0]), int(part[1]), part[2]) for part in (line.split(" ", 2) for line in lines)}

    def left(self, name: str, count: int) -> list[int]:
        """Return the numbers of the moments that are still to be tried."""
        return [number for number in range(count) if (self.seed, number, name) not in self.done]

    def add(self, name: str, number: int) -> None:
        """Note a moment."""
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as stream:
                stream.write(f"{self.seed} {number} {name}\n")


def commands(folder: Path, count: int, record: Record, only: str) -> Iterator[Found]:
    """Kill commands at moments that are not in the record."""
    traced.warm_up()
    shared = folder / "shared"
    shared.mkdir()
    moments.prepare(shared)
    for subject in moments.subjects(shared):
        kinds = 4 if subject.name.startswith("export") else 1  # the four formats share the moments
        left = record.left(subject.name, max(1, count // kinds))
        if not left or (only and subject.name != only):
            continue
        place = folder / subject.name.replace(" ", "-")
        place.mkdir()
        try:
            trial = moments.Trial(subject, place, record.seed)
        except moments.Fault as problem:
            yield subject.name, -1, str(problem), False
            continue
        for number in left:
            try:
                yield subject.name, number, trial.kill(number), True
            except moments.Fault as problem:
                yield subject.name, number, str(problem), False


def federations(folder: Path, count: int, record: Record, only: str, disks: bool) -> Iterator[Found]:
    """Break a federation at moments that are not in the record."""
    from tests.faults import federation

    with federation.federation(folder) as scene:
        for fault in federation.DISKS if disks else federation.FAULTS:
            name = fault.__name__.replace("_", " ")
            if only and name != only:
                continue
            once = fault is federation.Scene.wrong_certificates  # no chance in it
            for number in record.left(name, 1 if once else max(1, count // 4)):
                try:
                    yield name, number, fault(scene, random.Random(f"{name} {record.seed} {number}")), True
                except Exception as problem:
                    yield name, number, f"{type(problem).__name__}: {problem}", False
                scene.up()


def main() -> int:
    """Run the faults and return the exit code: 1 if something was not as promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--moments", type=int, default=20, help="moments of each command; a quarter for federations"
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="only these parts")
    parser.add_argument("--only", default="", help="only the fault of this name, such as 'kill both'")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument(
        "--record", type=Path, help="file of moments that were as promised and are not repeated"
    )
    asked = parser.parse_args()
    record = Record(asked.record, asked.seed)
    parts = asked.part or PARTS
    os.environ["PYTHONPATH"] = str(moments.ROOT)  # processes run this tree, whatever is installed
    if "disks" in parts and INSIDE not in os.environ:  # mounting needs a mount namespace of our own
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-rm", sys.executable, "-m", "tests.faults", *sys.argv[1:]])
    counts: collections.Counter[tuple[str, bool]] = collections.Counter()
    began = time.monotonic()
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            chosen = (Path(folder), asked.moments, record, asked.only)
            found = commands(*chosen) if part == "commands" else federations(*chosen, part == "disks")
            for name, number, text, fine in found:
                counts[name, fine] += 1
                if fine:
                    record.add(name, number)
                spent = time.monotonic() - began
                print(f"{spent:6.0f} s {'ok   ' if fine else 'FAULT'} {name}: {text}", flush=True)
    for _, _, name in record.done:  # of earlier calls
        counts[name, True] += 1
    for name in dict.fromkeys(name for name, _ in counts):
        print(f"{name}: {counts[name, True]} as promised, {counts[name, False]} not")
    return int(any(not fine for _, fine in counts))


if __name__ == "__main__":
    raise SystemExit(main())
