"""Time per round and memory against the number of clients, sampled clients, parameters and rows, with exponents."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CURVES: dict[str, list[dict[str, int]]] = {
    "clients, at most 1,000 sampled": [{"clients": 10**k, "sampled": min(10**k, 1000)} for k in range(1, 7)],
    "sampled clients": [{"clients": 10**k, "sampled": 10**k} for k in range(2, 6)],
    "parameters": [{"clients": 100, "sampled": 100, "features": d} for d in (30, 100, 300, 1000, 3000)],
    "rows per client": [
        {"clients": 100, "sampled": 100, "rows": n, "batch": 0} for n in (30, 100, 300, 1000, 3000)
    ],
}


def point(
    clients: int, sampled: int, features: int = 20, rows: int = 10, batch: int = 5, rounds: int = 12
) -> dict[str, float]:
    """Ditto on logistic regression, in this process: the fastest and the median round, and the most memory in use."""
    from coterie import fit, models  # first: it sets how threads wait
    from coterie.algorithms import make
    from coterie.federation.build import from_rows

    import torch  # isort: skip

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * rows, features, generator=generator)
    y = (x[:, 0] > 0).float()
    started = time.perf_counter()
    names = [str(k) for k in range(clients)]
    fed = from_rows(x, y, torch.full((clients,), rows), model=models.logistic(), names=names)
    built = time.perf_counter() - started
    del x, y
    algorithm = make("ditto", participation=sampled / clients, batch=batch)
    ends = [time.perf_counter()]
    fit(fed, algorithm, rounds, evaluate_every=0, watch=lambda t, total: ends.append(time.perf_counter()))
    seconds = [after - before for before, after in itertools.pairwise(ends)][2:]
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {
        "least_s": min(seconds),
        "median_s": statistics.median(seconds),
        "peak_mb": peak / 1e3,
        "build_s": built,
    }


def curves(out: Path, most_clients: int, repeats: int = 3) -> dict[str, Any]:
    """All curves, each point in processes of its own; the points of a curve are visited several times in turn."""
    result: dict[str, Any] = {}
    for name, settings in CURVES.items():
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
        axis = {"parameters": "features", "rows per client": "rows", "sampled clients": "sampled"}.get(
            name, "clients"
        )
        exponent = slope([p[axis] for p in points], [p["least_s"] for p in points])
        result[name] = {"axis": axis, "exponent": exponent, "points": points}
        print(f"{name}: exponent {exponent:.2f}")
        for p in points:
            print(
                f"  {p[axis]:>9,}  {1000 * p['least_s']:8.2f} ms per round  {p['peak_mb']:6.0f} MB",
                flush=True,
            )
    out.mkdir(parents=True, exist_ok=True)
    (out / "scaling.json").write_text(json.dumps(result, indent=2) + "\n")
    plot(result, out / "scaling.svg")
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
    """Time (line) and memory (dashes) of each curve, both axes logarithmic, as SVG."""
    width, height, pad = 420, 300, 55
    panels = [_panel(name, curve, width, height, pad) for name, curve in result.items()]
    placed = "".join(
        f'<g transform="translate({width * (k % 2)},{height * (k // 2)})">{panel}</g>'
        for k, panel in enumerate(panels)
    )
    tall = height * math.ceil(len(panels) / 2)
    style = "text{font:12px sans-serif;fill:#222}"
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width} {tall}"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="white"/>{placed}</svg>\n'
    )


def _panel(name: str, curve: dict[str, Any], width: int, height: int, pad: int) -> str:
    xs = [p[curve["axis"]] for p in curve["points"]]
    parts = [f'<text x="{pad}" y="20">{name}: time ~ n^{curve["exponent"]:.2f}</text>']
    for key, scale, unit, colour, dash in (
        ("least_s", 1000.0, "ms", "#1664b0", ""),
        ("peak_mb", 1.0, "MB", "#b05316", ' stroke-dasharray="5 4"'),
    ):
        ys = [p[key] * scale for p in curve["points"]]
        low, high = math.log(min(ys)), max(math.log(max(ys)), math.log(min(ys)) + 0.1)
        left, right = math.log(min(xs)), math.log(max(xs))
        places = [
            (
                pad + (width - 2 * pad) * (math.log(x) - left) / max(right - left, 1e-9),
                height - pad - (height - 2 * pad) * (math.log(y) - low) / (high - low),
            )
            for x, y in zip(xs, ys, strict=True)
        ]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        at, anchor = (4, "start") if key == "least_s" else (width - 4, "end")
        for value, y in ((min(ys), height - pad), (max(ys), pad)):
            parts.append(
                f'<text x="{at}" y="{y}" text-anchor="{anchor}" style="fill:{colour}">{value:.3g} {unit}</text>'
            )
    parts.append(f'<text x="{pad}" y="{height - pad + 25}">{min(xs):,}</text>')
    parts.append(f'<text x="{width - pad}" y="{height - pad + 25}" text-anchor="end">{max(xs):,}</text>')
    return "".join(parts)
