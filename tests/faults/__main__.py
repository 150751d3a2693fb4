"""`python -m tests.faults --moments 20`: kill commands and federations at random moments, fill disks, age certificates.

Commands die with SIGKILL and must end with the same bytes when they go on; a federation must lose no round and no run.
Prints a line for every fault, and exits with 1 if something was not as promised.
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


def commands(folder: Path, count: int, seed: int, only: str) -> Iterator[tuple[str, str, bool]]:
    """Kill commands; yield the name, what happened, and whether it was as promised."""
    traced.warm_up()
    shared = folder / "shared"
    shared.mkdir()
    moments.prepare(shared)
    for subject in moments.subjects(shared):
        if only and subject.name != only:
            continue
        place = folder / subject.name.replace(" ", "-")
        place.mkdir()
        try:
            trial = moments.Trial(subject, place, seed)
        except moments.Fault as problem:
            yield subject.name, str(problem), False
            continue
        kinds = 4 if subject.name.startswith("export") else 1  # the four formats share the moments
        for number in range(max(1, count // kinds)):
            try:
                yield subject.name, trial.kill(number), True
            except moments.Fault as problem:
                yield subject.name, str(problem), False


def federations(
    folder: Path, count: int, seed: int, only: str, disks: bool
) -> Iterator[tuple[str, str, bool]]:
    """Break a federation; yield the name, what happened, and whether it was as promised."""
    from tests.faults import federation

    with federation.federation(folder) as scene:
        for fault in federation.DISKS if disks else federation.FAULTS:
            name = fault.__name__.replace("_", " ")
            if only and name != only:
                continue
            once = fault is federation.Scene.wrong_certificates  # no chance in it
            for number in range(1 if once else max(1, count // 4)):
                try:
                    yield name, fault(scene, random.Random(f"{name} {seed} {number}")), True
                except Exception as problem:
                    yield name, f"{type(problem).__name__}: {problem}", False
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
    asked = parser.parse_args()
    parts = asked.part or PARTS
    os.environ["PYTHONPATH"] = str(moments.ROOT)  # processes run this tree, whatever is installed
    if "disks" in parts and INSIDE not in os.environ:  # mounting needs a mount namespace of our own
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-rm", sys.executable, "-m", "tests.faults", *sys.argv[1:]])
    counts: collections.Counter[tuple[str, bool]] = collections.Counter()
    began = time.monotonic()
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            chosen = (Path(folder), asked.moments, asked.seed, asked.only)
            found = commands(*chosen) if part == "commands" else federations(*chosen, part == "disks")
            for name, text, fine in found:
                counts[name, fine] += 1
                spent = time.monotonic() - began
                print(f"{spent:6.0f} s {'ok   ' if fine else 'FAULT'} {name}: {text}", flush=True)
    for name in dict.fromkeys(name for name, _ in counts):
        print(f"{name}: {counts[name, True]} as promised, {counts[name, False]} not")
    return int(any(not fine for _, fine in counts))


if __name__ == "__main__":
    raise SystemExit(main())
