"""CoBo among many clients: time of a round, memory, and how well a sparse W finds the clusters.

`python -m benchmarks.many_links [--clients N ...] [--out FILE.json]`. Linear regression with ten features and 20
rows a client, clusters of 100 clients that are eight spreads apart, 20 candidates a client, 20 rounds. Every number of
clients has a process of its own. The bar: at 100,000 clients a round takes less than 2 s on two cores, in less
than 8 GB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FEATURES, ROWS, MEMBERS, NEIGHBOURS, ROUNDS, NOISE = 10, 20, 100, 20, 20, 0.5
BAR_S, BAR_GB, AT = 2.0, 8.0, 100_000


def point(clients: int) -> dict[str, float]:
    """Run CoBo in this process; return seconds of rounds, the most memory in use, and the quality of W."""
    from coterie import Federation, fit, models
    from coterie.algorithms import make

    import torch  # isort: skip

    draw = torch.Generator().manual_seed(0)
    groups = torch.arange(clients) // MEMBERS
    alone = NOISE * (FEATURES / ROWS) ** 0.5
    centres = torch.randn(int(groups[-1]) + 1, FEATURES, generator=draw)
    centres *= 8 * alone / (2 * FEATURES) ** 0.5  # the usual distance of two is eight spreads
    x = torch.randn(clients * ROWS, FEATURES, generator=draw)
    y = (x.view(clients, ROWS, FEATURES) @ centres[groups].unsqueeze(-1)).flatten()
    y += NOISE * torch.randn(len(y), generator=draw)
    names = [str(k) for k in range(clients)]
    fed = Federation.from_rows(
        x,
        y,
        torch.full((clients,), ROWS),
        model=models.linear(),
        names=names,
        clusters=groups,
    )
    del x, y
    ends = [(time.perf_counter(), time.process_time())]
    run = fit(
        fed,
        make("cobo", neighbours=NEIGHBOURS),
        ROUNDS,
        evaluate_every=0,
        watch=lambda t, total: ends.append((time.perf_counter(), time.process_time())),
    )
    spent = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ends)]
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    i, j = run.state.links
    truth = centres[groups]
    return {
        "clients": clients,
        "mean_s": statistics.fmean(seconds for seconds, _ in spent),
        "median_s": statistics.median(seconds for seconds, _ in spent),
        "longest_s": max(seconds for seconds, _ in spent),
        "cpu_s": statistics.fmean(cpu for _, cpu in spent),
        "peak_gb": peak / 1e6,
        "links": len(run.state.weights) / clients,
        "inside": float((groups[i] == groups[j]).float().mean()),
        "error": float((run.personal - truth).norm(dim=1).mean()),
        "error_alone": NOISE * (FEATURES / (ROWS - FEATURES - 1)) ** 0.5,  # root mean square of least squares
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    before = json.loads(given.out.read_text()) if given.out and given.out.exists() else []
    points: list[dict[str, Any]] = [one for one in before if one["clients"] not in given.clients]
    for clients in given.clients:
        code = f"import json; from benchmarks.many_links import point; print(json.dumps(point({clients})))"
        done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
        one = json.loads(done.stdout.splitlines()[-1])
        points.append(one)
        print(
            f"{clients:>9,} clients: a round {one['mean_s']:.3f} s (longest {one['longest_s']:.2f}), "
            f"{one['cpu_s']:.3f} s of processors, {one['peak_gb']:.2f} GB; {one['links']:.1f} links a client, "
            f"{100 * one['inside']:.1f} % inside clusters; error {one['error']:.3f}, alone {one['error_alone']:.3f}",
            flush=True,
        )
        if clients == AT:
            kept = one["mean_s"] < BAR_S and one["peak_gb"] < BAR_GB
            print(f"bar of {BAR_S:g} s and {BAR_GB:g} GB: {'kept' if kept else 'missed'}")
        if given.out:
            given.out.write_text(json.dumps(sorted(points, key=lambda p: p["clients"]), indent=1) + "\n")


if __name__ == "__main__":
    main()
