"""Draw the figure of experiment flix/bytes: `python -m benchmarks.flix_bytes FOLDER` reads FOLDER/jobs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

Curves = dict[str, list[list[float]]]  # megabytes and gaps by solver
COLOURS = {
    "one-shot": "#222222", "dgd": "#1f77b4", "dcgd": "#17becf", "diana": "#2ca02c",
    "ef21": "#9467bd", "scaffnew": "#d62728", "sgd": "#ff7f0e", "adam": "#8c564b",
}  # fmt: skip
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 300, 50, 14, 30, 40
LOWEST = -8  # log10 of the gap


def panel(title: str, way: str, curves: Curves) -> str:
    """One plot: gap over the first gap against megabytes, both logarithmic."""
    sizes = [size for sent, _ in curves.values() for size in sent if size > 0]
    low, high = math.log10(min(sizes)), math.log10(max(sizes))

    def place(size: float, gap: float) -> str:
        x = LEFT + (math.log10(size) - low) / (high - low) * (WIDTH - LEFT - RIGHT)
        y = TOP + min(0.0, math.log10(max(gap, 1e-30))) / LOWEST * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f},{min(y, HEIGHT - BOTTOM):.1f}"

    up = HEIGHT - BOTTOM
    parts = [
        f'<text x="{LEFT}" y="18">{title}: gap over the first gap</text>',
        f'<path d="M{LEFT},{TOP}V{up}H{WIDTH - RIGHT}" fill="none" stroke="#808080"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{way}</text>',
    ]
    for power in range(0, LOWEST - 1, -2):
        y = TOP + power / LOWEST * (up - TOP)
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.0f}" text-anchor="end">1e{power}</text>')
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = place(10.0**power, 1.0).split(",")[0]
        parts.append(f'<text x="{x}" y="{up + 14}" text-anchor="middle">{10.0**power:g}</text>')
    for name, (sent, gaps) in curves.items():
        points = [place(size, gap) for size, gap in zip(sent, gaps, strict=True) if size > 0]
        style = f'stroke="{COLOURS[name]}" fill="none" stroke-width="1.8"'
        parts.append(f'<polyline points="{" ".join(points)}" {style}/>')
        if len(points) == 1:
            x, y = points[0].split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{COLOURS[name]}"/>')
    return "".join(parts)


def figure(jobs: list[Path]) -> str:
    """The plots of all data sets, up and down on the left and up alone on the right."""
    parts, tall = [], HEIGHT * len(jobs) + 30
    for row, job in enumerate(jobs):
        plot = json.loads(job.read_text(encoding="utf-8"))["plots"]["bytes"]
        for column, one in enumerate(plot["panels"]):
            moved = f'<g transform="translate({column * WIDTH},{row * HEIGHT})">'
            parts.append(f"{moved}{panel(plot['title'], one['x'], one['curves'])}</g>")
    for k, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{LEFT + 90 * k}" y="{tall - 8}" fill="{colour}">{name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {tall}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "figure.svg").write_text(figure(sorted((folder / "jobs").glob("*.json"))), encoding="utf-8")
