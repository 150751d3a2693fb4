"""Speed against peers and against the machine: `python -m benchmarks [run|scaling|check|install] --help`.

`run` (the default) writes one table, benchmarks/results/speed.md and speed.json; `check` runs an earlier revision and
the sources as they are in turn, and ends with 1 where speed fell by more than a fifth. (Ratios to a plain PyTorch loop,
which were compared before, differ between machines: on W1 from 35 to 56.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.environments import ALL, BENCH, BY_NAME, OURS, Peer, earlier
from benchmarks.race import TOLERANCE, Driver, Failed, difference
from benchmarks.table import markdown
from benchmarks.workloads import WORKLOADS, Workload

RESULTS = Path(__file__).resolve().parent / "results"
MOST_LOST = 0.2
BASE = "918aefb"  # the last revision before version 0.2 began
PAUSE = 0.5  # seconds before a turn: threads of the peer before may spin for a while after their work


def race(work: Workload, peers: list[Peer], repeats: int, seconds: float) -> dict[str, Any]:
    """All peers on one workload, asked in turn; results checked first."""
    file = BENCH / "data" / f"{work.name}.npz"
    work.write(file.parent)
    drivers, lines, expected = [], {}, None
    try:
        for peer in (OURS, *peers):
            print(f"{work.name} {peer.title}", end=": ", flush=True)
            try:
                driver = Driver(peer, file)
                drivers.append(driver)
                found = driver.result()
            except Failed as problem:
                lines[peer.name] = {"failed": str(problem)}
                print(problem, flush=True)
                continue
            if expected is None:
                expected = found
            off = difference(_partial(found, expected, work), expected)
            lines[peer.name] = {"difference": off}
            print(f"starts in {driver.startup:.1f} s, differs by {off:.1e}", flush=True)
            if not off < TOLERANCE and peer.name != "earlier":  # a draw may have changed on purpose
                lines[peer.name]["failed"] = f"differs by {off:.1e} of the largest parameter"
        alive = [driver for driver in drivers if "failed" not in lines[driver.peer.name]]
        ends = time.monotonic() + seconds
        for k in range(repeats):
            if k >= 3 and time.monotonic() > ends:
                break
            for driver in alive:
                time.sleep(PAUSE)
                driver.go()
    finally:
        for driver in drivers:
            driver.__exit__()
    for driver in alive:
        lines[driver.peer.name] |= _figures(driver, alive[0])
    about = {"load": machine.load(), "date": time.strftime("%Y-%m-%d")}
    return {"title": work.title, **about, "peers": lines}


def _partial(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], work: Workload
) -> dict[str, np.ndarray]:
    """Where a peer ran the first iterations only, they are compared with ours after as many."""
    if "partial" not in found:
        return found
    from coterie import fit

    fed = work.federation()
    short = fit(fed, work.algorithm(fed), int(found["iterations"]), evaluate_every=0)
    expected["partial"] = short.personal.numpy()
    return {"partial": found["partial"]}


def _figures(driver: Driver, ours: Driver) -> dict[str, Any]:
    """Seconds per round (median of all), and how many times ours that is, repeat by repeat."""
    medians = [statistics.median(rounds) for rounds in driver.rounds]
    ratios = [theirs / statistics.median(mine) for theirs, mine in zip(medians, ours.rounds, strict=True)]
    every = [second for rounds in driver.rounds for second in rounds]
    return {
        "seconds": statistics.median(every),
        "least": min(every),
        "cpu_seconds": statistics.median(driver.cpu),
        "ratio": statistics.median(ratios),
        "ratio_least": min(every) / min(second for rounds in ours.rounds for second in rounds),
        "repeats": len(medians),
        "startup": driver.startup,
        "peak_mb": driver.peak_mb,
    }


def run(arguments: argparse.Namespace) -> int:
    """The whole table."""
    chosen = [peer for peer in ALL if arguments.peers is None or peer.name in arguments.peers]
    for peer in chosen:
        if not peer.installed() and arguments.install:
            print(f"installing {peer.environment}", flush=True)
            peer.install()
    started, limit = time.time(), machine.limits()
    result: dict[str, Any] = {"machine": machine.description(), "workloads": {}, "missing": {}}
    for name in arguments.only or WORKLOADS:
        peers = [peer for peer in chosen if name in peer.runs and peer.installed()]
        result["workloads"][name] = race(WORKLOADS[name], peers, arguments.repeats, arguments.seconds)
        limit = {key: _better(key, value, limit[key]) for key, value in machine.limits().items()}
    for peer in chosen:
        if not peer.installed():
            result["missing"][peer.name] = "its environment is not installed (python -m benchmarks --install)"
        elif peer.why_not:
            result["missing"][peer.name] = peer.reasons
    seconds = {
        name: work["peers"]["ours"].get("least", float("nan")) for name, work in result["workloads"].items()
    }
    record = arguments.out / "speed.json"
    before = json.loads(record.read_text()) if record.exists() else {}
    if (
        before.get("machine", {}).get("processor") == result["machine"]["processor"]
    ):  # it may have been less busy
        limit = {key: _better(key, value, before["limits"].get(key, value)) for key, value in limit.items()}
    result |= {"limits": limit, "shares": machine.shares(limit, seconds), "took": time.time() - started}
    if before:  # workloads that were not run now keep their figures
        workloads = {**before["workloads"], **result["workloads"]}
        for name, work in result["workloads"].items():  # and so do peers that were not
            lines = {**before["workloads"].get(name, {"peers": {}})["peers"], **work["peers"]}
            work["peers"] = {peer: lines[peer] for peer in BY_NAME if peer in lines}
        result["workloads"] = {name: workloads[name] for name in sorted(workloads)}
        result["shares"] = {**before["shares"], **result["shares"]}
        missing = {**before["missing"], **result["missing"]}
        result["missing"] = {peer: missing[peer] for peer in BY_NAME if peer in missing}
    text = markdown(result)
    print(text)
    if not arguments.dry:
        arguments.out.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(result, indent=2) + "\n")
        (arguments.out / "speed.md").write_text(text)
    return 0


def _better(key: str, one: float, other: float) -> float:
    return min(one, other) if key.endswith("_s") and not key.endswith("gb_s") else max(one, other)


def check(arguments: argparse.Namespace) -> int:
    """Ours now against an earlier revision, in turn; three tries, because a machine has other things to do."""
    slower, before = list(arguments.only or WORKLOADS), earlier(arguments.base)
    for attempt in range(3):
        slower, left = [], slower
        for name in left:
            lines = race(WORKLOADS[name], [before], arguments.repeats, arguments.seconds)["peers"]
            if any("failed" in line for line in lines.values()):
                print(f"{name}: {lines}")
                return 1
            now = max(lines["earlier"]["ratio"], lines["earlier"]["ratio_least"])
            print(f"{name}: {now:.2f} of the speed at {arguments.base}")
            if now < 1 - MOST_LOST:
                slower.append(name)
        if not slower:
            return 0
        print(f"slower: {', '.join(slower)}" + ("; once more" if attempt < 2 else ""))
    return 1


def install(arguments: argparse.Namespace) -> int:
    for peer in ALL:
        if arguments.peers is None or peer.name in arguments.peers:
            print(peer.title, flush=True)
            peer.install()
    return 0


def scaling(arguments: argparse.Namespace) -> int:
    from benchmarks.scaling import curves

    curves(arguments.out, arguments.most_clients, min(arguments.repeats, 3), arguments.only)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {"run": run, "check": check, "install": install, "scaling": scaling}
    parser.add_argument("command", nargs="?", default="run", choices=commands)
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        help="workloads, such as W1,W2; scaling: curves, such as clients,sampled",
    )
    parser.add_argument(
        "--peers", type=lambda text: text.split(","), help=f"some of {','.join(p.name for p in ALL)}"
    )
    parser.add_argument("--repeats", type=int, default=7, help="trainings of each peer, interleaved")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="per workload; three repeats are always made"
    )
    parser.add_argument("--base", default=BASE, help="check: the revision to compare with")
    parser.add_argument("--install", action="store_true", help="make environments that are missing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the table")
    parser.add_argument("--dry", action="store_true", help="print only")
    parser.add_argument(
        "--most-clients", type=int, default=1_000_000, help="scaling: clients of the largest federation"
    )
    arguments = parser.parse_args()
    return commands[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
