"""Time per round and memory against the number of clients, sampled clients, parameters and rows, with exponents."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CURVES: dict[str, tuple[str, str, list[dict[str, int]]]] = {
    "clients": (
        "clients, at most 1,000 sampled",
        "clients",
        [{"clients": 10**k, "sampled": min(10**k, 1000)} for k in range(1, 7)],
    ),
    "sampled": (
        "sampled clients",
        "sampled",
        [{"clients": n, "sampled": n} for n in (100, 300, 1000, 3000, 10_000, 30_000, 100_000)],
    ),
    "parameters": (
        "parameters",
        "features",
        [{"clients": 100, "sampled": 100, "features": d} for d in (30, 100, 300, 1000, 3000)],
    ),
    "rows": (
        "rows per client",
        "rows",
        [{"clients": 100, "sampled": 100, "rows": n, "batch": 0} for n in (30, 100, 300, 1000, 3000)],
    ),
}
"""By name: title, what varies, and the settings of the points."""


def point(clients: int, sampled: int, features: int = 20, rows: int = 10, batch: int = 5) -> dict[str, float]:
    """Ditto on logistic regression, in this process: the fastest and the median round, and the most memory in use.

    `cpu_s` is the least processor time of a round, of all threads, which other work on the machine hardly changes.
    """
    from coterie import fit, models  # first: it sets how threads wait
    from coterie.algorithms import make
    from coterie.engine.federation import Federation

    import torch  # isort: skip

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * rows, features, generator=generator)
    y = (x[:, 0] > 0).float()
    started = time.perf_counter()
    names = [str(k) for k in range(clients)]
    fed = Federation.from_rows(x, y, torch.full((clients,), rows), model=models.logistic(), names=names)
    built = time.perf_counter() - started
    del x, y
    algorithm = make("ditto", participation=sampled / clients, batch=batch)
    rounds = max(12, min(100, 50_000 // sampled))
    ends = [(time.perf_counter(), time.process_time())]
    fit(
        fed,
        algorithm,
        rounds,
        evaluate_every=0,
        watch=lambda t, total: ends.append((time.perf_counter(), time.process_time())),
    )
    spent = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ends)][2:]
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {
        "least_s": min(seconds for seconds, _ in spent),
        "median_s": statistics.median(seconds for seconds, _ in spent),
        "cpu_s": min(cpu for _, cpu in spent),
        "peak_mb": peak / 1e3,
        "build_s": built,
    }


def curves(out: Path, most_clients: int, repeats: int = 3, only: list[str] | None = None) -> dict[str, Any]:
    """Curves by name, each point in processes of its own; the points of a curve are visited several times in turn.

    Curves that are not asked for stay as they were recorded.
    """
    record = out / "scaling.json"
    result: dict[str, Any] = json.loads(record.read_text()) if only and record.exists() else {}
    for name in only or CURVES:
        title, axis, settings = CURVES[name]
        asked = [setting for setting in settings if setting["clients"] <= most_clients]
        seen: list[list[dict[str, float]]] = [[] for _ in asked]
        for repeat in range(repeats):
            for place, setting in enumerate(asked):
                if repeat == 0 or setting["clients"] * setting.get("rows", 10) <= 2_000_000:
                    seen[place].append(_apart(setting))
        points = [
            {**setting, **{key: min(part[key] for part in found) for key in found[0]}}
            for setting, found in zip(asked, seen, strict=True)
        ]
        along = [p[axis] for p in points]
        exponents = {key: slope(along, [p[key] for p in points]) for key in ("least_s", "cpu_s")}
        result[name] = {
            "title": title,
            "axis": axis,
            "exponent": exponents["least_s"],
            "exponent_cpu": exponents["cpu_s"],
            "load": os.getloadavg()[0],
            "points": points,
        }
        print(
            f"{title}: time grows as n^{exponents['least_s']:.2f}, processor time as n^{exponents['cpu_s']:.2f}"
        )
        for p in points:
            print(
                f"  {p[axis]:>9,}  {1000 * p['least_s']:8.2f} ms per round  {1000 * p['cpu_s']:8.2f} ms of processors"
                f"  {p['peak_mb']:6.0f} MB",
                flush=True,
            )
        out.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(result, indent=2) + "\n")
    plot({name: result[name] for name in CURVES if name in result}, out / "scaling.svg")
    return result


def slope(xs: list[float], ys: list[float]) -> float:
    """The exponent b of y = a x^b, by least squares on logarithms."""
    u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
    middle, level = statistics.mean(u), statistics.mean(v)
    return sum((a - middle) * (b - level) for a, b in zip(u, v, strict=True)) / sum(
        (a - middle) ** 2 for a in u
    )


def _apart(setting: dict[str, int]) -> dict[str, float]:
    code = f"import json; from benchmarks.scaling import point; print(json.dumps(point(**{setting!r})))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def plot(result: dict[str, Any], path: Path) -> None:
    """Time, processor time and memory of each curve, both axes logarithmic, as SVG."""
    width, height = 460, 330
    placed = "".join(
        f'<g transform="translate({width * (k % 2)},{height * (k // 2)})">{_panel(curve, width, height)}</g>'
        for k, curve in enumerate(result.values())
    )
    tall = height * math.ceil(len(result) / 2)
    style = "text{font:12px sans-serif;fill:#222}"
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width} {tall}"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="white"/>{placed}</svg>\n'
    )


LINES = (
    ("least_s", 1e3, "time, ms", "#1664b0", ""),
    ("cpu_s", 1e3, "processor time, ms", "#6aa5dc", ' stroke-dasharray="2 3"'),
    ("peak_mb", 1.0, "memory, MB", "#b05316", ' stroke-dasharray="6 4"'),
)


def _panel(curve: dict[str, Any], width: int, height: int) -> str:
    left, right, top, bottom = 60, width - 40, 60, height - 45
    points, axis = curve["points"], curve["axis"]
    xs = [math.log10(p[axis]) for p in points]
    lines = [[math.log10(p[key] * scale) for p in points] for key, scale, *_ in LINES]
    low, high = math.floor(min(map(min, lines))), math.ceil(max(map(max, lines)))
    across = (right - left) / (max(xs) - min(xs))

    def place(x: float, y: float) -> tuple[float, float]:
        return left + across * (x - min(xs)), bottom - (bottom - top) * (y - low) / (high - low)

    grown = f"{curve['exponent']:.2f} (processor {curve['exponent_cpu']:.2f})"
    parts = [_text((left + right) / 2, 18, f"{curve['title']}: time ~ n^{grown}", "middle")]
    for k, (_, _, label, colour, _) in enumerate(LINES):
        parts.append(_text(left + (0, 75, 215)[k], 40, label, "start", colour))
    for power in range(low, high + 1):
        y = place(min(xs), power)[1]
        parts.append(
            f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>' + _text(left - 6, y + 4, _power(power))
        )
    for power in range(math.ceil(min(xs)), math.floor(max(xs)) + 1):
        x = place(power, low)[0]
        parts.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="#eee"/>')
        parts.append(_text(x, bottom + 18, _power(power), "middle"))
    parts.append(_text((left + right) / 2, bottom + 36, curve["title"].split(",")[0], "middle"))
    for ys, (_, _, _, colour, dash) in zip(lines, LINES, strict=True):
        places = [place(x, y) for x, y in zip(xs, ys, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "end", colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill:{colour}">{text}</text>'


def _power(power: int) -> str:
    return f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"
